//! One hand-off: the prefill leg and the decode leg, one after the other or at once, up to the moment where the
//! answer can be trusted enough to give the client a head. Owns all that it needs.

use super::leaving::Decoding;
use super::legs::by;
use super::prefill::{self, Computed, PrefillLeg};
use crate::gateway::Worker;
use crate::http::routes::ApiRoute;
use crate::kv::{Dispatch, Stored};
use crate::proxy::answer::{CachedElsewhere, Opened};
use crate::proxy::attempt::{self, Sending};
use crate::proxy::patience::Silence;
use crate::proxy::setback::Setback;
use crate::spans::Trace;
use crate::telemetry::names;
use actors::disagg_coordinator::Lease;
use actors::placement::Placement;
use bytes::Bytes;
use futures_util::FutureExt;
use hyper::HeaderMap;
use hyper::header::HeaderValue;
use metrics::histogram;
use routing::disagg::Step;
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use tracing::{Instrument, info_span};
use wire::handoff::{Connector, Lack, Leg, Order, Peer, Prefilled, Split};
use wire::splice::{AnswerEdit, Cached};

/// A worker of the pair.
pub struct Side {
    /// Counts the leg.
    pub placement: Placement,
    /// Tells the index of it.
    pub dispatch: Option<Dispatch>,
    /// How the other engine reaches it.
    pub peer: Peer,
}

/// All that a hand-off needs.
pub struct HandOver {
    /// Whose thread this is.
    pub worker: Rc<Worker>,
    /// The path family.
    pub route: ApiRoute,
    /// The client's, for both legs.
    pub headers: HeaderMap,
    /// The client's, for both legs.
    pub body: Bytes,
    /// The trace that both legs are recorded in.
    pub trace: Option<Trace>,
    /// The client's request id.
    pub request_id: Arc<str>,
    /// How it is handed over.
    pub connector: Arc<dyn Connector>,
    /// Who computes the prompt.
    pub prefill: Side,
    /// Who answers.
    pub decode: Side,
    /// Tells the index that storage has the prompt, once it is computed.
    pub stored: Option<Stored>,
    /// Holds the pair.
    pub lease: Lease,
    /// Whether prefill writes to storage before it answers.
    pub writes_storage: bool,
    /// How long prefill may take to answer, and what it says if it does not.
    pub prefill_within: (Duration, Silence),
    /// The same of decode, for its first byte.
    pub decode_within: (Duration, Silence),
    /// Nothing may take longer.
    pub deadline: Instant,
    /// Set when decode is sent.
    pub decoding: Decoding,
}

/// Why there is no answer.
pub struct Failed {
    /// Of which step.
    pub step: Step,
    /// What happened.
    pub setback: Setback,
}

/// Hands over.
pub async fn run(of: HandOver) -> Result<Opened, Failed> {
    let begun = Instant::now();
    let transfer_id = fastrand::u64(..) >> 1; // below 2^63, as SGLang wants it
    // engines take a request id for theirs: it must be of no other request
    let request_id = format!("{}-{transfer_id:016x}", of.request_id);
    let names = [&of.prefill, &of.decode].map(|side| {
        let backend = side.placement.in_flight.backend();
        backend.spec.name.clone()
    });
    let split = Split {
        body: &of.body,
        request_id: &request_id,
        transfer_id,
        prefill: &of.prefill.peer,
        decode: &of.decode.peer,
    };
    let lacks = |step, Lack(what): Lack| Failed {
        step,
        setback: Setback::lacking(&names[0], what),
    };
    let leg = of.connector.prefill(&split);
    let leg = leg.map_err(|lack| lacks(Step::Prefill, lack))?;
    let sending = |leg: Leg, name, (first_byte, silence)| Sending {
        leg: Some(name),
        route: of.route,
        headers: with_id(&of.headers, &leg.request_id).into(),
        body: leg.body,
        first_byte,
        silence,
        trace: of.trace.clone(),
    };
    let span = info_span!("prefill_leg", request_id = %request_id, backend = %names[0], connector = of.connector.name());
    let prefill = prefill::run(PrefillLeg {
        worker: of.worker.clone(),
        sending: sending(leg, "prefill", by(of.prefill_within, of.deadline)),
        placement: of.prefill.placement,
        dispatch: of.prefill.dispatch,
        stored: of.stored,
        connector: of.connector.clone(),
    });
    let mut prefill = prefill.instrument(span).boxed_local();
    let mut lease = of.lease;
    let cached: CachedElsewhere = Rc::new(Cell::new(Cached::Unknown));
    let together = of.connector.order() == Order::Together;
    let computed = if together {
        None
    } else {
        let computed = prefill.as_mut().await;
        Some(computed.map_err(|setback| {
            let failed = Failed {
                step: Step::Prefill,
                setback,
            };
            learn(&lease, &failed, of.writes_storage);
            failed
        })?)
    };
    let prefilled = computed
        .as_ref()
        .map_or(Prefilled::NotAwaited, Computed::prefilled);
    let leg = of.connector.decode(&split, prefilled);
    let leg = leg.map_err(|lack| lacks(Step::Decode, lack))?;
    if let Some(computed) = &computed {
        cached.set(Cached::of(computed.cached));
    }
    lease.decodes();
    of.decoding.set(true);
    let sent = Instant::now();
    let span = info_span!("decode_leg", request_id = %request_id, backend = %names[1], connector = of.connector.name());
    let placed = (of.decode.placement, of.decode.dispatch);
    let leg = sending(leg, "decode", by(of.decode_within, of.deadline));
    let decode = attempt::run(leg, of.worker.clone(), placed);
    let mut decode = decode.instrument(span).boxed_local();
    let opened = if together {
        let (opened, unfinished) = both(prefill, &mut decode, &cached).await;
        if let (Ok(_), Some(prefill)) = (&opened, unfinished) {
            finish(prefill, cached.clone());
        }
        opened
    } else {
        decode.await.map_err(|setback| Failed {
            step: Step::Decode,
            setback,
        })
    };
    match opened {
        Ok(opened) => {
            lease.handed_over(true);
            if matches!(opened, Opened::Stream(_)) {
                let took = sent.elapsed().as_secs_f64();
                histogram!(names::SPLIT_LEG, "leg" => "decode").record(took);
            }
            Ok(told(opened, lease, (begun, cached)))
        }
        Err(failed) => {
            learn(&lease, &failed, of.writes_storage);
            Err(failed)
        }
    }
}

