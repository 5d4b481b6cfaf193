//! Answers `/metrics`: counters as they were counted, gauges as the cluster is at that moment.

use super::names::{self, Kind};
use crate::cache::AnswerCache;
use crate::gateway::Gateway;
use actors::backend::{Backend, Counters};
use actors::cluster::ChildKind;
use actors::directory::Snapshot;
use actors::disagg_coordinator::SplitState;
use actors::kv_index::{KvIndexHandle, SourceHandle};
use actors::response_cache::{Outcome, TierStats};
use actors::support::mailbox::Mailbox;
use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use routing::cache_policy::{Skip, Why};
use routing::disagg::Step;
use routing::health::HealthState;
use routing::knowledge::Mode;
use routing::quota::Scope;
use routing::retry::Setback;
use routing::view::{BackendView, Passage, Role};
use std::collections::BTreeSet;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use wire::kv_events::Odd;

/// Histogram samples wait in memory until they are folded in; this often.
pub const UPKEEP_INTERVAL: Duration = Duration::from_secs(5);

const GAP_BUCKETS: [f64; 12] = [
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0,
];
const ASK_BUCKETS: [f64; 10] = [
    0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01,
];
/// From a router on the same thread to a lookup that waits for another gateway.
const ACTOR_BUCKETS: [f64; 13] = [
    0.000001, 0.0000025, 0.00001, 0.000025, 0.0001, 0.00025, 0.001, 0.0025, 0.01, 0.05, 0.25, 1.0,
    5.0,
];
const TIER_BUCKETS: [f64; 12] = [
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25,
];
const SHARE_BUCKETS: [f64; 10] = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9];
const STATES: [&str; 5] = ["starting", "healthy", "unhealthy", "draining", "failed"];
const PASSAGES: [Passage; 3] = [Passage::Closed, Passage::Open, Passage::HalfOpen];

/// Installs the process's recorder, once; latencies are counted in buckets up to these, in seconds.
pub fn recorder(latencies: &[f64]) -> PrometheusHandle {
    static RECORDER: OnceLock<PrometheusHandle> = OnceLock::new();
    RECORDER.get_or_init(|| install(latencies)).clone()
}

fn install(latencies: &[f64]) -> PrometheusHandle {
    let buckets = |builder: PrometheusBuilder, name: &str, buckets: &[f64]| {
        builder
            .set_buckets_for_metric(Matcher::Full(name.into()), buckets)
            .expect("the buckets are not empty")
    };
    let mut builder = buckets(PrometheusBuilder::new(), names::REQUEST_DURATION, latencies);
    builder = buckets(builder, names::TTFT, latencies);
    builder = buckets(builder, names::QUEUE_WAIT, latencies);
    builder = buckets(builder, names::SPLIT_LEG, latencies);
    builder = buckets(builder, names::ITL, &GAP_BUCKETS);
    builder = buckets(builder, names::KV_ASK, &ASK_BUCKETS);
    builder = buckets(builder, names::ACTOR_ASK, &ACTOR_BUCKETS);
    builder = buckets(builder, names::CACHE_LOOKUP, &TIER_BUCKETS);
    builder = buckets(builder, names::KV_OVERLAP, &SHARE_BUCKETS);
    let recorder = builder.build_recorder();
    let handle = recorder.handle();
    // fails only when another recorder was installed first, and then that one counts
    let _ = metrics::set_global_recorder(recorder);
    for metric in names::ALL {
        match metric.kind {
            Kind::Counter => describe_counter!(metric.name, metric.help),
            Kind::Gauge => describe_gauge!(metric.name, metric.help),
            Kind::Histogram => describe_histogram!(metric.name, metric.help),
        }
        // series without labels exist from the start, so that rates have a zero to begin at
        match (metric.kind, metric.labels.is_empty()) {
            (Kind::Counter, true) if metric.name != names::PROCESS_CPU => {
                counter!(metric.name).absolute(0);
            }
            (Kind::Gauge, true) => gauge!(metric.name).set(0.0),
            _ => {}
        }
    }
    begin_at_zero();
    gauge!(names::BUILD_INFO, "version" => env!("CARGO_PKG_VERSION")).set(1.0);
    let start = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    gauge!(names::PROCESS_START).set(start.as_secs_f64());
    handle
}

