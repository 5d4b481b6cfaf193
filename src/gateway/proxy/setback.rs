//! Attempts that gave no answer worth passing on while there may be a better one, each with the
//! answer that the client gets if there is none.

use super::attempt::Attempt;
use super::patience::{Collected, End, Interrupted, Patience};
use super::{headers, refusal, verdict};
use crate::http::error::{By, ErrorKind, Refusal};
use crate::telemetry::report::Report;
use crate::upstream::{Reply, SendError};
use actix_web::HttpResponse;
use actors::backend::Outcome;
use bytes::Bytes;
use hyper::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::{HeaderMap, StatusCode};
use routing::disagg::Step;
use routing::retry::Setback as Why;
use std::time::Duration;
use tracing::{debug, warn};

/// An engine's error body is passed on up to this.
const ERROR_BODY_MAX: usize = 256 << 10;
/// So much of it goes into the log.
const LOG_EXCERPT_MAX: usize = 200;

/// See the module.
#[derive(Debug)]
pub struct Setback {
    /// What happened.
    pub why: Why,
    kind: ErrorKind,
    answer: Given,
}

/// What the client gets if nothing better comes.
#[derive(Debug)]
enum Given {
    /// The engine's own words.
    Theirs(StatusCode, HeaderMap, Bytes),
    /// Ours.
    Ours(Refusal),
}

impl Setback {
    /// The answer, when there will be no other attempt.
    pub fn response(&self, mut report: Report) -> HttpResponse {
        match &self.answer {
            Given::Ours(refusal) => crate::http::refuse(refusal.clone(), report),
            Given::Theirs(status, headers, body) => {
                let by = match self.kind {
                    ErrorKind::BadRequest => By::Client,
                    _ => By::Backend,
                };
                report.error(by, self.kind);
                super::answer::whole((*status, headers), body.clone(), report)
            }
        }
    }

    /// The same, not to be tried again.
    pub fn settled(self) -> Self {
        let why = Why::Settled;
        Setback { why, ..self }
    }

    /// Whether the engine says that the request itself is wrong.
    pub fn is_refusal(&self) -> bool {
        self.kind == ErrorKind::BadRequest
    }

    /// Whether the engine asks for patience, in its own words.
    pub fn is_overload(&self) -> bool {
        self.kind == ErrorKind::Overloaded
    }

    /// Whether nothing came in time.
    pub fn is_silence(&self) -> bool {
        self.why == Why::FirstByteTimeout
    }

    /// Whether the engine itself says that it failed.
    pub fn is_engines_failure(&self) -> bool {
        let failed = matches!(self.kind, ErrorKind::Internal | ErrorKind::InStreamError);
        failed && matches!(self.answer, Given::Theirs(..))
    }

    /// Of a step of a split request, in our words.
    pub fn of_step(self, step: Step) -> Self {
        let what = match &self.answer {
            Given::Ours(refusal) => refusal.message(),
            Given::Theirs(status, _, body) => {
                format!(
                    "a backend answered {}: {}",
                    status.as_u16(),
                    excerpt(body).escape_debug()
                )
            }
        };
        Setback {
            why: Why::Settled,
            kind: self.kind,
            answer: Given::Ours(Refusal::Step(step, self.kind, what)),
        }
    }

    /// What must be known of a backend for a hand-off is not.
    pub fn lacking(backend: &str, what: &str) -> Self {
        let what = format!("lacks {what} for a hand-off");
        Setback::unusable(Why::BadGateway, ErrorKind::Internal, backend, &what)
    }

    /// The backend gave nothing that can be passed on.
    pub fn unusable(why: Why, kind: ErrorKind, backend: &str, what: &str) -> Self {
        warn!(backend, kind = kind.as_str(), what, "attempt failed");
        Setback {
            why,
            kind,
            answer: Given::Ours(refusal(kind, backend, what)),
        }
    }

    /// The request could not be sent, or its answer has no head.
    pub fn not_sent(error: &SendError, backend: &str) -> Self {
        let (why, kind, what) = match error {
            SendError::Local(source) => {
                warn!(backend, error = %source, "this machine is out of sockets or memory");
                return Setback {
                    why: Why::Refused,
                    kind: ErrorKind::Internal,
                    answer: Given::Ours(Refusal::NoSocket),
                };
            }
            SendError::Connect(_) => (Why::Refused, ErrorKind::Connect, "cannot be reached"),
            SendError::Handshake(source) => {
                warn!(backend, error = %source, "TLS handshake with a backend failed");
                (Why::Refused, ErrorKind::Connect, "failed the TLS handshake")
            }
            SendError::ConnectTimeout => {
                let what = "did not accept a connection in time";
                (Why::Refused, ErrorKind::Connect, what)
            }
            SendError::Broken(_) => {
                let what = "closed the connection without an answer";
                (Why::Reset, ErrorKind::StreamCut, what)
            }
            SendError::NotHttp(_) => {
                let what = "answered with something that is not HTTP";
                (Why::BadGateway, ErrorKind::BadBody, what)
            }
        };
        // addresses and system errors are for the log, not for clients
        let source = std::error::Error::source(error);
        debug!(backend, error = %error, source = source.map(ToString::to_string));
        Setback::unusable(why, kind, backend, what)
    }

