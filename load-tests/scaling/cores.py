"""CPU of a request and requests a second, with one worker pinned to one core and with two workers on both.

With one worker, engines and clients have the other cores; with two, on a machine that has no more than two, all share both, so
that requests a second say less than CPU of a request, which is what is judged: work that two threads do in each other's way
would show there. What sharing cores with the load costs shows there too: one worker that shares both cores with
the load, as the two do, tells it apart.

Beyond two cores nothing is measured here. That a request costs there what it costs on two is argued from what requests
share, by reading the code:

* The directory of backends is an `ArcSwap` (support/published.rs): readers take no lock, and it is written only when a
  backend's state changes. Rings are part of what it points to.
* Numbers of a backend (backend/live.rs) are atomics: a few additions a request. With few backends and many cores their cache
  lines move between cores at every request; and a choice reads those of all backends of the model, written by other cores or not.
* Each worker has its own `Router`, connections and retry budget: nothing of these is shared.
* Counters and histograms of /metrics are atomics, one set for all workers: as above, but the same lines for all requests.
* The ring of the last decisions (telemetry/recent.rs) is one mutex for all, held while one entry is put in and one leaves.
* The index is asked by a message to its shard, one thread: no lock, and a bound of its own (`load-tests/budgets.md`).
* Tokenizing takes place on threads of its own, which share a mutex around their inbox and one around the kept pieces.
* With quotas, permits and buckets are behind mutexes (quotas/permits.rs, rates.rs); the lock of the permits is held longer when many wait.
* With the response cache, flights meet in 16 shards, a mutex each.

Not known: where the mutex of decisions and the counters' cache lines begin to be felt, what several sockets with memory of their own add,
and how evenly the system spreads connections over many workers.
"""

import os
from contextlib import ExitStack

from ground import Ground, Loop, pinned, say
from lines import Curve, Line, points_of

BACKENDS = 4
CLIENTS_PER_WORKER = 32  # a busy worker does more in each turn, so both are to be as busy
REASON = "workers share atomics and short locks only"


def measure(ground: Ground) -> Curve:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        note = "One core: nothing to compare."
        return Curve("cores", "Workers", "workers, a core each", (), [note])
    cpu, rate, shared = [], [], []
    for turn in range(ground.effort.rounds):
        loops = {
            "1 worker on a core": serve(ground, 1, set(cores[:1])),
            "2 workers on two": serve(ground, 2, set(cores)),
            "1 worker on two": serve(ground, 1, set(cores)),
        }
        alone, two, beside = loops.values()
        cpu.append({1: alone.us_per_request, 2: two.us_per_request})
        shared.append({1: beside.us_per_request, 2: two.us_per_request})
        rate.append({1: alone.answers_per_s, 2: two.answers_per_s})
        for name, loop in loops.items():
            say(
                f"cores, round {turn + 1}: {name}: {loop.us_per_request:.1f} us of CPU a request, "
                f"{loop.answers_per_s:.0f} requests/s"
            )
    lines = (
        Line("a request, 1 worker on its own core", "us of CPU", points_of(cpu), 1.0, REASON, is_ratio=True),
        Line("a request, 1 worker on both cores", "us of CPU", points_of(shared), None, "without what sharing cores adds", is_ratio=True),
        Line("throughput", "requests/s", points_of(rate), None, "clients and engines share the cores"),
    )
    return Curve("cores", "Workers", "workers", lines)


def serve(ground: Ground, workers: int, cores: set[int]) -> Loop:
    """A closed loop with the router on these cores; engines and clients are on those that are left, if any is."""
    others = os.sched_getaffinity(0) - cores or cores
    clients = CLIENTS_PER_WORKER * workers
    with ExitStack() as stack:
        stack.enter_context(pinned(others))
        urls = stack.enter_context(ground.engines(BACKENDS))
        with pinned(cores):
            router = stack.enter_context(ground.router(urls, {"server": {"workers": workers}}))
        idle = ground.idle_cpu_share(router)
        ground.closed_loop(router, ground.effort.warm_s, clients=clients)
        return ground.closed_loop(router, ground.effort.seconds, idle, clients)
