"""What happens to the fleet meanwhile: drawn from a seed beforehand, and done one after the other, each mended before the next.

One engine is away at a time, so that the others can carry the load and no client need see an error before its first byte.
"""

import random
import threading
import time
from dataclasses import dataclass
from typing import Callable, Sequence

from grounds import UNREADABLE, Grounds

# Quiet between two: long enough for breakers (2 s) and probes (1 s) to find that all is well again.
PAUSE_S = (2.0, 5.0)
HOLD_S = (1.0, 4.0)
# Load goes on for so long after the last, so that what is found at the end is not its echo.
CALM_S = 8.0
RELOADS = ("watch", "SIGHUP", "POST")
KINDS = ("leave", "drain", "kill", "blink", "freeze", "refuse")


@dataclass(frozen=True)
class Event:
    """One thing that happens, not before `at_s` of the run."""

    at_s: float
    kind: str
    engine: str
    hold_s: float
    how: str = ""
    back: str = ""

    @property
    def says(self) -> str:
        by = f" by {self.how}" if self.how else ""
        return f"{self.kind} {self.engine if self.kind != 'refuse' else 'settings'}{by}"


def schedule(seed: int, duration_s: float, engines: Sequence[str]) -> list[Event]:
    """Every kind comes once in each round of all kinds, in an order of chance."""
    chance = random.Random(f"churn {seed}")
    events: list[Event] = []
    now, calm = chance.uniform(*PAUSE_S), min(CALM_S, duration_s / 4)
    while True:
        for kind in chance.sample(KINDS, len(KINDS)):
            hold_s = chance.uniform(*HOLD_S)
            if now + hold_s > duration_s - calm:
                return events
            how, back = chance.choice(RELOADS), chance.choice(RELOADS)
            told = kind in ("leave", "refuse")
            events.append(Event(now, kind, chance.choice(engines), hold_s, how if told else "", back if told else ""))
            now += hold_s + chance.uniform(*PAUSE_S)


class Churn:
    """Does what is scheduled, on a thread of its own."""

    def __init__(self, grounds: Grounds, events: Sequence[Event], begun: float, stop: threading.Event):
        self.grounds, self.events, self.begun, self.stop = grounds, events, begun, stop
        self.now = "all is well"
        # (seconds of the run, what)
        self.marks: list[tuple[float, str]] = []
        self.faults: list[str] = []
        self.calm = threading.Event()  # set when all has been done and mended

    def run(self, until_s: float) -> None:
        """Starts nothing after `until_s` of the run: waits may have made it late."""
        for event in self.events:
            self.stop.wait(max(0.0, self.begun + event.at_s - time.monotonic()))
            if self.stop.is_set() or time.monotonic() - self.begun > until_s:
                break
            self.now = event.says
            self.marks.append((time.monotonic() - self.begun, event.says))
            try:
                ACTS[event.kind](self, event)
            except Exception as error:  # told at the end; what follows is still of interest
                self.faults.append(f"{event.says}: {error!r}")
            self.now = "all is well"
        self.calm.set()

    def hold(self, event: Event) -> None:
        """The time for which it lasts: that is what is tested, nothing is waited for."""
        self.stop.wait(event.hold_s)

    def leave(self, event: Event) -> None:
        self.grounds.absent.add(event.engine)
        self.grounds.write_settings()
        try:
            self.grounds.reload(event.how)
            self.hold(event)
        finally:
            self.grounds.absent.discard(event.engine)
            self.grounds.write_settings()
            self.grounds.reload(event.back)
        self.serves(event)

    def drain(self, event: Event) -> None:
        path = f"/admin/backends/{event.engine}"
        self.told(path + "/drain")
        try:
            self.hold(event)
            self.expect(self.grounds.backends()[event.engine]["draining"], "a drained backend stays so")
        finally:
            self.told(path + "/undrain")
        self.serves(event)

    def kill(self, event: Event) -> None:
        self.grounds.kill(event.engine)
        self.hold(event)
        self.revive(event)

    def blink(self, event: Event) -> None:
        """Killed and started at once: a new process behind the same port, with an empty cache and events from 0."""
        self.grounds.kill(event.engine)
        self.revive(event)

    def freeze(self, event: Event) -> None:
        self.grounds.pause(event.engine)
        try:
            self.hold(event)
        finally:
            self.grounds.resume(event.engine)
        self.serves(event)

    def refuse(self, event: Event) -> None:
        self.grounds.refuse(UNREADABLE[len(self.marks) % len(UNREADABLE)], event.how)

    def revive(self, event: Event) -> None:
        self.grounds.restart(event.engine)
        self.grounds.wait_healthy(event.engine)
        self.serves(event)

    def serves(self, event: Event) -> None:
        def usable() -> bool:
            backend = self.grounds.backends().get(event.engine, {})
            return backend.get("health") == "healthy" and backend.get("breaker") == "closed" and not backend["draining"]

        self.grounds.until(usable, f"{event.engine} can take requests again after: {event.says}")

    def told(self, path: str) -> None:
        status, said = self.grounds.ask("POST", path)
        self.expect(status == 200, f"POST {path} answers {status}: {said}")

    @staticmethod
    def expect(met: bool, what: str) -> None:
        if not met:
            raise AssertionError(what)


ACTS: dict[str, Callable[[Churn, Event], None]] = {kind: getattr(Churn, kind) for kind in KINDS}
