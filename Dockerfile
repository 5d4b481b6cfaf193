# Three images from one build: `tidegate`, the router; `engine-sim`, the simulated engine; `s3-server`, an S3 server to try things with.
#
#   docker build --target tidegate   -t tidegate   .
#   docker build --target engine-sim -t engine-sim .
#   docker build --target s3-server  -t s3-server  .
#
# Works with the classic builder as well as with BuildKit, so it uses no `RUN --mount`.
# Dependencies are compiled in a layer of their own, which changes only with a manifest or Cargo.lock.

ARG RUST_IMAGE=rust:1.95-slim-bookworm
ARG BASE_IMAGE=debian:bookworm-slim

# ── The manifests, each with a stub for every source file that it names ───────
# This stage runs at every change of the sources, but its result does not change with them,
# and the layers that copy from it are compared by content. hyper-tls stays whole: a dependency is compiled against it.
FROM ${RUST_IMAGE} AS manifests
WORKDIR /workspace
COPY . .
RUN set -eu; \
    find . -type f ! -name Cargo.toml ! -name Cargo.lock ! -path './src/storage/hyper-tls/*' -delete; \
    find . -mindepth 2 -name Cargo.toml | while read -r manifest; do \
      sed -n 's/^path *= *"\(.*\.rs\)".*/\1/p' "$manifest" | while read -r source; do \
        stub="$(dirname "$manifest")/$source"; \
        mkdir -p "$(dirname "$stub")"; \
        [ -e "$stub" ] || echo 'fn main() {}' > "$stub"; \
      done; \
    done; \
    find . -type d -empty -delete

# ── The programs ──────────────────────────────────────────────────────────────
FROM ${RUST_IMAGE} AS builder
WORKDIR /workspace
ENV CARGO_INCREMENTAL=0
COPY --from=manifests /workspace ./
RUN cargo build --locked --profile dist -p tidegate-gateway -p engine-sim -p s3-server --bins
COPY . .
# COPY keeps file times, which may be older than the stubs' build: cargo would call the sources fresh.
RUN find actors src load-tests -name '*.rs' -exec touch {} + \
 && cargo build --locked --profile dist -p tidegate-gateway -p engine-sim -p s3-server --bins

# ── What the images share ────────────────────────────────────────────────────
# All that the programs need of a system: the libraries that they load, how names are looked up, and a user. No shell.
FROM ${BASE_IMAGE} AS system
COPY --from=builder /workspace/target/dist/tidegate /workspace/target/dist/engine-sim /workspace/target/dist/kv-store \
  /workspace/target/dist/s3-server /programs/
RUN set -eu; \
    mkdir -p /system/etc /system/tmp; \
    for program in /programs/*; do ldd "$program"; done \
      | awk '$3 ~ /^\// { print $3 } $1 ~ /^\// { print $1 }' | sort -u \
      | while read -r library; do cp -L --parents "$library" /system; done; \
    echo 'hosts: files dns' > /system/etc/nsswitch.conf; \
    echo 'tidegate:x:10001:10001::/nonexistent:/usr/sbin/nologin' > /system/etc/passwd; \
    echo 'tidegate:x:10001:' > /system/etc/group; \
    chmod 1777 /system/tmp

FROM scratch AS runtime
COPY --from=system /system/ /
# A numeric user lets Kubernetes check `runAsNonRoot`. Only the S3 server writes, below /tmp.
USER 10001:10001
WORKDIR /
# The programs end on SIGTERM as on SIGINT.
STOPSIGNAL SIGTERM

FROM runtime AS engine-sim
# The router's health check asks any URL, so there is no second one.
COPY --from=builder /workspace/target/dist/tidegate /workspace/target/dist/engine-sim /workspace/target/dist/kv-store /usr/local/bin/
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s --retries=3 CMD ["tidegate", "healthcheck", "--url", "http://127.0.0.1:8000/health"]
ENTRYPOINT ["engine-sim"]
CMD ["serve", "meta-llama/Llama-3.1-70B-Instruct", "--host", "0.0.0.0", "--port", "8000"]

FROM runtime AS s3-server
COPY --from=builder /workspace/target/dist/tidegate /workspace/target/dist/s3-server /usr/local/bin/
EXPOSE 9000
ENTRYPOINT ["s3-server"]
CMD ["--host", "0.0.0.0", "--port", "9000"]

# Last, so that a build without --target makes the router.
FROM runtime AS tidegate
COPY --from=builder /workspace/target/dist/tidegate /usr/local/bin/tidegate
EXPOSE 8080
HEALTHCHECK --interval=5s --timeout=3s --start-period=10s --retries=3 CMD ["tidegate", "healthcheck"]
ENTRYPOINT ["tidegate"]
CMD ["--config", "/etc/tidegate/tidegate.yaml"]
