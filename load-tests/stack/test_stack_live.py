"""Runs the stack with traffic, and asks a real Prometheus what every panel of every dashboard asks.

    TIDEGATE_STACK_BIN=target/debug pytest load-tests/stack

The tests are one story and run in this order: all is well, then workers and Redis are killed.
"""

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import pytest
import yaml

from panels import Panel, Prometheus, QueryError, all_panels, substituted
from plan import REPOSITORY

NET = "127.78.0"
SCRAPE_INTERVAL = "1s"
RATE_INTERVAL = "15s"
SHOWN_RANGE = "5m"
# Debug builds on a busy machine.
HEALTHY_WITHIN_S = 90
# From the first visit until each panel has something to show.
PANELS_WITHIN_S = 120
FAULTS_WITHIN_S = 60
STOP_WITHIN_S = 60
# Longer than all tests before take.
LOOKED_BACK_S = 300
POLL_S = 0.5
LOG_TAIL_BYTES = 4000
# Faster than in config/compose.yaml, which would take 45 s to call a dead worker unhealthy; slow enough that its breaker,
# which counts requests, opens before that.
HEALTH_INTERVAL = "4s"

KILLED = ["vllm-decode-1", "vllm-prefill-1", "vllm-prefill-2", "vllm-unified", "redis-cluster"]
KILLED_BACKENDS = ["decode-worker-1", "prefill-worker-1", "prefill-worker-2", "unified-fallback"]

# Panels that show only what goes wrong, or what somebody does: empty until then, and not after.
AFTER_FAULTS = {
    "overview: Retries": "by what a first attempt failed of",
    "runtime: Retries and exhausted budget": "by what a first attempt failed of",
    "runtime: Reloads": "settings are read again when SIGHUP comes",
    "response-cache: Lookups without an answer": "a tier that is away",
    "split-serving: Restarts": "a step whose worker died",
    "split-serving: Fallbacks by step and reason": "a step that nobody serves",
    "split-serving: Given up by step": "no unified worker is left",
}

PANELS = {panel.name: panel for panel in all_panels()}
METRIC_ROW = re.compile(r"^\|\s*`([a-z_:]+)`\s*\|\s*(counter|gauge|histogram)\s*\|", re.M)
DOCUMENTED = dict(METRIC_ROW.findall((REPOSITORY / "docs/metrics.md").read_text()))
EXPOSED = re.compile(r"^# TYPE (\S+) (\S+)$", re.M)


@dataclass(frozen=True)
class Stack:
    """What runs: addresses and processes by service."""

    services: dict[str, dict]
    work: Path

    def url(self, service: str) -> str:
        return f"http://{self.services[service]['address']}"

    def signal(self, service: str, number: int) -> None:
        os.kill(self.services[service]["pid"], number)

    @property
    def prometheus(self) -> Prometheus:
        return Prometheus(self.url("prometheus"))


def programs() -> Path:
    """Where our programs are: TIDEGATE_STACK_BIN, or the debug build."""
    given = Path(os.environ.get("TIDEGATE_STACK_BIN", "target/debug"))
    return given if given.is_absolute() else REPOSITORY / given


