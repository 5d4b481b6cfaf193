"""Points, the line through them, and whether it rises more than it may. Pure."""

import math
from dataclasses import dataclass, field
from statistics import median
from typing import Sequence

# Above the expected slope: what caches of the processor and noise may add. A cost that grows with the size itself has a slope
# that is 1 higher.
TOLERANCE = 0.15


@dataclass(frozen=True)
class Point:
    """What was measured at one size, once a round."""

    size: float
    values: tuple[float, ...]
    # Whether it stands out from the noise; what does not is shown, and not fitted.
    is_clear: bool = True

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def range(self) -> tuple[float, float]:
        return min(self.values), max(self.values)


@dataclass(frozen=True)
class Line:
    """One cost against one size."""

    name: str
    unit: str
    points: tuple[Point, ...]
    # The slope in log-log, or the ratio of the last point to the first; None: shown, and not judged.
    expected: float | None
    reason: str
    is_ratio: bool = False

    @property
    def figure(self) -> float | None:
        return ratio(self.points) if self.is_ratio else slope(self.points)

    @property
    def limit(self) -> float | None:
        return None if self.expected is None else self.expected + TOLERANCE

    @property
    def verdict(self) -> str:
        if self.limit is None:
            return "not judged"
        if self.figure is None:
            return "too few points"
        return "ok" if self.figure <= self.limit else "EXCEEDED"


@dataclass(frozen=True)
class Curve:
    """Lines over the same size, and what has to be said of them."""

    name: str
    title: str
    size_name: str
    lines: tuple[Line, ...]
    notes: list[str] = field(default_factory=list)


def slope(points: Sequence[Point]) -> float | None:
    """Of the least-squares line through the medians' logarithms; None with fewer than two sizes."""
    usable = [(math.log(p.size), math.log(p.median)) for p in points if p.is_clear and p.size > 0 and p.median > 0]
    if len({x for x, _ in usable}) < 2:
        return None
    mean_x = sum(x for x, _ in usable) / len(usable)
    mean_y = sum(y for _, y in usable) / len(usable)
    return sum((x - mean_x) * (y - mean_y) for x, y in usable) / sum((x - mean_x) ** 2 for x, _ in usable)


def ratio(points: Sequence[Point]) -> float | None:
    if len(points) < 2 or points[0].median <= 0:
        return None
    return points[-1].median / points[0].median


def straight(points: Sequence[Point]) -> tuple[float, float]:
    """A cost at size 0, and what each unit of size adds: the least-squares line through the medians as they are. Where the
    first is large, a cost that does grow with the size is not yet seen in log-log."""
    mean_x = sum(p.size for p in points) / len(points)
    mean_y = sum(p.median for p in points) / len(points)
    each = sum((p.size - mean_x) * (p.median - mean_y) for p in points) / sum((p.size - mean_x) ** 2 for p in points)
    return mean_y - each * mean_x, each


def points_of(rounds: Sequence[dict[float, float]]) -> tuple[Point, ...]:
    """Values by size, one dictionary for each round, as points."""
    sizes = sorted({size for one in rounds for size in one})
    return tuple(Point(size, tuple(one[size] for one in rounds if size in one)) for size in sizes)


def has_failed(curves: Sequence[Curve]) -> bool:
    return any(line.verdict in ("EXCEEDED", "too few points") for curve in curves for line in curve.lines)
