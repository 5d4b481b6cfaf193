"""The dashboards' queries as Grafana would send them, and a Prometheus to send them to."""

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from plan import REPOSITORY

DASHBOARDS = REPOSITORY / "grafana/dashboards"
QUERY_TIMEOUT_S = 10
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True)
class Panel:
    """A panel that shows something."""

    dashboard: str
    row: str
    model: dict

    @property
    def title(self) -> str:
        return self.model["title"]

    @property
    def name(self) -> str:
        return f"{self.dashboard}: {self.title}"

    @property
    def targets(self) -> list[dict]:
        return self.model["targets"]

    @property
    def unit(self) -> str:
        return self.model["fieldConfig"]["defaults"].get("unit", "short")


def panels_of(path: Path) -> list[Panel]:
    """Those of one dashboard, in the order in which they stand."""
    found, row = [], ""
    for model in json.loads(path.read_text())["panels"]:
        if model["type"] == "row":
            row = model["title"]
            assert not model.get("panels"), f"{path.name}: {row} is folded, which is not read here"
        else:
            found.append(Panel(path.stem, row, model))
    return found


def all_panels() -> list[Panel]:
    return [panel for path in sorted(DASHBOARDS.glob("*.json")) for panel in panels_of(path)]


def substituted(query: str, rate_interval: str, shown_range: str) -> str:
    """With everything selected."""
    values = {"__rate_interval": rate_interval, "__range": shown_range, "backend": ".*", "model": ".*"}
    return VARIABLE.sub(lambda found: values[found[1] or found[2]], query)


class QueryError(Exception):
    """Prometheus does not take the query."""


class Prometheus:
    def __init__(self, url: str):
        self.url = url.rstrip("/")

    def api(self, path: str, **parameters: str) -> dict:
        """The data of an answer of its API."""
        where = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(where, timeout=QUERY_TIMEOUT_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise QueryError(f"{parameters}: {error.read().decode(errors='replace')}") from error

    def instant(self, query: str) -> list[dict]:
        return self.api("query", query=query)["result"]

    def between(self, query: str, start: float, end: float, step_s: float) -> list[dict]:
        return self.api("query_range", query=query, start=f"{start}", end=f"{end}", step=f"{step_s}")["result"]
