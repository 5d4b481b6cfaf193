"""From which size on a prompt is worth a prefill worker: what it costs to compute it beside the answers of others, and what the
hand-off costs instead.

One request at a time is sent to a quiet fleet, and then to one whose decode workers generate other answers. Once the router lets
the decode worker compute everything (`min_prefill_tokens` huge), once nothing (1).
"""

import asyncio
import random
import sys
from bisect import bisect_left
from dataclasses import dataclass
from statistics import median
from typing import Iterable, Sequence

from fleet import Launcher
from long_prompts import shot
from paced import Shot, Stopwatch, Take, ask, measured
from report import percentile
from split_fleet import Mode, split_fleet
from split_report import table
from workloads import random_tokens

ON_DECODE = Mode("on the decode worker", split=True, min_prefill_tokens=1 << 40)
HANDED_OFF = Mode("handed off", split=True, min_prefill_tokens=1)
MODES = (ON_DECODE, HANDED_OFF)

PROBE_ANSWER_TOKENS = 4
STREAM_PROMPT_TOKENS = 32
# More than they generate until the last probe is through; then they are cut off.
STREAM_ANSWER_TOKENS = 40_000
STREAM_WITHIN_S = 900
# A stream has begun when it has so many.
STREAM_BEGUN_TOKENS = 5
STREAMS_BEGIN_WITHIN_S = 30
# Between two probes, and of a window without any.
PAUSE_S = 0.4
# A stall is visible when a prompt doubles the usual gap.
VISIBLE = 2.0

HEADER = """\
* TTFT: median of {reps} prompts, one after the other, none seen before, on a quiet fleet, and with {streams} other answers being
  generated.
* stall: the longest gap that other answers of the same decode worker saw while the prompt was served: the median of the {reps}
  (the longest of all). The line `none` is the same without any prompt, over windows of {pause:g} s.
* path: which paths the router took, over both."""


@dataclass(frozen=True)
class ThresholdSize:
    """How much."""

    prompts: tuple[int, ...]
    reps: int
    streams: int


FULL = ThresholdSize((64, 128, 256, 512, 1024, 2048, 4096), reps=15, streams=24)
QUICK = ThresholdSize((64, 512, 2048), reps=4, streams=12)


@dataclass
class Cell:
    """Prompts of one size in one mode."""

    idle_ttfts_s: list[float]
    busy_ttfts_s: list[float]
    stalls_s: list[float]
    paths: set[str]
    errors: list[str]


@dataclass
class Side:
    """One mode: its cells by prompt size, and what other answers see when there is no prompt."""

    cells: dict[int, Cell]
    quiet_gaps_s: list[float]
    quiet_stalls_s: list[float]

    @property
    def usual_gap_s(self) -> float:
        return percentile(self.quiet_gaps_s, 0.5)


def run_threshold(
    launcher: Launcher, size: ThresholdSize, scale: float, seed: str, modes: Sequence[Mode] = MODES
) -> dict[str, Side]:
    print(f"\n## Threshold\n\nTime scale {scale:g}.\n")
    print(HEADER.format(reps=size.reps, streams=size.streams, pause=PAUSE_S), flush=True)
    sides = {}
    for mode in modes:
        side = Side({prompt: Cell([], [], [], set(), []) for prompt in size.prompts}, [], [])
        chance = random.Random(f"{seed} threshold {mode.name}")
        with split_fleet(launcher, mode, scale) as fleet:
            measured(lambda: quiet(fleet.port, size, side, chance))
            measured(lambda: busy(fleet.port, size, side, chance))
        sides[mode.name] = side
        print(f"  {mode.name}: done", file=sys.stderr, flush=True)
    print(f"\n{threshold_table(sides)}\n\n{verdict(sides)}", flush=True)
    return sides


async def quiet(port: int, size: ThresholdSize, side: Side, chance: random.Random) -> list[Take]:
    clock = Stopwatch()
    for prompt_tokens in order(size, chance):
        take = await ask(port, probe(prompt_tokens, chance, clock()), clock)
        note(side.cells[prompt_tokens], take, side.cells[prompt_tokens].idle_ttfts_s)
    return []


async def busy(port: int, size: ThresholdSize, side: Side, chance: random.Random) -> list[Take]:
    clock, streams = Stopwatch(), [Take(0.0) for _ in range(size.streams)]

    async def stream(take: Take) -> None:
        other = shot(random_tokens(chance, STREAM_PROMPT_TOKENS), STREAM_ANSWER_TOKENS)
        await ask(port, other, clock, take, STREAM_WITHIN_S)

    running = [asyncio.create_task(stream(take)) for take in streams]
    await begun(streams, clock)
    for prompt_tokens in order(size, chance):
        start_s = clock()
        await asyncio.sleep(PAUSE_S)
        note_quiet(side, streams, start_s, clock())
        take = await ask(port, probe(prompt_tokens, chance, clock()), clock)
        await asyncio.sleep(PAUSE_S)  # the gap that began last has ended too
        cell = side.cells[prompt_tokens]
        note(cell, take, cell.busy_ttfts_s)
        if take.arrivals_s:
            cell.stalls_s += stall(on(streams, take.backend), take.due_s, take.arrivals_s[0])
    ended = sum(task.done() for task in running)
    if ended:
        first = next(take for take in streams if take.detail)
        next(iter(side.cells.values())).errors.append(f"{ended} of the other answers ended early, such as {first.detail}")
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return []


