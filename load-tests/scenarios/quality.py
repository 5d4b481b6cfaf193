#!/usr/bin/env python3
"""Measures how well the router places prompts: cache hits against the best possible, time to first token, and balance.

Starts simulated engines with small KV caches and the router in front of them, sends the same requests under each policy, stops
everything, and prints a Markdown table. Exits with 1 if any request failed.

    python3 load-tests/scenarios/quality.py --trace FILE
"""

import argparse
import json
import random
import shlex
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dialogues import ChatDialogue, Teller, TokenDialogue
from driver import drive
from fleet import POLICIES, FleetError, Launcher, Timing
from oracle import IMBALANCE_MAX, bounds
from report import HEADER, Case, Row, as_json, describe, row, table, verdict
from workloads import (
    BYTES_PER_TOKEN,
    Hot,
    Scale,
    Systems,
    Talk,
    Workload,
    conversations,
    hot_system,
    mooncake,
    shared_systems,
    turn_order,
)

REPOSITORY = Path(__file__).resolve().parents[2]
# Flip when the router keeps an index for engines without events.
APPROXIMATE_BY_DEFAULT = True
DEFAULT_POLICIES = ["round-robin", "ring", "exact", *(["approximate"] if APPROXIMATE_BY_DEFAULT else [])]
WORKLOADS = ["conversations", "chats", "systems", "hot", "trace"]
# The engine that is asked beforehand: fast, and with room for everything.
TELLER_TIMING = Timing(scale=0.0)
TELLER_BLOCKS = 100_000


@dataclass(frozen=True)
class Size:
    """How much of everything. Per engine the caches hold some dozens of prompts, so that chance alone makes no imbalance."""

    engines: int
    concurrency: int
    talk: Talk
    chat: Talk
    systems: Systems
    hot: Hot
    trace: Scale


FULL = Size(
    engines=8,
    concurrency=24,
    talk=Talk(conversations=300, turns=8, opening_tokens=250, follow_up_tokens=110, answer_tokens=12),
    chat=Talk(conversations=160, turns=6, opening_tokens=600, follow_up_tokens=150, answer_tokens=12),
    systems=Systems(3000, systems=300, system_tokens=range(200, 1000), tail_tokens=range(30, 100), answer_tokens=4),
    hot=Hot(
        requests=800, others_first=80, share=0.7, system_tokens=1000, tail_tokens=range(200, 400), other_tokens=range(300, 1200),
        answer_tokens=48,
    ),
    trace=Scale(requests=1600, block_tokens=32, answer_tokens=4, speed_up=30.0),
)
QUICK = Size(
    engines=4,
    concurrency=8,
    talk=Talk(conversations=30, turns=4, opening_tokens=250, follow_up_tokens=110, answer_tokens=4),
    chat=Talk(conversations=16, turns=3, opening_tokens=600, follow_up_tokens=150, answer_tokens=4),
    systems=Systems(240, systems=32, system_tokens=range(200, 600), tail_tokens=range(30, 60), answer_tokens=2),
    hot=Hot(
        requests=120, others_first=12, share=0.7, system_tokens=400, tail_tokens=range(60, 100), other_tokens=range(200, 400),
        answer_tokens=8,
    ),
    trace=Scale(requests=160, block_tokens=16, answer_tokens=2, speed_up=60.0),
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, default=REPOSITORY / "target/release", help="folder of tidegate and engine-sim")
    parser.add_argument("--trace", type=Path, help="a trace in Mooncake's format; without it that workload is left out")
    parser.add_argument("--engines", type=int, help=f"how many, {FULL.engines} by default")
    parser.add_argument("--concurrency", type=int, help=f"requests at one time, {FULL.concurrency} by default")
    parser.add_argument("--capacity", type=float, default=0.7, help="share of the working set that fits all caches together")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=DEFAULT_POLICIES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="writes the raw numbers to this file")
    parser.add_argument("--quick", action="store_true", help="small; also fails if exact finds no more than round robin and ring")
    parser.add_argument("--trace-block-tokens", type=int, help="tokens that stand for one block of the trace")
    parser.add_argument("--trace-requests", type=int, help="how much of the trace is played")
    parser.add_argument("--trace-speed-up", type=float, help="how many times faster the trace is played")
    parser.add_argument("--prefill-ms-per-token", type=float, default=Timing.prefill_ms_per_token)
    args = parser.parse_args()
    if not args.trace:
        args.workloads = [name for name in args.workloads if name != "trace"]
    if not args.workloads:
        parser.error("the workload `trace` needs --trace")
    return args