def until(faults: Callable[[], list[str]], within_s: float) -> list[str]:
    """What is still wrong when there is nothing, or no time, left."""
    deadline = time.monotonic() + within_s
    while (left := faults()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return left


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    """The running stack. Ended with SIGTERM, which must leave nothing behind."""
    work = tmp_path_factory.mktemp("stack")
    output = work / "stack.log"
    command = ["--bin", str(programs()), "--net", NET, "--traffic", "--scrape-interval", SCRAPE_INTERVAL, "--keep", str(work)]
    env = os.environ | {"PYTHON": sys.executable, "TIDEGATE__HEALTH_CHECKS__INTERVAL": HEALTH_INTERVAL}
    with output.open("wb") as log:
        process = subprocess.Popen(
            [REPOSITORY / "load-tests/stack.sh", *command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    said = lambda: output.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
    state = work / "stack.json"
    try:
        until(lambda: [] if state.exists() or process.poll() is not None else ["not yet"], HEALTHY_WITHIN_S)
        if not state.exists():
            pytest.fail(f"the stack ended, or was not healthy in {HEALTHY_WITHIN_S} s:\n{said()}", pytrace=False)
        running = Stack(json.loads(state.read_text()), work)
        yield running
        process.terminate()
        assert process.wait(STOP_WITHIN_S) == 0, said()
        assert not still_taken(running), said()
    finally:
        if process.poll() is None:
            # Once more in the usual way: only it knows what it has started.
            process.terminate()
            process.wait(STOP_WITHIN_S)


def still_taken(stack: Stack) -> list[str]:
    """Services that something still listens for."""
    taken = []
    for name, service in stack.services.items():
        host, _, port = service["address"].partition(":")
        if port:
            try:
                socket.create_server((host, int(port))).close()
            except OSError:
                taken.append(name)
    return taken


def shows(series: list[dict]) -> bool:
    """Whether there is a value to draw. 0 / 0 is none."""
    return any(not math.isnan(float(one["value"][1])) for one in series)


def empty(prometheus: Prometheus, panels: list[Panel]) -> list[str]:
    """Queries that bring nothing, and what they ask."""
    found = []
    for panel in panels:
        for target in panel.targets:
            query = substituted(target["expr"], RATE_INTERVAL, SHOWN_RANGE)
            try:
                if not shows(prometheus.instant(query)):
                    found.append(f"{panel.name}: {query}")
            except QueryError as error:
                found.append(f"{panel.name}: {error}")
    return found


def test_exceptions_name_panels():
    assert not set(AFTER_FAULTS) - set(PANELS)


def test_every_target_is_scraped(stack):
    configured = yaml.safe_load((REPOSITORY / "grafana/prometheus.yml").read_text())["scrape_configs"]
    wanted = sum(len(group["targets"]) for job in configured for group in job["static_configs"])

    def down() -> list[str]:
        targets = stack.prometheus.api("targets")["activeTargets"]
        faults = [f"{target['scrapeUrl']}: {target['lastError']}" for target in targets if target["health"] != "up"]
        return faults + ([] if len(targets) == wanted else [f"{len(targets)} targets instead of {wanted}"])

    assert not until(down, PANELS_WITHIN_S)


def test_the_alert_rules_are_loaded_and_evaluated(stack):
    groups = yaml.safe_load((REPOSITORY / "grafana/alerts.yml").read_text())["groups"]
    wanted = sorted(rule["alert"] for group in groups for rule in group["rules"])

    def faults() -> list[str]:
        rules = [rule for group in stack.prometheus.api("rules")["groups"] for rule in group["rules"]]
        wrong = [f"{rule['name']}: {rule['health']} {rule.get('lastError', '')}" for rule in rules if rule["health"] != "ok"]
        return wrong + ([] if sorted(rule["name"] for rule in rules) == wanted else ["other rules than in alerts.yml"])

    assert not until(faults, PANELS_WITHIN_S)


def test_every_panel_has_something_to_show_under_traffic(stack):
    panels = [panel for name, panel in PANELS.items() if name not in AFTER_FAULTS]
    assert len(panels) > 80, "the dashboards were not read"
    left = until(lambda: empty(stack.prometheus, panels), PANELS_WITHIN_S)
    assert not left, "nothing to show:\n" + "\n".join(left)


def test_every_metric_of_the_router_is_documented(stack):
    with urllib.request.urlopen(f"{stack.url('router')}/metrics", timeout=5) as answer:
        exposed = dict(EXPOSED.findall(answer.read().decode()))
    assert len(exposed) > 40, exposed
    assert {name: kind for name, kind in exposed.items() if DOCUMENTED.get(name) != kind} == {}


def test_faults_show_on_the_panels_that_wait_for_them(stack):
    for service in KILLED:
        stack.signal(service, signal.SIGKILL)
    stack.signal("router", signal.SIGHUP)
    panels = [PANELS[name] for name in AFTER_FAULTS]
    left = until(lambda: empty(stack.prometheus, panels), FAULTS_WITHIN_S)
    assert not left, "nothing to show:\n" + "\n".join(left)


def test_the_router_sees_who_is_dead(stack):
    # By expression: what it must bring, by backend.
    wanted = {
        'tidegate_backend_state{state="unhealthy"} == 1': KILLED_BACKENDS,
        'tidegate_backend_state{state="healthy"} == 1': ["decode-worker-2", "decode-worker-3"],
        "tidegate_kv_stream_connected == 0": KILLED_BACKENDS,
        'up{job="engines"} == 0': KILLED_BACKENDS,
    }

    def faults() -> list[str]:
        found = []
        for query, backends in wanted.items():
            seen = sorted(one["metric"]["backend"] for one in stack.prometheus.instant(query))
            found += [] if seen == sorted(backends) else [f"{query}: {seen}"]
        # Not all of them: a worker that health checks took away in time got no five failures.
        opened = f'max_over_time(tidegate_breaker_state{{state="open"}}[{SHOWN_RANGE}]) == 1'
        found += [] if stack.prometheus.instant(opened) else ["no breaker has opened"]
        return found + empty(stack.prometheus, [PANELS["overview: Health probes that did not pass"], PANELS["overview: Flaps"]])

    assert not until(faults, FAULTS_WITHIN_S)


def test_no_panel_was_ever_infinite(stack):
    """A share of nothing draws no line where it is 0 / 0, but 1 / 0 makes the axis endless."""
    end = time.time()
    found = [
        f"{panel.name}: {query}"
        for panel in PANELS.values()
        for query in (substituted(target["expr"], RATE_INTERVAL, SHOWN_RANGE) for target in panel.targets)
        for one in stack.prometheus.between(query, end - LOOKED_BACK_S, end, 1)
        if any(math.isinf(float(value)) for _, value in one["values"])
    ]
    assert not found, "\n".join(found)


def test_traffic_was_served_until_the_end(stack):
    lines = [line for line in (stack.work / "traffic.log").read_text().splitlines() if " served" in line]
    assert len(lines) > 2, "the generator of traffic told nothing"
    served = [int(re.search(r"(\d+) served", line)[1]) for line in lines]
    assert served[-1] > served[0] > 0, lines
