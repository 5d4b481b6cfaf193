"""What runs: engines and the router, and how they are killed, stopped, mended and configured. Ends all that it started."""

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Callable

from place import ADMIN_TOKEN, Engine, Place
from fleet import Launcher, Started, all_heard, fetch

ASK_TIMEOUT_S = 5
POLL_S = 0.05
# For what the router is to notice: two probes, a reconnect, and a machine that others use.
NOTICED_WITHIN_S = 15
# What no settings parser takes, and what it takes and the router does not.
UNREADABLE = ("backends: [", json.dumps({"backends": [{"name": "engine-1", "url": "nowhere", "colour": "red"}]}))


class Unmet(Exception):
    """What should have happened within a time and did not."""


class Grounds:
    """The running fleet of one soak test."""

    def __init__(self, launcher: Launcher, place: Place, stop: threading.Event):
        self.place, self.launcher, self.stop = place, launcher, stop
        self.engines = {engine.name: engine for engine in place.engines}
        self.running: dict[str, Started] = {}
        self.absent: set[str] = set()
        # When engines were killed, noted before they are.
        self.kills: list[float] = []
        self.config = launcher.work / "tidegate.yaml"
        self.stack = ExitStack()

    def __enter__(self) -> "Grounds":
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def start(self) -> None:
        for name in self.engines:
            self.restart(name)
        for name in self.engines:
            self.wait_healthy(name)
        self.write_settings()
        self.router = self.launcher.start(self.stack, ["tidegate", "--config", str(self.config)])
        self.router.wait(self.is_whole)

    def close(self) -> None:
        for started in self.running.values():
            if started.process.poll() is None:
                started.process.send_signal(signal.SIGCONT)  # a stopped one would not hear that it is to end
        self.stack.close()

    def is_whole(self) -> bool:
        """Whether the router has every engine, healthy, and every stream of events open."""
        listening = sum(engine.events != "" for engine in self.place.engines)
        metrics = self.metrics()
        streams = sum(line.startswith("tidegate_kv_stream_connected{") and line.endswith(" 1") for line in metrics.splitlines())
        return all_heard(metrics, len(self.engines), events=False) and streams == listening

    # engines

    def restart(self, name: str) -> None:
        self.running[name] = self.launcher.start(self.stack, self.engines[name].command())

    def wait_healthy(self, name: str) -> None:
        self.running[name].wait(lambda: fetch(f"{self.engines[name].url}/health") is not None)

    def kill(self, name: str) -> None:
        self.kills.append(time.monotonic())
        process = self.running[name].process
        process.kill()
        process.wait(ASK_TIMEOUT_S)

    def pause(self, name: str) -> None:
        self.running[name].process.send_signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        self.running[name].process.send_signal(signal.SIGCONT)

    # the router

    @property
    def pid(self) -> int:
        return self.router.process.pid

    @property
    def log(self) -> Path:
        return self.router.log

    def metrics(self) -> str:
        return fetch(f"{self.place.admin}/metrics")

    def ask(self, method: str, path: str) -> tuple[int, dict]:
        """One question to /admin; an error status is an answer too."""
        data = b"" if method == "POST" else None
        headers = {"authorization": f"Bearer {ADMIN_TOKEN}"}
        request = urllib.request.Request(f"{self.place.admin}{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=ASK_TIMEOUT_S) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read() or b"{}")

    def backends(self) -> dict[str, dict]:
        status, said = self.ask("GET", "/admin/backends")
        if status != 200:
            raise Unmet(f"/admin/backends answers {status}: {said}")
        return {backend["name"]: backend for backend in said["backends"]}

    def write_settings(self) -> None:
        self.write(json.dumps(self.place.settings(frozenset(self.absent)), indent=1))

    def write(self, text: str) -> None:
        unfinished = self.config.with_suffix(".new")
        unfinished.write_text(text)
        unfinished.replace(self.config)  # whoever reads it reads all of it

    def reload(self, how: str) -> None:
        """Has the settings as written taken in; the router watches the file anyway."""
        if how == "SIGHUP":
            os.kill(self.pid, signal.SIGHUP)
        elif how == "POST":
            status, said = self.ask("POST", "/admin/reload")
            if status != 200:
                raise Unmet(f"POST /admin/reload of good settings answers {status}: {said}")
        wanted = set(self.engines) - self.absent
        self.until(lambda: set(self.backends()) == wanted, f"the router has {sorted(wanted)} after a reload by {how}")

    def refuse(self, text: str, how: str) -> None:
        """Writes settings that must be refused, and sees that those of before stay."""
        before, rejected = set(self.backends()), self.rejected()
        self.write(text)
        try:
            if how == "SIGHUP":
                os.kill(self.pid, signal.SIGHUP)
            elif how == "POST":
                status, said = self.ask("POST", "/admin/reload")
                if not 400 <= status < 500:
                    raise Unmet(f"POST /admin/reload of faulty settings answers {status}: {said}")
            self.until(lambda: self.rejected() > rejected, f"faulty settings are refused after {how}")
            if set(self.backends()) != before:
                raise Unmet(f"faulty settings changed the backends to {sorted(self.backends())}")
        finally:
            self.write_settings()
        self.reload("POST")

    def rejected(self) -> float:
        lines = self.metrics().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith('tidegate_reloads_total{result="rejected"}'))

    def until(self, met: Callable[[], bool], what: str, within_s: float = NOTICED_WITHIN_S) -> None:
        """Returns once it is so; raises when it is not in time, or when everything is to end."""
        deadline = time.monotonic() + within_s
        while not met():
            if time.monotonic() > deadline or self.router.process.poll() is not None:
                raise Unmet(f"not within {within_s} s: {what}")
            if self.stop.wait(POLL_S):
                return


def engine_load(engine: Engine) -> float:
    """Requests that an engine still has, by its own count."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    lines = fetch(f"{engine.url}/metrics").splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] in names)
