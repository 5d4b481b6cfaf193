//! One attempt at one backend, up to the moment where its answer can be trusted enough to give
//! the client a head: the whole answer if it is short, the first event if it is a stream.

use super::answer::{Opened, StreamParts};
use super::patience::{Collected, End, Interrupted, Patience};
use super::setback::Setback;
use super::{Call, headers, verdict};
use crate::gateway::Worker;
use crate::http::error::ErrorKind;
use crate::kv::Dispatch;
use crate::telemetry::handles::BackendHandles;
use crate::telemetry::report::Report;
use crate::upstream::{Outgoing, Reply, SendError, bearer};
use actors::backend::{Backend, BackendSpec, InFlight, Outcome};
use actors::router::Placement;
use bytes::{Bytes, BytesMut};
use hyper::Method;
use hyper::header::{AUTHORIZATION, HeaderValue};
use routing::retry::Setback as Why;
use std::rc::Rc;
use tokio::time::Instant;
use wire::sse::{Boundaries, data_of};

/// Answers up to this are held until they are whole, and checked; longer ones are passed on.
const HELD_ANSWER_MAX: usize = 1 << 20;
/// The first event of a stream is waited for up to this.
const FIRST_EVENT_MAX: usize = 64 << 10;

/// Counts an attempt, and tells the breaker how it ended; cancelled unless said otherwise.
pub struct Attempt {
    in_flight: Option<InFlight>,
    handles: Rc<BackendHandles>,
    outcome: Outcome,
    dispatch: Option<Dispatch>,
    /// When it began.
    pub sent: Instant,
}

impl Attempt {
    fn new(in_flight: InFlight, handles: Rc<BackendHandles>, dispatch: Option<Dispatch>) -> Self {
        Attempt {
            dispatch,
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

    /// The backend's metrics.
    pub fn handles(&self) -> &BackendHandles {
        &self.handles
    }

    /// Says how it ended.
    pub fn end(mut self, outcome: Outcome) {
        self.outcome = outcome;
    }
}

const ONLY_DROP: &str = "only drop takes it";

impl Drop for Attempt {
    fn drop(&mut self) {
        self.handles.count(self.outcome);
        if let Some(in_flight) = self.in_flight.take() {
            in_flight.finish(self.outcome);
        }
    }
}

/// Sends the request and reads as far as described above.
pub async fn run(
    call: &Call,
    worker: &Rc<Worker>,
    (placement, dispatch): (Placement, Option<Dispatch>),
    report: &mut Report,
) -> Result<Opened, Setback> {
    let backend = placement.in_flight.backend().clone();
    let name = &*backend.spec.name;
    let rank = rank(&placement);
    let attempt = Attempt::new(
        placement.in_flight,
        worker.handles.backend(&backend),
        dispatch,
    );
    let upstream = &worker.gateway.settings.upstream;
    let first_byte = if call.wants_stream {
        upstream.first_byte_timeout
    } else {
        upstream.first_byte_timeout_non_streaming
    };
    let patience = Patience {
        first_byte: (attempt.sent + first_byte, first_byte),
        idle: upstream.idle_timeout,
    };
    let outgoing = outgoing(call, &backend.spec, rank);
    let counts = &backend.live.counters.connections;
    let sending = worker.client.send(&backend.spec.url, &outgoing, counts);
    let reply = match tokio::time::timeout_at(patience.first_byte.0, sending).await {
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
            attempt.end(Outcome::Failure);
            return Err(Setback::silent(
                ErrorKind::FirstByteTimeout,
                first_byte,
                name,
            ));
        }
    };
    drop(outgoing);
    let opened = if !reply.status.is_success() {
        Err(Setback::of_status(reply, attempt, &patience, name).await)
    } else if headers::is_event_stream(&reply.headers) {
        open_stream(reply, attempt, &patience, worker).await
    } else {
        read_whole((reply, call), attempt, &patience, worker).await
    };
    if opened.is_ok() {
        report.first_byte();
    }
    opened
}

/// The data-parallel rank that holds the beginning of the prompt, where one does.
fn rank(placement: &Placement) -> Option<u32> {
    let reach = placement.reach.filter(|reach| reach.overlap.blocks > 0)?;
    reach.memory?.rank
}

fn outgoing(call: &Call, spec: &BackendSpec, rank: Option<u32>) -> Outgoing {
    let mut headers = call.headers.clone();
    if let Some(rank) = rank {
        headers.insert(headers::RANK, HeaderValue::from(rank));
    }
    if let Some(key) = bearer(spec) {
        headers.insert(AUTHORIZATION, key);
    }
    Outgoing {
        method: Method::POST,
        path: spec.url.path(call.route.path()),
        headers,
        body: call.body.clone(),
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
            attempt.end(Outcome::Failure);
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
        attempt,
        worker: worker.clone(),
    })))
}

/// The beginning of a stream up to at least the end of its first event, and where that is.
async fn first_event(
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
    (mut reply, call): (Reply, &Call),
    mut attempt: Attempt,
    patience: &Patience,
    worker: &Rc<Worker>,
) -> Result<Opened, Setback> {
    let name = attempt.backend().spec.name.clone();
    let Collected { bytes: body, end } = patience.collect(&mut reply, HELD_ANSWER_MAX).await;
    match end {
        End::Interrupted(interrupted) => {
            attempt.end(Outcome::Failure);
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
                attempt,
                worker: worker.clone(),
            })));
        }
        End::Whole => {}
    }
    match verdict::of_body(&body, call.route.answers_openai()) {
        verdict::Body::Good(usage) => {
            attempt.prompt_is_computed();
            let gave_up = call.route.is_openai_stream() && verdict::gave_up(&body);
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
