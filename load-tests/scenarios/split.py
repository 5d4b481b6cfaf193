#!/usr/bin/env python3
"""Measures split serving (`disaggregated_serving`): prefill on one worker, decode on another, KV through shared storage.

Starts two prefill workers, three decode workers and a unified one, all simulated, the storage that they share, and the router in
front; sends long prompts at random times, watches every token, stops everything, and prints Markdown tables. Three parts, all of
them if none is named:

  --load       rising load, split against the same six engines that serve whole requests each
  --threshold  from which prompt size on a prefill worker is worth its hand-off (`min_prefill_tokens`)
  --faults     workers are killed and the storage is slow or cut off, under load

Exits with 1 if a client saw an error before the first byte of an answer, or an answer that ended short without saying so.

    cargo build --release --bin tidegate --bin engine-sim --bin kv-store
    python3 load-tests/scenarios/split.py --faults --only decode-killed store-hangs
"""

import argparse
import json
import shlex
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import split_faults
import split_load
import split_threshold
from fleet import FleetError
from long_prompts import LongPrompts
from split_fleet import (
    CHUNKED,
    ENGINE,
    ITL_MS,
    PREFILL_MS_PER_TOKEN,
    SPLIT,
    STORE_BYTES_PER_S,
    STORE_LATENCY_MS,
    UNIFIED,
    WORKERS,
    split_launcher,
)

REPOSITORY = Path(__file__).resolve().parents[2]
MODES = {"unified": UNIFIED, "chunked": CHUNKED, "split": SPLIT}
QUICK_FAULTS = ["prefill-killed", "decode-killed", "store-slow", "store-hangs", "store-gone"]
# Simulated times against real ones. One core carries the engines of the load at 0.5, and timers are exact enough for
# gaps between tokens; a threshold is about single gaps, so they are not shortened.
LOAD_SCALE, THRESHOLD_SCALE, QUICK_SCALE = 0.5, 1.0, 0.25


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_argument_group("parts")
    parts.add_argument("--load", action="store_true", help="rising load, split against unified only")
    parts.add_argument("--threshold", action="store_true", help="what a default of min_prefill_tokens rests on")
    parts.add_argument("--faults", action="store_true", help="what clients see when a part fails")
    parser.add_argument(
        "--bin", type=Path, default=REPOSITORY / "target/release", help="folder of tidegate, engine-sim and kv-store"
    )
    parser.add_argument("--quick", action="store_true", help="small: each part takes less than a minute")
    parser.add_argument(
        "--time-scale", type=float, metavar="FACTOR",
        help=f"multiplies the engines' times: {LOAD_SCALE} by default, {THRESHOLD_SCALE} for --threshold, {QUICK_SCALE} with"
        " --quick. Less is faster, up to where the machine is what is measured",
    )  # fmt: skip
    parser.add_argument(
        "--modes", nargs="+", choices=list(MODES),
        help="how the workers are used, unified and split for --load and split for --faults by default; with chunked, unified"
        f" engines compute long prompts by {CHUNKED.batched_tokens} tokens at a time",
    )  # fmt: skip
    parser.add_argument(
        "--only", nargs="+", choices=list(split_faults.FAULTS), metavar="FAULT",
        help=f"these faults only: {', '.join(split_faults.FAULTS)}",
    )  # fmt: skip
    parser.add_argument(
        "--prompt-tokens", type=span, default=LongPrompts.prompt_tokens, metavar="FROM-TO",
        help="lengths of prompts in --load and --faults, 4000-8000 by default",
    )  # fmt: skip
    parser.add_argument(
        "--output-tokens", type=span, default=LongPrompts.output_tokens, metavar="FROM-TO",
        help="and of their answers, 100-200 by default",
    )  # fmt: skip
    parser.add_argument(
        "--again", type=float, default=LongPrompts.again, metavar="SHARE",
        help=f"share of those requests that repeat an earlier prompt, {LongPrompts.again} by default",
    )  # fmt: skip
    parser.add_argument(
        "--shares", type=float, nargs="+", help=f"loads, as shares of the capacity; {split_load.FULL.shares} by default"
    )
    parser.add_argument("--seconds", type=float, help=f"how long each load lasts; {split_load.FULL.duration_s:g} by default")
    parser.add_argument(
        "--min-prefill-tokens", type=int, metavar="TOKENS",
        help="the router's setting in --load and --faults; its default if left out",
    )  # fmt: skip
    parser.add_argument(
        "--batched-tokens", type=int, default=SPLIT.batched_tokens, metavar="TOKENS",
        help=f"what a step of an engine may compute, {SPLIT.batched_tokens} by default (vLLM's max_num_batched_tokens)",
    )  # fmt: skip
    parser.add_argument("--seed", default="1", help="the same seed sends the same requests at the same times")
    parser.add_argument("--json", type=Path, help="writes the raw numbers to this file")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leaves settings and logs of all programs there")
    args = parser.parse_args()
    if not (args.load or args.threshold or args.faults):
        args.load = args.threshold = args.faults = True
    return args


