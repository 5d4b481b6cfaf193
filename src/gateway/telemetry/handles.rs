//! Metric handles of one worker thread, looked up once per label set instead of once per event.

use super::names;
use crate::http::routes::ApiRoute;
use actors::backend::{Backend, Outcome as CallOutcome};
use actors::response_cache::{Outcome, Step};
use metrics::{Counter, Histogram, counter, histogram};
use routing::ids::BackendId;
use std::cell::{OnceCell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

/// Numbers of one backend.
pub struct BackendHandles {
    /// Time to first token.
    pub ttft: Histogram,
    /// Between chunks.
    pub itl: Histogram,
    outcomes: [Counter; 5],
}

impl BackendHandles {
    /// Counts how an attempt ended.
    pub fn count(&self, outcome: CallOutcome) {
        self.outcomes[outcome as usize].increment(1);
    }
}

/// Counters by model.
pub struct ModelHandles {
    /// The model's name, or `unknown`.
    pub label: Arc<str>,
    /// Prompt tokens.
    pub prompt: Counter,
    /// Generated tokens.
    pub completion: Counter,
    /// Cached prompt tokens.
    pub cached: Counter,
}

/// The label of models that no backend serves: clients must not make labels.
pub const UNKNOWN_MODEL: &str = "unknown";

type RequestKey = (ApiRoute, Arc<str>, &'static str);

/// See the module.
#[derive(Default)]
pub struct Handles {
    backends: RefCell<HashMap<BackendId, Rc<BackendHandles>>>,
    models: RefCell<HashMap<Arc<str>, Rc<ModelHandles>>>,
    requests: RefCell<HashMap<RequestKey, Counter>>,
    durations: RefCell<HashMap<ApiRoute, Histogram>>,
    decisions: RefCell<HashMap<&'static str, Counter>>,
    lookups: RefCell<HashMap<&'static str, Counter>>,
    asks: OnceCell<Histogram>,
    actors: RefCell<HashMap<&'static str, Histogram>>,
    overlaps: OnceCell<Histogram>,
    cache: RefCell<HashMap<&'static str, Counter>>,
    saved: RefCell<HashMap<(Arc<str>, &'static str), Counter>>,
    tier_lookups: RefCell<HashMap<(&'static str, Outcome), Counter>>,
    tier_times: RefCell<HashMap<&'static str, Histogram>>,
    hit_bytes: RefCell<HashMap<&'static str, Counter>>,
}

impl Handles {
    /// The handles of a backend.
    pub fn backend(&self, backend: &Backend) -> Rc<BackendHandles> {
        let mut backends = self.backends.borrow_mut();
        let handles = backends.entry(backend.id).or_insert_with(|| {
            let name = backend.spec.name.to_string();
            let outcome = |outcome: CallOutcome| counter!(names::BACKEND_REQUESTS, "backend" => name.clone(), "outcome" => outcome.as_str());
            Rc::new(BackendHandles {
                ttft: histogram!(names::TTFT, "backend" => name.clone()),
                itl: histogram!(names::ITL, "backend" => name.clone()),
                outcomes: CallOutcome::ALL.map(outcome),
            })
        });
        handles.clone()
    }

    /// The handles of a model that some backend serves, or of all others.
    pub fn model(&self, model: &Arc<str>) -> Rc<ModelHandles> {
        let mut models = self.models.borrow_mut();
        if let Some(handles) = models.get(model) {
            return handles.clone();
        }
        let label = model.to_string();
        let handles = Rc::new(ModelHandles {
            label: model.clone(),
            prompt: counter!(names::PROMPT_TOKENS, "model" => label.clone()),
            completion: counter!(names::COMPLETION_TOKENS, "model" => label.clone()),
            cached: counter!(names::CACHED_PROMPT_TOKENS, "model" => label),
        });
        models.insert(model.clone(), handles.clone());
        handles
    }

    /// Counts a request that ended after `seconds`.
    pub fn request(
        &self,
        (route, model): (ApiRoute, &Arc<str>),
        status: &'static str,
        seconds: f64,
    ) {
        self.durations
            .borrow_mut()
            .entry(route)
            .or_insert_with(|| histogram!(names::REQUEST_DURATION, "route" => route.as_str()))
            .record(seconds);
        self.requests
            .borrow_mut()
            .entry((route, model.clone(), status))
            .or_insert_with(|| counter!(names::REQUESTS, "route" => route.as_str(), "model" => model.to_string(), "status" => status))
            .increment(1);
    }

    /// Compares what the index said of a prompt with what the engine says it had cached; an engine
    /// that does not say is counted apart, never as 0.
    pub fn prediction(&self, backend: &str, predicted: u64, actual: Option<u64>) {
        let Some(actual) = actual else {
            counter!(names::KV_UNCHECKED, "backend" => backend.to_owned()).increment(1);
            return;
        };
        counter!(names::KV_PREDICTED, "backend" => backend.to_owned()).increment(predicted);
        counter!(names::KV_ACTUAL, "backend" => backend.to_owned()).increment(actual);
        let error = predicted.abs_diff(actual);
        counter!(names::KV_ERROR, "backend" => backend.to_owned()).increment(error);
    }

    /// Counts a request that was looked up in the KV index, by what came of it.
    pub fn lookup(&self, result: &'static str) {
        self.lookups
            .borrow_mut()
            .entry(result)
            .or_insert_with(|| counter!(names::KV_LOOKUPS, "result" => result))
            .increment(1);
    }

    /// The index answered after `seconds`.
    pub fn asked_index(&self, seconds: f64) {
        let asks = self.asks.get_or_init(|| histogram!(names::KV_ASK));
        asks.record(seconds);
    }

    /// An actor answered after `seconds`, its time in the mailbox included.
    pub fn asked(&self, actor: &'static str, seconds: f64) {
        let mut actors = self.actors.borrow_mut();
        let asks = actors.entry(actor);
        asks.or_insert_with(|| histogram!(names::ACTOR_ASK, "actor" => actor))
            .record(seconds);
    }

    /// The chosen backend was known to have this share of a prompt.
    pub fn overlap(&self, share: f64) {
        let overlaps = self.overlaps.get_or_init(|| histogram!(names::KV_OVERLAP));
        overlaps.record(share);
    }

    /// Counts a request by what the response cache did.
    pub fn cache_request(&self, result: &'static str) {
        let mut cache = self.cache.borrow_mut();
        let counter = cache.entry(result);
        counter
            .or_insert_with(|| counter!(names::CACHE_REQUESTS, "result" => result))
            .increment(1);
    }

    /// Counts an answer from a tier: its bytes, and the tokens that no engine had to make.
    pub fn saved(&self, tier: &'static str, model: &Arc<str>, (bytes, tokens): (u64, (u64, u64))) {
        self.hit_bytes
            .borrow_mut()
            .entry(tier)
            .or_insert_with(|| counter!(names::CACHE_HIT_BYTES, "tier" => tier))
            .increment(bytes);
        for (kind, count) in [("prompt", tokens.0), ("completion", tokens.1)] {
            self.saved
                .borrow_mut()
                .entry((model.clone(), kind))
                .or_insert_with(|| counter!(names::CACHE_SAVED_TOKENS, "model" => model.to_string(), "kind" => kind))
                .increment(count);
        }
    }

    /// Counts a lookup in a tier; how long those in memory take is not worth a clock.
    pub fn cache_lookup(&self, step: Step) {
        let (tier, outcome) = (step.tier, step.outcome);
        self.tier_lookups
            .borrow_mut()
            .entry((tier, outcome))
            .or_insert_with(
                || counter!(names::CACHE_LOOKUPS, "tier" => tier, "result" => outcome.as_str()),
            )
            .increment(1);
        if outcome != Outcome::Skipped && tier != "memory" {
            self.tier_times
                .borrow_mut()
                .entry(tier)
                .or_insert_with(|| histogram!(names::CACHE_LOOKUP, "tier" => tier))
                .record(step.took.as_secs_f64());
        }
    }

    /// Counts a decision.
    pub fn decision(&self, route: &'static str) {
        self.decisions
            .borrow_mut()
            .entry(route)
            .or_insert_with(|| counter!(names::ROUTE_DECISIONS, "route" => route))
            .increment(1);
    }
}
