"""Runs the router for an hour under load while its fleet changes all the time, and says whether anything piles up or leaks.

    python3 load-tests/soak/soak.py                                        an hour; programs from target/release
    python3 load-tests/soak/soak.py --minutes 3 --svg soak.svg             a look at it

Starts engines and the router by itself, on free loopback ports, and ends them. Needs nothing but Python and our programs.
"""

import argparse
import json
import signal
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from neighbours import REPOSITORY
from clients import Crowd, Ledger, Witness, cast
from churn import Churn, schedule
from fleet import FleetError, Launcher
from grounds import Grounds, engine_load
import judge
import markdown
import picture
from judge import Check
from place import MODEL, Place
from samples import Metrics, Sample, gauges, parse, process

SAMPLE_S = 5.0
PROGRESS_S = 10.0
# Of a short run there are to be some samples, too.
SAMPLES_MIN = 12
# For what is open when the load stops: a whole wait of a quota's queue, and answers.
FINISH_WITHIN_S = 45
# Then, for every gauge to come to rest: kept connections live 4 s, a cut stream is opened again within a second.
SETTLE_WITHIN_S = 30
POLL_S = 0.25
FAILED_SAMPLES_MAX = 3

EPILOG = """\
what goes on meanwhile, one after the other, drawn from --seed:
  leave    a backend leaves the settings and returns (the file is watched, SIGHUP, POST /admin/reload)
  drain    a backend is drained and undrained through /admin
  kill     an engine gets SIGKILL and is started again some seconds later; blink: at once
  freeze   an engine gets SIGSTOP, and SIGCONT some seconds later
  refuse   faulty settings, which must change nothing
Some engines lose events, or number them anew, all the time.

Ends with 0, with 1 if a check is missed, and with 2 if it could not run.
"""


@dataclass
class Run:
    """One soak test and what is known of it."""

    grounds: Grounds
    seconds: float
    rate: float
    seed: int
    stop: threading.Event
    begun: float = field(default_factory=time.monotonic)
    samples: list[Sample] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    first_fds: int = 0
    lost_samples: int = 0

    def __post_init__(self):
        self.ledger = Ledger(self.grounds.kills)
        self.crowd = Crowd(Witness(self.grounds.place.api), self.ledger)
        self.load_ends = threading.Event()
        events = schedule(self.seed, self.seconds, list(self.grounds.engines))
        self.churn = Churn(self.grounds, events, self.begun, self.stop)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.begun

    def go(self) -> None:
        self.first_fds = process(self.grounds.pid)[1]
        cpu = time.process_time()
        players = cast(MODEL, self.seed)
        threading.Thread(target=self.crowd.run, args=(players, self.rate, self.load_ends), daemon=True).start()
        threading.Thread(target=self.churn.run, args=(self.seconds,), daemon=True).start()
        try:
            self.watch()
        finally:
            self.load_ends.set()
        cores = (time.process_time() - cpu) / max(self.elapsed, 1e-9)
        self.judge_load(cores)

    def watch(self) -> None:
        """Samples and tells until the time is over; then until the last event is mended."""
        every = min(SAMPLE_S, self.seconds / SAMPLES_MIN)
        due, told = self.begun, self.begun + PROGRESS_S
        while not self.stop.is_set() and self.grounds.router.process.poll() is None:
            self.sample()
            if time.monotonic() >= told:
                self.tell()
                told += PROGRESS_S
            if self.elapsed >= self.seconds and (self.churn.calm.is_set() or self.elapsed >= self.seconds + FINISH_WITHIN_S):
                return
            due = max(due + every, time.monotonic())
            self.stop.wait(due - time.monotonic())

    def sample(self) -> None:
        try:
            rss, fds, threads = process(self.grounds.pid)
            numbers = gauges(parse(self.grounds.metrics()))
        except (OSError, ValueError) as error:
            self.lost_samples += 1
            print(f"no sample: {error!r}", file=sys.stderr, flush=True)
            return
        ledger = self.ledger
        self.samples.append(Sample(self.elapsed, rss, fds, threads, ledger.ended, ledger.errors, numbers, self.churn.now))

    def tell(self) -> None:
        last = self.samples[-1] if self.samples else Sample(0, 0, 0, 0, 0, 0)
        print(
            f"{self.elapsed:6.0f} s  {self.ledger.ended} requests ({self.crowd.open} open), {self.ledger.errors} errors,"
            f" RSS {last.rss_bytes / 2**20:.1f} MiB, {last.fds} fds, {len(self.churn.marks)} events, now: {self.churn.now}",
            file=sys.stderr,
            flush=True,
        )

    def judge_load(self, cores: float) -> None:
        ledger, kept = self.ledger, judge.steady(self.samples)
        if len(kept) < 4:
            self.checks.append(Check("there are samples", False, str(len(self.samples)), "4 after the warm-up"))
            return
        skipped = ledger.skipped / max(1, ledger.ended)
        self.checks += [
            judge.memory(self.samples),
            judge.flat("descriptors", [sample.fds for sample in kept], judge.FDS_RISE_MAX),
            judge.flat("threads", [sample.threads for sample in kept], judge.THREADS_RISE_MAX),
            judge.nothing("churn does what it should", self.churn.faults, "every event takes effect and is mended in time"),
            Check("metrics are served", self.lost_samples <= FAILED_SAMPLES_MAX, f"{self.lost_samples} lost", "all samples"),
            Check("client is idle enough", cores <= judge.CLIENT_CORES_MAX, f"{cores:.2f} cores", f"{judge.CLIENT_CORES_MAX}"),
            Check("load is as claimed", skipped <= judge.SKIPPED_SHARE_MAX, f"{ledger.skipped} left out", "at most 1 %"),
        ]

    def settle(self) -> Metrics:
        """Waits for everything to come to rest, and judges what does not."""
        wait(lambda: self.crowd.open == 0, FINISH_WITHIN_S, self.stop)
        self.checks.append(Check("every client has an end", self.crowd.open == 0, f"{self.crowd.open} open", "0"))
        ledger = self.ledger
        wanted = "no error but a client's own fault, or an error event in a stream whose engine was killed"
        self.checks.append(judge.nothing("clients see no error", ledger.faults, wanted, ledger.errors))
        begun = time.monotonic()
        wait(lambda: not self.unsettled(), SETTLE_WITHIN_S, self.stop)
        left, took = self.unsettled(), time.monotonic() - begun
        self.checks.append(judge.nothing("all gauges of load are 0", left, f"within {SETTLE_WITHIN_S} s; took {took:.1f} s"))
        fds, most = process(self.grounds.pid)[1], self.first_fds + judge.FDS_LEFT_MAX
        self.checks.append(Check("descriptors are closed", fds <= most, f"{self.first_fds} → {fds}", f"at most {most}"))
        metrics = parse(self.grounds.metrics())
        self.checks += judge.counted(metrics, ledger.ended, ledger.visits["early leaver"])
        return metrics

    def unsettled(self) -> list[str]:
        try:
            loads = {name: engine_load(engine) for name, engine in self.grounds.engines.items()}
            stuck = judge.settled(parse(self.grounds.metrics()), self.grounds.backends(), loads)
        except OSError as error:
            return [f"cannot be asked: {error!r}"]
        fds = process(self.grounds.pid)[1]
        return stuck + ([f"{fds} descriptors"] if fds > self.first_fds + judge.FDS_LEFT_MAX else [])


