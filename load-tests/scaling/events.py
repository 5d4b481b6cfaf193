"""Latency of requests, and CPU of a block, against the blocks a second that engines announce while requests are served.

Four streams over ZeroMQ and 200 requests a second (open loop) whose prompts are tokenised and looked up. What a block costs
is the router's CPU beyond that at 0 blocks a second, over the blocks that the router's own metrics say it applied. Nothing
counts unless these are all blocks that were sent, with no gap, no resync and none unknown.
"""

import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Iterator

import neighbours  # noqa: F401  before what it makes importable
from fleet import FleetError, free_ports, stop
from ground import MODEL, Ground, Loop, Router, say, value
from lines import Curve, Line, Point
from neighbours import TOKENIZER

STREAMS = 4
RATES = (0, 2_000, 20_000, 100_000, 200_000)
RATES_QUICK = (0, 20_000, 100_000)
REQUESTS_PER_S = 200
SECONDS, SECONDS_QUICK = 4.0, 0.8
# A rate counts as reached from there on.
REACHED = 0.97
# The router rests later than this after the last block where it could not keep up; it takes 0.1 s to see that it does.
LATE_S = 0.4
# Extra CPU below this many times the range of that at 0 blocks is not told apart from noise.
CLEAR = 2.0
APPLIED = "tidegate_kv_blocks_applied_total"
FAULTS = (
    "tidegate_kv_blocks_unknown_total",
    "tidegate_kv_events_odd_total",
    "tidegate_kv_stream_gaps_total",
    "tidegate_kv_stream_resyncs_total",
    "tidegate_kv_index_evictions_total",
)


class Publisher:
    """The process that announces blocks."""

    def __init__(self, process: subprocess.Popen):
        self.process = process

    def line(self) -> str:
        line = self.process.stdout.readline()
        if not line:
            raise FleetError(f"the publisher ended with {self.process.wait()}")
        return line.strip()

    def begin(self, rate: float, seconds: float) -> None:
        self.process.stdin.write(f"{rate} {seconds}\n")
        self.process.stdin.flush()

    def end(self) -> tuple[int, float]:
        """Blocks that were sent, and in how many seconds."""
        blocks, took = self.line().split()
        return int(blocks), float(took)


@contextmanager
def publisher(ports: list[int]) -> Iterator[Publisher]:
    process = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("publisher.py"), *map(str, ports)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        started = Publisher(process)
        started.line()
        yield started
    finally:
        process.stdin.close()
        stop(process)
        process.stdout.close()


@dataclass(frozen=True)
class Served:
    """One run at one rate."""

    rate: int
    loop: Loop
    cpu_s: float
    applied: int
    # By the publisher's clock.
    sent_per_s: float
    # From the end of all requests and blocks until the router rested.
    late_s: float


def measure(ground: Ground) -> Curve:
    rates = ground.effort.pick(RATES, RATES_QUICK)
    seconds = ground.effort.pick(SECONDS, SECONDS_QUICK)
    rounds = []
    for turn in range(ground.effort.rounds):
        with serving(ground) as (router, announcing):
            ground.open_loop(router, REQUESTS_PER_S, ground.effort.warm_s)
            # each round begins with another rate, so that what changes in time is no slope
            order = [*rates[turn % len(rates) :], *rates[: turn % len(rates)]]
            rounds.append([serve(ground, router, announcing, rate, seconds) for rate in order])
        for one in rounds[-1]:
            say(
                f"events, round {turn + 1}: {one.rate:,} blocks/s: p50 {one.loop.p50_ms:.3f} ms, CPU {one.cpu_s * 1000:.1f} ms, "
                f"{one.applied:,} applied, sent at {one.sent_per_s:,.0f}/s, at rest {one.late_s:.2f} s later"
            )
    return curve(rounds)


@contextmanager
def serving(ground: Ground) -> Iterator[tuple[Router, Publisher]]:
    """A router that knows all engines exactly, and what announces their blocks."""
    ports = free_ports(STREAMS)
    index = {
        "enabled": True,
        "parity_check": False,
        "tokenizers": {MODEL: str(TOKENIZER)},
        "event_sources": [
            {"backend_name": f"e{n}", "endpoint": f"tcp://127.0.0.1:{port}", "reconnect_interval_ms": 100}
            for n, port in enumerate(ports)
        ],
    }

    def is_heard(metrics: str) -> bool:
        modes = [line for line in metrics.splitlines() if line.startswith("tidegate_kv_mode") and 'mode="exact"' in line]
        return sum(line.endswith(" 1") for line in modes) == STREAMS and value(metrics, APPLIED) > 0

    with ground.engines(STREAMS) as urls, publisher(ports) as announcing:
        with ground.router(urls, {"kv_cache_index": index}, is_heard) as router:
            announcing.line()  # has its subscribers
            yield router, announcing


