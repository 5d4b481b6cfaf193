"""Draws curves as an SVG: a small panel each, both axes logarithmic, bars from the least to the most of all rounds. Pure."""

import math
from dataclasses import dataclass
from html import escape
from itertools import cycle
from typing import Sequence

from lines import Curve, Line
from table import figure, number

COLUMNS = 2
PANEL_WIDTH = 560
LEFT, RIGHT, TOP = 70, 20, 56
PLOT_HEIGHT = 180
TITLE_ROOM = 30
LEGEND_TOP, LEGEND_ROW = 38, 15
COLOURS = ("#0969da", "#54aeff", "#cf222e", "#ff8182", "#1a7f37", "#6fdd8b")
DECADE_ROOM = 0.08  # of a plot, so that no point lies on its frame


@dataclass(frozen=True)
class Axis:
    """From values to pixels, by their logarithms."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * share

    def ticks(self) -> list[float]:
        """Powers of ten, and where there are few, what lies between."""
        decades = range(math.floor(self.low), math.ceil(self.high) + 1)
        for steps in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
            found = [step * 10.0**power for power in decades for step in steps]
            found = [value for value in found if self.low <= math.log10(value) <= self.high]
            if len(found) >= 3:
                break
        return found


def axis(values: Sequence[float], start: float, end: float, decades_min: float) -> Axis:
    """Around these values, over at least so many decades: else noise would look like a slope."""
    logs = [math.log10(value) for value in values if value > 0] or [0.0]
    middle, width = (min(logs) + max(logs)) / 2, max(max(logs) - min(logs), decades_min)
    width *= 1 + 2 * DECADE_ROOM
    return Axis(middle - width / 2, middle + width / 2, start, end)


def draw(curves: Sequence[Curve], title: str) -> str:
    rows = math.ceil(len(curves) / COLUMNS)
    panel_height = TOP + PLOT_HEIGHT + LEGEND_TOP + LEGEND_ROW * max([len(curve.lines) for curve in curves], default=0) + 10
    width, height = PANEL_WIDTH * min(COLUMNS, max(len(curves), 1)), TITLE_ROOM + panel_height * rows
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(title)}</text>',
    ]
    for at, curve in enumerate(curves):
        x, y = at % COLUMNS * PANEL_WIDTH, TITLE_ROOM + at // COLUMNS * panel_height
        parts += [f'<g transform="translate({x},{y})">', *panel(curve), "</g>"]
    return "\n".join([*parts, "</svg>\n"])


def panel(curve: Curve) -> list[str]:
    shown = [point for line in curve.lines for point in line.points]
    x = axis([point.size for point in shown], LEFT, PANEL_WIDTH - RIGHT, 0.5)
    values = [value for point in shown for value in (point.median, *point.range)]
    y = axis(values, TOP + PLOT_HEIGHT, TOP, 1.0)
    units = " · ".join(dict.fromkeys(line.unit for line in curve.lines))
    parts = [
        f'<text x="{LEFT}" y="20" font-size="13" font-weight="bold">{escape(curve.title)}</text>',
        f'<text x="{LEFT}" y="{TOP - 12}" fill="#57606a">{escape(units)} by {escape(curve.size_name)}</text>',
        f'<rect x="{LEFT}" y="{TOP}" width="{PANEL_WIDTH - LEFT - RIGHT}" height="{PLOT_HEIGHT}" fill="none" stroke="#d0d7de"/>',
        *grid(x, y),
    ]
    for at, (line, colour) in enumerate(zip(curve.lines, cycle(COLOURS))):
        parts += line_parts(line, colour, x, y)
        label = f"{line.name}, {line.unit}: {verdict(line)}"
        parts.append(f'<text x="{LEFT}" y="{TOP + PLOT_HEIGHT + LEGEND_TOP + at * LEGEND_ROW}" fill="{colour}">{escape(label)}</text>')
    return parts


def grid(x: Axis, y: Axis) -> list[str]:
    bottom = TOP + PLOT_HEIGHT
    parts = []
    for value in x.ticks():
        parts.append(f'<line x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{TOP}" y2="{bottom}" stroke="#eaeef2"/>')
        parts.append(f'<text x="{x(value):.1f}" y="{bottom + 15}" text-anchor="middle">{tick(value)}</text>')
    for value in y.ticks():
        parts.append(
            f'<line x1="{LEFT}" x2="{PANEL_WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#eaeef2"/>'
        )
        parts.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{tick(value)}</text>')
    return parts


def tick(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"


def line_parts(line: Line, colour: str, x: Axis, y: Axis) -> list[str]:
    """A line through the medians, a dot for each with its value, hollow where it is not fitted, and a bar over its range."""
    drawn = [point for point in line.points if point.size > 0 and point.median > 0]
    path = " ".join(f"{x(point.size):.1f},{y(point.median):.1f}" for point in drawn)
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>']
    for point in drawn:
        low, high = point.range
        at, bottom = x(point.size), y(low) if low > 0 else y.start
        fill = colour if point.is_clear else "white"
        parts.append(
            f'<line class="range" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom:.1f}" y2="{y(high):.1f}" stroke="{colour}" '
            'stroke-width="4" stroke-opacity="0.35"/>'
        )
        parts.append(
            f'<circle cx="{at:.1f}" cy="{y(point.median):.1f}" r="3" fill="{fill}" stroke="{colour}">'
            f"<title>{point.size:,.0f}: {number(point.median)} {escape(line.unit)}</title></circle>"
        )
        parts.append(
            f'<text x="{at:.1f}" y="{y(point.median) - 7:.1f}" fill="{colour}" font-size="9" text-anchor="middle">'
            f"{number(point.median)}</text>"
        )
    return parts


def verdict(line: Line) -> str:
    if line.limit is None:
        return f"{figure(line)} (not judged)" if line.is_ratio else "not judged"
    return f"{figure(line)} (expected {line.expected:g}, limit {line.limit:g})" + (" EXCEEDED" if line.verdict == "EXCEEDED" else "")
