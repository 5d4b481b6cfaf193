"""Lookups and changes of the index against the pairs of block and holder in it: index-bench --scale."""

import json
import subprocess

import neighbours  # noqa: F401  before what it makes importable
from fleet import FleetError
from ground import Ground, say
from lines import Curve, Line, Point

SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
SIZES_QUICK = (10_000, 100_000)
LASTS_S_MAX = 600
LINES = {
    "found_ns": "lookup of 128 blocks at four holders",
    "absent_ns": "lookup of 128 blocks that nobody has",
    "change_ns": "64 blocks removed and stored",
}
REASON = "hash tables and slabs: what grows is how much of it lies outside of the processor's caches"


def measure(ground: Ground) -> Curve:
    sizes = ground.effort.pick(SIZES, SIZES_QUICK)
    command = [ground.programs / "index-bench", "--scale", ",".join(map(str, sizes)), "--rounds", str(max(ground.effort.rounds, 3))]
    ran = subprocess.run(command, capture_output=True, timeout=LASTS_S_MAX, start_new_session=True, check=False)
    if ran.returncode != 0:
        raise FleetError(f"index-bench ended with {ran.returncode}:\n{ran.stderr.decode()}")
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    for row in rows:
        say(f"blocks: {row}")
    lines = []
    for field, name in LINES.items():
        by_size: dict[int, list[float]] = {}
        for row in rows:
            by_size.setdefault(row["pairs"], []).append(row[field] / 1000)
        points = tuple(Point(size, tuple(values)) for size, values in by_size.items())
        lines.append(Line(name, "us", points, 0.0, REASON))
    last = rows[-1]
    note = f"{last['pairs']:,} pairs of {last['blocks']:,} blocks take {last['bytes'] / 2**20:,.0f} MiB."
    return Curve("blocks", "Blocks in the index", "pairs of block and holder", tuple(lines), [note])
