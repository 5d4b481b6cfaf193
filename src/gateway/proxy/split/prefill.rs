//! The prefill leg: sent, waited for to its end, and judged. What it says is for the decode leg; its text is
//! for nobody.

use crate::gateway::Worker;
use crate::http::error::ErrorKind;
use crate::kv::{Dispatch, Stored};
use crate::proxy::attempt::{Attempt, HELD_ANSWER_MAX, Sending, first_event, send};
use crate::proxy::patience::{Collected, End, Interrupted, Patience};
use crate::proxy::setback::Setback;
use crate::proxy::{headers, verdict};
use crate::telemetry::names;
use crate::telemetry::prediction::Prediction;
use crate::upstream::Reply;
use actors::backend::Outcome;
use actors::placement::Placement;
use bytes::Bytes;
use metrics::{counter, histogram};
use routing::retry::Setback as Why;
use std::rc::Rc;
use std::sync::Arc;
use wire::handoff::{Connector, Prefilled, transfer_params};
use wire::openai::Usage;
use wire::sse::data_of;

/// All that the leg needs, so that it can go on without the request.
pub struct PrefillLeg {
    /// Whose thread this is.
    pub worker: Rc<Worker>,
    /// What is sent.
    pub sending: Sending,
    /// Where to.
    pub placement: Placement,
    /// Tells the index of it.
    pub dispatch: Option<Dispatch>,
    /// Tells the index that storage has the prompt, once it is computed.
    pub stored: Option<Stored>,
    /// Reads what it answers.
    pub connector: Arc<dyn Connector>,
}

/// What prefill has answered.
#[derive(Debug, Default)]
pub struct Computed {
    /// Its answer.
    body: Bytes,
    /// Of the prompt, as it says.
    pub cached: Option<u64>,
}

impl Computed {
    /// What the decode leg needs of it.
    pub fn prefilled(&self) -> Prefilled<'_> {
        match transfer_params(&self.body) {
            Ok(Some(params)) => Prefilled::Params(params),
            _ => Prefilled::WithoutParams,
        }
    }
}

/// Runs the leg to its end.
pub async fn run(leg: PrefillLeg) -> Result<Computed, Setback> {
    let backend = leg.placement.in_flight.backend().clone();
    let prediction = leg.placement.reach.map(|reach| Prediction {
        reach,
        mode: leg.placement.mode,
        backend: backend.clone(),
    });
    let sent = send(leg.sending, &leg.worker, (leg.placement, leg.dispatch)).await;
    let (mut reply, mut attempt, patience) = sent?;
    let (until, limit) = patience.first_byte;
    let reading = async {
        match headers::is_event_stream(&reply.headers) {
            true => drain(&mut reply, &patience).await,
            false => whole(&mut reply, &patience).await,
        }
    };
    let read = tokio::time::timeout_at(until, reading).await;
    let read = read.unwrap_or_else(|_| {
        let silent = Interrupted::Silent(ErrorKind::FirstByteTimeout, limit);
        Err(Fault::Interrupted(silent))
    });
    let name = &*backend.spec.name;
    let judged = read.and_then(|body| judge(body, &*leg.connector));
    let computed = match judged {
        Ok(computed) => computed,
        Err(fault) => {
            return Err(fault.setback(attempt, &patience, (&reply, name)));
        }
    };
    let took = attempt.sent.elapsed();
    attempt.prompt_is_computed();
    attempt.in_flight().first_byte(Some(took));
    attempt.end(Outcome::Success);
    histogram!(names::SPLIT_LEG, "leg" => "prefill").record(took.as_secs_f64());
    if let (Some(prediction), Some(usage)) = (&prediction, &computed.1) {
        prediction.check(usage, &leg.worker);
    }
    if let Some(stored) = leg.stored {
        stored.tell();
    }
    Ok(computed.0)
}

/// Why an answer is none.
enum Fault {
    Interrupted(Interrupted),
    TooLong,
    NotJson,
    Error(Option<hyper::StatusCode>, Bytes),
    Params(&'static str),
}

impl Fault {
    fn setback(
        self,
        attempt: Attempt,
        patience: &Patience,
        (reply, name): (&Reply, &str),
    ) -> Setback {
        let unusable = |why, what: &str| Setback::unusable(why, ErrorKind::BadBody, name, what);
        match self {
            Fault::Interrupted(interrupted) => {
                attempt.end_interrupted(&interrupted, patience);
                Setback::interrupted(interrupted, Why::Reset, name)
            }
            Fault::Error(code, body) => {
                Setback::of_success((code, &reply.headers), body, attempt, name)
            }
            Fault::TooLong => {
                attempt.end(Outcome::Failure);
                unusable(Why::Settled, "answered the prefill leg at great length")
            }
            Fault::NotJson => {
                attempt.end(Outcome::Failure);
                unusable(
                    Why::Settled,
                    "answered the prefill leg with a body that is not JSON",
                )
            }
            Fault::Params(what) => {
                counter!(names::SPLIT_PARAMS_FAULTS).increment(1);
                attempt.end(Outcome::Failure);
                unusable(
                    Why::BadGateway,
                    &format!("answered the prefill leg with {what}"),
                )
            }
        }
    }
}

async fn whole(reply: &mut Reply, patience: &Patience) -> Result<Bytes, Fault> {
    let Collected { bytes, end } = patience.collect(reply, HELD_ANSWER_MAX).await;
    match end {
        End::Whole => Ok(bytes),
        End::More => Err(Fault::TooLong),
        End::Interrupted(by) => Err(Fault::Interrupted(by)),
    }
}

/// A stream, of an engine that was sent what the client sent: only whether it begins well matters.
async fn drain(reply: &mut Reply, patience: &Patience) -> Result<Bytes, Fault> {
    let first = first_event(reply, patience).await;
    let (bytes, end) = match first {
        Ok(first) => first,
        Err(Some(by)) => return Err(Fault::Interrupted(by)),
        Err(None) => return Err(Fault::NotJson),
    };
    if let verdict::Said::Error(code) = verdict::of_event(&bytes[..end]) {
        let json =
            data_of(&bytes[..end]).map_or_else(Bytes::new, |data| Bytes::copy_from_slice(&data));
        return Err(Fault::Error(code, json));
    }
    while patience
        .first(reply)
        .await
        .map_err(Fault::Interrupted)?
        .is_some()
    {}
    Ok(Bytes::from_static(b"{}"))
}

fn judge(body: Bytes, connector: &dyn Connector) -> Result<(Computed, Option<Usage>), Fault> {
    let usage = match verdict::of_body(&body, true) {
        verdict::Body::Good(usage) => usage,
        verdict::Body::NotJson => return Err(Fault::NotJson),
        verdict::Body::Error(code) => return Err(Fault::Error(code, body)),
    };
    if transfer_params(&body).is_err() {
        return Err(Fault::Params("kv_transfer_params that are no object"));
    }
    let computed = Computed {
        body,
        cached: usage.and_then(|usage| usage.cached_tokens()),
    };
    match connector.fault_of(computed.prefilled()) {
        Some(what) => Err(Fault::Params(what)),
        None => Ok((computed, usage)),
    }
}
