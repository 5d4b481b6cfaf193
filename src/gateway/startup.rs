//! From settings to a serving process, and back: starts logging, metrics, the actor tree and the
//! listener, waits for a signal, and drains.

use crate::access;
use crate::cache;
use crate::gateway::{Buffered, Gateway, Gone, Phase, Phases, Requests, Worker};
use crate::handoff;
use crate::kv::{TokenCache, parity, share, wiring};
use crate::listener::{CLOSING_TIME, Listeners};
use crate::quotas::Quotas;
use crate::redis::Redis;
use crate::reload::{self, Origin, Parts, Reloader, Wiring};
use crate::settings::{Known, Settings};
use crate::spans::Tracer;
use crate::telemetry::handles::Handles;
use crate::telemetry::recent::Recent;
use crate::telemetry::{export, log};
use crate::tls::Tls;
use crate::tokenize::{self, EncodingThreads};
use crate::upstream::{Client, ClientSettings, HttpProber};
use actors::cluster::{Cluster, ClusterSettings};
use actors::health_checker::HealthSettings;
use actors::kv_index::KvIndex;
use actors::kv_share::KvShare;
use actors::router::RouterSeed;
use actors::support::supervise::Root;
use arc_swap::{ArcSwap, ArcSwapOption};
use routing::breaker::BreakerRules;
use routing::choose::ChoiceRules;
use routing::health::HealthRules;
use routing::retry::RetryBudget;
use std::cell::RefCell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tracing::{error, info, warn};

/// How often idle upstream connections are looked through.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);
/// How often a drain looks whether requests have ended.
const DRAIN_POLL: Duration = Duration::from_millis(20);
/// Exit code when a second signal came.
const INTERRUPTED: i32 = 130;

/// A gateway that listens.
pub struct Running {
    /// Where.
    pub address: SocketAddr,
    /// Where `/admin` is, when it has a listener of its own.
    pub admin_address: Option<SocketAddr>,
    /// Shared state.
    pub gateway: Arc<Gateway>,
    /// The root of the actor tree.
    pub cluster: Root<Cluster>,
    listeners: Listeners,
}

/// Where settings come from, and what they are, to be read again.
pub type Source = (Origin, Vec<Known>);

/// Serves until a signal comes; answers the exit code.
pub fn run(settings: Settings) -> i32 {
    run_from(settings, None)
}

/// The same with settings that can be read again.
pub fn run_from(settings: Settings, origin: Option<Source>) -> i32 {
    let guard = match log::start(&settings.logging) {
        Ok(guard) => guard,
        Err(message) => {
            eprintln!("{message}");
            return 1;
        }
    };
    let code = actix_rt::System::new().block_on(serve_from((settings, origin), |_| {}));
    drop(guard); // writes the last lines
    code
}

/// Serves until a signal comes, within a running actix system; answers the exit code. Logging is
/// the caller's. `started` is told when the gateway listens.
pub async fn serve(settings: Settings, started: impl FnOnce(&Running)) -> i32 {
    serve_from((settings, None), started).await
}

async fn serve_from(
    (settings, origin): (Settings, Option<Source>),
    started: impl FnOnce(&Running),
) -> i32 {
    // before anything that takes time, so that a signal during the start is heard
    let mut signals = match Signals::new() {
        Ok(signals) => signals,
        Err(error) => {
            error!(%error, "cannot listen for signals");
            return 1;
        }
    };
    let running = match start_from(settings, origin).await {
        Ok(running) => running,
        Err(error) => {
            // not by the log: its level may hide it
            eprintln!("{error}");
            return 1;
        }
    };
    started(&running);
    signals.next().await;
    tokio::select! {
        () = running.drain() => 0,
        () = signals.next() => {
            warn!("second signal, ending at once");
            INTERRUPTED
        }
    }
}

/// SIGTERM and SIGINT.
struct Signals(tokio::signal::unix::Signal, tokio::signal::unix::Signal);

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Signals(
            signal(SignalKind::terminate())?,
            signal(SignalKind::interrupt())?,
        ))
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.0.recv() => {}
            _ = self.1.recv() => {}
        }
    }
}

