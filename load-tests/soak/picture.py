"""Draws a run as an SVG: one strip per number over the same time, with a mark where something was done to the fleet."""

from dataclasses import dataclass
from html import escape
from typing import Sequence

from samples import Sample

WIDTH, LEFT, RIGHT, TOP = 1100, 80, 40, 56
STRIP, GAP = 110, 34
MARKS_ROOM = 40
COLOURS = {
    "leave": "#8250df",
    "drain": "#0969da",
    "kill": "#cf222e",
    "blink": "#bc4c00",
    "freeze": "#1b7c83",
    "refuse": "#6e7781",
}


@dataclass(frozen=True)
class Strip:
    name: str
    # (seconds, value)
    points: list[tuple[float, float]]


def strips(samples: Sequence[Sample]) -> list[Strip]:
    pairs = list(zip(samples, samples[1:]))
    rate = [(b.at_s, (b.requests - a.requests) / max(b.at_s - a.at_s, 1e-9)) for a, b in pairs]
    of = lambda value: [(sample.at_s, float(value(sample))) for sample in samples]
    return [
        Strip("RSS, MiB", of(lambda sample: sample.rss_bytes / 2**20)),
        Strip("open descriptors", of(lambda sample: sample.fds)),
        Strip("requests/s", rate),
        Strip("errors so far", of(lambda sample: sample.errors)),
        Strip("index entries", of(lambda sample: sample.gauges.get("tidegate_kv_index_entries", 0.0))),
    ]


def draw(samples: Sequence[Sample], marks: Sequence[tuple[float, str]], title: str) -> str:
    shown = strips(samples)
    end_s = max([sample.at_s for sample in samples] + [1.0])
    x = lambda at_s: LEFT + (WIDTH - LEFT - RIGHT) * at_s / end_s
    bottom = TOP + len(shown) * (STRIP + GAP)
    height = bottom + MARKS_ROOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="15">{escape(title)}</text>',
        *mark_lines(marks, x, bottom - GAP),
    ]
    for at, strip in enumerate(shown):
        parts += strip_lines(strip, x, TOP + at * (STRIP + GAP))
    parts += time_axis(end_s, x, bottom - GAP)
    parts += legend(bottom + 20)
    return "\n".join([*parts, "</svg>\n"])


def mark_lines(marks: Sequence[tuple[float, str]], x, bottom: float) -> list[str]:
    return [
        f'<line x1="{x(at_s):.1f}" x2="{x(at_s):.1f}" y1="{TOP}" y2="{bottom}" stroke="{colour(what)}" stroke-opacity="0.8">'
        f"<title>{at_s:.0f} s: {escape(what)}</title></line>"
        for at_s, what in marks
    ]


def colour(what: str) -> str:
    return COLOURS.get(what.split(" ")[0], "#000000")


def strip_lines(strip: Strip, x, top: float) -> list[str]:
    values = [value for _, value in strip.points] or [0.0]
    # From 0, unless that would flatten what is to be seen.
    low = 0.0 if min(values) < max(values) / 2 else min(values) - (max(values) - min(values) or max(values)) * 0.2
    high = max(max(values), low + 1e-9, 1.0)
    y = lambda value: top + STRIP - (value - low) / (high - low) * STRIP
    line = " ".join(f"{x(at_s):.1f},{y(value):.1f}" for at_s, value in strip.points)
    return [
        f'<rect x="{LEFT}" y="{top}" width="{WIDTH - LEFT - RIGHT}" height="{STRIP}" fill="none" stroke="#d0d7de"/>',
        f'<text x="{LEFT}" y="{top - 5}" font-weight="bold">{escape(strip.name)}</text>',
        f'<text x="{LEFT - 6}" y="{top + 10}" text-anchor="end">{high:,.1f}</text>',
        f'<text x="{LEFT - 6}" y="{top + STRIP}" text-anchor="end">{low:,.1f}</text>',
        f'<polyline points="{line}" fill="none" stroke="#24292f" stroke-width="1.5"/>',
    ]


def time_axis(end_s: float, x, y: float) -> list[str]:
    steps = [end_s * part / 6 for part in range(7)]
    label = lambda at_s: f"{at_s / 60:.1f} min" if end_s > 120 else f"{at_s:.0f} s"
    return [f'<text x="{x(at_s):.1f}" y="{y + 16}" text-anchor="middle">{label(at_s)}</text>' for at_s in steps]


def legend(y: float) -> list[str]:
    return [
        f'<text x="{LEFT + at * 90}" y="{y}" fill="{colour}">▏{kind}</text>' for at, (kind, colour) in enumerate(COLOURS.items())
    ]
