"""What of a soak test is judged, each with a figure and its reason. Pure: samples in, checks out."""

import re
from collections import Counter
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Sequence

from samples import LOAD_GAUGES, Metrics, Sample, total

# Until caches and the index are full and the allocator has its arenas: ten minutes of an hour. At 150 requests/s the last to be
# full are the tokens that each worker thread keeps (16 MiB), after some four minutes.
WARM_UP_SHARE = 1 / 6
WINDOWS = 12
# Of what is resident. An hour has half a million requests: 2 % of 100 MiB are four bytes for each, less than any object.
RSS_RISE_PER_HOUR_MAX = 0.02
# A small process has the same page noise: below this a rise is no sign of anything.
RSS_RISE_BYTES_PER_HOUR_MIN = 2 << 20
# Without the warm-up, so that a run of half an hour is judged. Of a shorter one the warm-up is too short, and a last step of the
# allocator would look like a leak: 1 MiB in three minutes are 20 MiB an hour.
RSS_JUDGED_FROM_S = 24 * 60
# Between first and last quarter. Connections follow the load of the moment, here some 25 requests with two sockets each.
FDS_RISE_MAX = 32
# The runtime's blocking threads come and go with file reads and name look-ups; one for each churn event would be dozens.
THREADS_RISE_MAX = 4
# When all is quiet, against before the load: connections of health probes and of /metrics.
FDS_LEFT_MAX = 8
# Events are taken in within milliseconds; more says that some wait in a queue that does not empty.
EVENT_LAG_S_MAX = 1.0
# The driver must not be what is measured.
CLIENT_CORES_MAX = 0.5
# Visits that found no place among the clients' threads: the load would not be what is claimed.
SKIPPED_SHARE_MAX = 0.01
# Faulty settings are written on purpose (churn.py). The rest of level ERROR is a fault, whatever it says.
EXPECTED_ERRORS = (re.compile(r"settings are faulty, those of before stay in effect"),)
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
LEVEL = re.compile(r"^\S+\s+ERROR\b")
SHOWN = 5


@dataclass(frozen=True)
class Check:
    name: str
    # None: the run was too short to say.
    met: bool | None
    found: str
    wanted: str


def steady(samples: Sequence[Sample]) -> list[Sample]:
    """Those after the warm-up."""
    from_s = samples[-1].at_s * WARM_UP_SHARE if samples else 0.0
    return [sample for sample in samples if sample.at_s >= from_s]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Theil and Sen's, over the medians of windows: neither a peak nor a step at one end moves it much."""
    size = max(1, len(points) // WINDOWS)
    windows = [points[at : at + size] for at in range(0, len(points), size)]
    middles = [(median(x for x, _ in window), median(y for _, y in window)) for window in windows]
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(middles, 2) if x2 > x1]
    return median(slopes) if slopes else 0.0


def memory(samples: Sequence[Sample]) -> Check:
    kept = steady(samples)
    resident = median(sample.rss_bytes for sample in kept)
    rise = slope([(sample.at_s, float(sample.rss_bytes)) for sample in kept]) * 3600
    most = max(resident * RSS_RISE_PER_HOUR_MAX, RSS_RISE_BYTES_PER_HOUR_MIN)
    long_enough = kept[-1].at_s - kept[0].at_s >= RSS_JUDGED_FROM_S
    found = f"{resident / 2**20:.1f} MiB, {rise / 2**20:+.2f} MiB an hour"
    wanted = f"at most {most / 2**20:+.2f} MiB an hour, judged from {RSS_JUDGED_FROM_S // 60} min after the warm-up on"
    return Check("memory is flat", rise <= most if long_enough else None, found, wanted)


def flat(name: str, values: Sequence[float], most: float) -> Check:
    """The last quarter against the first, by their medians."""
    quarter = max(1, len(values) // 4)
    before, after = median(values[:quarter]), median(values[-quarter:])
    return Check(f"{name} are flat", after - before <= most, f"{before:g} → {after:g}", f"at most {most:g} more")


def settled(metrics: Metrics, backends: dict[str, dict], engines: dict[str, float]) -> list[str]:
    """What is not as it should be when nobody asks for anything; empty when all is."""
    stuck = [f"{name} is {total(metrics, name):g}" for name in LOAD_GAUGES if total(metrics, name) != 0]
    for name, backend in backends.items():
        counts = ("in_flight", "queued_tokens", "held_kv_tokens")
        stuck += [f"{name}: {count} is {backend[count]}" for count in counts if backend.get(count)]
        if backend["health"] != "healthy" or backend["breaker"] != "closed" or backend["draining"]:
            stuck.append(f"{name}: {backend['health']}, breaker {backend['breaker']}, draining {backend['draining']}")
    stuck += [f"{name} still has {load:g} requests" for name, load in engines.items() if load]
    for (name, labels), value in metrics.items():
        if name == "tidegate_kv_stream_connected" and value != 1:
            stuck.append(f"event stream closed: {labels}")
        if name == "tidegate_kv_stream_lag_seconds" and value > EVENT_LAG_S_MAX:
            stuck.append(f"events come {value:.1f} s late: {labels}")
    return stuck


def counted(metrics: Metrics, ended: int, unsure: int) -> list[Check]:
    """What began has ended: the router's counters against the clients', and against each other."""
    requests = total(metrics, "tidegate_requests_total")
    timed = total(metrics, "tidegate_request_duration_seconds_count")
    # Who leaves at once may be gone before its head was read: such a request never began.
    met = ended - unsure <= requests <= ended
    wanted = f"{ended - unsure} to {ended}: all that clients sent, with and without the {unsure} that left early"
    return [
        Check("every request has ended", met, f"{requests:g} counted", wanted),
        Check("every request was timed", timed == requests, f"{timed:g} timed", f"{requests:g}"),
        zero("actors restarted", total(metrics, "tidegate_actor_restarts_total"), "an actor that panics is a fault"),
        zero("log lines lost", total(metrics, "tidegate_log_lines_dropped_total"), "the log is judged, so all of it is needed"),
        zero("retry budget spent", total(metrics, "tidegate_retry_budget_exhausted_total"), "one engine at a time is away"),
    ]


def zero(name: str, found: float, why: str) -> Check:
    return Check(f"{name}: none", found == 0, f"{found:g}", f"0; {why}")


def nothing(name: str, found: Sequence[str], wanted: str, count: int | None = None) -> Check:
    """That there is none of it; the first few are told."""
    many = len(found) if count is None else count
    return Check(name, many == 0, "; ".join([str(many), *found[:SHOWN]]), wanted)


def odd_lines(log: str) -> list[str]:
    """Lines of a log that must not be there."""
    lines = (COLOURS.sub("", line) for line in log.splitlines())
    odd = [line for line in lines if LEVEL.match(line) or "panicked" in line]
    return [line for line in odd if not any(expected.search(line) for expected in EXPECTED_ERRORS)]


def warnings(log: str) -> list[tuple[str, int]]:
    """How often each warning came, without what differs: shown, not judged."""
    plain = (COLOURS.sub("", line) for line in log.splitlines() if " WARN" in line)
    kinds = Counter(re.sub(r"\d+", "#", line.split("WARN", 1)[1]).strip()[:100] for line in plain)
    return kinds.most_common(12)
