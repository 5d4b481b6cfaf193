"""Draws a panel as a piece of HTML with SVG in it. Close to what Grafana draws, so that what is wrong there is seen here."""

import html
import math
import re
from dataclasses import dataclass

from panels import Panel
from units import written

COLUMNS = 24
ROW_PX = 34
PAGE_PX = 1800
GAP_PX = 8
TITLE_PX = 26
LEGEND_LINE_PX = 15
# More series than this are there, but not in the legend.
LEGEND_LINES = 6
AXIS_PX = 64
NAME_PX = 150
LEAST_PLOT_PX = 40
TIME_PX = 16
TICKS = 4
GREEN, ORANGE, RED, BLUE, PURPLE = "#73bf69", "#ff9830", "#f2495c", "#5794f2", "#b877d9"
COLORS = [GREEN, "#f2cc0c", BLUE, ORANGE, RED, PURPLE, "#8ab8ff", "#96d98d", "#ffb357", "#ca95e5", "#fade2a", "#ff7383"]
NAMED_COLORS = {"text": "#d8d9da", "green": GREEN, "orange": ORANGE, "red": RED, "blue": BLUE, "purple": PURPLE}
UNMAPPED = "#555"
LABEL = re.compile(r"\{\{\s*(\w+)\s*\}\}")


@dataclass
class Series:
    """One line of a panel. None where it has a gap."""

    name: str
    values: list[float | None]

    @property
    def last(self) -> float | None:
        return next((value for value in reversed(self.values) if value is not None), None)

    @property
    def most(self) -> float | None:
        return max((value for value in self.values if value is not None), default=None)


def series_of(target: dict, answer: list[dict], times: list[float]) -> list[Series]:
    """An answer of Prometheus, on the times that were asked for."""
    found = []
    for one in answer:
        at = {round(float(moment)): float(value) for moment, value in one["values"]}
        values = [at.get(round(moment)) for moment in times]
        legend = target.get("legendFormat", "")
        labels = ", ".join(f"{key}={value}" for key, value in one["metric"].items()) or "value"
        name = LABEL.sub(lambda label: one["metric"].get(label[1], ""), legend) or labels
        found.append(Series(name, [None if value is None or math.isnan(value) else value for value in values]))
    return [one for one in found if one.last is not None]


def draw(panel: Panel, series: list[Series], times: list[float]) -> str:
    """The panel at its place on the page."""
    place = panel.model["gridPos"]
    width = place["w"] * PAGE_PX // COLUMNS - GAP_PX
    height = place["h"] * ROW_PX - GAP_PX
    kinds = {"stat": stat, "timeseries": lines, "state-timeline": states}
    inner = '<div class="none">No data</div>'
    if series:
        inner = kinds[panel.model["type"]](panel, series, times, width, height - TITLE_PX)
    return box(place, width, height, f'<div class="title">{html.escape(panel.title)}</div>{inner}', "panel")


def row_title(title: str, place: dict) -> str:
    return box(place, PAGE_PX, place["h"] * ROW_PX, html.escape(title), "row")


def box(place: dict, width: int, height: int, inner: str, kind: str) -> str:
    left, top = place["x"] * PAGE_PX // COLUMNS, place["y"] * ROW_PX
    return f'<div class="{kind}" style="left:{left}px;top:{top}px;width:{width}px;height:{height}px">{inner}</div>'


def stat(panel: Panel, series: list[Series], times: list[float], width: int, height: int) -> str:
    defaults = panel.model["fieldConfig"]["defaults"]
    named = len(series) > 1 or panel.model["options"].get("textMode") == "value_and_name"
    shown = []
    for one in series:
        color = "text"
        for step in defaults.get("thresholds", {}).get("steps", []):
            if step["value"] is None or one.last >= step["value"]:
                color = step["color"]
        value = written(one.last, panel.unit, defaults.get("decimals"))
        name = f"<small>{html.escape(one.name)}</small> " if named else ""
        shown.append(f'<span style="color:{NAMED_COLORS.get(color, color)}">{name}{html.escape(value)}</span>')
    size = 34 if len(series) == 1 else 22
    return f'<div class="stat" style="height:{height}px;font-size:{size}px">{"<br>".join(shown)}</div>'


def lines(panel: Panel, series: list[Series], times: list[float], width: int, height: int) -> str:
    defaults = panel.model["fieldConfig"]["defaults"]
    stacked = defaults["custom"].get("stacking", {}).get("mode") == "normal"
    legend = series[:LEGEND_LINES]
    legend_lines = len(legend) + (len(series) > LEGEND_LINES)
    drawn = on_each_other(series) if stacked else [one.values for one in series]
    # An endless axis would show nothing at all.
    seen = [value for values in drawn for value in values if value is not None and math.isfinite(value)] or [0.0]
    low, high = min(defaults.get("min", min(seen)), min(seen)), defaults.get("max", max(seen))
    plot = Plot(width, max(LEAST_PLOT_PX, height - TIME_PX - LEGEND_LINE_PX * legend_lines - 12), low, max(high, low), len(times))
    parts = [plot.axis(panel.unit), plot.clock(times)]
    for number, values in reversed(list(enumerate(drawn))):
        parts += [plot.line(piece, COLORS[number % len(COLORS)], filled=stacked) for piece in pieces(values)]
    svg = f'<svg width="{width}" height="{plot.height + TIME_PX}">{"".join(parts)}</svg>'
    return svg + "".join(legend_line(number, one, panel.unit) for number, one in enumerate(legend)) + more(series)


