"""How the cost of a request grows with the size of what the router is in front of: one curve for each size.

    python3 load-tests/scaling/scaling.py --bin target/release --json scaling.json --svg scaling.svg
    python3 load-tests/scaling/scaling.py --curves backends cores
    python3 load-tests/scaling/scaling.py --quick            # under a minute; shows that it runs, its figures are rough

Curves: backends, blocks (in the index), events (a second, while requests are served), prompts (tokens), cores. The slope is
that of the least-squares line in log-log: 0 where the size costs nothing, 1 where the cost grows with it. Each line has the
slope that its data structures promise; 0.15 above that is its limit. Build first:
`cargo build --release -p tidegate-gateway -p loadgen -p index-bench -p cost-ladder`. The curve `events` needs pyzmq and
msgpack: .venv/bin/python has them after ./test.sh. All CPU is the router's, read from its process (Linux). The machine
should do nothing else meanwhile.

The table goes to standard output, progress to standard error. Exits with 1 when a line exceeds its limit or has too few
points to be judged, with 2 when it could not be measured.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import backends
import blocks
import chart
import cores
import events
import lines
import prompts
import publisher
import table
from fleet import FleetError
from ground import FULL, QUICK, Ground, raise_descriptor_limit, say

CURVES = {
    "backends": backends.measure,
    "blocks": blocks.measure,
    "events": events.measure,
    "prompts": prompts.measure,
    "cores": cores.measure,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, default=Path("target/release"), help="where the programs are")
    parser.add_argument("--curves", nargs="+", choices=CURVES, default=list(CURVES), help="only these")
    parser.add_argument("--quick", action="store_true", help="few sizes, short and rough")
    parser.add_argument("--json", type=Path, help="writes all figures to this file")
    parser.add_argument("--svg", type=Path, help="draws the curves into this file")
    return parser.parse_args()


def main() -> int:
    asked = arguments()
    if "events" in asked.curves and (what := publisher.missing()):
        say(what)
        return 2
    # Endings by signal run the same clean-up as others.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    raise_descriptor_limit()
    measured = []
    try:
        with tempfile.TemporaryDirectory() as work:
            ground = Ground(asked.bin.resolve(), Path(work), QUICK if asked.quick else FULL)
            for name in asked.curves:
                measured.append(CURVES[name](ground))
                print(table.markdown(measured[-1]), flush=True)
    except (FleetError, OSError, subprocess.SubprocessError) as error:
        say(f"not measured: {error}")
        return 2
    if asked.json:
        asked.json.write_text(json.dumps([table.as_json(curve) for curve in measured], indent=1))
    if asked.svg:
        asked.svg.write_text(chart.draw(measured, "Cost against size"))
    return 1 if lines.has_failed(measured) else 0


if __name__ == "__main__":
    sys.exit(main())
