"""Figures of streams and of their paths, and Markdown tables."""

from collections import Counter
from dataclasses import dataclass
from typing import Iterable, Sequence

from paced import DISHONEST, HONEST, Ending, Take
from report import percentile

PATHS = ("fast_decode", "prefill_then_decode", "unified", "fallback")


@dataclass(frozen=True)
class Figures:
    """What clients saw of a set of requests. Times of those that got a token; endings of all."""

    requests: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    # Between the tokens of one answer, over all of them.
    itl_p50_ms: float
    itl_p99_ms: float
    # The longest gap of each answer: the median answer's.
    longest_gap_ms: float
    # Share of answers without a gap beyond a limit.
    smooth: float
    paths: dict[str, float]
    endings: dict[str, int]
    first_errors: list[str]

    @property
    def refused(self) -> int:
        """Errors that a router could have hidden."""
        return self.endings.get(Ending.REFUSED.name, 0)

    @property
    def dishonest(self) -> int:
        return sum(self.endings.get(ending.name, 0) for ending in DISHONEST)

    @property
    def errors(self) -> int:
        return self.requests - self.endings.get(Ending.WHOLE.name, 0)


def figures(takes: Sequence[Take], smooth_gap_s: float = 0.0) -> Figures:
    begun = [take for take in takes if take.arrivals_s]
    ttfts = sorted(take.ttft_s for take in begun)
    gaps = sorted(gap for take in begun for gap in take.gaps_s)
    longest = sorted(max(take.gaps_s, default=0.0) for take in begun)
    paths = Counter(take.path or "none" for take in begun)
    return Figures(
        requests=len(takes),
        ttft_p50_ms=percentile(ttfts, 0.50) * 1000,
        ttft_p99_ms=percentile(ttfts, 0.99) * 1000,
        itl_p50_ms=percentile(gaps, 0.50) * 1000,
        itl_p99_ms=percentile(gaps, 0.99) * 1000,
        longest_gap_ms=percentile(longest, 0.50) * 1000,
        smooth=sum(gap <= smooth_gap_s for gap in longest) / len(longest) if longest else 0.0,
        paths={path: count / len(begun) for path, count in paths.items()},
        endings=dict(Counter(take.ending.name for take in takes)),
        first_errors=[f"{take.ending.value}: {take.detail}" for take in takes if take.ending is not Ending.WHOLE][:3],
    )


def due_between(takes: Iterable[Take], start_s: float, end_s: float) -> list[Take]:
    return [take for take in takes if start_s <= take.due_s < end_s]


def tokens_between(takes: Iterable[Take], start_s: float, end_s: float) -> int:
    return sum(1 for take in takes for at in take.arrivals_s if start_s <= at < end_s)


def served_between(takes: Iterable[Take], start_s: float, end_s: float) -> int:
    """Whole answers that ended then."""
    return sum(1 for take in takes if take.ending is Ending.WHOLE and start_s <= take.ended_s < end_s)


def path_cells(found: Figures) -> list[str]:
    """The share of each path; a dash where nothing is split."""
    if not any(path in found.paths for path in PATHS):
        return ["-"] * len(PATHS)
    return [f"{found.paths.get(path, 0):.0%}" for path in PATHS]


def ending_cells(found: Figures) -> list[str]:
    return [str(found.refused), *(str(found.endings.get(ending.name, 0)) for ending in HONEST), str(found.dishonest)]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """The first `texts` columns are text, the others numbers."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * texts + "--:|" * (len(heads) - texts)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)
