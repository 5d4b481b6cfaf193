//! What requests share: once per process ([`Gateway`]) and once per worker thread ([`Worker`]).

use crate::cache::AnswerCache;
use crate::handoff::Splitting;
use crate::kv::TokenCache;
use crate::quotas::Quotas;
use crate::reload::ReloadHandle;
use crate::settings::Settings;
use crate::spans::Tracer;
use crate::telemetry::handles::Handles;
use crate::telemetry::recent::Recent;
use crate::tls::Tls;
use crate::tokenize::{Encoders, EncodingThreads};
use crate::upstream::Client;
use actors::cluster::Reconciled;
use actors::directory::Directory;
use actors::kv_index::KvIndexHandle;
use actors::kv_share::ShareState;
use actors::router::RouterSeed;
use actors::support::mailbox::Mailbox;
use arc_swap::{ArcSwap, ArcSwapOption};
use metrics_exporter_prometheus::PrometheusHandle;
use routing::access::KeyRing;
use routing::retry::RetryBudget;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;

/// Shared by all worker threads.
pub struct Gateway {
    /// What requests go by; replaced whole when the settings are read again.
    pub settings: ArcSwap<Settings>,
    /// The cluster as it is.
    pub directory: Directory,
    /// Who holds which KV blocks, when `kv_cache_index` is on.
    pub kv: Option<KvIndexHandle>,
    /// How sharing with other gateways is doing, when `kv_cache_index.backend` is redis.
    pub sharing: Option<Arc<ShareState>>,
    /// Answers that are kept, when `response_cache` is on.
    pub cache: Option<Arc<AnswerCache>>,
    /// Hands prompts' KV from one engine to another, when `disaggregated_serving` is on.
    pub split: Option<ArcSwap<Splitting>>,
    /// Certificates, and whom backends must prove to be.
    pub tls: Tls,
    /// Who may ask, when `api_keys` are given.
    pub keys: ArcSwapOption<KeyRing>,
    /// What clients may ask for.
    pub quotas: Quotas,
    /// Makes tokens of prompts, by model.
    pub encoders: Encoders,
    /// The threads on which they do.
    pub encoding: EncodingThreads,
    /// Starts a router per thread.
    pub router: RouterSeed,
    /// Requests being served.
    pub requests: Requests,
    /// Request bodies in memory.
    pub buffered: Buffered,
    /// Reads the settings again.
    pub reload: ReloadHandle,
    /// Backends that were there once.
    pub gone: Gone,
    /// Where the process stands between start and end.
    pub phase: Phases,
    /// Begins traces, when `tracing.otlp_endpoint` is set.
    pub tracer: Option<Tracer>,
    /// The last requests, for `/admin/decisions`.
    pub recent: Recent,
    /// Renders `/metrics`.
    pub prometheus: PrometheusHandle,
}

impl Gateway {
    /// The settings of this moment. A request that holds them ends as it began.
    pub fn settings(&self) -> Arc<Settings> {
        self.settings.load_full()
    }

    /// Split serving as it is set at this moment.
    pub fn splitting(&self) -> Option<Arc<Splitting>> {
        self.split.as_ref().map(ArcSwap::load_full)
    }

    /// Calls that are being made for requests that share them, or whose answers are being kept.
    pub fn flights(&self) -> usize {
        let cache = self.cache.as_ref();
        cache.map_or(0, |cache| cache.flights.running())
    }

    /// Answers that are on their way into Redis or S3.
    pub fn writes(&self) -> usize {
        Mailbox::StoreTier.depth()
    }
}

/// Names of backends that left the settings: what was counted of them is told no longer.
#[derive(Debug, Default)]
pub struct Gone(Mutex<BTreeSet<String>>);

impl Gone {
    /// Backends came and went.
    pub fn follow(&self, reconciled: &Reconciled) {
        let mut gone = self.names();
        gone.extend(reconciled.removed.iter().map(|name| name.to_string()));
        for name in &reconciled.added {
            gone.remove(&**name);
        }
    }

