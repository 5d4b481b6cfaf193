"""Makes the modules of load-tests/scenarios importable: the same launcher and the same engines serve here."""

import sys
from pathlib import Path

LOAD_TESTS = Path(__file__).resolve().parents[1]
SCENARIOS = LOAD_TESTS / "scenarios"
TOKENIZER = LOAD_TESTS / "engine-sim" / "assets"

sys.path.append(str(SCENARIOS))