def span(text: str) -> range:
    """`4000-8000`, or one number."""
    first, _, last = text.partition("-")
    found = range(int(first), int(last or first) + 1)
    if not found or found.start < 1:
        raise argparse.ArgumentTypeError("give a number above 0, or two such as 4000-8000")
    return found


def run(args: argparse.Namespace, work: Path) -> int:
    start = time.monotonic()
    launcher = split_launcher(args.bin.resolve(), work)
    prompts = LongPrompts(args.prompt_tokens, args.output_tokens, args.again)
    scale = args.time_scale or (QUICK_SCALE if args.quick else LOAD_SCALE)
    print(f"`{shlex.join(['python3', *sys.argv])}`\n\n{describe(args.batched_tokens)}", flush=True)
    faults, raw = [], {}
    if args.load:
        rows = split_load.run_load(launcher, modes(args, ["unified", "split"]), prompts, load_size(args), scale, args.seed)
        faults += split_load.load_faults(rows)
        raw["load"] = [asdict(row) for row in rows]
    if args.threshold:
        size = split_threshold.QUICK if args.quick else split_threshold.FULL
        policies = [replace(mode, batched_tokens=args.batched_tokens) for mode in split_threshold.MODES]
        sides = split_threshold.run_threshold(launcher, size, args.time_scale or THRESHOLD_SCALE, args.seed, policies)
        faults += split_threshold.threshold_faults(sides)
        raw["threshold"] = {name: asdict(side) for name, side in sides.items()}
    if args.faults:
        size = split_faults.QUICK if args.quick else split_faults.FULL
        names = args.only or (QUICK_FAULTS if args.quick else list(split_faults.FAULTS))
        rows = split_faults.run_faults(launcher, modes(args, ["split"]), names, prompts, size, scale, args.seed)
        faults += split_faults.fault_faults(rows)
        raw["faults"] = [asdict(row) for row in rows]
    print(f"\n{time.monotonic() - start:.0f} s in all.")
    if args.json:
        args.json.write_text(json.dumps({"command": sys.argv, **raw}, indent=1, default=str))
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


def modes(args: argparse.Namespace, default: list[str]) -> list:
    changes = {
        "unified": {"batched_tokens": args.batched_tokens},
        "split": {"batched_tokens": args.batched_tokens, "min_prefill_tokens": args.min_prefill_tokens},
    }
    return [replace(MODES[name], **changes.get(name, {})) for name in args.modes or default]


def load_size(args: argparse.Namespace) -> split_load.LoadSize:
    size = split_load.QUICK if args.quick else split_load.FULL
    return replace(size, shares=tuple(args.shares or size.shares), duration_s=args.seconds or size.duration_s)


def describe(batched_tokens: int) -> str:
    workers = ", ".join(f"{worker.name} (weight {worker.weight})" for worker in WORKERS)
    return (
        f"Engines: {workers}; each a {ENGINE[0]} on four GPUs with {PREFILL_MS_PER_TOKEN:g} ms per prompt token and {ITL_MS:g} ms"
        f" between tokens, times the time scale, and {batched_tokens:,} tokens for a step. Storage:"
        f" {STORE_BYTES_PER_S / 1e9:g} GB/s for all engines together, {STORE_LATENCY_MS:g} ms for each transfer. All times in"
        " tables are real ones."
    )


def main() -> int:
    # a terminated run ends like an interrupted one, so that what it started is stopped too; a shell's background job
    # has SIGINT ignored
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    args = arguments()
    try:
        with ExitStack() as stack:
            if args.keep:
                args.keep.mkdir(parents=True, exist_ok=True)
            work = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-split-")))
            return run(args, work)
    except FleetError as error:
        print(f"split: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("split: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
