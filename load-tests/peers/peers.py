#!/usr/bin/env python3
"""Measures routers beside each other: the same engines that answer at once, the same clients, one router after the other.

    python3 load-tests/peers/peers.py [--environments DIR] [--write README.md]

Routers that are not installed, or that want more of an engine than these say, are left out, and said so. DIR holds Python environments by the names `sglang`, `vllm` and
`smg`, made by `python3 -m venv DIR/vllm && DIR/vllm/bin/pip install vllm-router` and so on (`sglang-router`, `smg`). nginx is
Debian's nginx-light. Client, router and engines share the machine: only ratios within one run mean anything. --write puts the
table between the marks in a Markdown file, with the date and the machine.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from routers import ROUTERS, Place, Router

REPOSITORY = Path(__file__).resolve().parents[2]
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
ENGINE_PORT, ENGINES = 18_911, 4
ROUTER_PORT = 18_921
READY_WITHIN_S = 75  # routers that load Python take their time
STOP_WITHIN_S = 5
# what is asked, as cost-ladder names it; how many clients
SHAPES = {"small JSON": ("64", 64), "64-chunk streams": ("stream", 32), "8 KiB prompt": (str(8 << 10), 64), "64 KiB prompt": (str(64 << 10), 64)}
PACED = "paced, p50 us"
PACED_RATE = 400
MARKS = ("<!-- performance: written by load-tests/peers/peers.py -->", "<!-- end of performance -->")
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


@dataclass
class Row:
    """What one router did: requests a second and CPU per request by shape, latency, memory; one value a round."""

    rates: dict[str, list[float]] = field(default_factory=dict)
    cpu_us: dict[str, list[float]] = field(default_factory=dict)
    paced_us: list[float] = field(default_factory=list)
    rss_idle_mib: list[float] = field(default_factory=list)
    rss_after_mib: list[float] = field(default_factory=list)


def family(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += family(int(child))
    return found


def cpu_s(pid: int) -> float:
    total = 0
    for one in family(pid):
        fields = Path(f"/proc/{one}/stat").read_text().rsplit(")", 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS_PER_S


def rss_mib(pid: int) -> float:
    pages = sum(int(Path(f"/proc/{one}/statm").read_text().split()[1]) for one in family(pid))
    return pages * PAGE / 2**20


def answers(port: int) -> bool:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(BODY).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=3) as answer:
            return answer.status == 200 and b"choices" in answer.read()
    except OSError:
        return False


def wait_until_it_answers(process: subprocess.Popen, port: int) -> bool:
    """Whether it answers as often in a row as it has engines, twice."""
    deadline, good = time.monotonic() + READY_WITHIN_S, 0
    while time.monotonic() < deadline and process.poll() is None:
        good = good + 1 if answers(port) else 0
        if good >= 2 * ENGINES:
            return True
        if good == 0:
            time.sleep(0.1)
    return False


def stop(process: subprocess.Popen) -> None:
    below = family(process.pid) if process.poll() is None else []
    process.terminate()
    try:
        process.wait(STOP_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid in below[1:]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


class Bench:
    def __init__(self, programs: Path, place: Place, secs: float):
        self.programs, self.place, self.secs = programs, place, secs

    def measure(self, router: Router, row: Row) -> bool:
        """Whether it answered, and was measured."""
        command = router.command(self.place)
        log = self.place.work / f"{router.name.replace(':', '-')}.log"
        quiet = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=quiet, cwd=self.place.work)
        try:
            if not wait_until_it_answers(process, self.place.port):
                tail = log.read_bytes()[-600:].decode(errors="replace")
                print(f"{router.title} does not answer, left out. Its last lines:\n{tail}", file=sys.stderr)
                return False
            row.rss_idle_mib.append(rss_mib(process.pid))
            for shape, (words, connections) in SHAPES.items():
                before = cpu_s(process.pid)
                driven = self.drive(words, connections)
                used = cpu_s(process.pid) - before
                row.rates.setdefault(shape, []).append(driven["answered"] / driven["seconds"])
                row.cpu_us.setdefault(shape, []).append(used / driven["answered"] * 1e6)
            row.paced_us.append(self.paced())
            row.rss_after_mib.append(rss_mib(process.pid))
            return True
        finally:
            stop(process)

    def drive(self, shape: str, connections: int) -> dict:
        command = [self.programs / "cost-ladder", "drive", "--port", str(self.place.port), "--shape", shape,
                   "--connections", str(connections), "--secs", str(self.secs)]  # fmt: skip
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    def paced(self) -> float:
        """The median latency of small requests at a modest rate, in microseconds."""
        out = self.place.work / "paced.json"
        command = [self.programs / "loadgen", "--url", f"http://127.0.0.1:{self.place.port}", "--model", "m", "--rate", str(PACED_RATE),
                   "--json-answers", "--systems", "0", "--turns", "1", "--user-words", "12", "--duration", str(self.secs),
                   "--requests", str(int(PACED_RATE * self.secs)), "--json", str(out)]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True)
        return json.loads(out.read_text())["end_to_end"]["p50_ms"] * 1e3


def machine() -> str:
    model = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "?")
    return f"{os.cpu_count()} cores ({model}), Linux {platform.release().split('-')[0]}"


def median(values: list[float]) -> float:
    return statistics.median(values)


def table(rows: dict[Router, Row], rounds: int, secs: float) -> str:
    lines = [
        f"Measured on {date.today()} on {machine()}: medians of {rounds} rounds of {secs:g} s; requests per second, and in brackets the router's CPU per "
        "request in us. *Paced* is what the router adds to the median latency at 400 requests/s, from when a request was due.",
        "",
        "| router | " + " | ".join(SHAPES) + " | paced, added | memory idle / after |",
        "|---|" + "--:|" * (len(SHAPES) + 2),
    ]
    for router, row in rows.items():
        if router is DIRECT:
            continue
        cells = [f"{median(row.rates[shape]):,.0f} ({median(row.cpu_us[shape]):.1f})" for shape in SHAPES]
        added = median(row.paced_us) - median(rows[DIRECT].paced_us)
        memory = f"{median(row.rss_idle_mib):.0f} / {median(row.rss_after_mib):.0f} MiB"
        lines.append(f"| {router.title} | " + " | ".join(cells) + f" | {added:.0f} us | {memory} |")
    return "\n".join(lines)


# an engine itself: what all paced latencies are compared with
DIRECT = Router("direct:", "no router", False)


def ratios(rows: dict[Router, Row]) -> list[str]:
    """Ours over the best of the others, of any policy and of those that know prefixes."""
    ours = next((row for router, row in rows.items() if router.name == "tidegate:ring"), None)
    others = {router: row for router, row in rows.items() if router.name.split(":")[0] not in ("tidegate", "nginx", "direct")}
    if ours is None or not others:
        return []
    said = []
    for what, chosen in (("any policy", others), ("a policy that knows prefixes", {r: row for r, row in others.items() if r.knows_prefixes})):
        each = []
        for shape in SHAPES:
            best = max(chosen, key=lambda router: median(chosen[router].rates[shape]))
            times = median(ours.rates[shape]) / median(chosen[best].rates[shape])
            each.append(f"{shape} {times:.2f} times ({best.title})")
        said.append(f"Tidegate (defaults) beside the best of the others with {what}: " + ", ".join(each) + ".")
    return said


def write(path: Path, text: str) -> None:
    whole = path.read_text()
    begin, end = (whole.find(mark) for mark in MARKS)
    if begin < 0 or end < begin:
        raise SystemExit(f"{path} lacks the marks {MARKS[0]} and {MARKS[1]}")
    path.write_text(f"{whole[: begin + len(MARKS[0])]}\n{text}\n{whole[end:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, default=REPOSITORY / "target/release", help="folder of tidegate, cost-ladder and loadgen")
    parser.add_argument("--environments", type=Path, help="folder of the other routers' Python environments")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--secs", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--only", nargs="+", choices=[router.name for router in ROUTERS], help="only these")
    parser.add_argument("--json", type=Path, help="writes all values of all rounds to this file")
    parser.add_argument("--write", type=Path, help="puts the table between the marks of this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="peers-") as work:
        rows = run(args, Path(work))
    text = "\n\n".join([table(rows, args.rounds, args.secs), *ratios(rows)])
    print(text)
    if args.json:
        args.json.write_text(json.dumps({router.name: vars(row) for router, row in rows.items()}, indent=1) + "\n")
    if args.write:
        write(args.write, text)


def run(args: argparse.Namespace, work: Path) -> dict[Router, Row]:
    programs = args.bin.resolve()
    place = Place(ROUTER_PORT, range(ENGINE_PORT, ENGINE_PORT + ENGINES), programs, args.environments and args.environments.resolve(), work)
    chosen = []
    for router in ROUTERS:
        if args.only and router.name not in args.only:
            continue
        if router.command(place) is None:
            print(f"{router.title}: not installed, left out", file=sys.stderr)
            continue
        chosen.append(router)
    engines = subprocess.Popen(
        [programs / "cost-ladder", "engine", "--port", str(ENGINE_PORT), "--count", str(ENGINES)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    rows = {router: Row() for router in [DIRECT, *chosen]}
    try:
        if not wait_until_it_answers(engines, ENGINE_PORT):
            raise SystemExit(f"the engines do not answer: is something else on port {ENGINE_PORT}?")
        direct = Bench(programs, Place(ENGINE_PORT, [], programs, None, work), args.secs)
        for number in range(1, args.rounds + 1):
            rows[DIRECT].paced_us.append(direct.paced())
            for router in list(chosen):
                if not Bench(programs, place, args.secs).measure(router, rows[router]):
                    chosen.remove(router)
                    rows.pop(router)
                    continue
                rates = ", ".join(f"{shape} {row[-1]:,.0f}/s" for shape, row in rows[router].rates.items())
                print(f"round {number} of {args.rounds}: {router.title}: {rates}", file=sys.stderr)
    finally:
        stop(engines)
    return rows


if __name__ == "__main__":
    main()
