"""Lookups and changes of the index against the pairs of block and holder in it: index-bench --scale.

Of chains of 128 blocks from anywhere in the index, and of the same few again and again, which the processor's caches hold at
every size. What the structure itself costs shows in the few; what others cost above these is the way to memory.
"""

import json
import subprocess

import neighbours  # noqa: F401  before what it makes importable
from fleet import FleetError
from ground import Ground, say
from lines import Curve, Line, Point, points_of

SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
SIZES_QUICK = (10_000, 100_000)
LASTS_S_MAX = 600
KINDS = {"found": "found at four holders", "absent": "found nowhere", "change": "64 blocks removed and stored"}
NAMES = {"few": "a few chains", "anywhere": "any chain"}
REASONS = {
    "few": "hash tables and slabs: as many steps at every size",
    "anywhere": "the same steps; those that miss the processor's caches are what the tolerance is for",
}
EXPECTED = {"few": 0.0, "anywhere": 0.0}


def measure(ground: Ground) -> Curve:
    sizes = ground.effort.pick(SIZES, SIZES_QUICK)
    command = [ground.programs / "index-bench", "--scale", ",".join(map(str, sizes)), "--rounds", str(max(ground.effort.rounds, 3))]
    ran = subprocess.run(command, capture_output=True, timeout=LASTS_S_MAX, start_new_session=True, check=False)
    if ran.returncode != 0:
        raise FleetError(f"index-bench ended with {ran.returncode}:\n{ran.stderr.decode()}")
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    for row in rows:
        say(f"blocks: {row}")
    lines = [
        Line(f"{name}, {NAMES[how]}", "us", points(rows, f"{how}_{kind}_ns"), EXPECTED[how], REASONS[how])
        for kind, name in KINDS.items()
        for how in REASONS
    ]
    last = rows[-1]
    note = f"{last['pairs']:,} pairs of {last['blocks']:,} blocks take {last['bytes'] / 2**20:,.0f} MiB."
    return Curve("blocks", "Lookups and changes of the index", "pairs of block and holder", tuple(lines), [note])


def points(rows: list[dict], field: str) -> tuple[Point, ...]:
    return points_of([{row["pairs"]: row[field] / 1000 for row in rows if row["round"] == turn} for turn in rounds_of(rows)])


def rounds_of(rows: list[dict]) -> list[int]:
    return sorted({row["round"] for row in rows})
