"""Starts simulated engines and the router on free loopback ports, and stops what it started.

Every measurement gets a fleet of its own, so that no cache and no index carries over from one to the next. Settings are
written as JSON, which is YAML too: the standard library has no YAML writer.
"""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterator, Sequence

MODEL = "sim-model"
BLOCK_SIZE = 16
MAX_MODEL_LEN = 131_072

READY_WITHIN_S = 20
STOP_WITHIN_S = 5
LOG_TAIL_BYTES = 3000
# Below the range from which the system takes ports for outgoing connections, so that none of those gets in between the
# check for a free port and the bind.
PORTS = range(20_000, 32_000)


class FleetError(Exception):
    """A process that did not start, or ended by itself."""


@dataclass(frozen=True)
class Timing:
    """How long a simulated engine takes. Prefill dominates, so that a missed prefix shows in the time to first token."""

    prefill_ms_per_token: float = 0.1
    itl_ms: float = 2.0
    itl_ms_per_sequence: float = 0.1
    overhead_ms: float = 1.0
    scale: float = 1.0

    def flags(self) -> list[str]:
        return [
            "--sim-prefill-ms-per-token", str(self.prefill_ms_per_token),
            "--sim-itl-ms", str(self.itl_ms),
            "--sim-itl-ms-per-sequence", str(self.itl_ms_per_sequence),
            "--sim-overhead-ms", str(self.overhead_ms),
            "--sim-time-scale", str(self.scale),
        ]  # fmt: skip


@dataclass(frozen=True)
class Backend:
    """An engine as the router's settings name it."""

    name: str
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True)
class Policy:
    """The router's settings that decide where a request goes."""

    name: str
    index: bool
    events: bool
    ring: bool
    strategy: str = "LeastConnections"

    def settings(self, backends: list[Backend], prefix_bytes: int) -> dict:
        sources = [
            {"backend_name": backend.name, "endpoint": f"{backend.url}/v1/kv_events", "reconnect_interval_ms": 100}
            for backend in backends
        ]
        return {
            "selection_strategy": self.strategy,
            "prefix_routing": {"enabled": self.ring, "max_prefix_length": prefix_bytes},
            "kv_cache_index": {"enabled": self.index, "event_sources": sources if self.events else []},
        }


# Round robin knows nothing; the ring knows how prompts begin; exact hears what engines hold; approximate remembers what it
# sent where.
POLICIES = {
    policy.name: policy
    for policy in (
        Policy("round-robin", index=False, events=False, ring=False, strategy="RoundRobin"),
        Policy("ring", index=False, events=False, ring=True),
        Policy("exact", index=True, events=True, ring=True),
        Policy("approximate", index=True, events=False, ring=True),
    )
}


@dataclass(frozen=True)
class Fleet:
    """What runs: the router's port, and the engines behind it."""

    port: int
    backends: list[Backend]

    def metrics(self) -> str:
        return fetch(f"http://127.0.0.1:{self.port}/metrics")


@dataclass(frozen=True)
class Started:
    """A program that runs, and what it writes."""

    process: subprocess.Popen
    log: Path

    def wait(self, ready: Callable[[], bool]) -> None:
        """Returns once it is as wanted."""
        wait_until(ready, self.process, self.log)


class Launcher:
    """Starts the programs of one folder; keeps their settings and logs in a work folder."""

    def __init__(self, programs: Path, work: Path, names: Sequence[str] = ("tidegate", "engine-sim")):
        self.programs = programs
        self.work = work
        self.started = 0
        for name in names:
            if not (programs / name).is_file():
                raise FleetError(f"{programs / name} is not there: build it, or name its folder with --bin")

    @contextmanager
    def engine(self, blocks: int, timing: Timing, name: str = "engine") -> Iterator[Backend]:
        """One engine with room for so many KV blocks."""
        with ExitStack() as stack:
            yield self._engines(stack, [name], blocks, timing)[0]

    @contextmanager
    def fleet(self, engines: int, blocks: int, timing: Timing, policy: Policy, prefix_bytes: int) -> Iterator[Fleet]:
        """Engines, all healthy and heard, and the router in front of them."""
        with ExitStack() as stack:
            backends = self._engines(stack, [f"engine-{i + 1}" for i in range(engines)], blocks, timing)
            port = free_ports(1)[0]
            settings = {
                "server": {"host": "127.0.0.1", "port": port},
                "logging": {"level": "warn", "access": False},
                "drain": {"timeout": "1s"},
                "backends": [{"name": b.name, "url": b.url, "models": [MODEL]} for b in backends],
                **policy.settings(backends, prefix_bytes),
            }
            router = self.router(stack, settings)
            fleet = Fleet(port, backends)
            router.wait(lambda: all_heard(fleet.metrics(), engines, policy.index and policy.events))
            yield fleet

    def _engines(self, stack: ExitStack, names: list[str], blocks: int, timing: Timing) -> list[Backend]:
        backends = [Backend(name, port) for name, port in zip(names, free_ports(len(names)))]
        started = []
        for backend in backends:
            command = [
                "engine-sim", "serve", MODEL, "--host", "127.0.0.1", "--port", str(backend.port),
                "--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(blocks),
                "--max-model-len", str(min(MAX_MODEL_LEN, blocks * BLOCK_SIZE)),
                "--enable-prompt-tokens-details", *timing.flags(),
            ]  # fmt: skip
            started.append(self.start(stack, command))
        for backend, engine in zip(backends, started):
            engine.wait(lambda: fetch(f"{backend.url}/health") is not None)
        return backends

    def router(self, stack: ExitStack, settings: dict) -> Started:
        """The router with these settings; it may not be ready yet."""
        path = self.work / f"router-{self.started}.yaml"
        path.write_text(json.dumps(settings, indent=1))
        return self.start(stack, ["tidegate", "--config", str(path)])

    def start(self, stack: ExitStack, command: list[str]) -> Started:
        """Starts a program that is stopped with the stack; it may not be ready yet."""
        self.started += 1
        log = self.work / f"{command[0]}-{self.started}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [self.programs / command[0], *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is ours alone: we stop them, in order
                env=own_environment(),
            )
        stack.callback(stop, process)
        return Started(process, log)


def own_environment() -> dict[str, str]:
    """Ours, without the router's overrides: they would change what is measured."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE__")}


def stop(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_until(ready: Callable[[], bool], process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            if ready():
                return
        except OSError:
            pass  # does not listen yet
        time.sleep(0.02)
    tail = log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
    raise FleetError(f"{log.stem} is not ready (exit code {process.poll()}). Its output:\n{tail}")


def all_heard(metrics: str, engines: int, events: bool) -> bool:
    """Whether the router takes every engine for healthy and, where it listens to them, has every stream open."""
    healthy = sum(
        line.startswith("tidegate_backend_state") and 'state="healthy"' in line and line.endswith(" 1")
        for line in metrics.splitlines()
    )
    connected = sum(
        line.startswith("tidegate_kv_stream_connected{") and line.endswith(" 1") for line in metrics.splitlines()
    )
    return healthy == engines and (connected == engines or not events)


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return answer.read().decode()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now; the start depends on our process, so that two runs seldom meet."""
    found = []
    offset = os.getpid() * 37 % len(PORTS)
    for port in [*PORTS[offset:], *PORTS[:offset]]:
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        found.append(port)
        if len(found) == count:
            return found
    raise FleetError(f"no {count} free ports")
