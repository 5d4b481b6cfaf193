"""What clients see of split serving when a part of it fails under load: workers are killed, the storage is slow or cut off.

The load is what the survivors can carry, and a unified worker lives; so nobody need see an error before the first byte of an
answer. A stream that has begun on a worker that dies cannot be saved, but must not look whole.
"""

import random
import sys
from dataclasses import dataclass, replace
from typing import Callable

from fleet import Launcher
from long_prompts import LongPrompts
from paced import Act, play, poisson
from report import percentile
from split_fleet import PREFILL_MS_PER_TOKEN, WORKERS, Mode, Patience, SplitFleet, split_fleet
from split_report import PATHS, Figures, due_between, ending_cells, figures, path_cells, table

# Of what the survivors can compute.
SHARE = 0.7

HEADER = """\
* requests/s: {share:.0%} of the prompts that the survivors can compute, counted by the workers named.
* error before the first byte: no token came. It must not happen. The next two end a stream that has begun, and say so: an error
  event, or a connection that breaks off. The last does not say so, and must not happen either.
* before, during, after: requests by when they were due. It breaks after {before:g} s and is mended {during:g} s later;
  {after:g} s follow. TTFT counts from when a request was due, as far as a token came."""


@dataclass(frozen=True)
class Fault:
    """What is broken, and mended again."""

    name: str
    says: str
    # How many workers' prefill is left at the least.
    survivors: int
    broken: Callable[[SplitFleet], None]
    mended: Callable[[SplitFleet], None]
    patience: Patience = Patience()


def killed(*names: str) -> tuple[Callable[[SplitFleet], None], Callable[[SplitFleet], None]]:
    def broken(fleet: SplitFleet) -> None:
        for name in names:
            fleet.kill(name)

    def mended(fleet: SplitFleet) -> None:
        for name in names:
            fleet.restart(name)
        for name in names:
            fleet.wait(name)

    return broken, mended


def disturbed(fault: dict) -> tuple[Callable[[SplitFleet], None], Callable[[SplitFleet], None]]:
    return lambda fleet: fleet.disturb(fault), lambda fleet: fleet.disturb({})


PREFILL = [worker.name for worker in WORKERS if worker.role == "prefill"]
DECODE = [worker.name for worker in WORKERS if worker.role == "decode"]
SLOW_MS = 1000
PATIENT = replace(Patience(), kv_transfer_s=5.0, load_s=15.0)
FAULTS = {
    fault.name: fault
    for fault in (
        Fault("prefill-killed", "one of two prefill workers gets SIGKILL and is started anew", 1, *killed(PREFILL[0])),
        Fault("decode-killed", "one of three decode workers gets SIGKILL and is started anew", 2, *killed(DECODE[0])),
        Fault("all-prefill-killed", "both prefill workers get SIGKILL and are started anew", 1, *killed(*PREFILL)),
        Fault("all-decode-killed", "all three decode workers get SIGKILL and are started anew", 1, *killed(*DECODE)),
        Fault("store-slow", f"every call to the storage takes {SLOW_MS} ms longer", 1, *disturbed({"slow_ms": SLOW_MS})),
        Fault("store-refuses", "the storage answers 503", 1, *disturbed({"refuse": 503})),
        Fault("store-hangs", "the storage never answers; engines give up before the router does", 1, *disturbed({"hang": True})),
        Fault("store-hangs-long", "the same; the router gives up before engines do", 1, *disturbed({"hang": True}), PATIENT),
        Fault("store-gone", "the storage gets SIGKILL and is started anew, empty", 1, *killed("store")),
    )
}


@dataclass(frozen=True)
class FaultSize:
    """How long, in seconds."""

    before_s: float
    during_s: float
    after_s: float

    @property
    def total_s(self) -> float:
        return self.before_s + self.during_s + self.after_s


FULL = FaultSize(20, 30, 40)
QUICK = FaultSize(2, 3, 2)


@dataclass(frozen=True)
class FaultRow:
    """What one fault came to."""

    mode: str
    fault: str
    rate_per_s: float
    all: Figures
    phases: dict[str, Figures]
    busy: float
    lag_p99_ms: float


