//! Split serving of one request: reserves workers, hands over between them, and begins again or falls back to a
//! unified worker while the client has no byte. What follows what is decided by [`routing::disagg`].

mod explain;
mod hand_over;
mod leaving;
mod legs;
mod prefill;
mod reserve;

pub use explain::{SplitPlan, explain_split};

use super::attempt::first_byte_limit;
use super::{Answer, Call, may_retry, note, pause};
use crate::gateway::Worker;
use crate::handoff::Splitting;
use crate::http::error::Refusal;
use crate::kv::{Found, lookup};
use crate::telemetry::names;
use crate::telemetry::report::Report;
use actors::placement::Placement;
use hand_over::Failed;
use metrics::counter;
use reserve::Reservation;
use routing::disagg::{Event, HandOff, Next, Path, Step};
use routing::ids::BackendId;
use routing::pairing::is_split;
use routing::view::Role;
use std::rc::Rc;
use tokio::time::Instant;
use tracing::warn;

/// How a request is served, as far as that is known beforehand.
pub enum Way {
    /// By one worker of this role, or of any; the path to tell of it, where serving is split.
    Whole(Option<Role>, Option<Path>),
    /// By a pair, if it is worth it.
    Split,
}

/// What can be done with a request.
pub fn way(call: &Call, worker: &Worker) -> Way {
    if worker.gateway.split.is_none() {
        return Way::Whole(None, None);
    }
    let snapshot = worker.gateway.directory.load();
    if !is_split(&snapshot.view, &call.model) {
        return Way::Whole(None, Some(Path::Unified)); // nobody to split it between
    }
    match (call.may_split, call.route.generates()) {
        (true, _) => Way::Split,
        (false, true) => Way::Whole(Some(Role::Unified), Some(Path::Unified)),
        (false, false) => Way::Whole(None, Some(Path::Unified)),
    }
}

/// A request that may be split, and what it is served with.
struct Request<'a> {
    call: &'a Call,
    splitting: &'a Splitting,
    worker: &'a Rc<Worker>,
    found: Option<&'a Found>,
    /// Nothing may take longer.
    deadline: Instant,
}

/// Tokens of the prompt, as well as is known.
fn tokens_of(call: &Call, found: Option<&Found>) -> u64 {
    match found {
        Some(found) => found.known.tokens(),
        None => lookup::tokens_by_text(call),
    }
}

/// Serves a request by a pair of workers, or by one where that is better. `calls`: answers that may be asked for
/// before the fallback.
pub async fn serve(
    (call, splitting): (&Call, &Splitting),
    worker: &Rc<Worker>,
    report: &mut Report,
    (found, calls): (Option<&Found>, u32),
) -> Answer {
    let limit = first_byte_limit(call, worker);
    let request = Request {
        call,
        splitting,
        worker,
        found,
        deadline: Instant::now() + splitting.prefill_timeout + limit,
    };
    let tokens = tokens_of(call, found);
    let mut course = Course {
        hand_off: HandOff::new(splitting.fallback),
        tried: Vec::new(),
        whole: false,
        fell_back: false,
        asked: 0,
        failure: None,
    };
    loop {
        let routing = call.span("route");
        let reserved = request.reserve(tokens, (&course.tried, course.whole)).await;
        drop(routing);
        let reserved = match reserved {
            Ok(reserved) => reserved,
            Err(refusal) => return course.unserved(refusal),
        };
        let path = reserved.path;
        report.path = Some(path);
        course.begin(&reserved, call);
        note_all(worker, &reserved, report);
        let pair = ids(&reserved);
        let ended = request.attempt(reserved).await;
        let failed = match ended {
            Ok(opened) => {
                counter!(names::SPLIT_REQUESTS, "path" => path.as_str()).increment(1);
                report.first_byte();
                return Answer::Opened(opened);
            }
            Err(failed) => failed,
        };
        if failed.step == Step::Prefill {
            // whoever was to answer has not been asked, or not been waited for
            report.backend = report.prefill_backend.take();
        }
        let event = course.judge(&failed, &request, calls);
        let step = failed.step;
        course.remember(failed, pair);
        let mut next = course.hand_off.on(event);
        if next == Some(Next::Restart) && !course.may_retry(worker) {
            let again = false;
            next = course.hand_off.on(Event::Failed { step, again });
        }
        match next {
            Some(Next::Restart) => {
                counter!(names::SPLIT_RESTARTS, "step" => step.as_str()).increment(1);
                pause(worker).await;
            }
            Some(Next::FallBack) => course.whole = true,
            _ => return course.give_up(),
        }
    }
}

