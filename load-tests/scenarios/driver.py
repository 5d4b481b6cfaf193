"""Sends requests to the router, so many at a time and in their order, and reads what the answers say.

Plain sockets and no HTTP library: it shares two cores with what it measures. It watches its own delay, so that a reader can
tell a slow fleet from a slow driver.
"""

import asyncio
import gc
import json
import time
from dataclasses import dataclass, field

from workloads import Request

ANSWER_WITHIN_S = 60
# How often the driver looks whether it is late itself.
LAG_INTERVAL_S = 0.01
STREAM_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True)
class Answer:
    """What one request came to."""

    backend: str = ""
    route: str = ""
    ttft_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def work(self) -> int:
        """Tokens that the engine had to compute."""
        return self.prompt_tokens - self.cached_tokens + self.output_tokens


@dataclass
class Drive:
    """What a workload came to."""

    answers: list[Answer]
    wall_s: float = 0.0
    # How late the driver woke up, sorted.
    lags_s: list[float] = field(default_factory=list)
    # Processor time of the driver itself.
    cpu_s: float = 0.0


def drive(port: int, requests: list[Request], concurrency: int) -> Drive:
    """Sends all; an error is an answer too."""
    gc.collect()
    gc.freeze()  # else every collection walks all prompts
    try:
        return asyncio.run(drive_all(port, requests, concurrency))
    finally:
        gc.unfreeze()


async def drive_all(port: int, requests: list[Request], concurrency: int) -> Drive:
    answers: list[Answer] = [Answer(error="not sent")] * len(requests)
    done = [asyncio.Event() for _ in requests]
    queue = iter(range(len(requests)))
    drive = Drive(answers)
    start, cpu = time.perf_counter(), time.process_time()

    async def lane() -> None:
        connection = Connection(port)
        for index in queue:
            request = requests[index]
            if request.after is not None:
                await done[request.after].wait()
            if request.at_s is not None:
                await asyncio.sleep(start + request.at_s - time.perf_counter())
            answers[index] = await connection.ask(request)
            done[index].set()
        connection.close()

    watch = asyncio.create_task(watch_lag(drive.lags_s))
    await asyncio.gather(*(lane() for _ in range(concurrency)))
    watch.cancel()
    drive.wall_s = time.perf_counter() - start
    drive.cpu_s = time.process_time() - cpu
    drive.lags_s.sort()
    return drive


async def watch_lag(lags_s: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(LAG_INTERVAL_S)
        lags_s.append(time.perf_counter() - before - LAG_INTERVAL_S)


class Connection:
    """One kept connection to the router; opened anew after an error."""

    def __init__(self, port: int):
        self.port = port
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def ask(self, request: Request) -> Answer:
        try:
            return await asyncio.wait_for(self._ask(request), ANSWER_WITHIN_S)
        except (OSError, ValueError, KeyError, asyncio.IncompleteReadError, asyncio.TimeoutError) as error:
            self.close()
            return Answer(error=repr(error))

    async def _ask(self, request: Request) -> Answer:
        if self.writer is None:
            self.reader, self.writer = await asyncio.open_connection(
                "127.0.0.1", self.port, limit=STREAM_LIMIT_BYTES
            )
        start = time.perf_counter()
        self.writer.write(
            b"POST %s HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            % (request.path.encode(), len(request.body))
            + request.body
        )
        status, headers = parse_head(await self.reader.readuntil(b"\r\n\r\n"))
        if status != 200 or headers.get("transfer-encoding") != "chunked":
            self.close()  # and with it the rest of the answer
            return Answer(error=f"status {status}")
        body, ttft_s = b"", 0.0
        while size := int(await self.reader.readline(), 16):
            body += (await self.reader.readexactly(size + 2))[:-2]
            if not ttft_s and b"data:" in body:
                ttft_s = time.perf_counter() - start
        await self.reader.readline()
        return Answer(
            backend=headers["x-tidegate-backend"],
            route=headers.get("x-tidegate-route", ""),
            ttft_s=ttft_s,
            **read_usage(body),
        )

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.reader = self.writer = None


def parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").rstrip().split("\r\n")
    pairs = (line.split(":", 1) for line in lines)
    return int(first.split()[1]), {name.lower(): value.strip() for name, value in pairs}


def read_usage(stream: bytes) -> dict:
    """The counts of a stream's last chunk; an error where it is not whole."""
    events = [line.removeprefix(b"data:").strip() for line in stream.splitlines() if line.startswith(b"data:")]
    if not events or events[-1] != b"[DONE]":
        return {"error": "the stream is cut"}
    last = json.loads(events[-2]) if len(events) > 1 else {}
    usage = last.get("usage")
    if not usage or "error" in last:
        return {"error": "the stream ends without usage"}
    details = usage.get("prompt_tokens_details") or {}
    return {
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": details["cached_tokens"],
        "output_tokens": usage["completion_tokens"],
    }
