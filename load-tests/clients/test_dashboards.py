"""Holds the dashboard and the alert rules to docs/metrics.md: no query may name a metric or a label that is not there."""

import json
import re

import pytest
import yaml

from conftest import REPOSITORY

ROW = re.compile(r"^\|\s*`([a-z_:]+)`\s*\|\s*(\w+)\s*\|([^|]*)\|([^|]*)\|([^|]*)\|$")
NAME = re.compile(r"\b(?:tidegate_|process_|vllm:)\w+")
# A metric, and the labels selected in the braces behind it.
SELECTED = re.compile(r"\b((?:tidegate_|process_|vllm:)\w+)\{([^}]*)\}")
GROUPED = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")
FROM_THE_SCRAPE = {"job", "instance", "le"}
ROWS = ["Traffic", "Latency", "Errors by who failed", "Backends", "Engines"]


def documented() -> dict[str, tuple[str, set[str]]]:
    """Each metric in docs/metrics.md: its type and its labels."""
    metrics = {}
    for line in (REPOSITORY / "docs/metrics.md").read_text().splitlines():
        if row := ROW.match(line):
            name, kind, labels, unit, meaning = row.groups()
            assert name not in metrics, f"docs/metrics.md has {name} twice"
            assert kind in ("counter", "gauge", "histogram"), f"docs/metrics.md: {name} is a {kind}"
            assert unit.strip() and meaning.strip().endswith("."), f"docs/metrics.md: {name} needs a unit and a sentence"
            metrics[name] = (kind, set(re.findall(r"`(\w+)`", labels)))
    assert len(metrics) > 30, f"only {len(metrics)} rows of docs/metrics.md were understood"
    return metrics


METRICS = documented()
# As they appear in queries: a histogram under its three names.
SERIES = {
    name + suffix: labels
    for name, (kind, labels) in METRICS.items()
    for suffix in (("_bucket", "_sum", "_count") if kind == "histogram" else ("",))
}
DASHBOARDS = sorted((REPOSITORY / "grafana/dashboards").glob("*.json"))
RULES = yaml.safe_load((REPOSITORY / "grafana/alerts.yml").read_text())["groups"]


def load(dashboard) -> dict:
    return json.loads(dashboard.read_text())


def panels(dashboard) -> list[dict]:
    """The panels that show something, wherever they are nested."""
    found, left = [], list(load(dashboard)["panels"])
    while left:
        panel = left.pop(0)
        left += panel.get("panels", [])
        if panel["type"] != "row":
            found.append(panel)
    assert found, f"{dashboard.name} shows nothing"
    return found


def queries() -> list[tuple[str, str]]:
    """Every query of the dashboards and the rules, with where it stands."""
    found = [
        (f"{path.stem}: {panel['title']}", target["expr"])
        for path in DASHBOARDS
        for panel in panels(path)
        for target in panel["targets"]
    ]
    found += [
        (f"{path.stem}: ${variable['name']}", variable["definition"])
        for path in DASHBOARDS
        for variable in load(path)["templating"]["list"]
        if variable["type"] == "query"
    ]
    return found + [(rule["alert"], rule["expr"]) for group in RULES for rule in group["rules"]]


def test_there_is_a_dashboard():
    assert DASHBOARDS, "grafana/dashboards is empty"


def test_queries_name_only_documented_metrics_and_labels():
    faults = []
    for where, query in queries():
        faults += [f"{where}: {name} is not in docs/metrics.md" for name in NAME.findall(query) if name not in SERIES]
        for name, selectors in SELECTED.findall(query):
            labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selectors))
            allowed = SERIES.get(name, set()) | FROM_THE_SCRAPE | ({"backend"} if name.startswith("vllm:") else set())
            faults += [f"{where}: {name} has no label {label}" for label in labels - allowed]
    assert not faults, "\n".join(faults)


