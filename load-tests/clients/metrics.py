"""Reads /metrics, as far as these tests need it."""

import re
import time
from typing import Callable

import httpx

SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def total(url: str, name: str, **labels: str) -> float:
    """The sum of a metric's series that carry these labels; 0 without any."""
    text = httpx.get(f"{url}/metrics", timeout=5).raise_for_status().text
    result = 0.0
    for line in text.splitlines():
        sample = SAMPLE.match(line)
        if sample and sample[1] == name and labels.items() <= dict(LABEL.findall(sample[2] or "")).items():
            result += float(sample[3])
    return result


def wait_for(what: str, read: Callable[[], float], wanted: Callable[[float], bool], within_s: float = 10) -> float:
    """Reads until the value is as wanted, and fails with the last one at the deadline."""
    deadline = time.monotonic() + within_s
    while True:
        value = read()
        if wanted(value):
            return value
        assert time.monotonic() < deadline, f"{what}: still {value} after {within_s} s"
        time.sleep(0.02)
