"""The fleet of split serving: prefill, decode and unified workers, the storage that they share, and the router in front.

The same six engines serve whole requests when nothing is split, so that both are compared on equal hardware. What breaks is
broken here too: workers are killed, and the storage gets slow, refuses, hangs or is gone.
"""

import json
import signal
import urllib.request
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

from fleet import MODEL, Launcher, Started, all_heard, fetch, free_ports

PROGRAMS = ("tidegate", "engine-sim", "kv-store")
# The engines take times, KV bytes and room from this name: a 70B on four GPUs.
ENGINE = ("Llama-3.1-70B", "--served-model-name", MODEL, "--tensor-parallel-size", "4")
PREFILL_MS_PER_TOKEN = 0.1
ITL_MS = 15.0
# Through storage to every engine together.
STORE_BYTES_PER_S = 20e9
STORE_LATENCY_MS = 2.0
NAMESPACE = "inference/kv-cache"
ADMIN_TIMEOUT_S = 5

KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer", "unified": "kv_both"}


@dataclass(frozen=True)
class Worker:
    """An engine by its part in split serving."""

    name: str
    role: str
    weight: int = 1


WORKERS = (
    Worker("prefill-worker-1", "prefill"),
    Worker("prefill-worker-2", "prefill"),
    Worker("decode-worker-1", "decode", 2),
    Worker("decode-worker-2", "decode", 2),
    Worker("decode-worker-3", "decode", 2),
    Worker("unified-fallback", "unified"),
)


@dataclass(frozen=True)
class Patience:
    """How long things wait for each other, in simulated seconds: the time scale makes them shorter."""

    prefill_s: float = 60.0
    kv_transfer_s: float = 15.0
    # An engine, for the storage, before it computes the prompt itself. Less than the router waits, so that a decode worker
    # can still answer in time.
    load_s: float = 4.0


@dataclass(frozen=True)
class Mode:
    """How the six workers are used."""

    name: str
    split: bool
    # None leaves the router its default.
    min_prefill_tokens: int | None = None
    # Tokens that a step of an engine may compute: what a long prompt is cut into.
    batched_tokens: int = 8192


UNIFIED = Mode("unified only", split=False)
# Other answers wait for a shorter time, and more often.
CHUNKED = Mode("unified only, small chunks", split=False, batched_tokens=512)
SPLIT = Mode("split", split=True)


@dataclass(frozen=True)
class Site:
    """Where everything listens."""

    router: int
    store: int
    engines: dict[str, int]

    @classmethod
    def free(cls) -> "Site":
        router, store, *engines = free_ports(2 + len(WORKERS))
        return cls(router, store, dict(zip((worker.name for worker in WORKERS), engines)))

    @property
    def store_url(self) -> str:
        return f"http://127.0.0.1:{self.store}"

    def url(self, worker: str) -> str:
        return f"http://127.0.0.1:{self.engines[worker]}"


def router_settings(mode: Mode, site: Site, patience: Patience, scale: float) -> dict:
    """As in the full example of config/seed, without the response cache; the index listens to all workers."""
    storage = {"endpoint": site.store_url, "kv_namespace": NAMESPACE}
    sources = [
        {"backend_name": worker.name, "endpoint": f"{site.url(worker.name)}/v1/kv_events", "reconnect_interval_ms": 200}
        for worker in WORKERS
    ]
    serving = {
        "enabled": mode.split,
        "prefill_timeout": duration(patience.prefill_s * scale),
        "kv_transfer_timeout": duration(patience.kv_transfer_s * scale),
        "fallback_to_unified": True,
        "default_external_storage": storage,
    }
    if mode.min_prefill_tokens is not None:
        serving["min_prefill_tokens"] = mode.min_prefill_tokens
    return {
        "server": {"host": "127.0.0.1", "port": site.router},
        "logging": {"level": "info", "access": False},
        "drain": {"timeout": "1s"},
        "backends": [backend_settings(worker, mode, site, storage) for worker in WORKERS],
        "kv_cache_index": {"enabled": True, "event_sources": sources},
        "disaggregated_serving": serving,
        "health_checks": {"interval": "1s", "timeout": "1s", "unhealthy_threshold": 3, "healthy_threshold": 2},
        "circuit_breaker": {"enabled": True, "failure_threshold": 5, "recovery_timeout": "30s"},
    }