def size_of(args: argparse.Namespace) -> Size:
    size = QUICK if args.quick else FULL
    trace = replace(
        size.trace,
        requests=args.trace_requests or size.trace.requests,
        block_tokens=args.trace_block_tokens or size.trace.block_tokens,
        speed_up=args.trace_speed_up or size.trace.speed_up,
    )
    return replace(
        size,
        engines=args.engines or size.engines,
        concurrency=args.concurrency or size.concurrency,
        trace=trace,
    )


def make_workload(name: str, size: Size, args: argparse.Namespace, launcher: Launcher) -> Workload:
    """Each from a seed of its own, so that leaving one out does not change another."""
    chance = random.Random(f"{args.seed} {name}")
    if name == "systems":
        # no system prompt is shorter, and the first of its tokens tell them apart
        return shared_systems(name, size.systems, chance, size.systems.system_tokens.start * BYTES_PER_TOKEN)
    if name == "hot":
        return hot_system(name, size.hot, chance, size.hot.system_tokens * BYTES_PER_TOKEN)
    if name == "trace":
        # nearly all prompts share the first block of a trace, so the second has to count
        return mooncake(name, args.trace, size.trace, 2 * size.trace.block_tokens * BYTES_PER_TOKEN)
    talk, dialogue = (size.talk, TokenDialogue) if name == "conversations" else (size.chat, ChatDialogue)
    order = turn_order(talk, size.concurrency, chance)
    with launcher.engine(TELLER_BLOCKS, TELLER_TIMING) as engine:
        dialogues = [dialogue(Teller(engine.url), chance) for _ in range(talk.conversations)]
        # what the first turn says tells conversations apart
        return conversations(name, talk, order, dialogues, talk.opening_tokens * BYTES_PER_TOKEN)


def make_case(workload: Workload, engines: int, capacity: float) -> Case:
    blocks = max(
        int(workload.working_set_blocks * capacity / engines),
        max(request.slots for request in workload.requests),  # the longest prompt must fit
    )
    return Case(workload, engines, blocks, bounds(workload.requests, engines, blocks))


def measure(case: Case, policy: str, size: Size, timing: Timing, launcher: Launcher) -> Row:
    workload = case.workload
    with launcher.fleet(case.engines, case.blocks, timing, POLICIES[policy], workload.prefix_bytes) as fleet:
        driven = drive(fleet.port, workload.requests, size.concurrency)
        return row(case, policy, driven, [backend.name for backend in fleet.backends], fleet.metrics())


def faults(rows: list[Row], quick: bool) -> list[str]:
    """What makes the run a failure."""
    found = [f"{r.workload}, {r.policy}: {r.errors} errors, such as {r.first_errors}" for r in rows if r.errors]
    # all workloads together: a small one alone may leave little to find
    hits: Counter[str] = Counter()
    for r in rows:
        hits[r.policy] += r.hit_tokens
    if quick and "exact" in hits:
        # also more than the ring, which serves where the index does not
        better = [f"{policy} found {hits[policy]}" for policy in ("round-robin", "ring") if hits[policy] >= hits["exact"]]
        found += [f"exact found {hits['exact']} cached tokens, {other}" for other in better]
    return found


def run(args: argparse.Namespace, work: Path) -> int:
    start = time.monotonic()
    launcher = Launcher(args.bin.resolve(), work)
    size, timing = size_of(args), Timing(prefill_ms_per_token=args.prefill_ms_per_token)
    parameters = {"capacity": args.capacity, "seed": args.seed, "timing": asdict(timing), "size": asdict(size)}
    print(f"`{shlex.join(['python3', *sys.argv])}`\n\n{HEADER.format(limit=IMBALANCE_MAX)}")
    print(f"{size.engines} engines, {size.concurrency} requests at a time, seed {args.seed}; {timing}\n", flush=True)
    cases, rows = [], []
    for name in args.workloads:
        case = make_case(make_workload(name, size, args, launcher), size.engines, args.capacity)
        cases.append(case)
        print(describe(case), flush=True)
        for policy in args.policies:
            rows.append(measure(case, policy, size, timing, launcher))
            print(f"  {policy}: {rows[-1].wall_s:.1f} s", file=sys.stderr, flush=True)
    print(f"\n{table(rows)}\n\n{'' if args.quick else verdict(rows)}{time.monotonic() - start:.0f} s in all.")
    if args.json:
        args.json.write_text(json.dumps(as_json(cases, rows, sys.argv, parameters), indent=1, default=str))
    found = faults(rows, args.quick)
    for fault in found:
        print(fault, file=sys.stderr)
    return 1 if found else 0


def main() -> int:
    # a terminated run ends like an interrupted one, so that what it started is stopped too; a shell's background job
    # has SIGINT ignored
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    args = arguments()
    try:
        with tempfile.TemporaryDirectory(prefix="tidegate-quality-") as work:
            return run(args, Path(work))
    except FleetError as error:
        print(f"quality: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("quality: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
