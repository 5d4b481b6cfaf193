"""Split serving under rising load, against the same engines without it: which of them keeps its times, and up to where."""

import random
import sys
from dataclasses import dataclass

from fleet import Launcher
from long_prompts import LongPrompts
from paced import play, poisson, saturate
from report import percentile
from split_fleet import ITL_MS, Mode, split_fleet
from split_report import (
    PATHS,
    Figures,
    due_between,
    figures,
    path_cells,
    served_between,
    table,
    tokens_between,
)

HEADS = [
    "mode", "requests/s", "of own capacity", "requests", "errors", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "longest gap",
    "smooth", "tokens/s", "served/s", *PATHS, "machine", "driver",
]  # fmt: skip

# An answer is smooth if none of its gaps is longer than so many usual ones: a reader would notice.
SMOOTH_GAPS = 5

HEADER = """\
* capacity: whole answers per second with {lanes} requests at a time, after the first {warm:g} of {seconds:g} s.
* requests/s: what is sent, at random times that know nothing of the fleet. Each mode gets the same shares of the smallest
  capacity; those with a larger one also get shares of their own.
* TTFT counts from when a request was due; ITL is the gap between two tokens of an answer, over all of them; longest gap: of each
  answer, the median answer's; smooth: share of answers without a gap above {smooth_ms:g} ms. Figures leave out the first
  {warm_up:g} of {duration:g} s, errors do not.
* errors: answers that were not whole, for whatever reason.
* machine: share of its processors at work; driver: how late its timer was, 99th percentile. Neither may be what is measured."""


@dataclass(frozen=True)
class LoadSize:
    """How much and how long."""

    shares: tuple[float, ...]
    # Of its own capacity, for a mode whose capacity is not the smallest.
    own_shares: tuple[float, ...]
    duration_s: float
    warm_up_s: float
    lanes: int
    capacity_s: float
    capacity_warm_s: float


FULL = LoadSize((0.3, 0.5, 0.7, 0.85), (0.5, 0.7, 0.85), 90, 10, 90, 60, 20)
QUICK = LoadSize((0.3, 0.7), (), 7, 1, 36, 8, 3)


@dataclass(frozen=True)
class LoadRow:
    """One mode at one rate."""

    mode: str
    rate_per_s: float
    of_capacity: float
    found: Figures
    errors: int
    refused: int
    tokens_per_s: float
    served_per_s: float
    busy: float
    lag_p99_ms: float
    first_errors: list[str]


def capacity(launcher: Launcher, mode: Mode, prompts: LongPrompts, size: LoadSize, scale: float, seed: str) -> float:
    with split_fleet(launcher, mode, scale) as fleet:
        played = saturate(fleet.port, prompts.shots(random.Random(f"{seed} capacity")), size.lanes, size.capacity_s)
    window_s = size.capacity_s - size.capacity_warm_s
    return served_between(played.takes, size.capacity_warm_s, size.capacity_s) / window_s


def measure(
    launcher: Launcher, mode: Mode, rate: float, own: float, prompts: LongPrompts, size: LoadSize, scale: float, seed: str
) -> LoadRow:
    # the same requests at the same times for every mode
    chance = random.Random(f"{seed} {rate:.6f}")
    shots = prompts.schedule(poisson(rate, size.duration_s, chance), chance)
    with split_fleet(launcher, mode, scale) as fleet:
        played = play(fleet.port, shots)
    everything = figures(played.takes)
    window_s = size.duration_s - size.warm_up_s
    return LoadRow(
        mode=mode.name,
        rate_per_s=rate,
        of_capacity=rate / own,
        found=figures(due_between(played.takes, size.warm_up_s, size.duration_s), smooth_gap_s(scale)),
        errors=everything.errors,
        refused=everything.refused,
        tokens_per_s=tokens_between(played.takes, size.warm_up_s, size.duration_s) / window_s,
        served_per_s=served_between(played.takes, size.warm_up_s, size.duration_s) / window_s,
        busy=played.busy,
        lag_p99_ms=percentile(played.lags_s, 0.99) * 1000,
        first_errors=everything.first_errors,
    )


def smooth_gap_s(scale: float) -> float:
    return SMOOTH_GAPS * ITL_MS / 1000 * scale


def plan(capacities: dict[str, float], size: LoadSize) -> dict[str, list[float]]:
    """The rates of each mode."""
    least = min(capacities.values())
    rates = {name: [share * least for share in size.shares] for name in capacities}
    for name, own in capacities.items():
        if own > least:
            rates[name] += [share * own for share in size.own_shares if share * own > size.shares[-1] * least]
    return rates


def run_load(
    launcher: Launcher, modes: list[Mode], prompts: LongPrompts, size: LoadSize, scale: float, seed: str
) -> list[LoadRow]:
    print(f"\n## Load\n\n{prompts.describe()}; time scale {scale:g}.\n")
    print(
        HEADER.format(
            lanes=size.lanes, warm=size.capacity_warm_s, seconds=size.capacity_s, warm_up=size.warm_up_s,
            duration=size.duration_s, smooth_ms=smooth_gap_s(scale) * 1000,
        )  # fmt: skip
    )
    capacities = {mode.name: capacity(launcher, mode, prompts, size, scale, seed) for mode in modes}
    print("\n" + "\n".join(f"Capacity, {name}: {own:.2f} requests/s." for name, own in capacities.items()), flush=True)
    rates, rows = plan(capacities, size), []
    for mode in modes:
        for rate in rates[mode.name]:
            rows.append(measure(launcher, mode, rate, capacities[mode.name], prompts, size, scale, seed))
            print(f"  {mode.name}, {rate:.2f} requests/s: done", file=sys.stderr, flush=True)
    print(f"\n{load_table(rows)}", flush=True)
    return rows


def load_table(rows: list[LoadRow]) -> str:
    return table(HEADS, ([*cells(row)] for row in rows))


def cells(row: LoadRow) -> list[str]:
    found = row.found
    return [
        row.mode, f"{row.rate_per_s:.2f}", f"{row.of_capacity:.0%}", str(found.requests), str(row.errors),
        f"{found.ttft_p50_ms:.0f} ms", f"{found.ttft_p99_ms:.0f} ms", f"{found.itl_p50_ms:.1f} ms", f"{found.itl_p99_ms:.1f} ms",
        f"{found.longest_gap_ms:.0f} ms", f"{found.smooth:.0%}", f"{row.tokens_per_s:.0f}", f"{row.served_per_s:.2f}",
        *path_cells(found), f"{row.busy:.0%}", f"{row.lag_p99_ms:.1f} ms",
    ]  # fmt: skip


def load_faults(rows: list[LoadRow]) -> list[str]:
    return [
        f"load, {row.mode} at {row.rate_per_s:.2f}/s: {row.errors} errors, {row.refused} before the first byte,"
        f" such as {row.first_errors}"
        for row in rows
        if row.errors
    ]
