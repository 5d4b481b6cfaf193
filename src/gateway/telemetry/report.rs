//! What one request was and how it ended: lives as long as the request, in the handler and then
//! in the response body, and is written down when it is dropped, on every ending.

mod written;

use super::handles::UNKNOWN_MODEL;
use super::names;
use super::prediction::Prediction;
use crate::gateway::{RequestCount, Worker};
use crate::http::error::{By, ErrorKind};
use crate::http::routes::ApiRoute;
use crate::quotas::Grant;
use crate::spans::{self, Trace, TraceId};
use actix_web::http::header::HeaderMap;
use metrics::counter;
use routing::disagg::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::info;
use wire::openai::Usage;
use wire::splice::Cached;

/// What a report is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Of {
    /// A client's request and the calls that were made for it.
    Both,
    /// A client's request, whose answer came from elsewhere.
    Request,
    /// A call that is made for several requests.
    Call,
}

/// What the response cache did for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheNote {
    /// The answer was there: in this tier, made so many seconds ago.
    Hit(&'static str, u64),
    /// The answer is that of an equal request that was being served.
    Joined,
    /// The answer was made for this request.
    Miss,
    /// The request is none that is cached.
    Bypass,
}

impl CacheNote {
    /// The word used in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            CacheNote::Hit(..) => "hit",
            CacheNote::Joined => "joined",
            CacheNote::Miss => "miss",
            CacheNote::Bypass => "bypass",
        }
    }
}

/// The tier that a joined answer came from.
pub const FLIGHT_TIER: &str = "flight";

/// See the module.
pub struct Report {
    worker: Rc<Worker>,
    of: Of,
    _count: Option<RequestCount>,
    /// What the response cache did.
    pub cache: Option<CacheNote>,
    /// The path family.
    pub route: ApiRoute,
    /// Given by the client, or made.
    pub request_id: Arc<str>,
    started: Instant,
    model: Option<Arc<str>>,
    /// Who serves it.
    pub backend: Option<Arc<str>>,
    /// How the backend was chosen.
    pub decision: &'static str,
    /// Blocks of the prompt that the backend was known to have, and all of them; when the index
    /// decided.
    pub overlap: Option<(u32, u32)>,
    /// What the backend was believed to have of the prompt; when the index was asked.
    pub prediction: Option<Prediction>,
    /// Attempts so far.
    pub attempts: u32,
    status: Option<u16>,
    error: Option<(By, ErrorKind)>,
    ttft: Option<Duration>,
    bytes: u64,
    usage: Option<Usage>,
    cached: Option<Cached>,
    /// The name of the client's key.
    pub key: Option<Arc<str>>,
    /// How it is served, where serving is split.
    pub path: Option<Path>,
    /// Who computed the prompt, where that is not the one who answers.
    pub prefill_backend: Option<Arc<str>>,
    /// The model that was wanted, where another serves.
    pub fallback_from: Option<Arc<str>>,
    /// What its client was given for it.
    pub grant: Grant,
    complete: bool,
    trace: Option<Trace>,
    /// Of the trace that the client named, where none is recorded here.
    trace_id: Option<TraceId>,
}

fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

impl Report {
    /// A request has come in.
    pub fn new(worker: Rc<Worker>, route: ApiRoute, request_id: Arc<str>) -> Self {
        let count = worker.gateway.requests.enter();
        Report {
            of: Of::Both,
            _count: Some(count),
            cache: None,
            worker,
            route,
            request_id,
            started: now(),
            model: None,
            backend: None,
            decision: "none",
            overlap: None,
            prediction: None,
            attempts: 0,
            status: None,
            error: None,
            ttft: None,
            bytes: 0,
            usage: None,
            cached: None,
            key: None,
            path: None,
            prefill_backend: None,
            trace: None,
            trace_id: None,
            fallback_from: None,
            grant: Grant::default(),
            complete: false,
        }
    }

    /// The request belongs to the trace that its headers name, or to a fresh one where traces are recorded.
    pub fn follow(&mut self, headers: &HeaderMap) {
        let given = spans::given(headers);
        let tracer = self.worker.gateway.tracer.as_ref();
        self.trace = tracer.map(|tracer| tracer.begin(given));
        let ours = self.trace.as_ref().map(Trace::id);
        self.trace_id = ours.or(given.map(|given| given.trace));
    }