/// Starts the actor tree and the listener, within a running actix system. Logging is the caller's.
///
/// # Errors
/// When the address cannot be bound; the message names it.
pub async fn start(settings: Settings) -> std::io::Result<Running> {
    start_from(settings, None).await
}

/// The same, with where the settings come from and what they are, to be read again.
///
/// # Errors
/// When the address cannot be bound; the message names it.
pub async fn start_from(
    mut settings: Settings,
    origin: Option<Source>,
) -> std::io::Result<Running> {
    // from here on: by default it would end the process
    let hangups = signal(SignalKind::hangup())?;
    let encoders = tokenize::load(&settings)?;
    let tls = Tls::load(&settings).map_err(std::io::Error::other)?;
    let client = Client::trusting(client_settings(&settings), tls.trust.clone());
    let mut wiring = Wiring::default();
    let (mut index, groups) = wiring.wire(&mut settings, &client);
    let redis = Redis::where_used(&settings).map_err(std::io::Error::other)?;
    let shared = settings.kv_cache_index.shared;
    let sharing = index.as_mut().filter(|_| shared).zip(redis.clone());
    let sharing = sharing.map(|(index, redis)| share::wire(&settings, redis, index));
    let index = index.map(|index| {
        let next = index.next.clone();
        let (root, kv) = KvIndex::supervised(index);
        ((root, next), kv)
    });
    let (index, kv) = index.unzip();
    let cache = cache::wiring::start(&settings.response_cache, redis.as_ref()).await;
    let cache = cache.map_err(std::io::Error::other)?;
    let prober = HttpProber::new(
        client_settings(&settings),
        settings.health_checks.path.clone(),
        tls.trust.clone(),
    );
    let (cluster, directory) = Cluster::supervised(cluster_settings(&settings), Rc::new(prober));
    let shared = sharing.clone().zip(kv.as_ref());
    let shared = shared
        .map(|(sharing, kv)| KvShare::supervised(sharing, kv.shard.clone(), directory.clone()).1);
    let rules = choice_rules(&settings);
    let (mut origin, effective) = origin.unzip();
    if let (Some(origin), Some(keys)) = (&mut origin, &settings.api_keys.file) {
        origin.files.add(keys.into());
    }
    let (reload, asked) = reload::channel(effective.unwrap_or_default());
    let keys = access::ring(&settings.api_keys).map_err(std::io::Error::other)?;
    let split = handoff::wiring::start(&settings, groups, rules, &directory);
    let gateway = Arc::new(Gateway {
        tls,
        keys: ArcSwapOption::from_pointee(keys),
        split: split.map(ArcSwap::from_pointee),
        router: RouterSeed::new(directory.clone(), rules),
        directory,
        kv,
        sharing: shared,
        cache,
        quotas: Quotas::default(),
        encoders,
        encoding: EncodingThreads::start(encoding_threads())?,
        requests: Requests::default(),
        buffered: Buffered::new(settings.server.max_buffered_request_bytes),
        phase: Phases::default(),
        tracer: Tracer::start(&settings.tracing, &client),
        prometheus: export::recorder(&settings.metrics.latency_buckets),
        recent: Recent::new(tokio::time::Instant::now().into_std()),
        reload,
        gone: Gone::default(),
        settings: ArcSwap::from_pointee(settings),
    });
    reload::say_loaded();
    let listeners = Listeners::open(&gateway)?;
    let (address, admin_address) = (listeners.address, listeners.admin_address);
    actix_rt::spawn(upkeep(gateway.clone()));
    actix_rt::spawn(gateway.tls.clone().watch());
    let settings = gateway.settings();
    if settings.kv_cache_index.parity_check {
        actix_rt::spawn(parity::watch(gateway.clone(), client.clone()));
    }
    if let Some(origin) = origin {
        let parts = Parts {
            wiring,
            client,
            cluster: cluster.clone(),
            index,
            sharing,
        };
        actix_rt::spawn(Reloader::new(origin, gateway.clone(), parts).run(asked, hangups));
    }
    let backends = settings.backends.len();
    info!(%address, admin = admin_address.map(tracing::field::display), backends, workers = settings.server.workers, strategy = ?settings.selection_strategy, version = env!("CARGO_PKG_VERSION"), "serving");
    Ok(Running {
        address,
        admin_address,
        gateway,
        cluster,
        listeners,
    })
}