/// The same for counters of which all labels are known and the first count may be the one that matters.
fn begin_at_zero() {
    let scopes = [
        Scope::Gateway,
        Scope::Key,
        Scope::Tenant,
        Scope::Model,
        Scope::Address,
    ];
    for scope in scopes {
        for limit in ["requests", "tokens", "concurrency", "queue"] {
            counter!(names::QUOTA_REFUSALS, "limit" => limit, "scope" => scope.as_str())
                .absolute(0);
        }
    }
    for setback in Setback::RETRYABLE {
        counter!(names::RETRIES, "reason" => setback.as_str()).absolute(0);
    }
    for step in Step::ALL {
        counter!(names::SPLIT_RESTARTS, "step" => step.as_str()).absolute(0);
        counter!(names::SPLIT_FAILURES, "step" => step.as_str()).absolute(0);
    }
    for result in ["done", "failed"] {
        counter!(names::SPLIT_RELEASES, "result" => result).absolute(0);
    }
    for result in ["applied", "unchanged", "rejected"] {
        counter!(names::RELOADS, "result" => result).absolute(0);
    }
    for listener in ["server", "admin"] {
        counter!(names::TLS_HANDSHAKE_FAILURES, "listener" => listener).absolute(0);
    }
    for of in ["server", "admin", "upstream"] {
        for result in ["ok", "failed"] {
            counter!(names::CERTIFICATE_RELOADS, "of" => of, "result" => result).absolute(0);
        }
    }
    for result in ["exported", "failed", "dropped"] {
        counter!(names::SPANS, "result" => result).absolute(0);
    }
}

/// The text that Prometheus reads.
pub fn render(gateway: &Gateway) -> String {
    gauge!(names::HTTP_IN_FLIGHT).set(gateway.requests.count() as f64);
    let (running, waiting) = gateway.quotas.permits.counts();
    gauge!(names::PERMITS).set(f64::from(running));
    gauge!(names::QUEUE_DEPTH).set(waiting as f64);
    gauge!(names::BUFFERED).set(gateway.buffered.bytes() as f64);
    counter!(names::LOG_LINES_DROPPED).absolute(super::log::dropped_lines());
    process_memory();
    let snapshot = gateway.directory.load();
    let mut restarts = [0u64; 2];
    for (view, entry) in snapshot.view.backends.iter().zip(&snapshot.entries) {
        state(view);
        backend(&entry.backend);
        for (sum, count) in restarts
            .iter_mut()
            .zip(&entry.backend.live.counters.actor_restarts)
        {
            *sum += count.load(Relaxed);
        }
    }
    for kind in ChildKind::ALL {
        counter!(names::ACTOR_RESTARTS, "actor" => kind.as_str()).absolute(restarts[kind as usize]);
    }
    for mailbox in Mailbox::ALL {
        gauge!(names::ACTOR_MAILBOX, "actor" => mailbox.as_str()).set(mailbox.depth() as f64);
    }
    counter!(names::ACTOR_RESTARTS, "actor" => "cluster").absolute(snapshot.cluster_restarts);
    counter!(names::ACTOR_RESTARTS, "actor" => "router").absolute(gateway.router.restarts().get());
    if let Some(splitting) = gateway.splitting() {
        split(&splitting.coordinator.state, &snapshot);
    }
    if let Some(kv) = &gateway.kv {
        kv_index(kv);
    }
    if let Some(sharing) = &gateway.sharing {
        gauge!(names::KV_SHARE_CONNECTED).set(sharing.connected.load(Relaxed) as f64);
        gauge!(names::KV_SHARE_LEADS).set(sharing.leads.load(Relaxed) as f64);
        counter!(names::KV_SHARE_SNAPSHOTS).absolute(sharing.snapshots.load(Relaxed));
        counter!(names::KV_SHARE_BYTES).absolute(sharing.bytes.load(Relaxed));
        counter!(names::ACTOR_RESTARTS, "actor" => "kv_share")
            .absolute(sharing.restarts.load(Relaxed));
        counter!(names::KV_SHARE_FAILURES).absolute(sharing.failures.load(Relaxed));
    }
    if let Some(cache) = &gateway.cache {
        response_cache(cache);
    }
    let mut text = without(gateway.prometheus.render(), &gateway.gone.names().clone());
    text += &process_cpu();
    text
}

/// The backend that a series is of.
fn backend_of(line: &str) -> Option<&str> {
    let (_, rest) = line.split_once("backend=\"")?;
    rest.split_once('"').map(|(name, _)| name)
}

/// Leaves out the series of backends that are no more: the registry cannot drop them.
fn without(text: String, gone: &BTreeSet<String>) -> String {
    if gone.is_empty() {
        return text;
    }
    let stays = |line: &&str| {
        line.starts_with('#') || !backend_of(line).is_some_and(|name| gone.contains(name))
    };
    let lines = text.lines().filter(stays);
    lines.flat_map(|line| [line, "\n"]).collect()
}

