//! Split serving of one request: reserves workers, hands over between them, and begins again or falls back to a
//! unified worker while the client has no byte. What follows what is decided by [`routing::disagg`].

mod hand_over;
mod leaving;
mod prefill;

use super::attempt::{self, Sending, first_byte_limit};
use super::setback::Setback;
use super::{Answer, Call, Opened, may_retry, note, pause};
use crate::gateway::Worker;
use crate::handoff::{Splitting, connector};
use crate::http::error::Refusal;
use crate::kv::{Dispatch, Found, Stored, lookup};
use crate::settings::ConnectorKind;
use crate::telemetry::names;
use crate::telemetry::report::Report;
use actors::backend::Outcome;
use actors::disagg_coordinator::{ExplainPair, Lease, ReservePair, Reserved};
use actors::placement::Placement;
use actors::router::Route;
use hand_over::{Failed, HandOver, Side};
use leaving::OnLeave;
use metrics::counter;
use routing::choose::NoBackend;
use routing::disagg::{Event, HandOff, Next, Path, Step};
use routing::ids::BackendId;
use routing::pairing::{Pairing, Unserved, is_split};
use routing::view::Role;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use tracing::warn;

/// For the coordinator to answer: it is asked like the index, and what goes on without it costs more.
const COORDINATOR_DEADLINE: Duration = Duration::from_millis(100);

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

/// Serves a request by a pair of workers, or by one where that is better. `calls`: answers that may be asked for
/// before the fallback.
pub async fn serve(
    (call, splitting): (&Call, &Splitting),
    worker: &Rc<Worker>,
    report: &mut Report,
    (found, calls): (Option<&Found>, u32),
) -> Answer {
    let limit = first_byte_limit(call, worker);
    let mut drive = Drive {
        call,
        splitting,
        worker,
        found,
        hand_off: HandOff::new(splitting.fallback),
        deadline: Instant::now() + splitting.prefill_timeout + limit,
        tried: Vec::new(),
        pair: (None, None),
        whole: false,
        failure: None,
        calls,
    };
    let tokens = tokens_of(call, found);
    loop {
        let reserved = match drive.reserve(tokens).await {
            Ok(reserved) => reserved,
            Err(refusal) => return drive.unserved(refusal),
        };
        let path = if drive.whole {
            Path::Fallback
        } else {
            reserved.path
        };
        report.path = Some(path);
        drive.note(&reserved, report);
        drive.hand_off.on(Event::Begun(path));
        let ended = drive.attempt(reserved).await;
        if path == Path::PrefillThenDecode
            && !matches!(&ended, Err(failed) if failed.step == Step::Prefill)
        {
            drive.hand_off.on(Event::PrefillDone);
        }
        let event = match ended {
            Ok(opened) => {
                drive.hand_off.on(Event::FirstByte);
                counter!(names::SPLIT_REQUESTS, "path" => path.as_str()).increment(1);
                report.first_byte();
                return Answer::Opened(opened);
            }
            Err(failed) => drive.failed(failed),
        };
        match drive.hand_off.on(event) {
            Some(Next::Restart) => {
                let step = drive
                    .failure
                    .as_ref()
                    .map_or(Step::Decode, |failed| failed.step);
                counter!(names::SPLIT_RESTARTS, "step" => step.as_str()).increment(1);
                pause(worker).await;
            }
            Some(Next::FallBack) => drive.fall_back(),
            _ => return drive.give_up(),
        }
    }
}

/// How a request would be split at this moment.
pub enum SplitPlan {
    /// Not at all.
    Whole(Path),
    /// So, with the backends' names by slot.
    Pair(Pairing, Vec<Arc<str>>),
    /// Nobody can do this step.
    Nobody(Step),
    /// The coordinator does not answer.
    Unknown,
}

/// Says how a request would be split; sends nothing.
pub async fn explain_split(worker: &Worker, call: &Call, found: Option<&Found>) -> SplitPlan {
    let splitting = match (way(call, worker), &worker.gateway.split) {
        (Way::Split, Some(splitting)) => splitting,
        _ => return SplitPlan::Whole(Path::Unified),
    };
    let ask = ExplainPair(ReservePair {
        route: super::route(call, found, None, &[]),
        tokens: tokens_of(call, found),
    });
    let address = splitting.coordinator.address.load();
    let Some(address) = address.as_ref() else {
        return SplitPlan::Unknown;
    };
    match tokio::time::timeout(COORDINATOR_DEADLINE, address.send(ask)).await {
        Ok(Ok(Ok((pairing, names)))) => SplitPlan::Pair(pairing, names),
        Ok(Ok(Err(unserved))) => SplitPlan::Nobody(unserved.step),
        _ => SplitPlan::Unknown,
    }
}

/// Tokens of the prompt, as well as is known.
fn tokens_of(call: &Call, found: Option<&Found>) -> u64 {
    match found {
        Some(found) => found.known.tokens(),
        None => lookup::tokens_by_text(call),
    }
}

