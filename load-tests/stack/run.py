"""Runs the plan of the stack: starts every service after those it depends on, and ends what it started. See stack.sh."""

import argparse
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from plan import PROMETHEUS, REPOSITORY, ROUTER, Options, Plan, PlanError, Service

# From a service's start to its first good health check; a debug build on a busy machine takes its time.
HEALTHY_WITHIN_S = 60
CHECK_TIMEOUT_S = 5
POLL_S = 0.1
LOG_TAIL_BYTES = 2000
NET = re.compile(r"127\.\d{1,3}\.\d{1,3}")
SCRAPE_INTERVAL = re.compile(r"[1-9]\d*s")
# Written when everything is healthy: who listens where, and their processes.
STATE_FILE = "stack.json"

EPILOG = """\
examples:
  stack.sh                                        until Ctrl-C or SIGTERM
  stack.sh --traffic --keep /tmp/stack            with traffic; logs and settings are left in /tmp/stack
  stack.sh --net 127.78.0                         a second stack beside the first
  TIDEGATE__SELECTION_STRATEGY=RoundRobin stack.sh    a setting of the router overridden
"""


class StackError(Exception):
    """A service that did not get healthy, or an address that is not free."""


@dataclass
class Running:
    service: Service
    process: subprocess.Popen
    log: Path
    deadline: float
    healthy: bool = False
    ended: bool = False


class Stack:
    """The services that run. Nothing else is ever ended."""

    def __init__(self, plan: Plan, work: Path):
        self.plan, self.work = plan, work
        self.running: dict[str, Running] = {}
        self.stopping = False

    def check_addresses(self) -> None:
        for service in self.plan.services.values():
            if service.port is None:
                continue
            try:
                socket.create_server((service.host, service.port)).close()
            except OSError as error:
                why = f"{service.address}, for {service.name}, cannot be had: {error.strerror}"
                raise StackError(f"{why}. Another stack? Choose another --net.") from error

    def start_all(self) -> None:
        """Starts each as soon as what it needs is healthy, like Compose."""
        while not self.stopping and len(self.healthy()) < len(self.plan.services):
            for service in self.plan.services.values():
                if service.name not in self.running and service.needs <= self.healthy():
                    self.start(service)
            for running in self.running.values():
                self.look_after(running)
            time.sleep(POLL_S)

    def healthy(self) -> set[str]:
        return {name for name, running in self.running.items() if running.healthy}

    def start(self, service: Service) -> None:
        log = self.work / f"{service.name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                service.command,
                cwd=self.work / service.name,
                env=service.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us: we end them, in order
            )
        self.running[service.name] = Running(service, process, log, time.monotonic() + HEALTHY_WITHIN_S)

    def look_after(self, running: Running) -> None:
        if running.healthy:
            return
        if (code := running.process.poll()) is not None:
            raise StackError(f"{running.service.name} ended with {code} before it was healthy.\n{tail(running.log)}")
        running.healthy = is_healthy(running.service)
        if running.healthy:
            print(f"{running.service.name:16} {running.service.address:22} pid {running.process.pid}", flush=True)
        elif time.monotonic() > running.deadline:
            raise StackError(f"{running.service.name} was not healthy in {HEALTHY_WITHIN_S} s.\n{tail(running.log)}")

    def write_state(self) -> None:
        state = {
            name: {"address": running.service.address, "pid": running.process.pid} for name, running in self.running.items()
        }
        unfinished = self.work / f"{STATE_FILE}.new"
        unfinished.write_text(json.dumps(state, indent=1))
        unfinished.replace(self.work / STATE_FILE)  # whoever sees it sees all of it

    def stay(self) -> None:
        """Until we are to end. What ends by itself stays down, and is told: whoever killed it wants to see that."""
        while not self.stopping:
            for running in self.running.values():
                if not running.ended and (code := running.process.poll()) is not None:
                    running.ended = True
                    print(f"{running.service.name} ended with {code}; the others go on", flush=True)
            time.sleep(POLL_S)

    def stop_all(self) -> None:
        """Those first that need the others."""
        for running in reversed(self.running.values()):
            if running.process.poll() is None:
                running.process.terminate()
                try:
                    running.process.wait(running.service.stop_grace_s)
                except subprocess.TimeoutExpired:
                    print(f"{running.service.name} did not end in {running.service.stop_grace_s} s, and is killed", flush=True)
                    running.process.kill()
                    running.process.wait()


def is_healthy(service: Service) -> bool:
    if service.check is None:
        return True
    try:
        return subprocess.run(service.check, env=service.env, capture_output=True, timeout=CHECK_TIMEOUT_S).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def tail(log: Path) -> str:
    return log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace") or "(it wrote nothing)"


def net(text: str) -> str:
    if not NET.fullmatch(text) or max(map(int, text.split("."))) > 255:
        raise argparse.ArgumentTypeError("three numbers of a loopback address, such as 127.77.0")
    return text


def scrape_interval(text: str) -> str:
    if not SCRAPE_INTERVAL.fullmatch(text):
        raise argparse.ArgumentTypeError("whole seconds, such as 1s")
    return text


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="stack.sh",
        description="Runs the stack of docker-compose.yml as plain processes on loopback addresses, until Ctrl-C or SIGTERM.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--bin", type=Path, default=REPOSITORY / "target/release", metavar="DIR", help="our programs [default: target/release]")
    add("--net", type=net, default="127.77.0", help="what all addresses begin with [default: %(default)s]")
    add("--traffic", action="store_true", help="run the generator of traffic too")
    add("--scrape-interval", type=scrape_interval, metavar="TIME", help="such as 1s [default: as in grafana/prometheus.yml]")
    add("--keep", type=Path, metavar="DIR", help="keep logs, settings and Prometheus' data there [default: removed]")
    return parser.parse_args()


def run(args: argparse.Namespace, work: Path) -> None:
    (work / STATE_FILE).unlink(missing_ok=True)
    plan = Plan(Options(args.bin.resolve(), args.net, work, args.traffic, args.scrape_interval))
    stack = Stack(plan, work)
    stack.check_addresses()

    def stop(*_):
        stack.stopping = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    try:
        stack.start_all()
        if not stack.stopping:
            stack.write_state()
            print(f"\nrouter      http://{plan.services[ROUTER].address}")
            print(f"Prometheus  http://{plan.services[PROMETHEUS].address}")
            print(f"logs        {work}\nCtrl-C ends it.", flush=True)
        stack.stay()
    finally:
        stack.stop_all()


def main() -> int:
    args = arguments()
    with ExitStack() as scratch:
        work = args.keep or Path(scratch.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-stack-")))
        work.mkdir(parents=True, exist_ok=True)
        try:
            run(args, work.resolve())
        except (PlanError, StackError) as error:
            print(f"stack.sh: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
