//! One request against the fleet: ask the router, try a backend, try another where that is
//! allowed, and hand the answer over.

pub mod answer;
mod attempt;
mod events;
pub mod headers;
mod patience;
mod setback;
mod shared;
mod split;
mod verdict;

pub use answer::{AnswerBody, Opened};
pub use shared::{Answered, Failure, Head, Told};
pub use split::{SplitPlan, explain_split};

use crate::gateway::{BufferedBytes, Worker};
use crate::http::error::{ErrorKind, Refusal};
use crate::http::routes::ApiRoute;
use crate::kv::{self, Dispatch, Found};
use crate::spans::{Kind, Span, Trace};
use crate::telemetry::names;
use crate::telemetry::prediction::Prediction;
use crate::telemetry::report::Report;
use actix_web::HttpResponse;
use actors::placement::Placement;
use actors::router::Route;
use attempt::Sending;
use bytes::Bytes;
use hyper::HeaderMap;
use metrics::counter;
use routing::choose::{NoBackend, Reason};
use routing::disagg::Step;
use routing::ids::{BackendId, PrefixKey, SessionKey};
use routing::view::Role;
use setback::Setback;
use split::Way;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;
use wire::splice::AnswerEdit;

/// What is asked of a backend, whichever it will be.
pub struct Call {
    /// The path family.
    pub route: ApiRoute,
    /// Whether the client asked for a stream.
    pub wants_stream: bool,
    /// For the backend.
    pub headers: Rc<HeaderMap>,
    /// For the backend.
    pub body: Bytes,
    /// Holds the body's place in the limit over all bodies.
    pub _held: BufferedBytes,
    /// As backends name it.
    pub model: Arc<str>,
    /// The model in whose place it serves, where nobody can serve that one.
    pub fallback_from: Option<Arc<str>>,
    /// Equal for requests that begin alike.
    pub prefix: Option<PrefixKey>,
    /// Equal for requests of one session.
    pub session: Option<SessionKey>,
    /// What is changed in the answer.
    pub edit: AnswerEdit,
    /// Whether token counts are asked for, by the client or by us.
    pub asks_usage: bool,
    /// Whether one engine may compute its prompt and another generate.
    pub may_split: bool,
    /// Tokens of its prompt and answer, before anybody has counted.
    pub tokens_estimated: u64,
    /// Given by the client, or made.
    pub request_id: Arc<str>,
    /// The trace that its calls are recorded in.
    pub trace: Option<Trace>,
}

impl Call {
    /// Its calls are recorded in this trace.
    pub fn belongs_to(&mut self, trace: Option<&Trace>) {
        if trace.is_some_and(Trace::is_ours) {
            // of a trace that is not gone on with
            Rc::make_mut(&mut self.headers).remove("tracestate");
        }
        self.trace = trace.cloned();
    }

    /// A part of it; ends when it is dropped.
    pub fn span(&self, name: &'static str) -> Option<Span> {
        let trace = self.trace.as_ref()?;
        Some(trace.span(name, Kind::Internal))
    }
}

/// How the attempts ended.
enum Answer {
    /// With an answer to pass on.
    Opened(Opened),
    /// With a failure that is not tried again.
    GivenUp(Setback),
    /// Without an attempt.
    Refused(Refusal),
}

/// Serves a request; the report moves into the answer's body. A request that still waits when
/// the process must end is told so.
pub async fn serve(call: Call, worker: Rc<Worker>, mut report: Report) -> HttpResponse {
    let calls = worker.gateway.settings.load().retry.max_attempts;
    match answer(&call, &worker, &mut report, calls).await {
        Answer::Opened(opened) => opened.response(&call, report),
        Answer::GivenUp(setback) => setback.response(report),
        Answer::Refused(refusal) => crate::http::refuse(refusal, report),
    }
}

/// What came of a request that is made for several clients.
pub enum Flown {
    /// An answer.
    Opened(Opened),
    /// None, and whether it would be right to try again.
    Failed(Failure, bool),
}

/// Makes a request for several clients, with at most so many calls.
pub async fn fly(call: &Call, worker: &Rc<Worker>, report: &mut Report, calls: u32) -> Flown {
    let may_repeat = |setback: &Setback| setback.why.is_retryable();
    match answer(call, worker, report, calls).await {
        Answer::Opened(opened) => Flown::Opened(opened),
        Answer::GivenUp(setback) => {
            let again = may_repeat(&setback);
            Flown::Failed(Failure::of_backend(setback, report), again)
        }
        Answer::Refused(refusal) => Flown::Failed(Failure::ours(refusal, report), false),
    }
}

async fn answer(call: &Call, worker: &Rc<Worker>, report: &mut Report, calls: u32) -> Answer {
    let cutting = worker.phase.cutting();
    tokio::select! {
        biased;
        answer = attempts(call, worker, report, calls) => answer,
        () = cutting => Answer::Refused(Refusal::Draining),
    }
}

