//! One attempt at one backend, up to the moment where its answer can be trusted enough to give
//! the client a head: the whole answer if it is short, the first event if it is a stream.

use super::answer::{Opened, StreamParts};
use super::{Call, headers, refusal, verdict};
use crate::gateway::Worker;
use crate::http::error::{By, ErrorKind};
use crate::telemetry::handles::BackendHandles;
use crate::telemetry::report::Report;
use crate::upstream::{Outgoing, Reply, SendError, bearer};
use actix_web::HttpResponse;
use actors::backend::{InFlight, Outcome};
use actors::router::Placement;
use bytes::{Bytes, BytesMut};
use hyper::header::AUTHORIZATION;
use hyper::{HeaderMap, Method, StatusCode};
use routing::retry::Setback as Why;
use std::rc::Rc;
use std::time::Duration;
use tracing::{debug, warn};
use wire::sse::Boundaries;

/// Answers up to this are held until they are whole, and checked; longer ones are passed on.
const HELD_ANSWER_MAX: usize = 1 << 20;
/// The first event of a stream is waited for up to this.
const FIRST_EVENT_MAX: usize = 64 << 10;
/// An engine's error body is passed on up to this.
const ERROR_BODY_MAX: usize = 256 << 10;
/// So much of it goes into the log.
const LOG_EXCERPT_MAX: usize = 200;

/// Counts an attempt, and tells the breaker how it ended; cancelled unless said otherwise.
pub struct Attempt {
    in_flight: Option<InFlight>,
    handles: Rc<BackendHandles>,
    outcome: Outcome,
}

impl Attempt {
    fn new(in_flight: InFlight, handles: Rc<BackendHandles>) -> Self {
        Attempt {
            in_flight: Some(in_flight),
            handles,
            outcome: Outcome::Cancelled,
        }
    }

