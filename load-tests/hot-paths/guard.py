"""Counts the instructions of one call of each hot path, and compares them with baseline.json.

    python3 load-tests/hot-paths/guard.py --bin target/release/hot-paths             compare; ends with 1 when one takes more
    python3 load-tests/hot-paths/guard.py --bin target/release/hot-paths --update    write baseline.json anew

Counted by callgrind: the same on a busy machine as on an idle one. Two runs with different numbers of calls are subtracted, so
that what a path is made of beforehand does not count. Another compiler may count a little differently: TOLERANCE is for that.
"""

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys

BASELINE = pathlib.Path(__file__).with_name("baseline.json")
TOLERANCE = 0.10
CALLS = (20, 120)
RUN_SECONDS = 120


def instructions(program, path, calls):
    """All instructions of one run."""
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", str(program), path, str(calls)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS)
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or not found:
        sys.exit(f"{path}: callgrind failed:\n{done.stderr}")
    return int(found.group(1))


def per_call(program, path):
    few, many = (instructions(program, path, calls) for calls in CALLS)
    return round((many - few) / (CALLS[1] - CALLS[0]))


def measured(program):
    paths = subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout.split()
    counts = {}
    for path in paths:
        counts[path] = per_call(program, path)
        print(f"  {path}: {counts[path]:,} instructions", flush=True)
    return counts


def worse(counts, baseline):
    """What takes more than it did, and what nobody has looked at yet."""
    found = []
    for path, count in counts.items():
        before = baseline.get(path)
        if before is None:
            found.append(f"{path} is not in {BASELINE.name}: run with --update")
        elif count > before * (1 + TOLERANCE):
            found.append(f"{path} takes {count:,} instructions, {count / before - 1:+.0%} against {before:,}")
        elif count < before * (1 - TOLERANCE):
            print(f"{path} takes {count / before - 1:+.0%}: run with --update, so that it stays so")
    found += [f"{path} is gone, but in {BASELINE.name}" for path in baseline if path not in counts]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, required=True, help="the program hot-paths, built with --release")
    parser.add_argument("--update", action="store_true", help="take what is counted as the new baseline")
    given = parser.parse_args()
    if not shutil.which("valgrind"):
        sys.exit("missing, please install: valgrind")
    counts = measured(given.bin)
    if given.update:
        BASELINE.write_text(json.dumps(counts, indent=2) + "\n")
        return
    found = worse(counts, json.loads(BASELINE.read_text()))
    if found:
        sys.exit("\n".join(found))
    print(f"{len(counts)} hot paths take what they took, within {TOLERANCE:.0%}")


if __name__ == "__main__":
    main()