/// How a request has gone so far.
struct Course {
    hand_off: HandOff,
    /// Those who have failed it.
    tried: Vec<BackendId>,
    /// Only unified workers are asked from now on.
    whole: bool,
    /// Whether one stands in already.
    fell_back: bool,
    /// Answers that were asked for.
    asked: u32,
    failure: Option<Failed>,
}

impl Course {
    fn begin(&mut self, reserved: &Reservation, call: &Call) {
        self.asked += 1;
        self.hand_off.on(Event::Begun(reserved.path));
        if reserved.path == Path::Fallback && !std::mem::replace(&mut self.fell_back, true) {
            let (step, reason) = match &self.failure {
                Some(failed) if failed.setback.is_silence() => (failed.step, "timeout"),
                Some(failed) => (failed.step, "failed"),
                None => reserved.stands_in.unwrap_or((Step::Prefill, "no_worker")),
            };
            let step = step.as_str();
            warn!(
                step,
                reason,
                request_id = &*call.request_id,
                "a step of a split request cannot be served, a unified worker stands in"
            );
            counter!(names::SPLIT_FALLBACKS, "step" => step, "reason" => reason).increment(1);
        }
    }

    /// What happened, for the hand-off's next step.
    fn judge(&mut self, failed: &Failed, request: &Request<'_>, calls: u32) -> Event {
        let Failed { step, setback } = failed;
        if *step != Step::Prefill {
            self.hand_off.on(Event::PrefillDone); // if there was one
        }
        let streams = request.call.wants_stream;
        // the answer may have been made, or be in the making, at great cost
        let made = *step == Step::Decode && setback.is_silence() && !streams;
        if setback.is_refusal() {
            return Event::Refused;
        }
        if made || Instant::now() >= request.deadline {
            return Event::OutOfTime;
        }
        // prefill may be at work on it still; a transfer that hangs may not hang elsewhere
        let hangs = *step == Step::Decode && setback.is_silence() && streams;
        let again = setback.why.is_retryable() || hangs;
        Event::Failed {
            step: *step,
            again: again && self.asked < calls,
        }
    }

    fn remember(&mut self, failed: Failed, (prefill, worker): (Option<BackendId>, BackendId)) {
        self.tried.extend(match failed.step {
            Step::Prefill => prefill,
            Step::Decode | Step::Unified => Some(worker),
        });
        self.failure = Some(failed);
    }

    fn may_retry(&self, worker: &Worker) -> bool {
        let setback = self.failure.as_ref().map(|failed| &failed.setback);
        setback.is_some_and(|setback| may_retry(worker, setback))
    }

    /// Nobody takes it: the first failure says more than that.
    fn unserved(self, refusal: Refusal) -> Answer {
        if self.failure.is_some() {
            return self.give_up();
        }
        if let Refusal::NoWorker(step, _) = &refusal {
            counter!(names::SPLIT_FAILURES, "step" => step.as_str()).increment(1);
        }
        Answer::Refused(refusal)
    }

    fn give_up(self) -> Answer {
        let Some(Failed { step, setback }) = self.failure else {
            return Answer::Refused(Refusal::NoCoordinator); // nothing gives up without a failure
        };
        if !setback.is_refusal() {
            counter!(names::SPLIT_FAILURES, "step" => step.as_str()).increment(1);
        }
        let theirs = setback.is_refusal() || setback.is_overload() || step == Step::Unified;
        Answer::GivenUp(match theirs {
            true => setback.settled(),
            false => setback.of_step(step),
        })
    }
}

fn ids(reserved: &Reservation) -> (Option<BackendId>, BackendId) {
    let id = |placed: &Placement| placed.in_flight.backend().id;
    (reserved.prefill.as_ref().map(id), id(&reserved.worker))
}

/// For headers, log and metrics. Of a pair, how prefill was chosen says more.
fn note_all(worker: &Worker, reserved: &Reservation, report: &mut Report) {
    report.prefill_backend = None;
    note(worker, &reserved.worker, report);
    let Some(prefill) = &reserved.prefill else {
        return;
    };
    let (answers, attempts) = (report.backend.take(), report.attempts);
    note(worker, prefill, report);
    report.prefill_backend = std::mem::replace(&mut report.backend, answers);
    report.attempts = attempts; // counts answers
    // what decode counts as cached came from prefill: it says nothing about its own cache
    report.prediction = None;
}
