"""Lookups and changes of the index against the pairs of block and holder in it: index-bench --scale.

Of chains of 128 blocks from anywhere in the index, and of the same few again and again, which the processor's caches hold at
every size. What the structure itself costs shows in the few: it takes as many steps at every size, so no slope is expected. For
chains from anywhere some of these steps wait for memory, and how long that takes grows with the size, whatever the structure:
index-bench measures it, by reads of which each tells where the next one is, in as many bytes as the index has. So what is
expected of any chain is the slope of a few chains' cost plus so many such waits as the structure promises.
"""

import json
import subprocess

import neighbours  # noqa: F401  before what it makes importable
from fleet import FleetError
from ground import Ground, say
from lines import Curve, Line, Point, points_of, slope

SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
SIZES_QUICK = (10_000, 100_000)
LASTS_S_MAX = 600
KINDS = {"found": "found at four holders", "absent": "found nowhere", "change": "64 blocks removed and stored"}
NAMES = {"few": "a few chains", "anywhere": "any chain"}
REASONS = {
    "few": "hash tables and slabs: as many steps at every size",
    "anywhere": "the same steps, and {waits} waits for memory (see the last line)",
}
# Found: the row of the hash table; then the block, its bits and the end of the stretch, side by side. Absent: the row. A change: a
# row for each block removed, and one for each stored.
WAITS = {"found": 2, "absent": 1, "change": 128}


def measure(ground: Ground) -> Curve:
    sizes = ground.effort.pick(SIZES, SIZES_QUICK)
    command = [ground.programs / "index-bench", "--scale", ",".join(map(str, sizes)), "--rounds", str(max(ground.effort.rounds, 3))]
    ran = subprocess.run(command, capture_output=True, timeout=LASTS_S_MAX, start_new_session=True, check=False)
    if ran.returncode != 0:
        raise FleetError(f"index-bench ended with {ran.returncode}:\n{ran.stderr.decode()}")
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    for row in rows:
        say(f"blocks: {row}")
    lines = [line(rows, kind, how) for kind in KINDS for how in REASONS]
    lines.append(Line("one wait for memory", "us", points(rows, "wait_ns"), None, "a read from anywhere in as many bytes"))
    last = rows[-1]
    note = f"{last['pairs']:,} pairs of {last['blocks']:,} blocks take {last['bytes'] / 2**20:,.0f} MiB."
    return Curve("blocks", "Lookups and changes of the index", "pairs of block and holder", tuple(lines), [note])


def line(rows: list[dict], kind: str, how: str) -> Line:
    measured = points(rows, f"{how}_{kind}_ns")
    reason = REASONS[how].format(waits=WAITS[kind])
    return Line(f"{KINDS[kind]}, {NAMES[how]}", "us", measured, 0.0 if how == "few" else promised(rows, kind), reason)


def promised(rows: list[dict], kind: str) -> float | None:
    """The slope of what a few chains cost and the waits of any other chain."""
    few, waits = points(rows, f"few_{kind}_ns"), points(rows, "wait_ns")
    return slope([Point(few.size, (few.median + WAITS[kind] * wait.median,)) for few, wait in zip(few, waits)])


def points(rows: list[dict], field: str) -> tuple[Point, ...]:
    return points_of([{row["pairs"]: row[field] / 1000 for row in rows if row["round"] == turn} for turn in rounds_of(rows)])


def rounds_of(rows: list[dict]) -> list[int]:
    return sorted({row["round"] for row in rows})