@dataclass(frozen=True)
class Plot:
    """Where values are, between two axes."""

    width: int
    height: int
    low: float
    high: float
    points: int

    def x(self, at: float) -> float:
        return AXIS_PX + (self.width - AXIS_PX - GAP_PX) * at / max(1, self.points - 1)

    def y(self, value: float) -> float:
        return 4 + (self.height - 8) * (1 - (value - self.low) / self.span)

    @property
    def span(self) -> float:
        return self.high - self.low or 1.0

    def axis(self, unit: str) -> str:
        parts = []
        for value in (self.low + self.span * tick / TICKS for tick in range(TICKS + 1)):
            y, said = self.y(value), html.escape(written(value, unit))
            parts.append(f'<line x1="{AXIS_PX}" x2="{self.width - GAP_PX}" y1="{y:.1f}" y2="{y:.1f}" stroke="#333"/>')
            parts.append(f'<text x="{AXIS_PX - 5}" y="{y + 4:.1f}" text-anchor="end">{said}</text>')
        return "".join(parts)

    def clock(self, times: list[float]) -> str:
        minutes = (times[-1] - times[0]) / 60
        parts = []
        for share, anchor in ((0, "start"), (0.5, "middle"), (1, "end")):
            said = "now" if share == 1 else f"-{minutes * (1 - share):.1f} min"
            x = self.x(share * (self.points - 1))
            parts.append(f'<text x="{x:.1f}" y="{self.height + 12}" text-anchor="{anchor}">{said}</text>')
        return "".join(parts)

    def line(self, piece: list[tuple[int, float]], color: str, filled: bool) -> str:
        points = " ".join(f"{self.x(at):.1f},{self.y(value):.1f}" for at, value in piece)
        drawn = f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>'
        if not filled:
            return drawn
        first, last, under = self.x(piece[0][0]), self.x(piece[-1][0]), self.y(self.low)
        area = f"{first:.1f},{under:.1f} {points} {last:.1f},{under:.1f}"
        return f'<polygon points="{area}" fill="{color}" fill-opacity="0.15"/>{drawn}'


def on_each_other(series: list[Series]) -> list[list[float | None]]:
    below, found = [0.0] * len(series[0].values), []
    for one in series:
        found.append([None if value is None else value + under for value, under in zip(one.values, below)])
        below = [under + (value or 0) for value, under in zip(one.values, below)]
    return found


def pieces(values: list[float | None]) -> list[list[tuple[int, float]]]:
    """Without the gaps."""
    found: list[list[tuple[int, float]]] = [[]]
    for at, value in enumerate(values):
        if value is None or math.isinf(value):
            found.append([])
        else:
            found[-1].append((at, value))
    return [piece for piece in found if piece]


def legend_line(number: int, one: Series, unit: str) -> str:
    square = f'<b style="color:{COLORS[number % len(COLORS)]}">■</b>'
    values = f"{written(one.last, unit)}, max {written(one.most, unit)}"
    return f'<div class="legend">{square} {html.escape(one.name)}<i>{html.escape(values)}</i></div>'


def more(series: list[Series]) -> str:
    hidden = len(series) - LEGEND_LINES
    return f'<div class="legend">and {hidden} more</div>' if hidden > 0 else ""


def states(panel: Panel, series: list[Series], times: list[float], width: int, height: int) -> str:
    mapped = {
        float(value): shown
        for mapping in panel.model["fieldConfig"]["defaults"].get("mappings", [])
        for value, shown in mapping["options"].items()
    }
    line = min(24, (height - 24) // len(series))
    step = (width - NAME_PX - GAP_PX) / len(times)
    parts = []
    for row, one in enumerate(series):
        top, name = row * line, html.escape(one.name)
        parts.append(f'<text x="{NAME_PX - 6}" y="{top + line * 0.65:.1f}" text-anchor="end">{name}</text>')
        for at, value in enumerate(one.values):
            if value is not None:
                place = f'x="{NAME_PX + at * step:.2f}" y="{top + 1}" width="{step + 0.5:.2f}" height="{line - 2}"'
                parts.append(f'<rect {place} fill="{color_of(mapped.get(value))}"/>')
    keys = "".join(
        f'<b style="color:{color_of(shown)}">■</b> {html.escape(shown["text"])} &nbsp;' for shown in mapped.values()
    )
    svg = f'<svg width="{width}" height="{line * len(series) + 2}">{"".join(parts)}</svg>'
    return f'{svg}<div class="legend">{keys}</div>'


def color_of(shown: dict | None) -> str:
    return NAMED_COLORS.get(shown["color"], shown["color"]) if shown else UNMAPPED