    /// The trace that it is recorded in.
    pub fn trace(&self) -> Option<&Trace> {
        self.trace.as_ref()
    }

    /// Of a call that is made for this request and others: what is counted of backends and tokens
    /// goes there from now on.
    pub fn of_call(&mut self) -> Report {
        self.of = Of::Request;
        let id = self.request_id.clone();
        let mut call = Report::new(self.worker.clone(), self.route, id);
        call.of = Of::Call;
        call._count = None;
        call.model.clone_from(&self.model);
        call
    }

    /// The answer comes from elsewhere: no call is made for this request.
    pub fn without_call(&mut self) {
        self.of = Of::Request;
    }

    /// Whether the answer comes from the cache.
    fn is_hit(&self) -> bool {
        matches!(self.cache, Some(CacheNote::Hit(..) | CacheNote::Joined))
    }

    /// How it came to its answer.
    fn reason(&self) -> &'static str {
        match self.is_hit() {
            true => "cache_hit",
            false => self.decision,
        }
    }

    /// How it ended.
    fn outcome(&self) -> &'static str {
        match self.complete {
            false => "client_cancelled",
            true => self.error.map_or("ok", |(_, kind)| kind.as_str()),
        }
    }

    /// What an answer says of itself in headers.
    pub fn tell_headers(&self, mut tell: impl FnMut(&'static str, &str)) {
        tell("x-request-id", &self.request_id);
        tell("x-tidegate-route", self.reason());
        if let Some((blocks, all)) = self.overlap {
            tell("x-tidegate-overlap", &format!("{blocks}/{all}"));
        }
        if let (Some(from), Some(model)) = (&self.fallback_from, &self.model) {
            tell("x-tidegate-model", model);
            tell("x-tidegate-fallback-from", from);
        }
        if let Some(backend) = &self.backend {
            tell("x-tidegate-backend", backend);
        }
        if let Some(backend) = &self.prefill_backend {
            tell("x-tidegate-prefill-backend", backend);
        }
        if let (Some(path), false) = (self.path, self.is_hit()) {
            tell("x-tidegate-path", path.as_str());
        }
        match self.cache {
            None => {}
            Some(CacheNote::Hit(tier, age)) => {
                tell("x-cache", "HIT");
                tell("x-cache-tier", tier);
                tell("age", &age.to_string());
            }
            Some(CacheNote::Joined) => {
                tell("x-cache", "HIT");
                tell("x-cache-tier", FLIGHT_TIER);
                tell("age", "0");
            }
            Some(CacheNote::Miss) => tell("x-cache", "MISS"),
            Some(CacheNote::Bypass) => tell("x-cache", "BYPASS"),
        }
        self.grant.note.tell(tell);
    }

    /// Tokens that count against the client's limits; none where nobody has counted.
    fn tokens_used(&self) -> Option<u64> {
        if self.is_hit() {
            return Some(0);
        }
        match &self.usage {
            Some(usage) => Some(usage.prompt_tokens + usage.completion_tokens.unwrap_or(0)),
            // its call went on without it: what it would have cost is not known
            None if self.of == Of::Request && !self.complete => None,
            // nothing of an answer: nothing to pay for
            None if self.backend.is_none() || self.status.is_some_and(|status| status >= 400) => {
                Some(0)
            }
            None => None,
        }
    }

    /// When the request came in.
    pub fn started(&self) -> Instant {
        self.started
    }

    /// The model that the request is for; a label only when some backend serves it.
    pub fn model(&mut self, model: &Arc<str>) {
        self.model = Some(model.clone());
    }

    /// The head was decided on.
    pub fn status(&mut self, status: u16) {
        self.status = Some(status);
    }

    /// The request failed. The first failure counts.
    pub fn error(&mut self, by: By, kind: ErrorKind) {
        self.error.get_or_insert((by, kind));
    }

    /// Bytes of the answer went out.
    pub fn sent(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
    }

    /// The first byte of the answer came.
    pub fn first_byte(&mut self) -> Duration {
        *self.ttft.get_or_insert_with(|| now() - self.started)
    }

    /// The engine said what it counted.
    pub fn usage(&mut self, mut usage: Usage) {
        if let Some(cached) = self.cached {
            usage.put_cached(cached);
        }
        self.usage = Some(usage);
    }

    /// What counts as cached, where another engine computed the prompt than the one that counts.
    pub fn cached_elsewhere(&mut self, cached: Cached) {
        self.cached = Some(cached);
    }

    /// What the engine said it counted.
    pub fn counted(&self) -> Option<Usage> {
        self.usage
    }

    /// The whole answer was handed over; without this the request counts as cancelled.
    pub fn complete(&mut self) {
        self.complete = true;
    }
}

