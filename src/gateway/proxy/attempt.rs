//! One attempt at one backend, up to the moment where its answer can be trusted enough to give
//! the client a head: the whole answer if it is short, the first event if it is a stream.

use super::answer::{Opened, StreamParts};
use super::patience::{Collected, End, Interrupted, Patience, Silence};
use super::setback::Setback;
use super::{Call, headers, verdict};
use crate::gateway::Worker;
use crate::http::error::ErrorKind;
use crate::http::routes::ApiRoute;
use crate::kv::Dispatch;
use crate::spans::{Kind, Span, Trace};
use crate::telemetry::handles::BackendHandles;
use crate::telemetry::names;
use crate::upstream::{Outgoing, Reply, SendError, bearer};
use actors::backend::{Backend, BackendSpec, InFlight, Outcome};
use actors::disagg_coordinator::Lease;
use actors::placement::Placement;
use bytes::{Bytes, BytesMut};
use hyper::header::{AUTHORIZATION, HeaderValue};
use hyper::{HeaderMap, Method};
use metrics::counter;
use routing::retry::Setback as Why;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use wire::sse::{Boundaries, data_of};

/// Answers up to this are held until they are whole, and checked; longer ones are passed on.
pub const HELD_ANSWER_MAX: usize = 1 << 20;
/// The first event of a stream is waited for up to this.
const FIRST_EVENT_MAX: usize = 64 << 10;

/// Counts an attempt, and tells the breaker how it ended; cancelled unless said otherwise.
pub struct Attempt {
    in_flight: Option<InFlight>,
    handles: Rc<BackendHandles>,
    outcome: Outcome,
    dispatch: Option<Dispatch>,
    lease: Option<Lease>,
    leg: Option<&'static str>,
    span: Option<Span>,
    /// When it began.
    pub sent: Instant,
}