    /// Nothing came in time.
    pub fn silent(kind: ErrorKind, limit: Duration, backend: &str) -> Self {
        let limit_s = limit.as_secs_f64();
        let what = match kind {
            ErrorKind::IdleTimeout => format!("sent nothing for {limit_s} s"),
            _ => format!("sent no first byte within {limit_s} s"),
        };
        Setback::unusable(Why::FirstByteTimeout, kind, backend, &what)
    }

    /// The answer broke off before it could be passed on. Its status was known, so work was done:
    /// `why` says whether it may be repeated.
    pub fn interrupted(by: Interrupted, why: Why, backend: &str) -> Self {
        match by {
            Interrupted::Silent(kind, limit) => Setback::silent(kind, limit, backend),
            Interrupted::Broken(error) => {
                debug!(backend, %error);
                let what = "closed the connection within its answer";
                Setback::unusable(why, ErrorKind::StreamCut, backend, what)
            }
        }
    }

    /// An answer that is no success: the engine's own words are kept for the client.
    pub async fn of_status(
        mut reply: Reply,
        attempt: Attempt,
        patience: &Patience,
        backend: &str,
    ) -> Self {
        let patience = patience.after_head();
        let Collected { bytes: body, end } = patience.collect(&mut reply, ERROR_BODY_MAX).await;
        let cut = !matches!(end, End::Whole);
        let (status, headers) = (reply.status, reply.headers);
        let says_more = verdict::is_object(&body);
        let has_own_key = attempt.backend().spec.api_key.is_some();
        let judged = verdict::of_status(status, headers.contains_key(RETRY_AFTER), says_more);
        if judged.outcome == Outcome::Backpressure {
            let live = &attempt.backend().live;
            live.rest(headers::retry_after(&headers));
        }
        if has_own_key && matches!(status.as_u16(), 401 | 403) {
            // the key is the operator's: the client can do nothing about it, and gets nothing of
            // the engine's words, which may repeat the key
            attempt.end(Outcome::Failure);
            let what = format!("answered {status} to the api_key that is configured for it");
            return Setback::unusable(Why::Settled, ErrorKind::Internal, backend, &what);
        }
        attempt.end(judged.outcome);
        let excerpt = excerpt(&body);
        let numeric = status.as_u16();
        match judged.outcome {
            Outcome::ClientError => debug!(
                backend,
                status = numeric,
                excerpt,
                "backend refused the request"
            ),
            _ => warn!(
                backend,
                status = numeric,
                excerpt,
                "backend answered with an error"
            ),
        }
        let kind = match judged.outcome {
            Outcome::ClientError => ErrorKind::BadRequest,
            Outcome::Backpressure => ErrorKind::Overloaded,
            _ => ErrorKind::Internal,
        };
        let why = judged.retry.unwrap_or(Why::Settled);
        // a proxy's HTML or plain text is no answer for a client that reads JSON
        let is_error = status.is_client_error() || status.is_server_error();
        let theirs = is_error && (says_more || judged.outcome == Outcome::ClientError && !cut);
        let answer = if theirs {
            Given::Theirs(status, headers, body)
        } else {
            in_our_words((status, &headers), kind, backend, &excerpt)
        };
        Setback { why, kind, answer }
    }

    /// A 200 that holds an error of the engine's: as the first event of a stream, or as its body.
    pub fn of_success(
        (code, headers): (Option<StatusCode>, &HeaderMap),
        json: Bytes,
        attempt: Attempt,
        backend: &str,
    ) -> Self {
        let status = code.unwrap_or(StatusCode::BAD_GATEWAY);
        let outcome = verdict::of_code(code);
        if outcome == Outcome::Backpressure {
            attempt.backend().live.rest(headers::retry_after(headers));
        }
        attempt.end(outcome);
        warn!(
            backend,
            status = status.as_u16(),
            excerpt = excerpt(&json),
            "backend answered 200 with an error"
        );
        let (why, kind) = match outcome {
            Outcome::ClientError => (Why::Settled, ErrorKind::BadRequest),
            _ => (Why::FirstEventError, ErrorKind::InStreamError),
        };
        let answer = Given::Theirs(status, json_only(), json);
        Setback { why, kind, answer }
    }
}

fn excerpt(body: &[u8]) -> String {
    String::from_utf8_lossy(&body[..body.len().min(LOG_EXCERPT_MAX)]).into_owned()
}

fn json_only() -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers
}

/// Wraps what is no JSON: the status stays where it can, `Retry-After` stays.
fn in_our_words(
    (status, headers): (StatusCode, &HeaderMap),
    kind: ErrorKind,
    backend: &str,
    excerpt: &str,
) -> Given {
    let what = format!("answered {status}: {}", excerpt.escape_debug());
    let wrapped = refusal(kind, backend, &what).body();
    let body = serde_json::to_vec(&wrapped).unwrap_or_default();
    let mut kept = json_only();
    if let Some(value) = headers.get(RETRY_AFTER) {
        kept.insert(RETRY_AFTER, value.clone());
    }
    let passes = status.is_server_error() || kind != ErrorKind::Internal;
    let status = if passes {
        status
    } else {
        StatusCode::BAD_GATEWAY
    };
    Given::Theirs(status, kept, body.into())
}
