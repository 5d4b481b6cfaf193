"""The load: the clients of load-tests/traffic, some that leave before the first byte, and what became of each request."""

import http.client
import json
import queue
import random
import select
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import Callable, Sequence

import neighbours  # noqa: F401
from acts import Cast, Visit
from wire import MAX_ANSWER_BYTES, Ending, Router, Taken, said

# Longer than any wait that is meant: a frozen engine, and the queue of a quota (place.py).
REQUEST_TIMEOUT_S = 40
# Before the head of an answer comes, or about then.
EARLY_S = (0.0, 0.03)
EARLY_WEIGHT = 6
# Requests that are open at one time. 150 a second that take 0.15 s are 23; the rest is for those behind a frozen engine.
MAX_OPEN = 128
MAX_WAITING = 256
KEPT_FAULTS = 20
# A kill is noted before it happens, and its echo takes a moment.
KILL_SLACK_S = 1.0
# What a client must see: its own fault.
OWN_FAULTS = {"unknown model": (404,), "bad body": (400,), "greedy": (200, 429)}


@dataclass(frozen=True)
class Seen(Taken):
    """What a client saw of its answer, with what is needed to judge it."""

    visit: str = ""
    stream: bool = False
    # The answer ended as HTTP says that it should.
    clean: bool = False
    # The stream said that it is whole, or that it is not.
    done: bool = False
    error_event: bool = False
    begun_s: float = 0.0
    ended_s: float = 0.0


class Witness(Router):
    """A router whose answers are looked at closely."""

    def post(self, path: str, body: dict | bytes, headers: dict[str, str], leave_after_bytes: int | None = None) -> Seen:
        begun = time.monotonic()
        seen = self.exchange(path, body, headers, leave_after_bytes)
        return replace(seen, begun_s=begun, ended_s=time.monotonic())

    def exchange(self, path: str, body: dict | bytes, headers: dict[str, str], leave_after_bytes: int | None) -> Seen:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=REQUEST_TIMEOUT_S)
        try:
            send(connection, path, body, headers)
            answer = connection.getresponse()
            if leave_after_bytes is not None and answer.status == 200:
                answer.read(leave_after_bytes)
                return Seen(Ending.LEFT, 200)
            return read(answer)
        except (OSError, http.client.HTTPException) as error:
            return Seen(Ending.FAILED, detail=f"no answer: {error!r}")
        finally:
            connection.close()

    def leave_early(self, path: str, body: dict, after_s: float) -> Seen:
        """Leaves when the answer begins, or `after_s` seconds after it has asked: whichever comes first."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=REQUEST_TIMEOUT_S)
        try:
            send(connection, path, body, {})
            waits = select.poll()
            waits.register(connection.sock, select.POLLIN)
            waits.poll(after_s * 1000)
            return Seen(Ending.LEFT)
        except (OSError, http.client.HTTPException) as error:
            return Seen(Ending.FAILED, detail=f"no connection: {error!r}")
        finally:
            connection.close()


def send(connection: http.client.HTTPConnection, path: str, body: dict | bytes, headers: dict[str, str]) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, {"content-type": "application/json", **headers})


def read(answer: http.client.HTTPResponse) -> Seen:
    clean, detail = True, ""
    try:
        content = answer.read(MAX_ANSWER_BYTES) if answer.length is None else answer.read()
    except http.client.IncompleteRead as cut:
        content, clean = cut.partial, False
    except (OSError, http.client.HTTPException) as error:
        content, clean, detail = b"", False, f"broken: {error!r}"
    stream = answer.getheader("content-type", "").startswith("text/event-stream")
    ending = Ending.SERVED if answer.status < 400 else Ending.REFUSED if answer.status < 500 else Ending.FAILED
    tail = content[-600:]
    return Seen(
        ending,
        answer.status,
        answer.getheader("x-cache", ""),
        answer.getheader("x-tidegate-backend", ""),
        said(content),
        detail or ("" if ending is Ending.SERVED and clean else tail.decode(errors="replace")),
        stream=stream,
        clean=clean,
        done=tail.rstrip().endswith(b"data: [DONE]"),
        error_event=stream and b'data: {"error"' in tail,
    )


def verdict(seen: Seen, kills: Sequence[float]) -> tuple[str, str]:
    """What kind of ending it was, and what was wrong with it; nothing if it was as it must be."""
    if seen.ending is Ending.LEFT:
        return "left", ""
    if seen.status in OWN_FAULTS.get(seen.visit, (200,)) and seen.status != 200:
        return "own fault", ""
    if seen.status != 200 or seen.visit in ("unknown model", "bad body"):
        return "failed", f"{seen.visit}: status {seen.status} {seen.detail}"
    if seen.stream and seen.error_event:
        killed = any(seen.begun_s - KILL_SLACK_S <= at <= seen.ended_s + KILL_SLACK_S for at in kills)
        return "error event", "" if killed else f"{seen.visit}: an error event, and nobody was killed: {seen.detail}"
    if not seen.clean or seen.stream and not seen.done:
        return "cut", f"{seen.visit}: {'stream' if seen.stream else 'answer'} cut without an error event: {seen.detail}"
    return "served", ""


class SoakCast(Cast):
    """The traffic's clients, each named in what comes of its requests, and some more."""

    def __post_init__(self):
        super().__post_init__()
        self.acts.append((EARLY_WEIGHT, self.early_leaver))

    def next_visit(self) -> Visit:
        visit = super().next_visit()
        return Visit(visit.name, [partial(named, visit.name, ask) for ask in visit.requests])

    def early_leaver(self) -> Visit:
        body, after_s = self.chat(self.question(40)), self.chance.uniform(*EARLY_S)
        return Visit("early leaver", [lambda router: router.leave_early("/v1/chat/completions", body, after_s)])


