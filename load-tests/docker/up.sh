#!/usr/bin/env bash
# Brings the whole compose stack up on a machine that can pull no image, and checks it:
#
#   load-tests/docker/up.sh                  # everything, about half an hour from nothing
#   load-tests/docker/up.sh --keep           # leave the stack up at the end
#   load-tests/docker/up.sh --images-only    # no stack, only the images
#
# Needs root on Debian. Installs what is missing from Debian's packages, starts a Docker engine by hand
# where none runs, makes images of the names that the Dockerfile and docker-compose.yml pull (Debian's own
# packages in place of theirs; Grafana alone is left out), builds our images with the Dockerfile itself,
# starts the stack with its traffic generator, and lets checks.py look at it. What it started it ends.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly PROJECT=tidegate-check
readonly DATA_ROOT=${DOCKER_DATA_ROOT:-/var/lib/docker}
readonly ENGINE_START_SECONDS=60
readonly SERVICES_LEFT_OUT=grafana
readonly RUST_IMAGE=rust:1.95-slim-bookworm
readonly BASE_IMAGE=debian:bookworm-slim
SCRATCH=$(mktemp -d)
ENGINE_PID=
STACK_UP=
KEEP=
IMAGES_ONLY=

step() { printf '\n=== %s (%d s elapsed)\n' "$1" "$SECONDS"; }

fail() {
  printf 'up.sh: %s\n' "$1" >&2
  exit 1
}

compose() { docker-compose -p "$PROJECT" -f docker-compose.yml "$@"; }

clean_up() {
  local status=$?
  trap - EXIT INT TERM
  if [ -n "$STACK_UP" ] && [ -z "$KEEP" ]; then
    COMPOSE_PROFILES=load compose down --volumes --timeout 5 >/dev/null 2>&1 || true
  fi
  if [ -n "$ENGINE_PID" ] && [ -z "$KEEP" ]; then
    kill "$ENGINE_PID" 2>/dev/null || true
    wait "$ENGINE_PID" 2>/dev/null || true
  fi
  rm -rf "$SCRATCH"
  exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

while [ $# -gt 0 ]; do
  case $1 in
    --keep) KEEP=yes ;;
    --images-only) IMAGES_ONLY=yes ;;
    -h | --help)
      sed -n '2,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    *) fail "unknown argument $1; see --help" ;;
  esac
  shift
done

has() { command -v "$1" >/dev/null 2>&1; }

install_tools() {
  [ "$(id -u)" -eq 0 ] || fail "must run as root: it starts a Docker engine"
  has apt-get || fail "needs Debian's packages"
  has cargo || fail "needs the Rust toolchain, which goes into the image that builds"
  local packages=()
  has dockerd || packages+=(docker.io)
  has docker-compose || packages+=(docker-compose)
  has debootstrap || packages+=(debootstrap)
  has python3 || packages+=(python3)
  if [ "${#packages[@]}" -gt 0 ]; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${packages[@]}" >/dev/null
  fi
}

start_engine() {
  if docker info >/dev/null 2>&1; then
    echo "a Docker engine runs already"
    return
  fi
  dockerd --data-root "$DATA_ROOT" >"$SCRATCH/dockerd.log" 2>&1 &
  ENGINE_PID=$!
  local end=$((SECONDS + ENGINE_START_SECONDS))
  until docker info >/dev/null 2>&1; do
    kill -0 "$ENGINE_PID" 2>/dev/null || fail "dockerd ended: $(tail -n 3 "$SCRATCH/dockerd.log")"
    [ "$SECONDS" -lt "$end" ] || fail "dockerd does not answer within $ENGINE_START_SECONDS s"
    sleep 0.5
  done
}

# The repository that apt on this machine uses, as it is configured.
debian_mirror() {
  apt-get indextargets --format '$(REPO_URI) $(CODENAME)' \
    | awk -v codename="$1" '$2 == codename { print $1; exit }'
}

# A Debian of its own with some packages, as an image of this name.
make_debian() {
  local image=$1 packages=$2 codename root
  docker image inspect "$image" >/dev/null 2>&1 && { echo "$image is there"; return; }
  codename=$(. /etc/os-release && echo "$VERSION_CODENAME")
  root=$(mktemp -d -p "$SCRATCH")
  debootstrap --variant=minbase ${packages:+--include="$packages"} "$codename" "$root" "$(debian_mirror "$codename")" \
    >"$SCRATCH/debootstrap.log" 2>&1 || fail "debootstrap: $(tail -n 3 "$SCRATCH/debootstrap.log")"
  rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale}/*
  tar -C "$root" -c . | docker import - "$image" >/dev/null
  rm -rf "$root"
  echo "made $image"
}

# What docker-compose.yml pulls, and we stand in for.
pulled_images() {
  awk '$1 == "image:" && $2 !~ /^tidegate/ { print $2 }' docker-compose.yml | grep -v "/$SERVICES_LEFT_OUT:" | sort -u
}

# One image for all that is pulled for running: it has every program under the name that compose calls.
make_stand_ins() {
  make_debian tidegate-stand-in redis-server,redis-tools,prometheus,python3,python-is-python3,wget
  local image
  for image in $(pulled_images); do
    case $image in
      */prometheus:*)
        printf 'FROM tidegate-stand-in\nENTRYPOINT ["/usr/bin/prometheus"]\n' | docker build -q -t "$image" - >/dev/null
        ;;
      *) docker tag tidegate-stand-in "$image" ;;
    esac
    echo "made $image"
  done
}

# This machine's toolchain and the sources of all dependencies, so that the Dockerfile builds without a network.
make_rust() {
  docker image inspect "$RUST_IMAGE" >/dev/null 2>&1 && { echo "$RUST_IMAGE is there"; return; }
  make_debian tidegate-cc gcc,libc6-dev,ca-certificates
  cargo fetch --locked
  local context="$SCRATCH/rust" home=${CARGO_HOME:-$HOME/.cargo}
  mkdir -p "$context/toolchain" "$context/registry"
  tar -C "$(rustc --print sysroot)" -c --exclude share --exclude lib/rustlib/src . | tar -C "$context/toolchain" -x
  tar -C "$home/registry" -c index cache | tar -C "$context/registry" -x
  cat >"$context/Dockerfile" <<'EOF'
FROM tidegate-cc
COPY toolchain /usr/local/rust
COPY registry /usr/local/cargo/registry
ENV PATH=/usr/local/rust/bin:/usr/sbin:/usr/bin:/sbin:/bin CARGO_HOME=/usr/local/cargo CARGO_NET_OFFLINE=true
EOF
  docker build -q -t "$RUST_IMAGE" "$context" >/dev/null
  rm -rf "$context"
  echo "made $RUST_IMAGE"
}

step "Tools"
install_tools

step "Docker engine"
start_engine

step "Images in place of those that are pulled"
make_debian "$BASE_IMAGE" ""
make_stand_ins
make_rust

step "Our images, by the Dockerfile"
compose build
docker images --format '{{.Repository}}:{{.Tag}} {{.Size}}' | grep '^tidegate.*:local'
[ -z "$IMAGES_ONLY" ] || exit 0

step "The stack"
STACK_UP=yes
services=$(COMPOSE_PROFILES=load compose config --services | grep -v "^$SERVICES_LEFT_OUT$")
# shellcheck disable=SC2086 # one word each
COMPOSE_PROFILES=load compose up -d $services

step "Checks"
COMPOSE_PROJECT=$PROJECT python3 load-tests/docker/checks.py