def backend_settings(worker: Worker, mode: Mode, site: Site, storage: dict) -> dict:
    settings = {"name": worker.name, "url": site.url(worker.name), "models": [MODEL]}
    if mode.split:
        return settings | {"role": worker.role, "weight": worker.weight}
    # all alike, and each reads and writes the storage
    return settings | {"external_storage": storage}


def engine_command(worker: Worker, mode: Mode, site: Site, patience: Patience, scale: float) -> list[str]:
    transfer = {
        "kv_connector": "VastKVConnector",
        "kv_role": KV_ROLES[worker.role] if mode.split else "kv_both",
        "kv_connector_extra_config": {"vast_endpoint": site.store_url, "kv_namespace": NAMESPACE},
    }
    return [
        "engine-sim", "serve", *ENGINE, "--host", "127.0.0.1", "--port", str(site.engines[worker.name]),
        "--enable-prompt-tokens-details", "--max-num-batched-tokens", str(mode.batched_tokens),
        "--sim-time-scale", str(scale), "--sim-kv-store", site.store_url,
        "--sim-kv-load-timeout", str(patience.load_s), "--kv-transfer-config", json.dumps(transfer),
    ]  # fmt: skip


def store_command(site: Site, scale: float) -> list[str]:
    return [
        "kv-store", "--port", str(site.store), "--bandwidth", str(STORE_BYTES_PER_S), "--latency-ms", str(STORE_LATENCY_MS),
        "--sim-time-scale", str(scale),
    ]  # fmt: skip


def duration(seconds: float) -> str:
    return f"{round(seconds * 1000)}ms"


class SplitFleet:
    """What runs, and how to break and mend it."""

    def __init__(self, launcher: Launcher, mode: Mode, patience: Patience, scale: float):
        self.launcher = launcher
        self.site = Site.free()
        self.stack = ExitStack()
        self.running: dict[str, Started] = {}
        self.commands = {
            worker.name: engine_command(worker, mode, self.site, patience, scale) for worker in WORKERS
        } | {"store": store_command(self.site, scale)}
        self.settings = router_settings(mode, self.site, patience, scale)

    def start(self) -> None:
        for name in self.commands:
            self.restart(name)
        for name in self.commands:
            self.wait(name)
        router = self.launcher.router(self.stack, self.settings)
        router.wait(lambda: all_heard(self.metrics(), len(WORKERS), events=True))

    @property
    def port(self) -> int:
        return self.site.router

    def metrics(self) -> str:
        return fetch(f"http://127.0.0.1:{self.port}/metrics")

    def restart(self, name: str) -> None:
        """Starts a worker or the storage, at its own port and with nothing in its cache."""
        self.running[name] = self.launcher.start(self.stack, self.commands[name])

    def wait(self, name: str) -> None:
        url = self.site.store_url if name == "store" else self.site.url(name)
        self.running[name].wait(lambda: fetch(f"{url}/health") is not None)

    def kill(self, name: str) -> None:
        """At once, without a word to anybody."""
        process = self.running[name].process
        process.send_signal(signal.SIGKILL)
        process.wait()

    def disturb(self, fault: dict) -> None:
        """What is wrong with the storage from the next call on; nothing if empty."""
        body = json.dumps(fault).encode()
        request = urllib.request.Request(
            f"{self.site.store_url}/admin/fault", body, {"content-type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=ADMIN_TIMEOUT_S).close()


@contextmanager
def split_fleet(launcher: Launcher, mode: Mode, scale: float, patience: Patience = Patience()) -> Iterator[SplitFleet]:
    """All healthy and heard; stopped at the end, whatever became of them."""
    fleet = SplitFleet(launcher, mode, patience, scale)
    with fleet.stack:
        fleet.start()
        yield fleet


def split_launcher(programs: Path, work: Path) -> Launcher:
    return Launcher(programs, work, PROGRAMS)
