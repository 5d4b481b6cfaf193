"""Turns what was driven into numbers, and numbers into a Markdown table."""

import re
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Iterable

from driver import Answer, Drive
from oracle import IMBALANCE_MAX, Bounds, imbalance, replay
from workloads import Workload

# What the exact index has to reach of what the oracle finds.
OF_BEST_MIN = 0.95

HEADER = """\
* hits: prompt tokens that engines found in their caches (`usage.prompt_tokens_details.cached_tokens`); rate: of all prompt tokens.
* of best: hits against the best possible with the same caches. That is the most that any of several greedy placements reaches
  which know all caches at every moment and keep the busiest worker within {limit} x the mean work, on the same requests
  in the same order. More than 100 % is possible: greedy is not optimal.
* imbalance: work of the busiest engine against the mean; work: prompt tokens computed and output tokens.
* TTFT: from sending the request to the first SSE data line.
* model: hits that the oracle's model of a cache gives for the placements as they were, against the hits measured. Far from
  100 %, the column "of best" would mean nothing. What runs at one time, the model plays one after the other.
* driver: how late the driver's own timer was, 99th percentile, and its share of one core. It must not be what is measured.
"""


@dataclass(frozen=True)
class Row:
    """One workload under one policy."""

    workload: str
    policy: str
    requests: int
    errors: int
    hit_tokens: int
    prompt_tokens: int
    of_best: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    imbalance: float
    work: dict[str, int]
    routes: dict[str, int]
    model: float
    wall_s: float
    driver_lag_p99_ms: float
    driver_cpu: float
    router: dict[str, float]
    first_errors: list[str]

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True)
class Case:
    """A workload, the engines it meets, and what could be had of it."""

    workload: Workload
    engines: int
    blocks: int
    bounds: Bounds


def row(case: Case, policy: str, drive: Drive, names: list[str], metrics: str) -> Row:
    good = [answer for answer in drive.answers if not answer.error]
    errors = mistakes(case.workload, drive.answers)
    work = {name: 0 for name in names}
    for answer in good:
        work[answer.backend] += answer.work
    hits = sum(answer.cached_tokens for answer in good)
    ttfts = sorted(answer.ttft_s for answer in good)
    placed = [(r, names.index(a.backend)) for r, a in zip(case.workload.requests, drive.answers) if not a.error]
    modelled = replay([r for r, _ in placed], [w for _, w in placed], case.blocks)
    return Row(
        workload=case.workload.name,
        policy=policy,
        requests=len(drive.answers),
        errors=len(errors),
        hit_tokens=hits,
        prompt_tokens=sum(answer.prompt_tokens for answer in good),
        of_best=hits / case.bounds.best.hit_tokens if case.bounds.best.hit_tokens else 1.0,
        ttft_p50_ms=percentile(ttfts, 0.50) * 1000,
        ttft_p99_ms=percentile(ttfts, 0.99) * 1000,
        imbalance=imbalance(list(work.values())),
        work=work,
        routes=dict(Counter(answer.route for answer in good)),
        model=modelled / hits if hits else 1.0,
        wall_s=drive.wall_s,
        driver_lag_p99_ms=percentile(drive.lags_s, 0.99) * 1000,
        driver_cpu=drive.cpu_s / drive.wall_s,
        router=router_counts(metrics),
        first_errors=errors[:3],
    )


def mistakes(workload: Workload, answers: Iterable[Answer]) -> list[str]:
    """What went wrong. Counts that differ from the plan are an error too: the oracle would have played something else."""
    found = []
    for request, answer in zip(workload.requests, answers):
        if answer.error:
            found.append(answer.error)
        elif (answer.prompt_tokens, answer.output_tokens) != (request.prompt_tokens, request.output_tokens):
            found.append(
                f"{answer.prompt_tokens} prompt and {answer.output_tokens} output tokens,"
                f" expected {request.prompt_tokens} and {request.output_tokens}"
            )
    return found


def percentile(ordered: list[float], share: float) -> float:
    """By nearest rank; 0 of nothing."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def router_counts(metrics: str) -> dict[str, float]:
    """The router's own counters that explain a result, summed over backends."""
    counts: Counter[str] = Counter()
    for line in metrics.splitlines():
        sample = re.match(r"(tidegate_kv_\w+|tidegate_prefix_spills_total|tidegate_retries_total)(\{.*\})? (\S+)$", line)
        if sample and "_seconds" not in sample[1]:
            result = re.search(r'(?:result|kind|why|reason)="(\w+)"', sample[2] or "")
            counts[sample[1] + (f":{result[1]}" if result else "")] += float(sample[3])
    return dict(counts)


def table(rows: list[Row]) -> str:
    heads = [
        "workload", "policy", "hits", "rate", "of best", "TTFT p50", "TTFT p99", "imbalance", "errors", "model", "driver",
    ]  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|---|---|" + "--:|" * (len(heads) - 2)]
    for r in rows:
        cells = [
            r.workload, r.policy, f"{r.hit_tokens:,}", f"{r.hit_rate:.1%}", f"{r.of_best:.1%}",
            f"{r.ttft_p50_ms:.0f} ms", f"{r.ttft_p99_ms:.0f} ms", f"{r.imbalance:.2f}", str(r.errors), f"{r.model:.1%}",
            f"{r.driver_lag_p99_ms:.0f} ms, {r.driver_cpu:.0%}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdict(rows: list[Row]) -> str:
    """Which workloads the exact index serves as well as it should; empty where it was not measured."""
    lines = []
    for r in (r for r in rows if r.policy == "exact"):
        met = r.of_best >= OF_BEST_MIN and r.imbalance <= IMBALANCE_MAX
        lines.append(f"* {r.workload}: {'met' if met else 'missed'}, {r.of_best:.1%} and {r.imbalance:.2f}")
    goal = f"Exact should have at least {OF_BEST_MIN:.0%} of the best, and an imbalance of at most {IMBALANCE_MAX}:\n\n"
    return goal + "\n".join(lines) + "\n\n" if lines else ""


def describe(case: Case) -> str:
    """One workload in a line, with its bounds as shares of the prompt tokens."""
    workload, bounds, total = case.workload, case.bounds, case.workload.prompt_tokens
    fit = case.blocks * case.engines / workload.working_set_blocks
    rule = bounds.best_rule
    return (
        f"* {workload.name}: {len(workload.requests)} requests, {total:,} prompt tokens;"
        f" {workload.working_set_blocks:,} different blocks, {case.blocks:,} fit one engine ({fit:.0%} fit all)."
        f" Could be reused: {bounds.endless_hit_tokens / total:.1%} with endless caches,"
        f" {bounds.pooled_hit_tokens / total:.1%} with one cache of all sizes together,"
        f" {bounds.unbalanced.hit_tokens / total:.1%} by the best greedy placement (imbalance {bounds.unbalanced.imbalance:.2f}),"
        f" {bounds.best.hit_tokens / total:.1%} by the best balanced one"
        f" (imbalance {bounds.best.imbalance:.2f}, binds from {rule.min_share:.0%} of a prompt), which is the best of the table."
    )


def as_json(cases: list[Case], rows: list[Row], command: list[str], parameters: dict) -> dict:
    return {
        "command": command,
        "parameters": parameters,
        "workloads": {
            case.workload.name: {
                "requests": len(case.workload.requests),
                "prompt_tokens": case.workload.prompt_tokens,
                "working_set_blocks": case.workload.working_set_blocks,
                "engine_blocks": case.blocks,
                "bounds": asdict(case.bounds),
            }
            for case in cases
        },
        "results": [{**asdict(r), "hit_rate": r.hit_rate} for r in rows],
    }