def serve(ground: Ground, router: Router, announcing: Publisher, rate: int, seconds: float) -> Served:
    router.settled_cpu_s()
    before = router.metrics()
    cpu = router.settled_cpu_s()
    if rate:
        announcing.begin(rate, seconds)
    loop = ground.open_loop(router, REQUESTS_PER_S, seconds)
    sent, took = announcing.end() if rate else (0, seconds)
    ended = time.monotonic()
    cpu, late_s = router.settled_cpu_s() - cpu, time.monotonic() - ended
    after = wait_until_applied(router, before, sent)
    for name in FAULTS:
        if value(after, name) != value(before, name):
            raise FleetError(f"at {rate:,} blocks/s {name} rose from {value(before, name):g} to {value(after, name):g}")
    return Served(rate, loop, cpu, sent, sent / took, late_s)


def wait_until_applied(router: Router, before: str, sent: int) -> str:
    """The metrics, when they show every block that was sent: they are published in turns of their own."""
    deadline = time.monotonic() + 5
    while True:
        metrics = router.metrics()
        applied = value(metrics, APPLIED) - value(before, APPLIED)
        if applied == sent:
            return metrics
        if applied > sent or time.monotonic() > deadline:
            raise FleetError(f"{sent:,} blocks were sent, and {applied:,.0f} applied")
        time.sleep(0.02)


def curve(rounds: list[list[Served]]) -> Curve:
    quiet = [one.loop for served in rounds for one in served if one.rate == 0]
    latency, blocks, notes = [], [], []
    notes.append(
        f"At 0 blocks/s: p50 {median(loop.p50_ms for loop in quiet):.3f} ms, "
        f"{median(loop.us_per_request for loop in quiet):.0f} us of CPU a request."
    )
    for rate in sorted({one.rate for served in rounds for one in served} - {0}):
        of_rate = [one for served in rounds for one in served if one.rate == rate]
        extra = [one.cpu_s - one.loop.requests * at_rest_s(served) for served in rounds for one in served if one.rate == rate]
        noise_s = spread([at_rest_s(served) for served in rounds]) * median(one.loop.requests for one in of_rate)
        latency.append(Point(rate, tuple(one.loop.p50_ms for one in of_rate)))
        each = tuple(cpu / one.applied * 1e6 for cpu, one in zip(extra, of_rate))
        blocks.append(Point(rate, each, is_clear=median(extra) > CLEAR * noise_s and min(extra) > 0))
        notes += shortfall(rate, of_rate)
    notes.append("All blocks sent were applied: no gap, no resync, none unknown, none crowded out.")
    lines = (
        Line("whole answers, p50", "ms", tuple(latency), 0.0, "events are taken in on other threads than requests"),
        Line("CPU of a block", "us", tuple(blocks), 0.0, "each block is read, hashed and stored once, however many come"),
    )
    return Curve("events", "KV events while serving", "blocks announced per second", lines, notes)


def at_rest_s(served: list[Served]) -> float:
    """CPU of a request at 0 blocks a second, in the same round."""
    (quiet,) = [one for one in served if one.rate == 0]
    return quiet.cpu_s / quiet.loop.requests


def spread(values: list[float]) -> float:
    return max(values) - min(values)


def shortfall(rate: int, served: list[Served]) -> list[str]:
    """Who could not keep up, and with what."""
    notes = []
    sent = median(one.sent_per_s for one in served)
    late = median(one.late_s for one in served)
    if sent < rate * REACHED:
        notes.append(f"The publisher sent {sent:,.0f} blocks/s where {rate:,} were wanted: it is what was too slow.")
    if late > LATE_S:
        taken = median(one.applied / (one.applied / one.sent_per_s + one.late_s) for one in served)
        notes.append(f"At {rate:,} blocks/s the router was done {late:.1f} s after the last was sent: it took in {taken:,.0f}/s.")
    return notes
