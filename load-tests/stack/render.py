"""Draws the dashboards from their JSON and a Prometheus' data into pictures, to look at them without a Grafana.

    load-tests/stack.sh --traffic            # in another terminal, for two minutes
    .venv/bin/python load-tests/stack/render.py --prometheus http://127.77.0.12:9090 --out /tmp/dashboards

Needs Chromium. Writes NAME.html beside each NAME.png; says which panels have nothing to show.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from draw import PAGE_PX, ROW_PX, Series, draw, row_title, series_of
from panels import DASHBOARDS, Panel, Prometheus, QueryError, panels_of, substituted

# As Grafana asks, by width: points of a line.
POINTS = 120
STACK_S = "http://127.77.0.12:9090"
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM_WITHIN_S = 60
MARGIN_PX = 12
STYLE = """
body { margin: 12px; background: #111217; color: #d8d9da; font: 12px sans-serif; }
#page { position: relative; }
.row, .panel { position: absolute; overflow: hidden; }
.row { font-weight: bold; font-size: 15px; padding-top: 6px; }
.panel { background: #181b1f; border: 1px solid #2c3036; box-sizing: border-box; }
.title { padding: 5px 8px; font-weight: bold; }
.none { text-align: center; color: #888; padding-top: 20px; font-size: 15px; }
.stat { text-align: center; line-height: 1.15; padding-top: 10px; box-sizing: border-box; }
.stat small { font-size: 55%; }
.legend { padding: 0 8px; font-size: 11px; line-height: 15px; white-space: nowrap; }
.legend i { float: right; font-style: normal; color: #aaa; }
svg text { fill: #999; font-size: 10px; }
"""


def asked(prometheus: Prometheus, panel: Panel, times: list[float], step_s: int, rate_interval: str) -> list[Series]:
    shown_range = f"{round(times[-1] - times[0])}s"
    found = []
    for target in panel.targets:
        query = substituted(target["expr"], rate_interval, shown_range)
        found += series_of(target, prometheus.between(query, times[0], times[-1], step_s), times)
    return found


def page(path: Path, prometheus: Prometheus, minutes: float, rate_interval: str) -> tuple[str, int, list[str]]:
    """A dashboard's HTML and height, and the panels that are empty."""
    step_s = max(1, round(minutes * 60 / POINTS))
    end = int(time.time())
    times = [float(moment) for moment in range(end - round(minutes * 60), end + 1, step_s)]
    model = json.loads(path.read_text())
    parts = [row_title(row["title"], row["gridPos"]) for row in model["panels"] if row["type"] == "row"]
    empty = []
    for panel in panels_of(path):
        series = asked(prometheus, panel, times, step_s, rate_interval)
        empty += [] if series else [panel.title]
        parts.append(draw(panel, series, times))
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in model["panels"]) * ROW_PX
    body = f'<div id="page" style="height:{height}px">{"".join(parts)}</div>'
    return f'<!doctype html><meta charset="utf-8"><style>{STYLE}</style>{body}', height, empty


def picture(chromium: str, source: Path, target: Path, height: int) -> None:
    size = f"{PAGE_PX + 2 * MARGIN_PX},{height + 2 * MARGIN_PX}"
    flags = ["--headless", "--disable-gpu", "--hide-scrollbars", f"--window-size={size}", f"--screenshot={target}"]
    if os.geteuid() == 0:
        flags.append("--no-sandbox")  # which root has none of; what is drawn is our own page
    subprocess.run([chromium, *flags, source.as_uri()], check=True, capture_output=True, timeout=CHROMIUM_WITHIN_S)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Draws the dashboards from a Prometheus' data into pictures.")
    parser.add_argument("--prometheus", default=STACK_S, metavar="URL", help="[default: %(default)s, of stack.sh]")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the pictures go")
    parser.add_argument("--minutes", type=float, default=5, help="the range that is shown, up to now [default: %(default)s]")
    parser.add_argument("--rate-interval", default="20s", metavar="TIME", help="four scrapes [default: %(default)s]")
    parser.add_argument("--dashboard", action="append", metavar="NAME", help="only this one, such as overview; may be repeated")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    chromium = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if chromium is None:
        print("render.py: missing, please install: chromium", file=sys.stderr)
        return 1
    args.out.mkdir(parents=True, exist_ok=True)
    for path in sorted(DASHBOARDS.glob("*.json")):
        if args.dashboard and path.stem not in args.dashboard:
            continue
        try:
            text, height, empty = page(path, Prometheus(args.prometheus), args.minutes, args.rate_interval)
        except (OSError, QueryError) as error:
            print(f"render.py: {args.prometheus}: {error}", file=sys.stderr)
            return 1
        source = (args.out / f"{path.stem}.html").resolve()
        source.write_text(text)
        target = source.with_suffix(".png")
        picture(chromium, source, target, height)
        print(f"{target}" + (f"  empty: {', '.join(empty)}" if empty else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
