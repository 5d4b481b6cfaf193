"""Values as Grafana writes them, for the units that the dashboards use."""

import math
import time
from typing import Callable

THOUSAND = 1000
THOUSANDS = ["", " K", " Mil", " Bil", " Tri"]
BINARY = [" B", " KiB", " MiB", " GiB", " TiB"]
DECIMAL_BYTES = [" B/s", " kB/s", " MB/s", " GB/s", " TB/s"]
# Each up to the one below it.
DURATIONS = [(1, "ms", 1e-3), (60, "s", 1), (3600, "min", 60), (86400, "h", 3600), (float("inf"), "d", 86400)]
AGES = [(60, "s", 1), (3600, "min", 60), (86400, "h", 3600), (float("inf"), "d", 86400)]
MICROSECONDS_BELOW_S = 1e-3
SIGNIFICANT = 3


def number(value: float) -> str:
    """With three digits that count, and none that say nothing."""
    if math.isinf(value):
        return "∞"
    if value != 0 and abs(value) < 10 ** -SIGNIFICANT:
        return f"{value:.1e}"
    return f"{value:.{SIGNIFICANT}g}" if abs(value) < 10**SIGNIFICANT else f"{value:.0f}"


def scaled(value: float, step: int, suffixes: list[str]) -> str:
    at = 0
    while abs(value) >= step and at + 1 < len(suffixes):
        value, at = value / step, at + 1
    return f"{number(value)}{suffixes[at]}"


def duration(value: float) -> str:
    if 0 < abs(value) < MICROSECONDS_BELOW_S:
        return f"{number(value * 1e6)} µs"
    unit, size = next(((unit, size) for below, unit, size in DURATIONS if abs(value) < below), ("", 1))
    return f"{number(value / size)} {unit}" if value else "0 s"


def from_now(milliseconds: float) -> str:
    age = max(0.0, time.time() - milliseconds / 1000)
    unit, size = next((unit, size) for below, unit, size in AGES if age < below)
    return f"{age / size:.0f} {unit} ago"


def rate(unit: str) -> Callable[[float], str]:
    return lambda value: f"{scaled(value, THOUSAND, THOUSANDS)} {unit}/s"


FORMATS: dict[str, Callable[[float], str]] = {
    "short": lambda value: scaled(value, THOUSAND, THOUSANDS),
    "none": number,
    "percentunit": lambda value: f"{number(value * 100)}%",
    "bytes": lambda value: scaled(value, 1024, BINARY),
    "Bps": lambda value: scaled(value, THOUSAND, DECIMAL_BYTES),
    "s": duration,
    "ops": rate("op"),
    "reqps": rate("req"),
    "cps": rate("c"),
    "dateTimeFromNow": from_now,
}


def written(value: float, unit: str, decimals: int | None = None) -> str:
    """`decimals`: as the panel asks, where its unit is a bare number."""
    if unit == "short" and decimals == 0 and abs(value) < THOUSAND:
        return f"{value:.0f}"
    return FORMATS[unit](value)