/// One request on its way.
struct Drive<'a> {
    call: &'a Call,
    splitting: &'a Splitting,
    worker: &'a Rc<Worker>,
    found: Option<&'a Found>,
    hand_off: HandOff,
    deadline: Instant,
    /// Those who have failed it.
    tried: Vec<BackendId>,
    /// Those who are at work on it: prefill, and who answers.
    pair: (Option<BackendId>, Option<BackendId>),
    /// Only unified workers are asked from now on.
    whole: bool,
    failure: Option<Failed>,
    calls: u32,
}

impl Drive<'_> {
    /// Workers for it.
    async fn reserve(&self, tokens: u64) -> Result<Reservation, Refusal> {
        if self.whole {
            return self.unified().await;
        }
        let ask = ReservePair {
            route: self.route(None),
            tokens,
        };
        let address = self.splitting.coordinator.address.load();
        let answer = match address.as_ref() {
            Some(address) => tokio::time::timeout(COORDINATOR_DEADLINE, address.send(ask))
                .await
                .ok(),
            None => None,
        };
        match answer.and_then(Result::ok) {
            Some(Ok(reserved)) => {
                self.count_missing(&reserved);
                Ok(Reservation::of(reserved))
            }
            Some(Err(Unserved {
                why: NoBackend::NoneServing,
                step,
            })) => Err(Refusal::NoWorker(step, self.call.model.to_string())),
            Some(Err(Unserved { why, .. })) => {
                Err(Refusal::NoBackend(why, self.call.model.to_string()))
            }
            None if self.splitting.fallback => {
                warn!(
                    "the coordinator of split serving does not answer, a unified worker stands in"
                );
                count_fallback(Step::Prefill, "no_coordinator");
                self.unified().await
            }
            None => Err(Refusal::NoCoordinator),
        }
    }

    /// A unified worker, by this thread's own router.
    async fn unified(&self) -> Result<Reservation, Refusal> {
        let placed = super::place(self.worker, self.route(Some(Role::Unified))).await;
        placed.map(Reservation::unified)
    }

    fn route(&self, role: Option<Role>) -> Route {
        super::route(self.call, self.found, role, &self.tried)
    }

    fn count_missing(&self, reserved: &Reserved) {
        let Some((step, suspended)) = reserved.missing else {
            return;
        };
        match &self.failure {
            // nobody is left of those who could have done better
            Some(failed) => self.count_fallback(failed),
            None if suspended => count_fallback(step, "suspended"),
            None => count_fallback(step, "no_worker"),
        }
    }

    fn count_fallback(&self, Failed { step, setback }: &Failed) {
        let reason = if setback.is_silence() {
            "timeout"
        } else {
            "failed"
        };
        warn!(
            step = step.as_str(),
            reason,
            request_id = &*self.call.request_id,
            "a step of a split request failed, a unified worker stands in"
        );
        count_fallback(*step, reason);
    }

    fn note(&mut self, reserved: &Reservation, report: &mut Report) {
        report.prefill_backend = None;
        if let Some(prefill) = &reserved.prefill {
            note(self.worker, prefill, report);
            report.attempts -= 1; // counts answers
            let decision = report.decision;
            let overlap = report.overlap;
            note(self.worker, &reserved.worker, report);
            (report.decision, report.overlap) = (decision, overlap);
            // what decode counts as cached came from prefill: it says nothing about its own cache
            report.prediction = None;
            report.prefill_backend = Some(prefill.in_flight.backend().spec.name.clone());
        } else {
            note(self.worker, &reserved.worker, report);
        }
        let id = |placed: &Placement| placed.in_flight.backend().id;
        self.pair = (
            reserved.prefill.as_ref().map(id),
            Some(id(&reserved.worker)),
        );
    }

    async fn attempt(&self, reserved: Reservation) -> Result<Opened, Failed> {
        match reserved.prefill {
            Some(prefill) => {
                let lease = reserved.lease.expect("a pair is leased");
                self.hand_over((prefill, reserved.worker), lease).await
            }
            None => {
                let step = match reserved.path {
                    Path::FastDecode | Path::PrefillThenDecode => Step::Decode,
                    Path::Unified | Path::Fallback => Step::Unified,
                };
                let mut sending = Sending::whole(self.call, self.worker);
                sending.first_byte.0 = sending.first_byte.0.min(self.deadline);
                if step == Step::Decode {
                    sending.leg = Some("decode");
                    let (limit, silence) = self.decode_within();
                    sending.first_byte = ((Instant::now() + limit).min(self.deadline), limit);
                    sending.silence = silence;
                }
                let dispatch = self.dispatch(&reserved.worker);
                let opened =
                    attempt::run(sending, self.worker.clone(), (reserved.worker, dispatch)).await;
                let mut opened = opened.map_err(|setback| Failed { step, setback })?;
                if let (Opened::Stream(parts), Some(lease)) = (&mut opened, reserved.lease) {
                    parts.attempt.hold(lease);
                }
                Ok(opened)
            }
        }
    }

    async fn hand_over(
        &self,
        (prefill, decode): (Placement, Placement),
        lease: Lease,
    ) -> Result<Opened, Failed> {
        let (splitting, worker) = (self.splitting, self.worker);
        let name = |of: &Placement| of.in_flight.backend().spec.name.clone();
        let seats = (
            splitting.seats.get(&name(&prefill)),
            splitting.seats.get(&name(&decode)),
        );
        let (Some(seat), Some(other)) = seats else {
            let setback = Setback::lacking(&name(&prefill), "its seat in split serving");
            return Err(Failed {
                step: Step::Prefill,
                setback,
            });
        };
        let connector = connector(seat, other);
        let peer = hand_over::peer(splitting, worker, &prefill).await;
        let prefill_by = Instant::now() + splitting.prefill_timeout;
        let goes_on = connector.pins();
        let decoding = leaving::Decoding::default();
        let dispatched = self.dispatch(&prefill);
        let stored = (seat.connector == ConnectorKind::SharedStorage)
            .then(|| Stored::new(self.found?, &prefill))
            .flatten()
            .filter(|_| worker.gateway.settings.kv_cache_index.storage_offloading);
        let backend = name(&prefill);
        let work = hand_over::run(HandOver {
            worker: worker.clone(),
            route: self.call.route,
            headers: self.call.headers.clone(),
            body: self.call.body.clone(),
            request_id: self.call.request_id.clone(),
            connector: connector.into(),
            decode: Side {
                dispatch: self.dispatch(&decode),
                placement: decode,
                peer: other.peer.clone(),
            },
            prefill: Side {
                placement: prefill,
                dispatch: dispatched,
                peer: peer.unwrap_or_default(),
            },
            stored,
            lease,
            prefill_by: (prefill_by.min(self.deadline), splitting.prefill_timeout),
            decode_within: self.decode_within(),
            deadline: self.deadline,
            decoding: decoding.clone(),
        });
        let ended = OnLeave::new(Box::pin(work), goes_on.then_some(decoding)).await;
        if ended.is_err() {
            splitting.engine_ids.forget(&backend);
        }
        ended
    }

    /// A streamed answer begins once the KV is there; one that is not streamed only when all of it is made.
    fn decode_within(&self) -> (Duration, Outcome) {
        match self.call.wants_stream {
            true => (self.splitting.transfer_timeout, Outcome::Cancelled),
            false => (first_byte_limit(self.call, self.worker), Outcome::Failure),
        }
    }

    fn dispatch(&self, placement: &Placement) -> Option<Dispatch> {
        Dispatch::new(
            self.found?,
            placement.in_flight.backend(),
            placement.reach.as_ref(),
        )
    }

    /// What happened, for the hand-off's next step. Remembers it for the client.
    fn failed(&mut self, failed: Failed) -> Event {
        let (step, setback) = (failed.step, &failed.setback);
        let event = if setback.is_refusal() {
            Event::Refused
        } else if Instant::now() >= self.deadline {
            Event::OutOfTime
        } else {
            // prefill may be at work on it still; a transfer that hangs may not hang elsewhere
            let hangs = step == Step::Decode && setback.is_silence() && self.call.wants_stream;
            let again = setback.why.is_retryable() || hangs;
            let more = self.hand_off.legs() < self.calls * LEGS_PER_CALL;
            let again = again && more && may_retry(self.worker, setback);
            Event::Failed { step, again }
        };
        self.tried.extend(match step {
            Step::Prefill => self.pair.0,
            Step::Decode | Step::Unified => self.pair.1,
        });
        self.failure = Some(failed);
        event
    }

    fn fall_back(&mut self) {
        if let Some(failed) = &self.failure {
            self.count_fallback(failed);
        }
        self.whole = true;
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
        Answer::GivenUp(if theirs {
            setback.settled()
        } else {
            setback.of_step(step)
        })
    }
}

/// A call is a hand-off of two legs.
const LEGS_PER_CALL: u32 = 2;

fn count_fallback(step: Step, reason: &'static str) {
    counter!(names::SPLIT_FALLBACKS, "step" => step.as_str(), "reason" => reason).increment(1);
}

/// Workers that wait for the request.
struct Reservation {
    path: Path,
    prefill: Option<Placement>,
    worker: Placement,
    lease: Option<Lease>,
}

impl Reservation {
    fn of(reserved: Reserved) -> Self {
        Reservation {
            path: reserved.path,
            prefill: reserved.prefill,
            worker: reserved.worker,
            lease: Some(reserved.lease),
        }
    }

    fn unified(worker: Placement) -> Self {
        Reservation {
            path: Path::Fallback,
            prefill: None,
            worker,
            lease: None,
        }
    }
}
