"""CPU of a request against the number of backends: all healthy, with prompts that all differ.

With the prefix ring (the default), and with the index on besides, which then goes by the prompts' text. Connections are
opened beforehand; with many backends there are many of them, each used seldom, and that is part of what is measured.
"""

import neighbours  # noqa: F401  before what it makes importable
from fleet import FleetError
from ground import Ground, say, value
from lines import Curve, Line, points_of, straight

SIZES = (4, 16, 64, 256, 512)
SIZES_QUICK = (4, 64)
INDEX = {"ring": {}, "ring and index": {"kv_cache_index": {"enabled": True}}}
FOUND = 'tidegate_kv_lookups_total{result="found"}'  # the index answered, whatever it said
REASON = "one snapshot, and a binary search on the ring; each backend is looked at, which is to be little beside all else"


def measure(ground: Ground) -> Curve:
    sizes = ground.effort.pick(SIZES, SIZES_QUICK)
    rounds: dict[str, list[dict[float, float]]] = {name: [] for name in INDEX}
    with ground.engines(max(sizes)) as urls:
        for turn in range(ground.effort.rounds):
            for name, settings in INDEX.items():
                found = {}
                for size in sizes:
                    with ground.router(urls[:size], settings) as router:
                        idle = ground.idle_cpu_share(router)
                        ground.closed_loop(router, ground.effort.warm_s)  # opens the connections
                        loop = ground.closed_loop(router, ground.effort.seconds, idle)
                        looked_up = value(router.metrics(), FOUND)
                    if settings and looked_up < loop.requests:
                        raise FleetError(f"the index is on, and looked up {looked_up:.0f} of {loop.requests} requests")
                    found[size] = loop.us_per_request
                    say(
                        f"backends, round {turn + 1}, {name}: {size}: {loop.us_per_request:.1f} us of CPU a request, "
                        f"{loop.answers_per_s:.0f} requests/s, idle {idle * 1000:.2f} ms/s, {looked_up:.0f} lookups"
                    )
                rounds[name].append(found)
    lines = [Line(name, "us of CPU per request", points_of(rounds[name]), 0.0, REASON) for name in INDEX]
    return Curve("backends", "Backends", "backends", tuple(lines), [straight_note(line) for line in lines])


def straight_note(line: Line) -> str:
    start, each = straight(line.points)
    return f"{line.name}: as a straight line, {start:.1f} us and {each * 1000:+.0f} ns for each backend."