type Prefilling = futures_util::future::LocalBoxFuture<'static, Result<Computed, Setback>>;
type Decoded = futures_util::future::LocalBoxFuture<'static, Result<Opened, Setback>>;

/// Waits for decode's beginning, and for prefill's failure. Answers prefill where it is still under way.
async fn both(
    mut prefill: Prefilling,
    decode: &mut Decoded,
    cached: &CachedElsewhere,
) -> (Result<Opened, Failed>, Option<Prefilling>) {
    let of = |step| move |setback| Failed { step, setback };
    tokio::select! {
        biased;
        computed = &mut prefill => match computed {
            Err(setback) => (Err(of(Step::Prefill)(setback)), None),
            Ok(computed) => {
                cached.set(Cached::of(computed.cached));
                (decode.await.map_err(of(Step::Decode)), None)
            }
        },
        opened = &mut *decode => (opened.map_err(of(Step::Decode)), Some(prefill)),
    }
}

/// Once decode answers, prefill has nothing left to do but to say so; one that does not is stopped after this.
const PREFILL_ENDS_WITHIN: Duration = Duration::from_secs(5);

/// Prefill's answer is read to its end: it may come while the client has the first tokens already.
fn finish(prefill: Prefilling, cached: CachedElsewhere) {
    actix_web::rt::spawn(async move {
        let ended = tokio::time::timeout(PREFILL_ENDS_WITHIN, prefill).await;
        if let Ok(Ok(computed)) = ended {
            cached.set(Cached::of(computed.cached));
        }
    });
}

/// Tells whether the failure says something about the way between the workers: decode waits for what comes that way,
/// and prefill, too, where it writes to storage.
fn learn(lease: &Lease, Failed { step, setback }: &Failed, writes_storage: bool) {
    let is_the_way = match step {
        Step::Prefill => writes_storage && setback.is_silence(),
        Step::Decode => setback.is_silence() || setback.is_engines_failure(),
        Step::Unified => false,
    };
    if is_the_way {
        lease.handed_over(false);
    }
}

fn with_id(headers: &HeaderMap, id: &str) -> HeaderMap {
    let mut headers = headers.clone();
    if let Ok(id) = HeaderValue::from_str(id) {
        headers.insert("x-request-id", id);
    }
    headers
}

/// The answer says of cached tokens what prefill has said; the pair is leased until it has ended.
fn told(opened: Opened, lease: Lease, (begun, cached): (Instant, CachedElsewhere)) -> Opened {
    match opened {
        Opened::Whole {
            status,
            headers,
            body,
            mut usage,
            gave_up,
        } => {
            let edit = AnswerEdit {
                cached: Some(cached.get()),
                ..AnswerEdit::default()
            };
            if let Some(usage) = &mut usage {
                usage.put_cached(cached.get());
            }
            Opened::Whole {
                status,
                headers,
                body: edit.json(&body),
                usage,
                gave_up,
            }
        }
        Opened::Stream(mut parts) => {
            parts.begun = begun;
            parts.cached = Some(cached);
            parts.attempt.hold(lease);
            Opened::Stream(parts)
        }
    }
}