    /// The count in the directory.
    pub fn in_flight(&mut self) -> &mut InFlight {
        self.in_flight.as_mut().expect("only drop takes it")
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

impl Drop for Attempt {
    fn drop(&mut self) {
        self.handles.count(self.outcome);
        if let Some(in_flight) = self.in_flight.take() {
            in_flight.finish(self.outcome);
        }
    }
}

/// An attempt that gave no answer worth passing on while there may be a better one.
pub struct Setback {
    /// What happened.
    pub why: Why,
    kind: ErrorKind,
    answer: Given,
}

/// What the client gets if nothing better comes.
enum Given {
    /// The engine's own words.
    Theirs(StatusCode, HeaderMap, Bytes),
    /// Ours.
    Ours(crate::http::error::Refusal),
}

impl Setback {
    /// The answer, when there will be no other attempt.
    pub fn response(self, mut report: Report) -> HttpResponse {
        match self.answer {
            Given::Ours(refusal) => crate::http::refuse(refusal, report),
            Given::Theirs(status, headers, body) => {
                report.error(By::Backend, self.kind);
                super::answer::whole((status, &headers), body, report)
            }
        }
    }
}

/// Sends the request and reads as far as described above.
pub async fn run(
    call: &Call,
    worker: &Rc<Worker>,
    placement: Placement,
    report: &mut Report,
) -> Result<Opened, Setback> {
    let backend = placement.in_flight.backend().clone();
    let name = backend.spec.name.clone();
    let mut attempt = Attempt::new(placement.in_flight, worker.handles.backend(&backend));
    let upstream = &worker.gateway.settings.upstream;
    let first_byte_timeout = if call.wants_stream {
        upstream.first_byte_timeout
    } else {
        upstream.first_byte_timeout_non_streaming
    };
    let deadline = tokio::time::Instant::now() + first_byte_timeout;
    let outgoing = outgoing(call, &backend.spec);
    let sending = worker.client.send(
        &backend.spec.url,
        &outgoing,
        &backend.live.counters.connections,
    );
    let reply = match tokio::time::timeout_at(deadline, sending).await {
        Ok(Ok(reply)) => reply,
        Ok(Err(error)) => {
            attempt.end(Outcome::Failure);
            return Err(not_sent(error, &name));
        }
        Err(_) => {
            attempt.end(Outcome::Failure);
            return Err(silent(
                ErrorKind::FirstByteTimeout,
                first_byte_timeout,
                &name,
            ));
        }
    };
    drop(outgoing);
    let patience = Patience {
        first_byte: (deadline, first_byte_timeout),
        idle: upstream.idle_timeout,
    };
    let opened = if !reply.status.is_success() {
        Err(failed_status(reply, attempt, &patience, &name).await)
    } else if headers::is_event_stream(&reply.headers) {
        open_stream(reply, attempt, (&patience, worker), &name).await
    } else {
        attempt.in_flight().first_byte(None);
        read_whole(reply, attempt, (&patience, worker), &name).await
    };
    if opened.is_ok() {
        report.first_byte();
    }
    opened
}

fn outgoing(call: &Call, spec: &actors::backend::BackendSpec) -> Outgoing {
    let mut headers = call.headers.clone();
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

fn not_sent(error: SendError, backend: &str) -> Setback {
    let (why, kind, what) = match &error {
        SendError::Connect(_) => (Why::Refused, ErrorKind::Connect, "cannot be reached"),
        SendError::ConnectTimeout => (
            Why::Refused,
            ErrorKind::Connect,
            "did not accept a connection in time",
        ),
        SendError::Broken(_) => (
            Why::Reset,
            ErrorKind::StreamCut,
            "closed the connection without an answer",
        ),
        SendError::NotHttp(_) => (
            Why::BadGateway,
            ErrorKind::BadBody,
            "answered with something that is not HTTP",
        ),
    };
    let source = std::error::Error::source(&error)
        .map(ToString::to_string)
        .unwrap_or_default();
    warn!(backend, kind = kind.as_str(), source, "attempt failed");
    Setback {
        why,
        kind,
        answer: Given::Ours(refusal(kind, backend, what)),
    }
}

fn silent(kind: ErrorKind, limit: Duration, backend: &str) -> Setback {
    let limit_s = limit.as_secs_f64();
    warn!(
        backend,
        kind = kind.as_str(),
        limit_s,
        "backend was silent for too long"
    );
    let what = match kind {
        ErrorKind::IdleTimeout => format!("sent nothing for {limit_s} s"),
        _ => format!("sent no first byte within {limit_s} s"),
    };
    Setback {
        why: Why::FirstByteTimeout,
        kind,
        answer: Given::Ours(refusal(kind, backend, &what)),
    }
}

/// How long a backend may be silent: before its answer begins, and within it. A long answer that
/// flows is never cut.
struct Patience {
    first_byte: (tokio::time::Instant, Duration),
    idle: Duration,
}

/// Why an answer could not be read on.
enum Interrupted {
    /// The connection broke.
    Broken(hyper::Error),
    /// Nothing came in time.
    Silent(ErrorKind, Duration),
}

impl Patience {
    /// A chunk of what counts as the beginning.
    async fn first(&self, reply: &mut Reply) -> Result<Option<Bytes>, Interrupted> {
        let (deadline, limit) = self.first_byte;
        let silent = Interrupted::Silent(ErrorKind::FirstByteTimeout, limit);
        chunk_by(deadline, reply).await.ok_or(silent)?
    }

    /// A chunk of the rest.
    async fn next(&self, reply: &mut Reply) -> Result<Option<Bytes>, Interrupted> {
        let deadline = tokio::time::Instant::now() + self.idle;
        let silent = Interrupted::Silent(ErrorKind::IdleTimeout, self.idle);
        chunk_by(deadline, reply).await.ok_or(silent)?
    }
}

async fn chunk_by(
    deadline: tokio::time::Instant,
    reply: &mut Reply,
) -> Option<Result<Option<Bytes>, Interrupted>> {
    let chunk = tokio::time::timeout_at(deadline, reply.body.chunk()).await;
    Some(chunk.ok()?.transpose().map_err(Interrupted::Broken))
}

/// Reads up to `limit` bytes; the flag says whether the answer has ended.
async fn collect(
    reply: &mut Reply,
    limit: usize,
    patience: &Patience,
) -> Result<(Bytes, bool), Interrupted> {
    let Some(first) = patience.first(reply).await? else {
        return Ok((Bytes::new(), true));
    };
    if first.len() >= limit {
        return Ok((first, false));
    }
    // most answers are one chunk: look for the end before anything is copied
    let Some(second) = patience.next(reply).await? else {
        return Ok((first, true));
    };
    let mut all = BytesMut::from(&first[..]);
    all.extend_from_slice(&second);
    while all.len() < limit {
        match patience.next(reply).await? {
            Some(chunk) => all.extend_from_slice(&chunk),
            None => return Ok((all.freeze(), true)),
        }
    }
    Ok((all.freeze(), false))
}

/// An answer that is no success: the engine's own words are kept for the client.
async fn failed_status(
    mut reply: Reply,
    attempt: Attempt,
    patience: &Patience,
    backend: &str,
) -> Setback {
    let collected = collect(&mut reply, ERROR_BODY_MAX, patience).await;
    let (status, headers) = (reply.status, reply.headers);
    let body = collected.map_or_else(|_| Bytes::new(), |(body, _)| body);
    let retry_after = headers::retry_after(&headers);
    let says_more = verdict::is_object(&body);
    let judged = verdict::of_status(status, headers.contains_key("retry-after"), says_more);
    if judged.outcome == Outcome::Backpressure {
        attempt
            .in_flight
            .iter()
            .for_each(|a| a.backend().live.rest(retry_after));
    }
    attempt.end(judged.outcome);
    let excerpt = String::from_utf8_lossy(&body[..body.len().min(LOG_EXCERPT_MAX)]).into_owned();
    if judged.outcome == Outcome::ClientError {
        debug!(
            backend,
            status = status.as_u16(),
            excerpt,
            "backend refused the request"
        );
    } else {
        warn!(
            backend,
            status = status.as_u16(),
            excerpt,
            "backend answered with an error"
        );
    }
    let kind = match judged.outcome {
        Outcome::ClientError => ErrorKind::BadRequest,
        Outcome::Backpressure => ErrorKind::Overloaded,
        _ => ErrorKind::Internal,
    };
    // a proxy's HTML or plain text is no answer for a client that reads JSON
    let theirs = says_more || status.is_client_error();
    let answer = if theirs {
        Given::Theirs(status, headers, body)
    } else {
        let what = format!("answered {status}: {}", excerpt.escape_debug());
        let wrapped = refusal(kind, backend, &what).body();
        let body = serde_json::to_vec(&wrapped).unwrap_or_default();
        let status = if status.is_server_error() {
            status
        } else {
            StatusCode::BAD_GATEWAY
        };
        let mut kept = HeaderMap::new();
        if let Some(value) = headers.get("retry-after") {
            kept.insert("retry-after", value.clone());
        }
        kept.insert(
            "content-type",
            hyper::header::HeaderValue::from_static("application/json"),
        );
        Given::Theirs(status, kept, body.into())
    };
    Setback {
        why: judged.retry.unwrap_or(Why::Settled),
        kind,
        answer,
    }
}

/// A stream: waits for its first event, so that an engine that fails at once can be told from
/// one that serves.
async fn open_stream(
    mut reply: Reply,
    mut attempt: Attempt,
    (patience, worker): (&Patience, &Rc<Worker>),
    backend: &str,
) -> Result<Opened, Setback> {
    let mut first = BytesMut::new();
    let mut boundaries = Boundaries::default();
    let event_end = loop {
        match patience.first(&mut reply).await {
            Ok(Some(chunk)) => {
                let before = first.len();
                first.extend_from_slice(&chunk);
                if let Some(end) = boundaries.next_end(&chunk) {
                    break before + end;
                }
                if first.len() > FIRST_EVENT_MAX {
                    break first.len();
                }
            }
            Err(Interrupted::Silent(kind, limit)) => {
                attempt.end(Outcome::Failure);
                return Err(silent(kind, limit, backend));
            }
            ended => {
                attempt.end(Outcome::Failure);
                let source = match ended {
                    Err(Interrupted::Broken(error)) => error.to_string(),
                    _ => String::new(),
                };
                warn!(backend, source, "stream ended before its first event");
                let kind = ErrorKind::StreamCut;
                let answer = Given::Ours(refusal(
                    kind,
                    backend,
                    "ended the stream before its first event",
                ));
                return Err(Setback {
                    why: Why::Reset,
                    kind,
                    answer,
                });
            }
        }
    };
    let first = first.freeze();
    if let verdict::Said::Error(code) = verdict::of_event(&first[..event_end]) {
        return Err(first_event_error(
            code,
            &first[..event_end],
            attempt,
            backend,
        ));
    }
    let started = attempt.in_flight();
    started.progress();
    Ok(Opened::Stream(StreamParts {
        status: reply.status,
        headers: reply.headers,
        body: reply.body,
        is_events: true,
        first,
        attempt,
        worker: worker.clone(),
    }))
}

fn first_event_error(
    code: Option<StatusCode>,
    event: &[u8],
    attempt: Attempt,
    backend: &str,
) -> Setback {
    let status = code.unwrap_or(StatusCode::BAD_GATEWAY);
    let excerpt = String::from_utf8_lossy(&event[..event.len().min(LOG_EXCERPT_MAX)]).into_owned();
    warn!(
        backend,
        status = status.as_u16(),
        excerpt,
        "stream began with an error"
    );
    let client_error = status.is_client_error() && status != StatusCode::TOO_MANY_REQUESTS;
    attempt.end(if client_error {
        Outcome::ClientError
    } else {
        Outcome::Failure
    });
    let body =
        wire::sse::data_of(event).map_or_else(Bytes::new, |data| Bytes::copy_from_slice(&data));
    let mut headers = HeaderMap::new();
    headers.insert(
        "content-type",
        hyper::header::HeaderValue::from_static("application/json"),
    );
    Setback {
        why: if client_error {
            Why::Settled
        } else {
            Why::FirstEventError
        },
        kind: if client_error {
            ErrorKind::BadRequest
        } else {
            ErrorKind::InStreamError
        },
        answer: Given::Theirs(status, headers, body),
    }
}

/// A JSON answer: held until it is whole, unless it is very long.
async fn read_whole(
    mut reply: Reply,
    attempt: Attempt,
    (patience, worker): (&Patience, &Rc<Worker>),
    backend: &str,
) -> Result<Opened, Setback> {
    let bad = |what: &str, kind: ErrorKind, why: Why| {
        warn!(
            backend,
            kind = kind.as_str(),
            what,
            "backend gave no usable answer"
        );
        Setback {
            why,
            kind,
            answer: Given::Ours(refusal(kind, backend, what)),
        }
    };
    let (body, ended) = match collect(&mut reply, HELD_ANSWER_MAX, patience).await {
        Ok(collected) => collected,
        Err(Interrupted::Silent(kind, limit)) => {
            attempt.end(Outcome::Failure);
            return Err(silent(kind, limit, backend));
        }
        Err(Interrupted::Broken(_)) => {
            attempt.end(Outcome::Failure);
            return Err(bad(
                "closed the connection within its answer",
                ErrorKind::StreamCut,
                Why::Settled,
            ));
        }
    };
    if !ended {
        return Ok(Opened::Stream(StreamParts {
            status: reply.status,
            headers: reply.headers,
            body: reply.body,
            is_events: false,
            first: body,
            attempt,
            worker: worker.clone(),
        }));
    }
    match verdict::of_body(&body) {
        verdict::Body::Good(usage) => {
            attempt.end(Outcome::Success);
            Ok(Opened::Whole {
                status: reply.status,
                headers: reply.headers,
                body,
                usage,
            })
        }
        verdict::Body::NotJson => {
            attempt.end(Outcome::Failure);
            Err(bad(
                "answered 200 with a body that is not JSON",
                ErrorKind::BadBody,
                Why::Settled,
            ))
        }
        verdict::Body::Error(code) => {
            attempt.end(Outcome::Failure);
            let status = code.unwrap_or(StatusCode::BAD_GATEWAY);
            warn!(
                backend,
                status = status.as_u16(),
                "backend answered 200 with an error"
            );
            Err(Setback {
                why: Why::Settled,
                kind: ErrorKind::BadBody,
                answer: Given::Theirs(status, reply.headers, body),
            })
        }
    }
}