fn split(state: &SplitState, snapshot: &Snapshot) {
    let steps = [
        ("prefill", &state.steps.prefill),
        ("decode", &state.steps.decode),
    ];
    for (step, count) in steps {
        gauge!(names::SPLIT_PAIRS, "step" => step).set(count.load(Relaxed) as f64);
    }
    gauge!(names::SPLIT_SUSPENDED).set(state.suspended.load(Relaxed) as f64);
    counter!(names::ACTOR_RESTARTS, "actor" => "disagg_coordinator")
        .absolute(state.restarts.load(Relaxed));
    let decoders = snapshot.entries.iter().map(|entry| &entry.backend);
    for backend in decoders.filter(|backend| backend.spec.role == Role::Decode) {
        let name = backend.spec.name.to_string();
        gauge!(names::HELD_KV, "backend" => name).set(backend.live.held_tokens() as f64);
    }
}

fn response_cache(cache: &AnswerCache) {
    gauge!(names::CACHE_FLIGHTS).set(cache.flights.running() as f64);
    gauge!(names::CACHE_FLIGHT_BYTES).set(cache.flights.held() as f64);
    counter!(names::CACHE_HANDOVERS).absolute(cache.handovers.load(Relaxed));
    counter!(names::CACHE_PROMOTIONS).absolute(cache.tiers.promotions.load(Relaxed));
    for (why, count) in Why::ALL.into_iter().zip(cache.bypassed.all()) {
        counter!(names::CACHE_BYPASS, "why" => why.as_str()).absolute(count);
    }
    for (why, count) in Skip::ALL.into_iter().zip(cache.unkept.all()) {
        counter!(names::CACHE_UNKEPT, "why" => why.as_str()).absolute(count);
    }
    for (result, count) in ["found", "lapsed"].into_iter().zip(&cache.waits) {
        counter!(names::CACHE_LOCK_WAITS, "result" => result).absolute(count.load(Relaxed));
    }
    for tier in cache.tiers.tiers.iter() {
        cache_tier(tier);
    }
    counter!(names::ACTOR_RESTARTS, "actor" => "response_cache")
        .absolute(cache.tiers.restarts.load(Relaxed));
}

fn cache_tier(tier: &TierStats) {
    let name = tier.name;
    gauge!(names::CACHE_TIER_UP, "tier" => name).set(f64::from(tier.up.load(Relaxed)));
    counter!(names::CACHE_TIER_CHANGES, "tier" => name).absolute(tier.changes.load(Relaxed));
    if matches!(name, "memory" | "disk") {
        gauge!(names::CACHE_BYTES, "tier" => name).set(tier.bytes.load(Relaxed) as f64);
        gauge!(names::CACHE_ENTRIES, "tier" => name).set(tier.entries.load(Relaxed) as f64);
    }
    for (why, count) in [("size", &tier.crowded_out), ("expired", &tier.expired)] {
        counter!(names::CACHE_EVICTIONS, "tier" => name, "why" => why)
            .absolute(count.load(Relaxed));
    }
    for (result, count) in Outcome::STORES.into_iter().zip(&tier.stores) {
        counter!(names::CACHE_STORES, "tier" => name, "result" => result.as_str())
            .absolute(count.load(Relaxed));
    }
    let actor = match name {
        "memory" => "memory_tier",
        "redis" => "redis_tier",
        _ => "object_tier",
    };
    counter!(names::ACTOR_RESTARTS, "actor" => actor).absolute(tier.restarts.load(Relaxed));
}

fn kv_index(kv: &KvIndexHandle) {
    let gauges = kv.gauges.load();
    gauge!(names::KV_ENTRIES).set(gauges.entries as f64);
    gauge!(names::KV_BLOCKS).set(gauges.blocks as f64);
    gauge!(names::KV_BYTES).set(gauges.bytes as f64);
    for (why, count) in ["expired", "crowded_out", "disproved"]
        .into_iter()
        .zip(gauges.evicted)
    {
        counter!(names::KV_EVICTED, "why" => why).absolute(count);
    }
    gauge!(names::KV_FRUITLESS).set(kv.fruitless.load(Relaxed) as f64);
    counter!(names::KV_APPLIED).absolute(gauges.applied);
    counter!(names::KV_UNKNOWN).absolute(gauges.unknown);
    for (why, count) in Odd::ALL.into_iter().zip(gauges.odd) {
        counter!(names::KV_ODD, "why" => why.as_str()).absolute(count);
    }
    for (actor, count) in ["index_shard", "kv_subscriber", "kv_index"]
        .into_iter()
        .zip(kv.restarts.iter())
    {
        counter!(names::ACTOR_RESTARTS, "actor" => actor).absolute(count.load(Relaxed));
    }
    for source in kv.sources.load().iter() {
        stream(source);
    }
    for member in kv.members.load().iter() {
        let name = member.backend.to_string();
        counter!(names::KV_UNCHECKED, "backend" => name).absolute(0);
        let present = member.standing.mode().0;
        for mode in Mode::ALL {
            let is = f64::from(mode == present);
            gauge!(names::KV_MODE, "backend" => member.backend.to_string(), "mode" => mode.as_str())
                .set(is);
        }
    }
}

