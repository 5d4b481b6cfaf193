"""A short soak test with real programs: that it runs, changes the fleet, finds nothing, and ends what it started.

    TIDEGATE_SOAK_BIN=target/debug pytest load-tests/soak
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from neighbours import REPOSITORY

MINUTES = "0.3"
# Debug builds: the load is not what is tested here.
RATE = "20"
# 18 s of load, and what starts, settles and stops.
WITHIN_S = 90


def programs() -> Path | None:
    """Where our programs are: TIDEGATE_SOAK_BIN."""
    given = os.environ.get("TIDEGATE_SOAK_BIN")
    return REPOSITORY / given if given else None  # an absolute path stays as it is


@pytest.mark.skipif(programs() is None, reason="TIDEGATE_SOAK_BIN does not say where the programs are")
def test_a_short_run_meets_every_check_and_leaves_no_process(tmp_path):
    said = tmp_path / "run.json"
    command = [sys.executable, Path(__file__).with_name("soak.py"), "--minutes", MINUTES, "--rate", RATE]
    command += ["--bin", programs(), "--json", said, "--svg", tmp_path / "run.svg", "--keep", tmp_path / "work"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads(said.read_text())
    assert run["events"] and run["samples"][-1]["requests"] > 0
    assert not still_running(tmp_path / "work")


def still_running(work: Path) -> list[str]:
    """Processes that write a log there: all that the run has started."""
    found = []
    for output in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            if output.readlink().is_relative_to(work):
                found.append(str(output))
        except OSError:
            continue  # it ended meanwhile, or is not ours to look at
    return found
