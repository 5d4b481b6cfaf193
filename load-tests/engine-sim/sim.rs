//! Starts and stops one simulated engine: the engine's thread, and an HTTP server with one worker. Several run in one process.

use crate::api::{App, unix_now};
use crate::config::SimConfig;
use crate::engine;
use crate::engine_client::EngineClient;
use crate::event_log::EventBatch;
use crate::failure::Faults;
use crate::kv_events::{feed::Feed, publisher::Publisher};
use crate::kv_transfer::{Kv, offload};
use crate::listening::{listen, port_of, report, reserve};
use crate::metrics::Metrics;
use crate::tokenizer::Tokenizer;
use actix_web::dev::ServerHandle;
use actix_web::web;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use tokio::task::JoinHandle;

/// Starts engines.
#[derive(Debug)]
pub struct Sim;

/// A running engine. It stops when this is dropped.
#[derive(Debug)]
pub struct SimHandle {
    addr: SocketAddr,
    kv_port: u16,
    config: Arc<SimConfig>,
    faults: Arc<Faults>,
    metrics: Arc<Metrics>,
    engine: EngineClient,
    feed: Arc<Feed>,
    publisher: Option<Publisher>,
    server: Arc<Mutex<Option<ServerHandle>>>,
    listening: JoinHandle<()>,
}

/// Counts of one engine at one moment. Totals are since its start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SimStats {
    /// Requests to the chat, completions and embeddings routes, whatever became of them.
    pub requests_total: u64,
    /// Sequences in the batch.
    pub running: u64,
    /// Sequences that arrived and are not in the batch; requests that wait for keys and values from elsewhere are among them.
    pub waiting: u64,
    /// Sequences whose client left before the end.
    pub aborted_total: u64,
    /// Prompt tokens of sequences that gave a first token.
    pub prompt_tokens: u64,
    /// Of these, tokens that the prefix cache supplied.
    pub cached_tokens: u64,
    /// Tokens generated.
    pub generation_tokens: u64,
    /// Sequences sent back to the queue for want of blocks.
    pub preemptions_total: u64,
    /// KV blocks that sequences use or that are kept for other engines.
    pub kv_blocks_used: u64,
    /// KV blocks that are kept for other engines.
    pub kv_blocks_pinned: u64,
    /// Prompt tokens that came from storage or other engines.
    pub kv_loaded_tokens: u64,
    /// Requests whose blocks were kept for another engine that did not come in time.
    pub kv_expired_leases_total: u64,
    /// Failed attempts to get blocks from storage or another engine.
    pub kv_load_failures_total: u64,
    /// Failed attempts to leave blocks for others.
    pub kv_save_failures_total: u64,
}

impl Sim {
    /// Starts an engine. Its address is taken at once; it listens when the startup delay has passed and refuses connections
    /// before. Call it inside an actix system.
    ///
    /// # Errors
    /// Settings that cannot run (`InvalidInput`), or an address that is not free.
    pub fn start(config: SimConfig) -> io::Result<SimHandle> {
        config
            .validate()
            .map_err(|fault| io::Error::new(io::ErrorKind::InvalidInput, fault))?;
        let socket = reserve(&config.host, config.port)?;
        let addr = socket
            .local_addr()?
            .as_socket()
            .ok_or_else(|| io::Error::other("the socket has no IP address"))?;
        let kv_socket = match (&config.kv_transfer, config.kv_sharing.port) {
            (Some(_), Some(port)) => Some(reserve(&config.host, port)?),
            _ => None,
        };
        let kv_port = match &kv_socket {
            Some(socket) => port_of(socket)?,
            None => addr.port(),
        };
        let sockets = [Some(socket), kv_socket];
        let config = Arc::new(config);
        let metrics = Arc::new(Metrics::default());
        let faults = Arc::new(Faults::new(config.faults, config.seed));
        let (events, quirks) = (&config.kv_events, &config.kv_event_quirks);
        let feed = Arc::new(Feed::new(events, quirks.clone(), config.block_size));
        let publisher = Publisher::start(events, quirks, &feed)?;
        let engine = engine::start(
            config.clone(),
            metrics.clone(),
            feed.clone(),
            offload(&config, &metrics),
        )?;
        let app = web::Data::new(App {
            config: config.clone(),
            engine: engine.clone(),
            feed: feed.clone(),
            tokenizer: Tokenizer::shared(),
            faults: faults.clone(),
            metrics: metrics.clone(),
            started: unix_now(),
            kv: Kv::new(&config, &engine, &metrics, kv_port),
            engine_id: fastrand::u32(..),
            next_request: AtomicU64::new(0),
        });
        let server = Arc::new(Mutex::new(None));
        let listening = match config.startup_delay.is_zero() {
            true => {
                let running = listen(sockets, app, &server)?;
                actix_rt::spawn(async move { report(running.await) })
            }
            false => {
                let (server, delay) = (server.clone(), config.scaled(config.startup_delay));
                actix_rt::spawn(async move {
                    tokio::time::sleep(delay).await;
                    match listen(sockets, app, &server) {
                        Ok(running) => report(running.await),
                        Err(fault) => tracing::error!(%fault, "engine could not listen"),
                    }
                })
            }
        };
        Ok(SimHandle {
            addr,
            kv_port,
            config,
            faults,
            metrics,
            engine,
            feed,
            publisher,
            server,
            listening,
        })
    }
}

