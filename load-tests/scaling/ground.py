"""What all curves stand on: engines that answer at once, the router, the load generator, and the router's CPU time."""

import json
import os
import resource
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterator

import neighbours  # noqa: F401  before what it makes importable
from fleet import PORTS, FleetError, Launcher, all_heard, fetch, free_ports
from process_cpu import cpu_s

MODEL = "m"
CLIENTS = 32
# More than a router on a small machine answers, so that the time ends a closed loop. All are made beforehand.
REQUESTS_PER_S_MAX = 20_000
USER_WORDS = 200  # some 1.2 kB, the shortest 0.6 kB: the index cuts text into blocks of 512 bytes
LOADGEN_GRACE_S = 30
SETTLED_WITHIN_S = 60
SETTLED_LOOK_S = 0.1
SETTLED_CPU_S = 0.002  # in such a look: health probes, and nothing else
PROGRAMS = ("tidegate", "cost-ladder", "loadgen", "index-bench")


@dataclass(frozen=True)
class Effort:
    """How much is measured: `--quick` shows that all of it runs."""

    rounds: int
    seconds: float
    warm_s: float
    is_quick: bool

    def pick(self, full, quick):
        return quick if self.is_quick else full


FULL = Effort(rounds=3, seconds=3.0, warm_s=1.0, is_quick=False)
QUICK = Effort(rounds=2, seconds=0.4, warm_s=0.2, is_quick=True)


class Router:
    """A router that runs."""

    def __init__(self, pid: int, port: int):
        self.pid = pid
        self.port = port
        self.loops = 0

    def cpu_s(self) -> float:
        return cpu_s(self.pid)

    def metrics(self) -> str:
        return fetch(f"http://127.0.0.1:{self.port}/metrics")

    def settled_cpu_s(self) -> float:
        """CPU time so far, once it rests. Asks nothing of the router, which would cost CPU."""
        deadline = time.monotonic() + SETTLED_WITHIN_S
        before = self.cpu_s()
        while time.monotonic() < deadline:
            time.sleep(SETTLED_LOOK_S)
            now = self.cpu_s()
            if now - before < SETTLED_CPU_S:
                return now
            before = now
        raise FleetError(f"the router did not come to rest in {SETTLED_WITHIN_S} s")


@dataclass(frozen=True)
class Loop:
    """What a run of the load generator showed."""

    requests: int
    answers_per_s: float
    p50_ms: float
    # Of the router, for all requests, without what it takes at rest.
    router_cpu_s: float

    @property
    def us_per_request(self) -> float:
        return self.router_cpu_s / self.requests * 1e6


class Ground:
    """Starts and stops programs of one folder; keeps settings and logs in a work folder."""

    def __init__(self, programs: Path, work: Path, effort: Effort):
        self.launcher = Launcher(programs, work, PROGRAMS)
        self.programs = programs
        self.work = work
        self.effort = effort

    @contextmanager
    def engines(self, count: int) -> Iterator[list[str]]:
        """The URLs of so many engines that answer at once, all in one process."""
        first = free_range(count)
        with ExitStack() as stack:
            started = self.launcher.start(stack, ["cost-ladder", "engine", "--port", str(first), "--count", str(count)])
            started.wait(lambda: fetch(f"http://127.0.0.1:{first + count - 1}/health") is not None)
            yield [f"http://127.0.0.1:{port}" for port in range(first, first + count)]

    @contextmanager
    def router(self, urls: list[str], more: dict | None = None, ready: Callable[[str], bool] | None = None) -> Iterator[Router]:
        """The router at its defaults but for `more`, when it takes all engines for healthy and `ready` says so of its metrics."""
        more = more or {}
        port = free_ports(1)[0]
        settings = {
            "logging": {"level": "warn", "access": False},
            "drain": {"timeout": "1s"},
            "backends": [{"name": f"e{n}", "url": url, "models": [MODEL]} for n, url in enumerate(urls)],
            **more,
            "server": {"host": "127.0.0.1", "port": port, **more.get("server", {})},
        }
        with ExitStack() as stack:
            started = self.launcher.router(stack, settings)
            router = Router(started.process.pid, port)

            def is_ready() -> bool:
                metrics = router.metrics()
                return all_heard(metrics, len(urls), False) and (ready is None or ready(metrics))

            started.wait(is_ready)
            yield router

    def idle_cpu_share(self, router: Router) -> float:
        """CPU seconds a second of a router that nobody asks: health probes."""
        router.settled_cpu_s()
        cpu, clock = router.cpu_s(), time.monotonic()
        time.sleep(self.effort.seconds)  # the time that is measured
        return (router.cpu_s() - cpu) / (time.monotonic() - clock)

    def closed_loop(self, router: Router, seconds: float, idle_share: float = 0.0, clients: int = CLIENTS) -> Loop:
        """Small JSON requests, all different, each client one after the other."""
        requests = int(REQUESTS_PER_S_MAX * seconds)
        return self.load(router, ["--concurrency", str(clients), "--requests", str(requests)], seconds, idle_share)

    def open_loop(self, router: Router, rate: float, seconds: float) -> Loop:
        """So many a second, at random times."""
        return self.load(router, ["--rate", str(rate), "--requests", str(int(rate * seconds * 2) + 100)], seconds, 0.0)

    def load(self, router: Router, pace: list[str], seconds: float, idle_share: float) -> Loop:
        router.loops += 1
        report = self.work / "loadgen.json"
        command = [
            self.programs / "loadgen", "--url", f"http://127.0.0.1:{router.port}", "--model", MODEL, "--json-answers",
            "--turns", "1", "--systems", "0", "--user-words", str(USER_WORDS), "--seed", str(router.loops),
            "--duration", str(seconds), "--json", report, *pace,
        ]  # fmt: skip
        cpu, clock = router.cpu_s(), time.monotonic()
        ran = subprocess.run(
            command, capture_output=True, timeout=seconds + LOADGEN_GRACE_S, start_new_session=True, check=False
        )
        cpu, clock = router.cpu_s() - cpu, time.monotonic() - clock
        if ran.returncode != 0:
            raise FleetError(f"loadgen ended with {ran.returncode}:\n{ran.stdout.decode()}{ran.stderr.decode()}")
        said = json.loads(report.read_text())
        if said["ends"].get("whole", 0) == 0:
            raise FleetError(f"no request had an answer: {said['ends']}")
        return Loop(
            requests=said["requests"],
            answers_per_s=said["answers_per_second"],
            p50_ms=said["end_to_end"]["p50_ms"],
            router_cpu_s=cpu - idle_share * clock,
        )


def raise_descriptor_limit() -> None:
    """Hundreds of engines, with connections to each, are more than the usual 1,024 descriptors. Programs that are started
    inherit the limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def free_range(count: int) -> int:
    """The first of so many ports in a row that nobody listens on now."""
    start = PORTS.start + os.getpid() * 37 % max(len(PORTS) - count, 1)
    for first in [*range(start, PORTS.stop - count, count), *range(PORTS.start, start, count)]:
        if all_free(range(first, first + count)):
            return first
    raise FleetError(f"no {count} free ports in a row")


def all_free(ports: range) -> bool:
    for port in ports:
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            return False
    return True


@contextmanager
def pinned(cores: set[int]) -> Iterator[None]:
    """What is started meanwhile stays on these cores, as with taskset."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def value(metrics: str, name: str) -> float:
    """Of a metric, the sum over its series."""
    lines = [line for line in metrics.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]  # or it has its labels
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
