#!/usr/bin/env bash
# The stack of docker-compose.yml as plain processes, for machines without containers and for tests: the router, six
# simulated engines, their storage, Redis, an S3 server and Prometheus, each on a loopback address of its own.
#
#   cargo build --release --workspace
#   load-tests/stack.sh --traffic
#   load-tests/stack.sh --help
#
# What runs, and how, is read from the files that Compose reads: docker-compose.yml, config/compose.yaml and
# grafana/prometheus.yml. So what is seen here holds there, but for the images. Grafana is left out: stack/render.py draws
# the dashboards.
#
# Linux only, whose loopback takes all of 127.0.0.0/8. Needs Python 3 with PyYAML (./test.sh makes a .venv that has it),
# redis-server and Prometheus (PATH, or where ./test.sh has unpacked it).
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
  printf 'stack.sh: %s\n' "$1" >&2
  exit 1
}

has_yaml() { "$1" -c 'import yaml' >/dev/null 2>&1; }

PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
has_yaml "$PYTHON" || PYTHON=$(command -v python3) || fail "missing, please install: python3"
has_yaml "$PYTHON" || fail "missing, please install: PyYAML (python3-yaml), or let ./test.sh make .venv"

# In place of this shell, so that a signal for one is for the other.
exec "$PYTHON" -B "$ROOT/load-tests/stack/run.py" "$@"