def rate_of(fault: Fault, prompts: LongPrompts, scale: float) -> float:
    prefill_s = prompts.mean_prompt_tokens * PREFILL_MS_PER_TOKEN / 1000 * scale
    return SHARE * fault.survivors / prefill_s


def measure(
    launcher: Launcher, mode: Mode, fault: Fault, prompts: LongPrompts, size: FaultSize, scale: float, seed: str
) -> FaultRow:
    chance = random.Random(f"{seed} {fault.name}")
    rate = rate_of(fault, prompts, scale)
    shots = prompts.schedule(poisson(rate, size.total_s, chance), chance)
    mended_s = size.before_s + size.during_s
    with split_fleet(launcher, mode, scale, fault.patience) as fleet:
        acts = [Act(size.before_s, lambda: fault.broken(fleet)), Act(mended_s, lambda: fault.mended(fleet))]
        played = play(fleet.port, shots, acts)
    phases = {"before": (0.0, size.before_s), "during": (size.before_s, mended_s), "after": (mended_s, size.total_s)}
    return FaultRow(
        mode=mode.name,
        fault=fault.name,
        rate_per_s=rate,
        all=figures(played.takes),
        phases={name: figures(due_between(played.takes, *span)) for name, span in phases.items()},
        busy=played.busy,
        lag_p99_ms=percentile(played.lags_s, 0.99) * 1000,
    )


def run_faults(
    launcher: Launcher, modes: list[Mode], names: list[str], prompts: LongPrompts, size: FaultSize, scale: float, seed: str
) -> list[FaultRow]:
    print(f"\n## Faults\n\n{prompts.describe()}; time scale {scale:g}.\n")
    print(HEADER.format(share=SHARE, before=size.before_s, during=size.during_s, after=size.after_s))
    for name in names:
        fault = FAULTS[name]
        waits = ", ".join(f"{value * scale:g} s" for value in (fault.patience.kv_transfer_s, fault.patience.load_s))
        print(
            f"* {name}: {fault.says}. Survivors: {fault.survivors}. The router waits for a first token, and an engine for the"
            f" storage: {waits}."
        )
    sys.stdout.flush()
    rows = []
    for mode in modes:
        for name in names:
            rows.append(measure(launcher, mode, FAULTS[name], prompts, size, scale, seed))
            print(f"  {mode.name}, {name}: done", file=sys.stderr, flush=True)
    print(f"\n{ending_table(rows)}\n\n{phase_table(rows)}", flush=True)
    return rows


def ending_table(rows: list[FaultRow]) -> str:
    heads = [
        "mode", "fault", "requests/s", "requests", "error before the first byte", "error event", "broken connection",
        "short or no end", "machine", "driver",
    ]  # fmt: skip
    return table(
        heads,
        (
            [
                row.mode, row.fault, f"{row.rate_per_s:.2f}", str(row.all.requests), *ending_cells(row.all),
                f"{row.busy:.0%}", f"{row.lag_p99_ms:.1f} ms",
            ]  # fmt: skip
            for row in rows
        ),
        texts=2,
    )


def phase_table(rows: list[FaultRow]) -> str:
    heads = ["mode", "fault", "when", "requests", "TTFT p50", "TTFT p99", "ITL p99", *PATHS]
    return table(
        heads,
        (
            [
                row.mode, row.fault, name, str(found.requests), f"{found.ttft_p50_ms:.0f} ms", f"{found.ttft_p99_ms:.0f} ms",
                f"{found.itl_p99_ms:.1f} ms", *path_cells(found),
            ]  # fmt: skip
            for row in rows
            for name, found in row.phases.items()
        ),
        texts=3,
    )


def fault_faults(rows: list[FaultRow]) -> list[str]:
    """What must not happen."""
    found = []
    for row in rows:
        if row.all.refused or row.all.dishonest:
            found.append(
                f"{row.mode}, {row.fault}: {row.all.refused} errors before the first byte, {row.all.dishonest} streams that ended"
                f" without a word; such as {row.all.first_errors}"
            )
    return found
