"""Open loop: sends requests when they are due, whatever became of those before, and notes when each token came and how each
answer ended.

`driver.py` sends so many at a time and in order; here a slow fleet gets no fewer requests for being slow, and the time to the
first token counts from when a request was due. Each request has a connection of its own.
"""

import asyncio
import gc
import json
import random
import time
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Callable, Iterator, Sequence

from driver import STREAM_LIMIT_BYTES, parse_head, watch_lag

# The whole of one answer. None takes so long unless something hangs.
ANSWER_WITHIN_S = 120
ERROR_BODY_BYTES_MAX = 4096


class Ending(Enum):
    """What a client made of an answer's end."""

    WHOLE = "whole"
    # no token had come: a router could have hidden it
    REFUSED = "error before the first byte"
    # a token had come, and then the client was told
    ERROR_EVENT = "error event"
    BROKEN = "broken connection"
    # and then the client was not told
    SHORT = "short without an error"
    SILENT = "no end"


HONEST = (Ending.ERROR_EVENT, Ending.BROKEN)
DISHONEST = (Ending.SHORT, Ending.SILENT)


@dataclass(frozen=True)
class Shot:
    """A request, and when it is due."""

    due_s: float
    body: bytes
    prompt_tokens: int
    output_tokens: int


@dataclass
class Take:
    """What one request came to. All times count from the start of the run."""

    due_s: float
    prompt_tokens: int = 0
    backend: str = ""
    path: str = ""
    arrivals_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    cached_tokens: int = 0
    ending: Ending = Ending.REFUSED
    detail: str = ""

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.due_s

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.arrivals_s, self.arrivals_s[1:])]


@dataclass
class Played:
    """What a run came to."""

    takes: list[Take]
    # How late the generator woke up, sorted.
    lags_s: list[float] = field(default_factory=list)
    # Share of the machine's processors that was at work, by anybody.
    busy: float = 0.0


@dataclass(frozen=True)
class Act:
    """Something that happens to the fleet during a run, on a thread of its own."""

    at_s: float
    do: Callable[[], None]


class Reading:
    """What a stream has said so far. It may come in any pieces."""

    def __init__(self):
        self.rest = b""
        self.tokens = 0
        self.said_tokens: int | None = None
        self.cached_tokens = 0
        self.error = ""
        self.done = False

    def feed(self, data: bytes) -> int:
        """Takes the next bytes; answers how many tokens they brought."""
        before = self.tokens
        *events, self.rest = (self.rest + data.replace(b"\r\n", b"\n")).split(b"\n\n")
        for event in events:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                self.take(b"\n".join(lines))
        return self.tokens - before

    def take(self, event: bytes) -> None:
        if event == b"[DONE]":
            self.done = True
            return
        said = json.loads(event)
        if "error" in said or said.get("object") == "error":
            self.error = event.decode(errors="replace")
            return
        self.tokens += len(said.get("choices") or [])
        if usage := said.get("usage"):
            self.said_tokens = usage["completion_tokens"]
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def ending_of(reading: Reading, wanted_tokens: int, clean: bool, late: bool) -> Ending:
    """`clean`: the answer's last chunk said that it was the last; `late`: the client gave up waiting."""
    if reading.tokens == 0:
        return Ending.REFUSED
    if reading.error:
        return Ending.ERROR_EVENT
    if late:
        return Ending.SILENT
    if not clean:
        return Ending.BROKEN
    whole = reading.done and reading.tokens == reading.said_tokens == wanted_tokens
    return Ending.WHOLE if whole else Ending.SHORT


def poisson(rate_per_s: float, duration_s: float, chance: random.Random) -> list[float]:
    """When requests are due that know nothing of each other."""
    due, now = [], chance.expovariate(rate_per_s)
    while now < duration_s:
        due.append(now)
        now += chance.expovariate(rate_per_s)
    return due


