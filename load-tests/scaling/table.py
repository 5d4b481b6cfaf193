"""What was measured, as Markdown and as JSON. Pure."""

from lines import Curve, Line, Point


def number(value: float) -> str:
    """Three digits or so: these are measurements."""
    if value == 0:
        return "0"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"


def cell(point: Point) -> str:
    low, high = point.range
    text = f"{number(point.median)} ({number(low)} to {number(high)})"
    return text if point.is_clear else f"({text}: within the noise, not fitted)"


def figure(line: Line) -> str:
    if line.is_ratio:
        return f"ratio {line.figure:.3f}" if line.figure is not None else "no ratio"
    return f"slope {line.figure:+.3f}" if line.figure is not None else "no slope"


def markdown(curve: Curve) -> str:
    """A table of points and one of verdicts: medians, with the range over rounds in brackets."""
    sizes = sorted({point.size for line in curve.lines for point in line.points})
    head = " | ".join(f"{line.name}, {line.unit}" for line in curve.lines)
    rows = [f"## {curve.title}", "", f"| {curve.size_name} | {head} |", "|--:|" + "--:|" * len(curve.lines)]
    for size in sizes:
        found = [{point.size: point for point in line.points}.get(size) for line in curve.lines]
        rows.append(f"| {size:,.0f} | {' | '.join(cell(point) if point else '' for point in found)} |")
    rows += ["", "| line | measured | expected | limit | verdict | why |", "|---|--:|--:|--:|---|---|"]
    for line in curve.lines:
        expected = "" if line.expected is None else f"{line.expected:.3g}"
        limit = "" if line.limit is None else f"{line.limit:.3g}"
        measured = "" if line.expected is None and line.is_ratio is False else figure(line)
        rows.append(f"| {line.name} | {measured} | {expected} | {limit} | {line.verdict} | {line.reason} |")
    return "\n".join([*rows, "", *(f"* {note}" for note in curve.notes), ""])


def as_json(curve: Curve) -> dict:
    return {
        "name": curve.name,
        "title": curve.title,
        "size": curve.size_name,
        "notes": curve.notes,
        "lines": [
            {
                "name": line.name, "unit": line.unit, "figure": line.figure, "expected": line.expected,
                "limit": line.limit, "verdict": line.verdict, "reason": line.reason,
                "points": [{"size": p.size, "values": p.values, "clear": p.is_clear} for p in line.points],
            }
            for line in curve.lines
        ],
    }  # fmt: skip