async def begun(streams: Sequence[Take], clock: Stopwatch) -> None:
    while any(len(take.arrivals_s) < STREAM_BEGUN_TOKENS for take in streams):
        if clock() > STREAMS_BEGIN_WITHIN_S:
            raise RuntimeError("the other answers do not begin")
        await asyncio.sleep(0.05)


def order(size: ThresholdSize, chance: random.Random) -> list[int]:
    """Sizes mixed, so that what else the machine does meets them alike."""
    sizes = list(size.prompts) * size.reps
    chance.shuffle(sizes)
    return sizes


def probe(prompt_tokens: int, chance: random.Random, due_s: float) -> Shot:
    return shot(random_tokens(chance, prompt_tokens), PROBE_ANSWER_TOKENS, due_s)


def note(cell: Cell, take: Take, ttfts_s: list[float]) -> None:
    cell.paths.add(take.path or "none")
    if take.arrivals_s:
        ttfts_s.append(take.ttft_s)
    if take.detail:
        cell.errors.append(f"{take.ending.value}: {take.detail}")


def note_quiet(side: Side, streams: Sequence[Take], start_s: float, end_s: float) -> None:
    for backend in {take.backend for take in streams}:
        # without the gap that is still open
        side.quiet_stalls_s += stall(on(streams, backend), start_s, end_s)
    for take in streams:
        side.quiet_gaps_s += gaps(take.arrivals_s, start_s, end_s)
    side.quiet_gaps_s.sort()


def on(streams: Iterable[Take], backend: str) -> list[Take]:
    return [take for take in streams if take.backend == backend]


def stall(streams: Iterable[Take], start_s: float, end_s: float) -> list[float]:
    """The longest gap of any of these that lies in this time or touches it; nothing where there is no gap."""
    found = [gap for take in streams for gap in gaps(take.arrivals_s, start_s, end_s)]
    return [max(found)] if found else []


def gaps(arrivals_s: Sequence[float], start_s: float, end_s: float) -> list[float]:
    """Gaps that end after `start_s` and begin before `end_s`."""
    first = max(1, bisect_left(arrivals_s, start_s))
    found = []
    for at in range(first, len(arrivals_s)):
        if arrivals_s[at - 1] >= end_s:
            break
        found.append(arrivals_s[at] - arrivals_s[at - 1])
    return found


def threshold_table(sides: dict[str, Side]) -> str:
    heads = ["prompt tokens"]
    for name in sides:
        heads += [f"{name}: TTFT quiet", "busy", "stall of others", "path"]
    rows = [["none"]]
    for side in sides.values():
        rows[0] += ["", "", milliseconds(side.quiet_stalls_s), ""]
    for prompt_tokens in next(iter(sides.values())).cells:
        row = [f"{prompt_tokens:,}"]
        for side in sides.values():
            cell = side.cells[prompt_tokens]
            row += [middle(cell.idle_ttfts_s), middle(cell.busy_ttfts_s), milliseconds(cell.stalls_s)]
            row.append(", ".join(sorted(cell.paths)))
        rows.append(row)
    usual = "; ".join(
        f"{name} p50 {side.usual_gap_s * 1000:.1f} ms, p99 {percentile(side.quiet_gaps_s, 0.99) * 1000:.1f} ms"
        for name, side in sides.items()
    )
    return f"{table(heads, rows)}\n\nGaps without a prompt: {usual}."


def middle(values_s: list[float]) -> str:
    return f"{median(values_s) * 1000:.0f} ms" if values_s else "-"


def milliseconds(values_s: list[float]) -> str:
    return f"{median(values_s) * 1000:.0f} ms ({max(values_s) * 1000:.0f})" if values_s else "-"


def visible_from(side: Side) -> int | None:
    """The smallest prompt from which on every size stalls others visibly."""
    found = None
    for prompt_tokens, cell in sorted(side.cells.items(), reverse=True):
        if not cell.stalls_s or median(cell.stalls_s) < VISIBLE * side.usual_gap_s:
            break
        found = prompt_tokens
    return found


def verdict(sides: dict[str, Side]) -> str:
    side = sides.get(ON_DECODE.name)
    if side is None:
        return ""
    size = visible_from(side)
    what = f"prompts of {size:,} tokens and more" if size else "no size that was measured"
    return f"On the decode worker, the stall is {VISIBLE:g} times the usual gap or longer with {what}."


def threshold_faults(sides: dict[str, Side]) -> list[str]:
    return [
        f"threshold, {name}, {prompt_tokens} tokens: {len(cell.errors)} errors, such as {cell.errors[0]}"
        for name, side in sides.items()
        for prompt_tokens, cell in side.cells.items()
        if cell.errors
    ]