/// The retry loop.
async fn attempts(call: &Call, worker: &Rc<Worker>, report: &mut Report, calls: u32) -> Answer {
    worker.budget.borrow_mut().earn();
    let looking = worker
        .gateway
        .kv
        .as_ref()
        .and_then(|_| call.span("kv_lookup"));
    let found = kv::lookup::find(call, worker).await;
    drop(looking);
    let (role, path) = match (split::way(call, worker), worker.gateway.splitting()) {
        (Way::Split, Some(splitting)) => {
            let asked = (found.as_ref(), calls);
            return Box::pin(split::serve((call, &splitting), worker, report, asked)).await;
        }
        (Way::Whole(role, path), _) => (role, path),
        (Way::Split, None) => (None, None),
    };
    report.path = path;
    let mut tried = Vec::new();
    let mut setback: Option<Setback> = None;
    loop {
        let routing = call.span("route");
        let placed = place(worker, route(call, found.as_ref(), role, &tried)).await;
        drop(routing);
        let placement = match placed {
            Ok(placement) => placement,
            // nobody else can: the first failure says more than "nobody else"
            Err(refusal) => return setback.map_or(Answer::Refused(refusal), Answer::GivenUp),
        };
        if let Some(failed) = setback.take() {
            if !may_retry(worker, &failed) {
                return Answer::GivenUp(failed);
            }
            pause(worker).await;
        }
        note(worker, &placement, report);
        tried.push(placement.in_flight.backend().id);
        let dispatch = found.as_ref().and_then(|found| {
            Dispatch::new(
                found,
                placement.in_flight.backend(),
                placement.reach.as_ref(),
            )
        });
        let sending = Sending::whole(call, worker);
        match attempt::run(sending, worker.clone(), (placement, dispatch)).await {
            Ok(opened) => {
                if let Some(path) = path {
                    counter!(names::SPLIT_REQUESTS, "path" => path.as_str()).increment(1);
                }
                report.first_byte();
                return Answer::Opened(opened);
            }
            Err(failed) => {
                let more = tried.len() < calls as usize;
                if !more || !failed.why.is_retryable() {
                    return Answer::GivenUp(failed);
                }
                setback = Some(failed);
            }
        }
    }
}

/// Where the request could go.
fn route(call: &Call, found: Option<&Found>, role: Option<Role>, tried: &[BackendId]) -> Route {
    Route {
        model: call.model.clone(),
        known: found.map(|found| found.known.clone()),
        prefix: call.prefix,
        session: call.session,
        role,
        tried: tried.to_vec(),
    }
}

/// Asks this thread's router. One that died while it answered is replaced and asked again.
async fn place(worker: &Worker, route: Route) -> Result<Placement, Refusal> {
    for _ in 0..2 {
        let Some(router) = worker.gateway.router.router() else {
            break;
        };
        let start = Instant::now();
        let asked = router.send(route.clone()).await;
        worker
            .handles
            .asked("router", start.elapsed().as_secs_f64());
        if let Ok(answer) = asked {
            return answer.map_err(|why| {
                let model = route.model.to_string();
                match (why, route.role) {
                    (NoBackend::NoneServing, Some(Role::Unified)) => {
                        Refusal::NoWorker(Step::Unified, model)
                    }
                    _ => Refusal::NoBackend(why, model),
                }
            });
        }
    }
    Err(Refusal::NoRouter)
}

fn may_retry(worker: &Worker, setback: &Setback) -> bool {
    if !worker.budget.borrow_mut().spend() {
        counter!(names::RETRY_BUDGET_EXHAUSTED).increment(1);
        return false;
    }
    counter!(names::RETRIES, "reason" => setback.why.as_str()).increment(1);
    true
}

/// A random wait: requests that failed together shall not come back together.
pub async fn pause(worker: &Worker) {
    let most = worker.gateway.settings.load().retry.backoff_max;
    tokio::time::sleep(most.mul_f64(fastrand::f64())).await;
}

fn note(worker: &Worker, placement: &Placement, report: &mut Report) {
    report.attempts += 1;
    report.prediction = placement.reach.map(|reach| Prediction {
        reach,
        mode: placement.mode,
        backend: placement.in_flight.backend().clone(),
    });
    report.backend = Some(placement.in_flight.backend().spec.name.clone());
    report.decision = match placement.reason {
        Reason::Prefix { spilled } => {
            if spilled {
                counter!(names::PREFIX_SPILLS).increment(1);
            }
            "prefix"
        }
        Reason::KvIndex { blocks } => {
            let all = placement.reach.map_or(blocks, |reach| reach.of_blocks);
            report.overlap = Some((blocks, all));
            "kv_index"
        }
        Reason::Probe | Reason::Strategy | Reason::Session => "strategy",
    };
    if let Some(reach) = placement.reach.filter(|reach| reach.of_blocks > 0) {
        worker.handles.overlap(reach.overlap.raw);
    }
    worker.handles.decision(report.decision);
}

/// What a client is told of a backend that failed.
fn refusal(kind: ErrorKind, backend: &str, what: &str) -> Refusal {
    Refusal::Backend(kind, format!("backend `{backend}` {what}"))
}
