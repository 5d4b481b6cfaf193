"""Keeps a small, bounded load on a router, so that every panel of the dashboards has something to show.

    docker-compose --profile load up                                        beside the whole stack
    python3 load-tests/traffic/traffic.py --url http://127.0.0.1:8080       against any router

Needs nothing but Python. The clients that it plays are in acts.py.
"""

import argparse
import queue
import random
import signal
import sys
import threading
import time
from collections import Counter

from acts import Cast, Visit
from wire import Ending, Router, Taken

MODEL = "meta-llama/Llama-3.1-70B-Instruct"
# Requests that may be open at one time; a visit for which there is no room is left out, and counted.
MAX_OPEN = 24
MAX_WAITING_VISITS = 8
# Above, Python would be what is measured.
MAX_RATE = 200.0
READY_POLL_S = 0.25
PROGRESS_S = 5.0
# At the end, for what is still open.
FINISH_S = 10.0

EPILOG = """\
clients it plays:
  chats of several turns with shared system prompts, prompts below and above 512 tokens (with split serving the
  latter go through a prefill worker), streams and whole answers, questions that were asked before (the response
  cache knows them) or are asked by three at once, two choices, completions, embeddings, /tokenize, a model that
  does not exist (404), a body that is no JSON (400), and clients that leave in the middle of an answer.

examples:
  traffic.py --url http://127.0.0.1:8080                     until Ctrl-C or SIGTERM
  traffic.py --url http://127.0.0.1:8080 --rate 20 --duration 60
  traffic.py --url http://127.0.0.1:8080 --seed 7            the same visits as another run with 7

Ends with 0, and with 1 if the router was not ready in time or nothing was served.
"""


class Tally:
    """Counts what became of the requests."""

    def __init__(self):
        self.lock = threading.Lock()
        self.endings, self.visits, self.caches, self.paths = Counter(), Counter(), Counter(), Counter()
        self.open = 0
        self.skipped = 0
        self.last_fault = ""

    def begin(self, visit: str) -> None:
        with self.lock:
            self.visits[visit] += 1
            self.open += 1

    def end(self, taken: Taken) -> None:
        with self.lock:
            self.open -= 1
            self.endings[taken.ending] += 1
            self.caches[taken.cache or "-"] += 1
            self.paths[taken.path or "-"] += 1
            if taken.ending is Ending.FAILED:
                self.last_fault = f"{taken.status} {taken.detail}"

    def line(self) -> str:
        with self.lock:
            counts = ", ".join(f"{self.endings[ending]} {ending.value}" for ending in Ending)
            fault = f"; last fault: {self.last_fault}" if self.last_fault else ""
            return f"{counts}, {self.open} open, {self.skipped} left out{fault}"

    def summary(self) -> str:
        table = lambda counts: ", ".join(f"{count} {name}" for name, count in counts.most_common())
        return f"{self.line()}\n  clients: {table(self.visits)}\n  cache:   {table(self.caches)}\n  paths:   {table(self.paths)}"


class Players:
    """Threads that play the visits. As many as requests may be open, so that this bounds the load."""

    def __init__(self, router: Router, tally: Tally):
        self.router, self.tally = router, tally
        self.waiting: queue.Queue = queue.Queue(MAX_WAITING_VISITS)
        for _ in range(MAX_OPEN):
            # Daemons: what hangs does not keep the process from ending.
            threading.Thread(target=self.play, daemon=True).start()

    def take(self, visit: Visit) -> None:
        for ask in visit.requests:
            try:
                self.waiting.put_nowait((visit.name, ask))
            except queue.Full:
                self.tally.skipped += 1

    def play(self) -> None:
        while True:
            name, ask = self.waiting.get()
            self.tally.begin(name)
            try:
                taken = ask(self.router)
            except Exception as error:  # a fault of ours must not end the thread unseen
                taken = Taken(Ending.FAILED, detail=repr(error))
            self.tally.end(taken)
            self.waiting.task_done()

    def finish(self, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while self.waiting.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.05)


def wait_until_ready(router: Router, within_s: float, stop: threading.Event) -> bool:
    deadline = time.monotonic() + within_s
    while not stop.is_set() and time.monotonic() < deadline:
        if router.ready():
            return True
        stop.wait(READY_POLL_S)
    return False


def run(cast: Cast, players: Players, tally: Tally, rate: float, duration_s: float, stop: threading.Event) -> None:
    """Visits come at random, `rate` a second on average, as those of people do."""
    begun = time.monotonic()
    due, report = begun, begun + PROGRESS_S
    while not stop.is_set() and (duration_s == 0 or time.monotonic() < begun + duration_s):
        players.take(cast.next_visit())
        due += cast.chance.expovariate(rate)
        now = time.monotonic()
        if now >= report:
            print(f"{now - begun:.0f} s: {tally.line()}", flush=True)
            report = now + PROGRESS_S
        stop.wait(max(0.0, due - now))


def rate(text: str) -> float:
    value = float(text)
    if not 0 < value <= MAX_RATE:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most {MAX_RATE:g}")
    return value


def seconds(text: str) -> float:
    value = float(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return value


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Keeps a small, bounded load on a router, so that every panel of the dashboards has something to show.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="the router [default: %(default)s]")
    parser.add_argument("--model", default=MODEL, help="the model to ask for [default: %(default)s]")
    parser.add_argument("--rate", type=rate, default=6.0, help=f"visits a second, at most {MAX_RATE:g} [default: %(default)s]")
    parser.add_argument("--duration", type=seconds, default=0.0, metavar="SECONDS", help="0: until SIGTERM [default: 0]")
    parser.add_argument("--seed", type=int, default=1, help="what the visits are drawn from [default: %(default)s]")
    parser.add_argument("--ready-within", type=seconds, default=60.0, metavar="SECONDS", help="for /ready [default: 60]")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        router = Router(args.url)
    except ValueError as error:
        print(f"traffic.py: {error}", file=sys.stderr)
        return 2
    if not wait_until_ready(router, args.ready_within, stop):
        if stop.is_set():
            return 0
        print(f"traffic.py: {args.url}/ready did not say 200 in {args.ready_within:g} s", file=sys.stderr)
        return 1
    tally = Tally()
    players = Players(router, tally)
    run(Cast(args.model, random.Random(args.seed)), players, tally, args.rate, args.duration, stop)
    players.finish(FINISH_S)
    print(f"in all: {tally.summary()}", flush=True)
    return 0 if stop.is_set() or tally.endings[Ending.SERVED] else 1


if __name__ == "__main__":
    sys.exit(main())