async def ask(
    port: int, shot: Shot, clock: Callable[[], float], take: Take | None = None, within_s: float = ANSWER_WITHIN_S
) -> Take:
    """One request, at once. A given take is filled as the answer comes."""
    take = take or Take(shot.due_s)
    take.prompt_tokens = shot.prompt_tokens
    reading, clean, late = Reading(), False, False
    try:
        clean = await asyncio.wait_for(converse(port, shot, clock, take, reading), within_s)
    except asyncio.TimeoutError:
        late, take.detail = True, f"not whole within {within_s} s"
    except (OSError, EOFError, ValueError, KeyError, asyncio.LimitOverrunError) as error:
        take.detail = repr(error)
    take.ended_s = clock()
    take.cached_tokens = reading.cached_tokens
    take.ending = ending_of(reading, shot.output_tokens, clean, late)
    take.detail = reading.error or take.detail
    return take


async def converse(port: int, shot: Shot, clock: Callable[[], float], take: Take, reading: Reading) -> bool:
    """Whether the answer ended as HTTP says that it should."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=STREAM_LIMIT_BYTES)
    try:
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            % len(shot.body)
            + shot.body
        )
        status, headers = parse_head(await reader.readuntil(b"\r\n\r\n"))
        take.backend = headers.get("x-tidegate-backend", "")
        take.path = headers.get("x-tidegate-path", "")
        if status != 200 or headers.get("transfer-encoding") != "chunked":
            body = await reader.read(ERROR_BODY_BYTES_MAX)
            take.detail = f"status {status}: {body.decode(errors='replace')}"
            return False
        while size := int(await reader.readline(), 16):
            data = (await reader.readexactly(size + 2))[:-2]
            tokens = reading.feed(data)
            take.arrivals_s += [clock()] * tokens
        await reader.readline()
        return True
    finally:
        writer.close()


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self):
        self.start = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self.start


def play(port: int, shots: Sequence[Shot], acts: Sequence[Act] = ()) -> Played:
    """Sends all when they are due, and does to the fleet what is to be done; returns when every answer has ended."""
    return measured(lambda: play_all(port, shots, acts))


async def play_all(port: int, shots: Sequence[Shot], acts: Sequence[Act]) -> list[Take]:
    clock = Stopwatch()

    async def later(shot: Shot) -> Take:
        await asyncio.sleep(shot.due_s - clock())
        return await ask(port, shot, clock)

    async def happen(act: Act) -> None:
        await asyncio.sleep(act.at_s - clock())
        await asyncio.to_thread(act.do)

    happening = asyncio.gather(*(happen(act) for act in acts))
    takes, _ = await asyncio.gather(asyncio.gather(*(later(shot) for shot in shots)), happening)
    return takes


def saturate(port: int, shots: Iterator[Shot], lanes: int, duration_s: float) -> Played:
    """Closed loop: so many at a time, each followed by the next, until the time is up; what is under way then is cut off."""
    return measured(lambda: saturate_all(port, shots, lanes, duration_s))


async def saturate_all(port: int, shots: Iterator[Shot], lanes: int, duration_s: float) -> list[Take]:
    clock, takes = Stopwatch(), []

    async def lane() -> None:
        for shot in shots:
            takes.append(await ask(port, shot, clock))

    running = [asyncio.create_task(lane()) for _ in range(lanes)]
    await asyncio.wait(running, timeout=duration_s)
    for task in running:
        task.cancel()
    for ended in await asyncio.gather(*running, return_exceptions=True):
        if isinstance(ended, Exception):
            raise ended
    return takes


def measured(run: Callable) -> Played:
    """Runs it with the generator and the machine watched."""

    async def watched() -> Played:
        played = Played([])
        watch = asyncio.create_task(watch_lag(played.lags_s))
        before = processor_ticks()
        played.takes = await run()
        played.busy = busy_share(before, processor_ticks())
        watch.cancel()
        played.lags_s.sort()
        return played

    gc.collect()
    gc.freeze()  # else every collection walks all prompts
    try:
        return asyncio.run(watched())
    finally:
        gc.unfreeze()


def processor_ticks() -> list[int]:
    """Of all processors since the machine's start: user, nice, system, idle, waiting for disks, and so on."""
    return [int(ticks) for ticks in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]


def busy_share(before: list[int], after: list[int]) -> float:
    passed = [later - earlier for earlier, later in zip(before, after)]
    return 1 - (passed[3] + passed[4]) / sum(passed) if sum(passed) else 0.0