def test_queries_group_by_labels_that_their_metrics_have():
    faults = []
    for where, query in queries():
        known = set().union(*(SERIES.get(name, set()) for name in NAME.findall(query))) | FROM_THE_SCRAPE | {"backend"}
        for group in GROUPED.findall(query):
            labels = {label.strip() for label in group.split(",") if label.strip()}
            faults += [f"{where}: no metric of the query has the label {label}" for label in labels - known]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_each_panel_says_what_it_shows_and_in_which_unit(path):
    for panel in panels(path):
        assert panel.get("description", "").endswith("."), f"{panel['title']}: a description in sentences"
        assert panel["fieldConfig"]["defaults"].get("unit"), f"{panel['title']}: no unit"
        assert panel["targets"], f"{panel['title']}: no query"


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_rate_is_taken_of_counters_and_never_of_gauges(path):
    counted = re.compile(r"\b(?:rate|increase)\(\s*((?:tidegate_|process_|vllm:)\w+)")
    for panel in panels(path):
        for target in panel["targets"]:
            for name in counted.findall(target["expr"]):
                kind = METRICS.get(name, ("histogram",))[0]
                assert kind != "gauge", f"{panel['title']}: the rate of the gauge {name}"


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_only_parts_of_one_sum_are_stacked(path):
    """The height of a stack must mean something: quantiles, maxima and different things have no sum."""
    for panel in panels(path):
        stacking = panel["fieldConfig"]["defaults"].get("custom", {}).get("stacking", {})
        if stacking.get("mode") == "normal":
            queries = [target["expr"] for target in panel["targets"]]
            assert len(queries) == 1 and queries[0].startswith("sum"), f"{panel['title']} stacks {queries}"


def test_panels_do_not_overlap():
    for path in DASHBOARDS:
        taken = {}
        for panel in load(path)["panels"]:
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24, f"{panel['title']} is wider than the grid"
            for cell in ((x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])):
                assert cell not in taken, f"{panel['title']} covers {taken[cell]}"
                taken[cell] = panel["title"]


def test_the_overview_has_its_rows_and_variables():
    overview = load(REPOSITORY / "grafana/dashboards/overview.json")
    assert (overview["uid"], overview["title"]) == ("tidegate-overview", "Overview")
    rows = [panel["title"] for panel in overview["panels"] if panel["type"] == "row"]
    assert rows[: len(ROWS)] == ROWS, rows
    assert [variable["name"] for variable in overview["templating"]["list"]] == ["backend", "model"]
    ids = [panel["id"] for panel in overview["panels"]]
    assert len(ids) == len(set(ids)), "two panels with one id"


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_each_dashboard_leads_to_all_others_with_what_was_selected(path):
    others = {f"/d/{load(other)['uid']}": load(other)["title"] for other in DASHBOARDS if other != path}
    links = load(path)["links"]
    assert {link["url"]: link["title"] for link in links} == others
    assert all(link["keepTime"] and link["includeVars"] for link in links)
    assert [variable["name"] for variable in load(path)["templating"]["list"]] == ["backend", "model"]


def test_every_metric_of_the_router_is_shown_or_alerted_on():
    everything = " ".join(query for _, query in queries())
    named = set(NAME.findall(everything))
    unseen = [name for name, (kind, _) in METRICS.items() if name not in named and f"{name}_bucket" not in named]
    assert not unseen, f"documented, and nobody looks at them: {unseen}"


def test_the_dashboards_use_the_provisioned_data_source():
    sources = yaml.safe_load((REPOSITORY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    uids = {source["uid"] for source in sources}
    for path in DASHBOARDS:
        for panel in panels(path):
            for part in (panel, *panel["targets"]):
                assert part["datasource"]["uid"] in uids, f"{panel['title']}: {part['datasource']}"


def test_every_alert_has_a_section_in_the_runbook_and_every_section_an_alert():
    groups = yaml.safe_load((REPOSITORY / "grafana/alerts.yml").read_text())["groups"]
    alerts = [rule["alert"] for group in groups for rule in group["rules"]]
    runbook = (REPOSITORY / "docs/runbook.md").read_text()
    sections = [line.removeprefix("## ") for line in runbook.splitlines() if line.startswith("## ")]
    assert sections == alerts