def named(visit: str, ask: Callable[[Witness], Seen], router: Witness) -> Seen:
    return replace(ask(router), visit=visit)


class Ledger:
    """Counts what became of the requests. Keeps no request: its own memory stays as it is."""

    def __init__(self, kills: Sequence[float]):
        self.lock, self.kills = threading.Lock(), kills
        self.endings: Counter[str] = Counter()
        self.visits: Counter[str] = Counter()
        self.caches: Counter[str] = Counter()
        self.faults: list[str] = []
        self.errors = self.skipped = self.ended = 0

    def end(self, seen: Seen) -> None:
        ending, fault = verdict(seen, self.kills)
        with self.lock:
            self.ended += 1
            self.endings[ending] += 1
            self.visits[seen.visit] += 1
            self.caches[seen.cache or "-"] += 1
            if fault:
                self.errors += 1
                if len(self.faults) < KEPT_FAULTS:
                    self.faults.append(f"{fault} [{seen.path or 'no backend'}, {seen.ended_s - seen.begun_s:.2f} s]")


class Crowd:
    """Threads that play visits, as many as requests may be open."""

    def __init__(self, router: Witness, ledger: Ledger):
        self.router, self.ledger = router, ledger
        self.waiting: queue.Queue = queue.Queue(MAX_WAITING)
        for _ in range(MAX_OPEN):
            # Daemons: what hangs does not keep the process from ending.
            threading.Thread(target=self.play, daemon=True).start()

    def play(self) -> None:
        while True:
            ask = self.waiting.get()
            try:
                seen = ask(self.router)
            except Exception as error:  # a fault of ours must not end the thread unseen
                seen = Seen(Ending.FAILED, detail=repr(error), visit="client")
            self.ledger.end(seen)
            self.waiting.task_done()

    def run(self, cast: SoakCast, rate: float, stop: threading.Event) -> None:
        """Visits come at random, `rate` a second on average, until the stop."""
        due = time.monotonic()
        while not stop.wait(max(0.0, due - time.monotonic())):
            due = max(due + cast.chance.expovariate(rate), time.monotonic() - 1.0)  # a pause is not made up for by a burst
            for ask in cast.next_visit().requests:
                try:
                    self.waiting.put_nowait(ask)
                except queue.Full:
                    self.ledger.skipped += 1

    @property
    def open(self) -> int:
        return self.waiting.unfinished_tasks


def cast(model: str, seed: int) -> SoakCast:
    return SoakCast(model, random.Random(seed))