/// The label of a stream that is not of one rank alone.
const ALL_RANKS: &str = "all";

fn stream(source: &SourceHandle) {
    let state = source.state.load();
    let name = || source.backend.to_string();
    let rank = || {
        source
            .rank
            .map_or(ALL_RANKS.into(), |rank| rank.to_string())
    };
    gauge!(names::KV_CONNECTED, "backend" => name(), "rank" => rank())
        .set(f64::from(state.connected));
    gauge!(names::KV_LAST_EVENT, "backend" => name(), "rank" => rank()).set(state.last_ts);
    gauge!(names::KV_LAG, "backend" => name(), "rank" => rank()).set(state.lag);
    counter!(names::KV_REPLAYS, "backend" => name(), "rank" => rank()).absolute(state.replays);
    counter!(names::KV_RESYNCS, "backend" => name(), "rank" => rank()).absolute(state.resyncs);
    let tally = state.tally;
    for (kind, count) in [
        ("gap", tally.gaps),
        ("lost", tally.lost),
        ("restart", tally.restarts),
        ("undecodable", state.undecodable),
    ] {
        counter!(names::KV_GAPS, "backend" => name(), "kind" => kind, "rank" => rank())
            .absolute(count);
    }
}

fn state(view: &BackendView) {
    let present = match (view.health, view.draining) {
        (HealthState::Healthy, true) => "draining",
        (health, _) => health.as_str(),
    };
    for state in STATES {
        let is = f64::from(state == present);
        gauge!(names::BACKEND_STATE, "backend" => view.name.to_string(), "state" => state).set(is);
    }
    for passage in PASSAGES {
        let is = f64::from(passage == view.passage);
        gauge!(names::BREAKER_STATE, "backend" => view.name.to_string(), "state" => passage.as_str()).set(is);
    }
}

fn backend(backend: &Backend) {
    let name = || backend.spec.name.to_string();
    let counters = &backend.live.counters;
    gauge!(names::IN_FLIGHT, "backend" => name()).set(f64::from(backend.live.in_flight()));
    counter!(names::BACKEND_FLAPS, "backend" => name()).absolute(counters.flaps.load(Relaxed));
    for (result, count) in Counters::PROBE_RESULTS.into_iter().zip(&counters.probes) {
        counter!(names::HEALTH_PROBES, "backend" => name(), "result" => result)
            .absolute(count.load(Relaxed));
    }
    let connections = &counters.connections;
    for (kind, count) in [
        ("new", &connections.new),
        ("reused", &connections.reused),
        ("stale", &connections.stale),
    ] {
        counter!(names::UPSTREAM_CONNECTIONS, "backend" => name(), "kind" => kind)
            .absolute(count.load(Relaxed));
    }
}

/// Pages and clock ticks are 4 KiB and 10 ms on every Linux that Rust's standard library runs on
/// with its default targets.
fn process_memory() {
    const PAGE: f64 = 4096.0;
    if let Ok(statm) = std::fs::read_to_string("/proc/self/statm")
        && let Some(pages) = statm.split(' ').nth(1).and_then(|n| n.parse::<f64>().ok())
    {
        gauge!(names::PROCESS_MEMORY).set(pages * PAGE);
    }
}

/// Written by hand: the registry's counters are whole numbers.
fn process_cpu() -> String {
    const TICKS_PER_SECOND: f64 = 100.0;
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks = fields.split_whitespace().skip(11).take(2);
    let ticks: f64 = ticks.filter_map(|n| n.parse::<f64>().ok()).sum();
    let (name, seconds) = (names::PROCESS_CPU, ticks / TICKS_PER_SECOND);
    format!("# TYPE {name} counter\n{name} {seconds}\n")
}