    /// The names.
    pub fn names(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Of one worker thread.
pub struct Worker {
    /// What all share.
    pub gateway: Arc<Gateway>,
    /// This thread's connections.
    pub client: Client,
    /// This thread's share of retries.
    pub budget: RefCell<RetryBudget>,
    /// This thread's metric handles.
    pub handles: Handles,
    /// Tokens of texts that engines tokenised.
    pub tokens: TokenCache,
    /// Where the process stands, as this thread has heard: every request waits on it, and waiters of one thread do not get in
    /// the way of another's.
    pub phase: Rc<Phases>,
}

/// Counts requests being served.
#[derive(Debug, Clone, Default)]
pub struct Requests(Arc<AtomicUsize>);

/// One request; counts until it is dropped.
#[derive(Debug)]
pub struct RequestCount(Arc<AtomicUsize>);

impl Requests {
    /// Counts one in.
    pub fn enter(&self) -> RequestCount {
        self.0.fetch_add(1, Relaxed);
        RequestCount(self.0.clone())
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.load(Relaxed)
    }
}

impl Drop for RequestCount {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// Counts bytes of request bodies in memory, against a limit over all requests.
#[derive(Debug, Clone)]
pub struct Buffered {
    bytes: Arc<AtomicUsize>,
    limit: usize,
}

/// Bytes of one request; given back when dropped.
#[derive(Debug)]
pub struct BufferedBytes {
    all: Buffered,
    bytes: usize,
}

impl Buffered {
    /// None yet.
    pub fn new(limit: usize) -> Self {
        Buffered {
            bytes: Arc::default(),
            limit,
        }
    }

    /// How many there are.
    pub fn bytes(&self) -> usize {
        self.bytes.load(Relaxed)
    }

    /// The count of a new request.
    pub fn start(&self) -> BufferedBytes {
        BufferedBytes {
            all: self.clone(),
            bytes: 0,
        }
    }
}

impl BufferedBytes {
    /// Counts more in; false when that is over the limit.
    pub fn grow(&mut self, bytes: usize) -> bool {
        let before = self.all.bytes.fetch_add(bytes, Relaxed);
        self.bytes += bytes;
        before + bytes <= self.all.limit
    }
}

impl Drop for BufferedBytes {
    fn drop(&mut self) {
        self.all.bytes.fetch_sub(self.bytes, Relaxed);
    }
}

/// Between start and end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Serving.
    Serving,
    /// `/ready` answers 503; requests are still taken.
    Unready,
    /// New requests are refused, running ones go on.
    Draining,
    /// Running streams end with an error event.
    Cutting,
}

/// The present phase; can be waited on.
#[derive(Debug)]
pub struct Phases(watch::Sender<Phase>);

impl Default for Phases {
    fn default() -> Self {
        Phases(watch::Sender::new(Phase::Serving))
    }
}

impl Phases {
    /// The present phase.
    pub fn now(&self) -> Phase {
        *self.0.borrow()
    }

    /// Enters a later phase.
    pub fn enter(&self, phase: Phase) {
        self.0.send_modify(|present| *present = phase.max(*present));
    }

    /// The same phases for the waiters of one thread, which hear of each from a task there.
    pub fn of_thread(&self) -> Rc<Phases> {
        let mut whole = self.0.subscribe();
        let own = Rc::new(Phases(watch::Sender::new(*whole.borrow_and_update())));
        let tells = own.clone();
        actix_rt::spawn(async move {
            while whole.changed().await.is_ok() {
                tells.enter(*whole.borrow_and_update());
            }
        });
        own
    }

    /// Ends when streams are to be cut.
    pub fn cutting(&self) -> impl Future<Output = ()> + 'static {
        let mut phases = self.0.subscribe();
        async move {
            // the sender lives as long as the gateway; without it nobody cuts
            if phases
                .wait_for(|phase| *phase == Phase::Cutting)
                .await
                .is_err()
            {
                std::future::pending::<()>().await;
            }
        }
    }
}