/// One for each core: more would only wait for each other.
fn encoding_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn client_settings(settings: &Settings) -> ClientSettings {
    let upstream = &settings.upstream;
    ClientSettings {
        connect_timeout: upstream.connect_timeout,
        pool_idle_timeout: upstream.pool_idle_timeout,
        connection_max_age: upstream.connection_max_age,
        max_idle_per_backend: upstream.max_idle_per_backend,
    }
}

/// How backends are chosen.
pub fn choice_rules(settings: &Settings) -> ChoiceRules {
    ChoiceRules {
        strategy: settings.selection_strategy,
        prefix_routing: settings.prefix_routing.enabled,
        load_factor_epsilon: settings.prefix_routing.load_factor_epsilon,
        weights: wiring::weights(settings),
    }
}

/// What the cluster is made of.
pub fn cluster_settings(settings: &Settings) -> ClusterSettings {
    let (checks, breaker) = (&settings.health_checks, &settings.circuit_breaker);
    ClusterSettings {
        backends: settings.backends.clone(),
        health: checks.enabled.then_some(HealthSettings {
            rules: HealthRules {
                unhealthy_threshold: checks.unhealthy_threshold,
                healthy_threshold: checks.healthy_threshold,
            },
            interval: checks.interval,
            timeout: checks.timeout,
        }),
        breaker: breaker.enabled.then_some(BreakerRules {
            failure_threshold: breaker.failure_threshold,
            recovery_timeout: breaker.recovery_timeout,
        }),
        virtual_nodes: settings.prefix_routing.virtual_nodes,
    }
}

/// What one worker thread needs; built once per thread (and bound address), within its runtime.
pub fn worker(gateway: &Arc<Gateway>) -> Worker {
    let trust = gateway.tls.trust.clone();
    let client = Client::trusting(client_settings(&gateway.settings()), trust);
    let swept = client.clone();
    actix_rt::spawn(async move {
        loop {
            tokio::time::sleep(SWEEP_INTERVAL).await;
            swept.sweep();
        }
    });
    Worker {
        gateway: gateway.clone(),
        client,
        budget: RefCell::new(RetryBudget::new(gateway.settings().retry.budget_ratio)),
        handles: Handles::default(),
        tokens: TokenCache::default(),
        phase: gateway.phase.of_thread(),
    }
}

async fn upkeep(gateway: Arc<Gateway>) {
    loop {
        tokio::time::sleep(export::UPKEEP_INTERVAL).await;
        gateway.prometheus.run_upkeep();
    }
}

impl Running {
    /// Lets requests end, then closes the listener: `/ready` turns 503, after `drain.delay` new
    /// requests are refused, after `drain.timeout` streams are cut with an error event.
    pub async fn drain(&self) {
        let settings = &self.gateway.settings().drain.clone();
        info!(
            running = self.gateway.requests.count(),
            delay_s = settings.delay.as_secs_f64(),
            timeout_s = settings.timeout.as_secs_f64(),
            "draining"
        );
        self.gateway.phase.enter(Phase::Unready);
        tokio::time::sleep(settings.delay).await;
        self.gateway.phase.enter(Phase::Draining);
        if tokio::time::timeout(settings.timeout, self.all_ended())
            .await
            .is_err()
        {
            warn!(
                running = self.gateway.requests.count(),
                "drain timeout, cutting what still runs"
            );
            self.gateway.phase.enter(Phase::Cutting);
            let _ = tokio::time::timeout(CLOSING_TIME, self.all_ended()).await;
        }
        self.stop().await;
        info!("stopped");
    }

    async fn all_ended(&self) {
        // answers are kept after the client has them
        let gateway = &self.gateway;
        while gateway.requests.count() > 0 || gateway.flights() > 0 || gateway.writes() > 0 {
            tokio::time::sleep(DRAIN_POLL).await;
        }
    }

    /// Takes over changed certificates now, instead of within [`crate::tls::LOOK_INTERVAL`].
    pub fn reload_certificates(&self) {
        self.gateway.tls.reload();
    }

    /// Closes the listeners and waits for connections, briefly.
    pub async fn stop(&self) {
        self.listeners.close().await;
        if let Some(tracer) = &self.gateway.tracer {
            tracer.flush().await;
        }
    }
}
