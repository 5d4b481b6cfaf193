"""What the router is like at a moment: its process as the system sees it, and its own numbers."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

LINE = re.compile(r"^([a-zA-Z_:]+)(?:\{(.*)\})? (\S+)$")
# All that counts what is under way, and must be 0 when nobody asks for anything.
LOAD_GAUGES = (
    "tidegate_http_in_flight_requests",
    "tidegate_in_flight_requests",
    "tidegate_buffered_request_bytes",
    "tidegate_quota_queue_depth",
    "tidegate_quota_running_requests",
    "tidegate_cache_flights",
    "tidegate_cache_flight_bytes",
    "tidegate_split_pairs",
    "tidegate_actor_mailbox_depth",
    "tidegate_backend_held_kv_tokens",
)
# What has a bound and must stay within it, or shows how full things are.
SIZE_GAUGES = (
    "tidegate_kv_index_entries",
    "tidegate_kv_index_blocks",
    "tidegate_kv_index_bytes",
    "tidegate_cache_entries",
    "tidegate_cache_bytes",
)


@dataclass(frozen=True)
class Sample:
    at_s: float
    rss_bytes: int
    fds: int
    threads: int
    # Of the clients, so far.
    requests: int
    errors: int
    gauges: dict[str, float] = field(default_factory=dict)
    now: str = ""


Metrics = dict[tuple[str, str], float]


def parse(text: str) -> Metrics:
    """Value by name and labels, as they stand there."""
    return {(found[1], found[2] or ""): float(found[3]) for line in text.splitlines() if (found := LINE.match(line))}


def total(metrics: Metrics, name: str, label: str = "") -> float:
    """Of all series with that name, and with that label where one is given."""
    return sum(value for (of, labels), value in metrics.items() if of == name and label in labels)


def gauges(metrics: Metrics) -> dict[str, float]:
    return {name: total(metrics, name) for name in LOAD_GAUGES + SIZE_GAUGES}


def process(pid: int) -> tuple[int, int, int]:
    """Resident bytes, open descriptors, threads."""
    proc = Path("/proc") / str(pid)
    resident = int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resident, len(os.listdir(proc / "fd")), len(os.listdir(proc / "task"))
