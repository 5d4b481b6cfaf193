//! From settings to a serving process, and back: starts logging, metrics, the actor tree and the
//! listener, waits for a signal, and drains.

use crate::access;
use crate::cache;
use crate::gateway::{Buffered, Gateway, Gone, Phase, Phases, Requests, Worker};
use crate::handoff;
use crate::http;
use crate::kv::{TokenCache, parity, share, wiring};
use crate::quotas::Quotas;
use crate::redis::Redis;
use crate::reload::{self, Origin, Parts, Reloader, Wiring};
use crate::settings::{Known, Settings};
use crate::telemetry::handles::Handles;
use crate::telemetry::{export, log};
use crate::tokenize::{self, EncodingThreads};
use crate::upstream::{Client, ClientSettings, HttpProber};
use actix_web::dev::{Server, ServerHandle};
use actix_web::rt::net::TcpStream;
use actix_web::{App, HttpServer};
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
use socket2::TcpKeepalive;
use std::cell::RefCell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tracing::{error, info, warn};

/// How often idle upstream connections are looked through.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);
/// A silent client connection is probed by the kernel after this.
const CLIENT_PROBE_AFTER: Duration = Duration::from_secs(15);
/// For cut streams to send their last event, and for connections to close.
const CLOSING_TIME: Duration = Duration::from_secs(2);
/// How often a drain looks whether requests have ended.
const DRAIN_POLL: Duration = Duration::from_millis(20);
/// Exit code when a second signal came.
const INTERRUPTED: i32 = 130;

/// A gateway that listens.
pub struct Running {
    /// Where.
    pub address: SocketAddr,
    /// Shared state.
    pub gateway: Arc<Gateway>,
    /// The root of the actor tree.
    pub cluster: Root<Cluster>,
    server: ServerHandle,
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
    let client = Client::new(client_settings(&settings));
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
        prometheus: export::recorder(&settings.metrics.latency_buckets),
        reload,
        gone: Gone::default(),
        settings: ArcSwap::from_pointee(settings),
    });
    reload::say_loaded();
    let (server, address) = listen(&gateway)?;
    let handle = server.handle();
    actix_rt::spawn(server);
    actix_rt::spawn(upkeep(gateway.clone()));
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
    info!(%address, backends, workers = settings.server.workers, strategy = ?settings.selection_strategy, version = env!("CARGO_PKG_VERSION"), "serving");
    Ok(Running {
        address,
        gateway,
        cluster,
        server: handle,
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

fn listen(gateway: &Arc<Gateway>) -> std::io::Result<(Server, SocketAddr)> {
    let settings = gateway.settings().server.clone();
    let shared = gateway.clone();
    let write_timeout = settings.client_write_timeout;
    let server = HttpServer::new(move || {
        let worker = Rc::new(worker(&shared));
        App::new().configure(|config| http::configure(config, &worker))
    })
    .workers(settings.workers)
    .max_connections(settings.max_connections)
    .keep_alive(settings.keep_alive)
    .tcp_nodelay(true)
    // a client that closes its sending side has left: its request must not run on
    .h1_allow_half_closed(false)
    .disable_signals()
    .shutdown_timeout(CLOSING_TIME.as_secs())
    .on_connect(move |io, _| {
        if let Some(stream) = io.downcast_ref::<TcpStream>() {
            limit_unread(stream, write_timeout);
        }
    })
    .bind((settings.host.as_str(), settings.port))
    .map_err(|error| {
        let where_to = format!("{}:{}", settings.host, settings.port);
        std::io::Error::new(
            error.kind(),
            format!("cannot listen on {where_to} (server.host, server.port): {error}"),
        )
    })?;
    let address = server.addrs().first().copied();
    let address = address.ok_or_else(|| std::io::Error::other("no address was bound"))?;
    Ok((server.run(), address))
}

/// The kernel drops a connection whose peer takes nothing for this long; the write that fails
/// then drops the answer, and frees its backend slot.
fn limit_unread(stream: &TcpStream, timeout: Duration) {
    let socket = socket2::SockRef::from(stream);
    if let Err(error) = socket.set_tcp_user_timeout(Some(timeout)) {
        warn!(%error, "cannot set client_write_timeout on a connection");
    }
    // while nothing is being written, only this shows that a client has vanished without a word
    let keepalive = TcpKeepalive::new()
        .with_time(CLIENT_PROBE_AFTER)
        .with_interval(CLIENT_PROBE_AFTER);
    if let Err(error) = socket.set_tcp_keepalive(&keepalive) {
        warn!(%error, "cannot set keepalive on a connection");
    }
}

/// What one worker thread needs; built once per thread (and bound address), within its runtime.
pub fn worker(gateway: &Arc<Gateway>) -> Worker {
    let client = Client::new(client_settings(&gateway.settings()));
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

    /// Closes the listener and waits for connections, briefly.
    pub async fn stop(&self) {
        self.server.stop(true).await;
    }
}