impl Attempt {
    fn new(
        in_flight: InFlight,
        handles: Rc<BackendHandles>,
        (dispatch, leg): (Option<Dispatch>, Option<&'static str>),
        span: Option<Span>,
    ) -> Self {
        Attempt {
            dispatch,
            leg,
            span,
            lease: None,
            in_flight: Some(in_flight),
            handles,
            outcome: Outcome::Cancelled,
            sent: Instant::now(),
        }
    }

    /// The count in the directory.
    pub fn in_flight(&mut self) -> &mut InFlight {
        self.in_flight.as_mut().expect(ONLY_DROP)
    }

    /// The backend.
    pub fn backend(&self) -> &Backend {
        self.in_flight.as_ref().expect(ONLY_DROP).backend()
    }

    /// The first byte came: the prompt has been computed.
    pub fn prompt_is_computed(&mut self) {
        if let Some(dispatch) = &mut self.dispatch {
            dispatch.served();
        }
    }

    /// It holds a pair of workers until it has ended.
    pub fn hold(&mut self, lease: Lease) {
        self.lease = Some(lease);
    }

    /// The backend's metrics.
    pub fn handles(&self) -> &BackendHandles {
        &self.handles
    }

    /// Says how it ended.
    pub fn end(mut self, outcome: Outcome) {
        self.outcome = outcome;
    }

    /// Its first byte did not come in time.
    pub fn end_in_silence(self, silence: Silence) {
        let tries = self.in_flight.as_ref().is_some_and(InFlight::is_probe);
        match silence {
            Silence::Fails => self.end(Outcome::Failure),
            Silence::Ours => self.end(Outcome::Cancelled),
            Silence::Stalls => {
                self.backend().live.stalled();
                // one that is tried must show that it works
                self.end(match tries {
                    true => Outcome::Failure,
                    false => Outcome::Cancelled,
                });
            }
        }
    }

    /// Its answer could not be read on.
    pub fn end_interrupted(self, interrupted: &Interrupted, patience: &Patience) {
        match interrupted {
            Interrupted::Silent(ErrorKind::FirstByteTimeout, _) => {
                self.end_in_silence(patience.silence)
            }
            Interrupted::Silent(..) | Interrupted::Broken(_) => self.end(Outcome::Failure),
        }
    }
}

const ONLY_DROP: &str = "only drop takes it";

impl Drop for Attempt {
    fn drop(&mut self) {
        self.handles.count(self.outcome);
        if let Some(span) = &mut self.span {
            span.word("tidegate.outcome", self.outcome.as_str());
            if self.outcome == Outcome::Failure {
                span.fail();
            }
        }
        if let Some(leg) = self.leg {
            let outcome = self.outcome.as_str();
            counter!(names::SPLIT_LEGS, "leg" => leg, "outcome" => outcome).increment(1);
        }
        if let Some(in_flight) = self.in_flight.take() {
            in_flight.finish(self.outcome);
        }
    }
}

/// What one backend is sent, and how long its first byte is waited for.
pub struct Sending {
    /// The path family.
    pub route: ApiRoute,
    /// All headers but the backend's own.
    pub headers: Rc<HeaderMap>,
    /// The body.
    pub body: Bytes,
    /// When the first byte must have come, and the limit that this follows from.
    pub first_byte: (Instant, Duration),
    /// What it says when it does not.
    pub silence: Silence,
    /// Which leg of a split request it is; a label.
    pub leg: Option<&'static str>,
    /// The trace that it is recorded in.
    pub trace: Option<Trace>,
}

impl Sending {
    /// The request as the client meant it.
    pub fn whole(call: &Call, worker: &Worker) -> Self {
        let limit = first_byte_limit(call, worker);
        Sending {
            route: call.route,
            headers: call.headers.clone(),
            body: call.body.clone(),
            first_byte: (Instant::now() + limit, limit),
            silence: Silence::Fails,
            leg: None,
            trace: call.trace.clone(),
        }
    }
}

/// How long the first byte of an answer is waited for.
pub fn first_byte_limit(call: &Call, worker: &Worker) -> Duration {
    let settings = worker.gateway.settings.load();
    let upstream = &settings.upstream;
    match call.wants_stream {
        true => upstream.first_byte_timeout,
        false => upstream.first_byte_timeout_non_streaming,
    }
}

/// Sends to a backend, and answers what it answers when that is a success.
pub async fn send(
    sending: Sending,
    worker: &Rc<Worker>,
    (placement, dispatch): (Placement, Option<Dispatch>),
) -> Result<(Reply, Attempt, Patience), Setback> {
    let backend = placement.in_flight.backend().clone();
    let name = &*backend.spec.name;
    let rank = rank(&placement);
    let span = span(&sending, &backend.spec.name);
    let parent = span.as_ref().map(Span::header);
    let attempt = Attempt::new(
        placement.in_flight,
        worker.handles.backend(&backend),
        (dispatch, sending.leg),
        span,
    );
    let patience = Patience {
        first_byte: sending.first_byte,
        idle: worker.gateway.settings.load().upstream.idle_timeout,
        silence: sending.silence,
    };
    let parent = parent.and_then(|parent| HeaderValue::from_str(&parent).ok());
    let outgoing = || outgoing(&sending, &backend.spec, (rank, parent.clone()));
    let counts = &backend.live.counters.connections;
    let url = &backend.spec.url;
    let waited = worker.client.send_made(url, outgoing, counts);
    let reply = match tokio::time::timeout_at(patience.first_byte.0, waited).await {
        Ok(Ok(reply)) => reply,
        Ok(Err(error)) => {
            // what went wrong on this side says nothing about the backend
            let ours = matches!(error, SendError::Local(_));
            attempt.end(if ours {
                Outcome::Cancelled
            } else {
                Outcome::Failure
            });
            return Err(Setback::not_sent(&error, name));
        }
        Err(_) => {
            attempt.end_in_silence(patience.silence);
            let limit = patience.first_byte.1;
            return Err(Setback::silent(ErrorKind::FirstByteTimeout, limit, name));
        }
    };
    if !reply.status.is_success() {
        // boxed: failures make no room in the future of all
        return Err(Box::pin(Setback::of_status(reply, attempt, &patience, name)).await);
    }
    Ok((reply, attempt, patience))
}

/// Of a call to this backend.
fn span(sending: &Sending, backend: &Arc<str>) -> Option<Span> {
    let name = match sending.leg {
        Some("prefill") => "prefill_leg",
        Some(_) => "decode_leg",
        None => "upstream_call",
    };
    let mut span = sending.trace.as_ref()?.span(name, Kind::Client);
    span.text("tidegate.backend", backend);
    Some(span)
}

/// Sends the request and reads as far as described above.
pub async fn run(
    sending: Sending,
    worker: Rc<Worker>,
    placed: (Placement, Option<Dispatch>),
) -> Result<Opened, Setback> {
    let route = sending.route;
    let (reply, attempt, patience) = send(sending, &worker, placed).await?;
    if headers::is_event_stream(&reply.headers) {
        open_stream(reply, attempt, &patience, &worker).await
    } else {
        read_whole((reply, route), attempt, &patience, &worker).await
    }
}

/// The data-parallel rank that holds the beginning of the prompt, where one does.
fn rank(placement: &Placement) -> Option<u32> {
    let reach = placement.reach.filter(|reach| reach.overlap.blocks > 0)?;
    reach.memory?.rank
}

fn outgoing(
    sending: &Sending,
    spec: &BackendSpec,
    (rank, parent): (Option<u32>, Option<HeaderValue>),
) -> Outgoing {
    let mut headers = HeaderMap::clone(&sending.headers);
    if let Some(rank) = rank {
        headers.insert(headers::RANK, HeaderValue::from(rank));
    }
    if let Some(key) = bearer(spec) {
        headers.insert(AUTHORIZATION, key);
    }
    if let Some(parent) = parent {
        headers.insert("traceparent", parent);
    }
    Outgoing {
        method: Method::POST,
        path: spec.url.path(sending.route.path()),
        headers,
        body: sending.body.clone(),
    }
}

/// A stream: waits for its first event, so that an engine that fails at once can be told from
/// one that serves.
async fn open_stream(
    mut reply: Reply,
    mut attempt: Attempt,
    patience: &Patience,
    worker: &Rc<Worker>,
) -> Result<Opened, Setback> {
    let (first, event_end) = match first_event(&mut reply, patience).await {
        Ok(found) => found,
        Err(interrupted) => {
            let name = attempt.backend().spec.name.clone();
            match &interrupted {
                Some(interrupted) => attempt.end_interrupted(interrupted, patience),
                None => attempt.end(Outcome::Failure),
            }
            return Err(match interrupted {
                Some(interrupted) => Setback::interrupted(interrupted, Why::Reset, &name),
                None => {
                    let what = "ended the stream before its first event";
                    Setback::unusable(Why::Reset, ErrorKind::StreamCut, &name, what)
                }
            });
        }
    };
    let event = &first[..event_end];
    if let verdict::Said::Error(code) = verdict::of_event(event) {
        let name = attempt.backend().spec.name.clone();
        let json = data_of(event).map_or_else(Bytes::new, |data| Bytes::copy_from_slice(&data));
        return Err(Setback::of_success(
            (code, &reply.headers),
            json,
            attempt,
            &name,
        ));
    }
    attempt.prompt_is_computed();
    attempt.backend().live.record_progress();
    Ok(Opened::Stream(Box::new(StreamParts {
        status: reply.status,
        headers: reply.headers,
        body: reply.body,
        is_events: true,
        first,
        begun: attempt.sent,
        cached: None,
        attempt,
        worker: worker.clone(),
    })))
}

/// The beginning of a stream up to at least the end of its first event, and where that is.
pub async fn first_event(
    reply: &mut Reply,
    patience: &Patience,
) -> Result<(Bytes, usize), Option<Interrupted>> {
    let mut first = BytesMut::new();
    let mut boundaries = Boundaries::default();
    loop {
        let Some(chunk) = patience.first(reply).await.map_err(Some)? else {
            return Err(None);
        };
        let before = first.len();
        first.extend_from_slice(&chunk);
        if let Some(end) = boundaries.next_end(&chunk) {
            return Ok((first.freeze(), before + end));
        }
        if first.len() > FIRST_EVENT_MAX {
            let all = first.len();
            return Ok((first.freeze(), all));
        }
    }
}

/// A JSON answer: held until it is whole, unless it is very long.
async fn read_whole(
    (mut reply, route): (Reply, ApiRoute),
    mut attempt: Attempt,
    patience: &Patience,
    worker: &Rc<Worker>,
) -> Result<Opened, Setback> {
    let name = attempt.backend().spec.name.clone();
    let Collected { bytes: body, end } = patience.collect(&mut reply, HELD_ANSWER_MAX).await;
    match end {
        End::Interrupted(interrupted) => {
            attempt.end_interrupted(&interrupted, patience);
            return Err(Setback::interrupted(interrupted, Why::Settled, &name));
        }
        End::More => {
            attempt.in_flight().first_byte(None);
            attempt.prompt_is_computed();
            return Ok(Opened::Stream(Box::new(StreamParts {
                status: reply.status,
                headers: reply.headers,
                body: reply.body,
                is_events: false,
                first: body,
                begun: attempt.sent,
                cached: None,
                attempt,
                worker: worker.clone(),
            })));
        }
        End::Whole => {}
    }
    match verdict::of_body(&body, route.answers_openai()) {
        verdict::Body::Good(usage) => {
            attempt.prompt_is_computed();
            let gave_up = route.is_openai_stream() && verdict::gave_up(&body);
            attempt.end(match gave_up {
                false => Outcome::Success,
                true => Outcome::Failure,
            });
            Ok(Opened::Whole {
                gave_up,
                status: reply.status,
                headers: reply.headers,
                body,
                usage,
            })
        }
        verdict::Body::NotJson => {
            attempt.end(Outcome::Failure);
            let what = "answered 200 with a body that is not JSON";
            Err(Setback::unusable(
                Why::Settled,
                ErrorKind::BadBody,
                &name,
                what,
            ))
        }
        verdict::Body::Error(code) => {
            // the whole answer was made: it is not asked for again
            let setback = Setback::of_success((code, &reply.headers), body, attempt, &name);
            Err(setback.settled())
        }
    }
}