impl SimHandle {
    /// Where it listens, with the port that it got.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The port where other engines reach it.
    pub fn kv_port(&self) -> u16 {
        self.kv_port
    }

    /// `http://host:port`, without a slash at the end.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// What it was started with.
    pub fn config(&self) -> &SimConfig {
        &self.config
    }

    /// Counts at this moment.
    pub fn stats(&self) -> SimStats {
        let metrics = &self.metrics;
        SimStats {
            requests_total: metrics.requests.load(Relaxed),
            running: metrics.running.load(Relaxed),
            waiting: metrics.all_waiting(),
            aborted_total: metrics.aborted.load(Relaxed),
            prompt_tokens: metrics.prompt_tokens.load(Relaxed),
            cached_tokens: metrics.cached_tokens.load(Relaxed),
            generation_tokens: metrics.generation_tokens.load(Relaxed),
            preemptions_total: metrics.preemptions.load(Relaxed),
            kv_blocks_used: metrics.blocks_used.load(Relaxed),
            kv_blocks_pinned: metrics.blocks_pinned.load(Relaxed),
            kv_loaded_tokens: metrics.loaded_tokens.load(Relaxed),
            kv_expired_leases_total: metrics.expired_leases.load(Relaxed),
            kv_load_failures_total: metrics.load_failures.load(Relaxed),
            kv_save_failures_total: metrics.save_failures.load(Relaxed),
        }
    }

    /// Failures, settable while it runs.
    pub fn faults(&self) -> &Faults {
        &self.faults
    }

    /// The KV cache events that are still kept, oldest first.
    pub fn events(&self) -> Vec<EventBatch> {
        let kept = self.feed.since(0);
        kept.iter().map(|batch| (**batch).clone()).collect()
    }

    /// Where subscribers of the ZeroMQ events connect to, with the port that it got, and the loopback address if it listens on
    /// all of them; or where it connects to itself. None without ZeroMQ.
    pub fn kv_endpoint(&self) -> Option<String> {
        let publisher = self.publisher.as_ref()?;
        Some(publisher.endpoint().to_owned())
    }

    /// Where replays of the ZeroMQ events are asked for.
    pub fn replay_endpoint(&self) -> Option<String> {
        let publisher = self.publisher.as_ref()?;
        publisher.replay_endpoint().map(str::to_owned)
    }

    /// Makes cache and events those of a new process: nothing is cached, nothing is kept, and the next batch has number 0. No
    /// event tells it, and listeners stay connected. What runs at this moment goes on, but its blocks are not announced.
    /// Returns when it has happened, at the end of the current step.
    pub async fn restart_events(&self) {
        self.engine.restart_events().await;
    }

    /// Stops at once: running answers are cut, as when the process is killed. Returns when the port is free.
    pub async fn stop(mut self) {
        if let Some(publisher) = self.publisher.take() {
            publisher.stop().await;
        }
        let handle = self
            .server
            .lock()
            .expect("nobody panics with this lock")
            .take();
        match handle {
            Some(handle) => {
                handle.stop(false).await;
                let _ = (&mut self.listening).await; // ends with the server; a panic there was reported
            }
            None => self.listening.abort(),
        }
    }

    /// Returns when the server has ended by itself, which it does only on a fault.
    pub async fn ended(&mut self) {
        let _ = (&mut self.listening).await; // a panic there was reported
    }
}

impl Drop for SimHandle {
    fn drop(&mut self) {
        match self.server.lock().ok().and_then(|mut handle| handle.take()) {
            Some(handle) => drop(handle.stop(false)), // the command is sent at the call; nobody waits for the answer
            None => self.listening.abort(),
        }
    }
}
