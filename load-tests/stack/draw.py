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
TIME_PX = 16
TICKS = 4
COLORS = ["#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#8ab8ff", "#96d98d", "#ffb357", "#ca95e5", "#fade2a", "#ff7383"]
NAMED_COLORS = {"text": "#d8d9da", "green": "#73bf69", "orange": "#ff9830", "red": "#f2495c", "blue": "#5794f2", "purple": "#b877d9"}
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
    inner = kinds[panel.model["type"]](panel, series, times, width, height - TITLE_PX) if series else '<div class="none">No data</div>'
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
    plot_height = max(40, height - TIME_PX - LEGEND_LINE_PX * legend_lines - 12)
    drawn = on_each_other(series) if stacked else [one.values for one in series]
    seen = [value for values in drawn for value in values if value is not None]
    seen = [value for value in seen if math.isfinite(value)] or [0.0]  # an endless axis shows nothing at all
    low = min([defaults.get("min", min(seen)), min(seen)])
    high = defaults.get("max", max(seen))
    if high <= low:
        high = low + 1
    x = lambda at: AXIS_PX + (width - AXIS_PX - 8) * at / max(1, len(times) - 1)
    y = lambda value: 4 + (plot_height - 8) * (1 - (value - low) / (high - low))
    parts = []
    for tick in range(TICKS + 1):
        value = low + (high - low) * tick / TICKS
        parts.append(f'<line x1="{AXIS_PX}" x2="{width - 8}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#333"/>')
        parts.append(f'<text x="{AXIS_PX - 5}" y="{y(value) + 4:.1f}" text-anchor="end">{html.escape(written(value, panel.unit))}</text>')
    for number, values in reversed(list(enumerate(drawn))):
        color = COLORS[number % len(COLORS)]
        for piece in pieces(values):
            points = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in piece)
            if stacked:
                first, last = x(piece[0][0]), x(piece[-1][0])
                under = f"{first:.1f},{y(low):.1f} {points} {last:.1f},{y(low):.1f}"
                parts.append(f'<polygon points="{under}" fill="{color}" fill-opacity="0.15"/>')
            parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>')
    minutes = (times[-1] - times[0]) / 60
    for share in (0, 0.5, 1):
        anchor = {0: "start", 0.5: "middle", 1: "end"}[share]
        text = "now" if share == 1 else f"-{minutes * (1 - share):.1f} min"
        parts.append(f'<text x="{x(share * (len(times) - 1)):.1f}" y="{plot_height + 12}" text-anchor="{anchor}">{text}</text>')
    svg = f'<svg width="{width}" height="{plot_height + TIME_PX}">{"".join(parts)}</svg>'
    return svg + "".join(legend_line(number, one, panel.unit) for number, one in enumerate(legend)) + more(series)


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
    name_px = 150
    line = min(24, (height - 24) // len(series))
    parts = []
    for row, one in enumerate(series):
        parts.append(f'<text x="{name_px - 6}" y="{row * line + line * 0.65:.1f}" text-anchor="end">{html.escape(one.name)}</text>')
        step = (width - name_px - 8) / len(times)
        for at, value in enumerate(one.values):
            if value is not None:
                color = mapped[value]["color"] if value in mapped else UNMAPPED
                fill = NAMED_COLORS.get(color, color)
                parts.append(f'<rect x="{name_px + at * step:.2f}" y="{row * line + 1}" width="{step + 0.5:.2f}" height="{line - 2}" fill="{fill}"/>')
    keys = "".join(
        f'<b style="color:{NAMED_COLORS.get(shown["color"], shown["color"])}">■</b> {html.escape(shown["text"])} &nbsp;' for shown in mapped.values()
    )
    return f'<svg width="{width}" height="{line * len(series) + 2}">{"".join(parts)}</svg><div class="legend">{keys}</div>'