def wait(met, within_s: float, stop: threading.Event) -> None:
    deadline = time.monotonic() + within_s
    while not met() and time.monotonic() < deadline and not stop.wait(POLL_S):
        pass


def soak(run: Run) -> Metrics:
    """All of it; what is found is in run.checks."""
    metrics: Metrics = {}
    run.go()
    process = run.grounds.router.process
    if process.poll() is None and not run.stop.is_set():
        metrics = run.settle()
        alive = Witness(run.grounds.place.api).ready()
        run.checks.append(Check("the router is alive and ready", alive, "ready" if alive else "not ready", "ready"))
    else:
        why = "interrupted" if process.poll() is None else f"the router ended with {process.poll()}"
        run.checks.append(Check("the run is whole", False, why, "load until its end"))
    odd = judge.odd_lines(run.grounds.log.read_text(errors="replace"))
    run.checks.append(judge.nothing("the log has no panic and no ERROR", odd, "only refusals of the faulty settings written here"))
    return metrics


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Runs the router for long under load while its fleet changes, and says whether anything piles up.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--minutes", type=minutes, default=60.0, help="of load [default: 60]")
    add("--bin", type=Path, default=REPOSITORY / "target/release", metavar="DIR", help="our programs [default: target/release]")
    add("--rate", type=float, default=120.0, metavar="VISITS", help="a second; a visit is 1.2 requests [default: %(default)s]")
    add("--seed", type=int, default=1, help="of clients and events [default: %(default)s]")
    add("--json", type=Path, metavar="FILE", help="all samples, events and checks")
    add("--svg", type=Path, metavar="FILE", help="a picture of the run")
    add("--keep", type=Path, metavar="DIR", help="keep logs and settings there [default: removed]")
    return parser.parse_args()


def minutes(text: str) -> float:
    value = float(text)
    if not 0.2 <= value <= 24 * 60:
        raise argparse.ArgumentTypeError("from 0.2 to 1440")
    return value


def write_files(args: argparse.Namespace, run: Run, title: str) -> None:
    if args.json:
        whole = {
            "title": title,
            "checks": [asdict(check) for check in run.checks],
            "events": run.churn.marks,
            "samples": [asdict(sample) for sample in run.samples],
        }
        args.json.write_text(json.dumps(whole, indent=1))
    if args.svg:
        args.svg.write_text(picture.draw(run.samples, run.churn.marks, title))


def main() -> int:
    args = arguments()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with tempfile.TemporaryDirectory(prefix="tidegate-soak-") as scratch:
        work = (args.keep or Path(scratch)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        try:
            with Grounds(Launcher(args.bin.resolve(), work), Place.free(), stop) as grounds:
                run = Run(grounds, args.minutes * 60, args.rate, args.seed, stop)
                metrics = soak(run)
                log = grounds.log.read_text(errors="replace")
        except FleetError as error:
            print(f"soak.py: {error}", file=sys.stderr)
            return 2
    title = f"Soak test: {args.minutes:g} minutes, {run.ledger.ended} requests, {len(run.churn.marks)} events, seed {args.seed}"
    write_files(args, run, title)
    print(markdown.report(title, run.checks, run.ledger, metrics, judge.warnings(log)), end="", flush=True)
    return 1 if any(check.met is False for check in run.checks) else 0


if __name__ == "__main__":
    sys.exit(main())
