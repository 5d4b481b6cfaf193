"""What is to run: each engine's command line and the router's settings. Starts nothing."""

import json
from dataclasses import dataclass

import neighbours  # noqa: F401
from acts import BATCH_KEY, GREEDY_KEY, RESERVED_MODEL
from fleet import Timing, free_ports

MODEL = "sim-model"
BLOCK_SIZE = 16
# 16,384 tokens: a few conversations and long prompts, so that engines evict all the time.
BLOCKS = 1024
# An answer of 40 tokens takes a tenth of a second: some 20 requests run at one time, and streams last long enough to be cut.
TIMING = Timing(prefill_ms_per_token=0.01, itl_ms=2.0, itl_ms_per_sequence=0.05)
ADMIN_TOKEN = "soak-admin-token"
# Engines whose every so-manieth batch of events is not sent live: gaps, all the time.
DROP_EVERY = 40
RESTART_AFTER_BATCHES = 400


@dataclass(frozen=True)
class Engine:
    """One engine: where it listens, and how its cache is known."""

    name: str
    port: int
    # "zmq", "zmq-replay", "sse", or "" for an engine that announces nothing.
    events: str
    flags: tuple[str, ...] = ()
    live_port: int = 0
    replay_port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        return [
            "engine-sim", "serve", MODEL, "--host", "127.0.0.1", "--port", str(self.port), "--block-size", str(BLOCK_SIZE),
            "--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", str(BLOCKS * BLOCK_SIZE),
            "--enable-prompt-tokens-details", *TIMING.flags(), *self.event_flags(), *self.flags,
        ]  # fmt: skip

    def event_flags(self) -> list[str]:
        if not self.events.startswith("zmq"):
            return []
        # With a * the engine listens; with an address it would connect.
        config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{self.live_port}"}
        if self.events == "zmq-replay":
            config["replay_endpoint"] = f"tcp://*:{self.replay_port}"
        return ["--kv-events-config", json.dumps(config)]

    def source(self) -> dict | None:
        """As the router's settings name its events."""
        if not self.events:
            return None
        zmq = f"tcp://127.0.0.1:{self.live_port}"
        source = {
            "backend_name": self.name,
            "endpoint": f"{self.url}/v1/kv_events" if self.events == "sse" else zmq,
            "reconnect_interval_ms": 200,
        }
        if self.events == "zmq-replay":
            source["replay_endpoint"] = f"tcp://127.0.0.1:{self.replay_port}"
        return source


# Every way of knowing a cache, with and without gaps, and an engine that counts its events anew without a new process.
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("zmq-replay", ()),
    ("zmq-replay", ("--sim-kv-events-drop-every", str(DROP_EVERY))),
    ("zmq", ()),
    ("zmq", ("--sim-kv-events-drop-every", str(DROP_EVERY))),
    ("zmq-replay", ("--sim-kv-events-restart-after", str(RESTART_AFTER_BATCHES))),
    ("sse", ()),
    ("", ()),
    ("", ()),
)


@dataclass(frozen=True)
class Place:
    """Ports of the router and of all engines."""

    api_port: int
    admin_port: int
    engines: tuple[Engine, ...]

    @classmethod
    def free(cls) -> "Place":
        api, admin, *ports = free_ports(2 + 3 * len(KINDS))
        engines = tuple(
            Engine(f"engine-{at + 1}", *ports[3 * at : 3 * at + 1], events, flags, *ports[3 * at + 1 : 3 * at + 3])
            for at, (events, flags) in enumerate(KINDS)
        )
        return cls(api, admin, engines)

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.api_port}"

    @property
    def admin(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    def settings(self, absent: frozenset[str] = frozenset()) -> dict:
        """The router's, without the engines that are absent for now."""
        present = [engine for engine in self.engines if engine.name not in absent]
        sources = [source for engine in present if (source := engine.source())]
        return {
            "server": {"host": "127.0.0.1", "port": self.api_port},
            "admin": {"listen": f"127.0.0.1:{self.admin_port}", "token": ADMIN_TOKEN},
            "logging": {"level": "info", "access": False},
            "drain": {"timeout": "2s"},
            "api_keys": keys(),
            # Longer than an engine rests (churn.py), so that who waits for one behind it is still served.
            "quotas": {"queue": {"size": 512, "timeout": "20s"}},
            "fallback_chains": {RESERVED_MODEL: [MODEL]},
            # Small and short-lived: answers leave it for want of room and by age.
            "response_cache": {"enabled": True, "backend": "memory", "ttl": "45s", "l1": {"max_bytes": "256KiB"}},
            # Entries expire within the warm-up, so that what is judged has both beginnings and ends.
            "kv_cache_index": {"enabled": True, "max_entries": 50_000, "entry_ttl_seconds": 60, "event_sources": sources},
            "backends": [{"name": engine.name, "url": engine.url, "models": [MODEL]} for engine in present],
            "health_checks": {"interval": "1s", "timeout": "1s", "unhealthy_threshold": 2, "healthy_threshold": 1},
            "circuit_breaker": {"enabled": True, "failure_threshold": 5, "recovery_timeout": "2s"},
        }


def keys() -> dict:
    """One whose requests wait for each other and all get their turn, and one that asks for more than it may."""
    return {
        "mode": "permissive",
        "keys": [
            {"name": "batch", "key": BATCH_KEY, "priority": "low", "limits": {"concurrent": 8}},
            {"name": "greedy", "key": GREEDY_KEY, "limits": {"requests_per_minute": 120}},
        ],
    }