/// To the microsecond: more digits are noise.
fn millis(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1000.0
}

fn class(status: u16) -> &'static str {
    match status {
        100..=199 => "1xx",
        200..=299 => "2xx",
        300..=399 => "3xx",
        400..=499 => "4xx",
        _ => "5xx",
    }
}

impl Drop for Report {
    fn drop(&mut self) {
        let elapsed = now().saturating_duration_since(self.started);
        let cancelled = !self.complete;
        let handles = &self.worker.handles;
        let served = self.model.as_ref().filter(|model| {
            let snapshot = self.worker.gateway.directory.load();
            snapshot.view.pools.contains_key(*model)
        });
        let model = &served.cloned().unwrap_or_else(|| Arc::from(UNKNOWN_MODEL));
        let status = match self.status {
            Some(status) if !cancelled => class(status),
            _ => "cancelled",
        };
        if self.of != Of::Call {
            handles.request((self.route, model), status, elapsed.as_secs_f64());
        }
        if let (Some(usage), true) = (&self.usage, self.of != Of::Request) {
            let tokens = handles.model(model);
            tokens.prompt.increment(usage.prompt_tokens);
            tokens
                .completion
                .increment(usage.completion_tokens.unwrap_or(0));
            if let Some(prediction) = &self.prediction {
                prediction.check(usage, &self.worker);
            }
            tokens.cached.increment(usage.cached_tokens().unwrap_or(0));
        }
        if self.of == Of::Call {
            return;
        }
        if let Some(from) = &self.fallback_from {
            counter!(names::FALLBACKS, "from" => from.to_string(), "to" => model.to_string())
                .increment(1);
        }
        let used = self.tokens_used();
        self.grant.used(used);
        if let Some(cache) = self.cache {
            handles.cache_request(cache.as_str());
            let tier = match cache {
                CacheNote::Hit(tier, _) => Some(tier),
                CacheNote::Joined => Some(FLIGHT_TIER),
                CacheNote::Miss | CacheNote::Bypass => None,
            };
            if let (Some(tier), true) = (tier, self.complete && self.error.is_none()) {
                let usage = self.usage.unwrap_or_default();
                let tokens = (usage.prompt_tokens, usage.completion_tokens.unwrap_or(0));
                handles.saved(tier, model, (self.bytes, tokens));
            }
        }
        if let Some((by, kind)) = self.error {
            counter!(names::ERRORS, "by" => by.as_str(), "kind" => kind.as_str()).increment(1);
        }
        self.remember(elapsed);
        self.trace_request(elapsed);
        if self.worker.gateway.settings.load().logging.access {
            info!(
                target: "access",
                request_id = %self.request_id,
                trace_id = self.trace_id.map(tracing::field::display),
                route = self.route.as_str(),
                model = self.model.as_deref().unwrap_or(""),
                status = self.status.unwrap_or(0),
                outcome = self.outcome(),
                key = self.key.as_deref().unwrap_or(""),
                backend = self.backend.as_deref().unwrap_or(""),
                decision = self.reason(),
                cache = self.cache.map_or("off", CacheNote::as_str),
                fallback_from = self.fallback_from.as_deref().unwrap_or(""),
                path = self.path.map_or("", Path::as_str),
                prefill_backend = self.prefill_backend.as_deref().unwrap_or(""),
                overlap = self.overlap.map_or(0, |(blocks, _)| blocks),
                attempts = self.attempts,
                ttft_ms = self.ttft.map_or(0.0, millis),
                ms = millis(elapsed),
                bytes = self.bytes,
                prompt_tokens = self.usage.map_or(0, |u| u.prompt_tokens),
                completion_tokens = self.usage.and_then(|u| u.completion_tokens).unwrap_or(0),
                "request"
            );
        }
    }
}
