"""Makes the modules of load-tests/traffic and load-tests/scenarios importable: the same clients and launcher serve here."""

import sys
from pathlib import Path

LOAD_TESTS = Path(__file__).resolve().parents[1]
REPOSITORY = LOAD_TESTS.parent

for folder in ("traffic", "scenarios"):
    sys.path.append(str(LOAD_TESTS / folder))
