//! The answer on its way to the client: whole, or as a body that reads from the backend while the
//! client reads from it. The body holds the attempt's count, the backend's connection and the
//! report; dropping it, at the end or because the client left, releases all three.

use super::attempt::Attempt;
use super::events::{Ending, Events};
use super::{Call, Head, Told, headers, verdict};
use crate::gateway::Worker;
use crate::http::error::{By, ErrorKind, Refusal};
use crate::telemetry::names;
use crate::telemetry::report::Report;
use crate::upstream::ReplyBody;
use actix_web::HttpResponse;
use actix_web::body::{BodySize, MessageBody};
use actix_web::http::StatusCode as ClientStatus;
use actix_web::http::header::HeaderName;
use actors::backend::Outcome;
use bytes::Bytes;
use futures_util::future::LocalBoxFuture;
use hyper::{HeaderMap, StatusCode};
use metrics::counter;
use std::cell::Cell;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::time::{Instant as TokioInstant, Sleep};
use tracing::warn;
use wire::openai::Usage;
use wire::splice::Cached;

/// An answer that the client shall get.
pub enum Opened {
    /// All of it.
    Whole {
        /// Its status.
        status: StatusCode,
        /// Its headers.
        headers: HeaderMap,
        /// Its body.
        body: Bytes,
        /// What the engine counted.
        usage: Option<Usage>,
        /// Whether the engine says in it that it gave up.
        gave_up: bool,
    },
    /// The rest is to be read.
    Stream(Box<StreamParts>),
}

/// A stream, or a long answer, whose beginning has been read.
pub struct StreamParts {
    /// Its status.
    pub status: StatusCode,
    /// Its headers.
    pub headers: HeaderMap,
    /// The rest.
    pub body: ReplyBody,
    /// Whether it is made of events.
    pub is_events: bool,
    /// What was read.
    pub first: Bytes,
    /// Counts it.
    pub attempt: Attempt,
    /// When the first leg that led to it was sent.
    pub begun: TokioInstant,
    /// What counts as cached, where another engine computed the prompt.
    pub cached: Option<CachedElsewhere>,
    /// Whose thread this is.
    pub worker: Rc<Worker>,
}

/// Cached tokens of a prompt as the engine says that computed it: perhaps while the answer is on its way.
pub type CachedElsewhere = Rc<Cell<Cached>>;

impl Opened {
    /// The answer for the client.
    pub fn response(self, call: &Call, mut report: Report) -> HttpResponse {
        match self {
            Opened::Whole {
                status,
                headers,
                body,
                usage,
                gave_up,
            } => {
                if let Some(usage) = usage {
                    report.usage(usage);
                }
                if gave_up {
                    report.error(By::Backend, ErrorKind::InStreamError);
                }
                whole((status, &headers), call.edit.json(&body), report)
            }
            Opened::Stream(parts) => stream(*parts, call, report),
        }
    }
}

/// A whole answer.
pub fn whole(
    (status, headers): (StatusCode, &HeaderMap),
    body: Bytes,
    mut report: Report,
) -> HttpResponse {
    report.sent(body.len());
    report.complete();
    let mut response = head(status, headers, &mut report);
    response.body(body)
}

/// The head of an answer, with all that is told in headers.
pub fn head(
    status: StatusCode,
    headers: &HeaderMap,
    report: &mut Report,
) -> actix_web::HttpResponseBuilder {
    report.status(status.as_u16());
    let status = ClientStatus::from_u16(status.as_u16()).unwrap_or(ClientStatus::BAD_GATEWAY);
    let mut response = HttpResponse::build(status);
    headers::to_client(headers, |name, value| {
        response.append_header((name, value));
    });
    report.tell_headers(|name, value| {
        response.insert_header((HeaderName::from_static(name), value));
    });
    response
}

/// The head of a stream of events. Proxies in front of us must pass events as they come.
pub fn events_head(
    status: StatusCode,
    headers: &HeaderMap,
    report: &mut Report,
) -> actix_web::HttpResponseBuilder {
    let mut response = head(status, headers, report);
    response.insert_header(("x-accel-buffering", "no"));
    if !headers.contains_key("cache-control") {
        response.insert_header(("cache-control", "no-cache, no-transform"));
    }
    response
}

fn stream(parts: StreamParts, call: &Call, mut report: Report) -> HttpResponse {
    let mut response = if parts.is_events {
        events_head(parts.status, &parts.headers, &mut report)
    } else {
        head(parts.status, &parts.headers, &mut report)
    };
    response.body(AnswerBody::new(parts, call, report))
}

impl StreamParts {
    /// For several clients: the head, and the body that is read for all of them.
    pub fn shared(self, call: &Call, report: Report) -> (Head, AnswerBody) {
        let head = Head {
            status: self.status,
            headers: self.headers.clone(),
            is_events: self.is_events,
            length: self.body.length().filter(|_| !self.is_events),
            told: Told::of(&report),
        };
        (head, AnswerBody::new(self, call, report))
    }
}

impl AnswerBody {
    fn new(mut parts: StreamParts, call: &Call, report: Report) -> Self {
        if parts.is_events {
            let of_leg = parts.attempt.sent.elapsed();
            parts.attempt.in_flight().first_byte(Some(of_leg));
            let ttft = parts.begun.elapsed();
            parts.attempt.handles().ttft.record(ttft.as_secs_f64());
        }
        let length = parts
            .body
            .length()
            .filter(|_| call.edit.is_none() && !parts.is_events);
        let cached = parts.cached.take();
        let events = parts.is_events.then(|| Events::new(call, cached));
        let settings = parts.worker.gateway.settings();
        let idle_timeout = settings.upstream.idle_timeout;
        let server = &settings.server;
        AnswerBody {
            cutting: Box::pin(parts.worker.phase.cutting()),
            idle: Box::pin(tokio::time::sleep(idle_timeout)),
            last_chunk: now(),
            waiting_since: None,
            taking: Taking::within(server.client_write_timeout),
            idle_timeout,
            first: Some(if parts.is_events {
                parts.first
            } else {
                call.edit.json_beginning(&parts.first)
            }),
            length,
            running: Some(Running {
                body: parts.body,
                attempt: parts.attempt,
            }),
            events,
            report: Some(report),
            ended: None,
            usage: None,
        }
    }

    /// The next chunk, for whoever reads it in a client's place.
    pub async fn next(&mut self) -> Option<Result<Bytes, BrokenAnswer>> {
        std::future::poll_fn(|cx| self.poll_bytes(cx)).await
    }

    /// What the engine has counted, once it has ended.
    pub fn usage(&self) -> Option<Usage> {
        self.usage
    }

    /// How it ended: with all that had to be said, or by whose fault not.
    pub fn ended(&self) -> Option<Result<(), (By, ErrorKind)>> {
        self.ended
    }
}

fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

struct Running {
    body: ReplyBody,
    attempt: Attempt,
}

/// See the module.
pub struct AnswerBody {
    first: Option<Bytes>,
    running: Option<Running>,
    events: Option<Events>,
    length: Option<u64>,
    report: Option<Report>,
    idle: Pin<Box<Sleep>>,
    idle_timeout: Duration,
    last_chunk: Instant,
    /// Since when the backend is waited for; none while the client is.
    waiting_since: Option<Instant>,
    taking: Taking,
    cutting: LocalBoxFuture<'static, ()>,
    ended: Option<Result<(), (By, ErrorKind)>>,
    usage: Option<Usage>,
}

impl AnswerBody {
    fn pass(&mut self, chunk: Bytes) -> Bytes {
        let Some(report) = &mut self.report else {
            return chunk;
        };
        let out = match &mut self.events {
            Some(events) => events.pass(chunk, report),
            None => chunk,
        };
        report.sent(out.len());
        out
    }

    fn took_chunk(&mut self) {
        let at = now();
        if let Some(running) = &mut self.running {
            running.attempt.in_flight().progress();
            // without a wait, the gap is the client's: it was slow to take the last chunk
            if let (Some(since), true) = (self.waiting_since, self.events.is_some()) {
                let gap = at.saturating_duration_since(since.max(self.last_chunk));
                running.attempt.handles().itl.record(gap.as_secs_f64());
            }
        }
        self.waiting_since = None;
        self.last_chunk = at;
    }

    /// The backend has sent all of it.
    fn end(&mut self) -> Option<Result<Bytes, BrokenAnswer>> {
        match self
            .events
            .as_ref()
            .map_or(Ending::Finished, Events::ending)
        {
            Ending::Finished => self.settle(Outcome::Success, None),
            Ending::Error(code) => {
                self.settle(verdict::of_code(code), Some(ErrorKind::InStreamError));
            }
            Ending::Unfinished => {
                let what = "ended the stream before the answer was finished";
                return self.fail(ErrorKind::StreamCut, what);
            }
        }
        self.events.as_mut().and_then(Events::rest).map(Ok)
    }

    fn is_done(&self) -> bool {
        self.events.as_ref().is_some_and(Events::is_done)
    }

    fn settle(&mut self, outcome: Outcome, error: Option<ErrorKind>) {
        if let Some(running) = self.running.take() {
            running.attempt.end(outcome);
        }
        self.ended = Some(error.map_or(Ok(()), |kind| Err((By::Backend, kind))));
        if let Some(mut report) = self.report.take() {
            if let Some(kind) = error {
                report.error(By::Backend, kind);
            }
            self.usage = report.counted();
            report.complete();
        }
    }

    /// The backend failed within its answer: an event says so, or the body breaks off. Never a
    /// clean end.
    fn fail(&mut self, kind: ErrorKind, what: &str) -> Option<Result<Bytes, BrokenAnswer>> {
        let backend = self
            .report
            .as_ref()
            .and_then(|report| report.backend.clone());
        let backend = backend.as_deref().unwrap_or_default();
        let request_id = self.report.as_ref().map(|report| report.request_id.clone());
        warn!(
            backend,
            request_id = request_id.as_deref(),
            kind = kind.as_str(),
            what,
            "stream failed"
        );
        let refusal = super::refusal(kind, backend, what);
        self.settle(Outcome::Failure, Some(kind));
        Some(self.break_off(&refusal))
    }

    /// The process ends before the stream does.
    fn cut(&mut self) -> Option<Result<Bytes, BrokenAnswer>> {
        self.running = None; // counts as cancelled: not the backend's fault
        self.ended = Some(Err((By::Router, ErrorKind::Overloaded)));
        if let Some(mut report) = self.report.take() {
            report.error(By::Router, ErrorKind::Overloaded);
            report.complete();
        }
        Some(self.break_off(&Refusal::Draining))
    }

    fn break_off(&mut self, refusal: &Refusal) -> Result<Bytes, BrokenAnswer> {
        let events = self.events.as_ref().ok_or(BrokenAnswer)?;
        Ok(events.error_event(refusal))
    }

    /// Whether the backend has been silent for too long. A client that does not take what was
    /// sent to it is no silence of the backend's.
    fn poll_idle(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let since = *self.waiting_since.get_or_insert_with(now);
        let deadline = since + self.idle_timeout;
        loop {
            std::task::ready!(self.idle.as_mut().poll(cx));
            if now() >= deadline {
                return Poll::Ready(());
            }
            // the timer was set for an earlier wait
            self.idle.as_mut().reset(deadline.into());
        }
    }
}

impl MessageBody for AnswerBody {
    type Error = BrokenAnswer;

    fn size(&self) -> BodySize {
        match self.length {
            Some(length) => BodySize::Sized(length),
            None => BodySize::Stream,
        }
    }

    fn poll_next(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, Self::Error>>> {
        let this = &mut *self;
        let next = this.poll_bytes(cx);
        this.taking.note(&next);
        next
    }
}

impl Drop for AnswerBody {
    fn drop(&mut self) {
        self.taking.count_stall(self.report.is_some());
    }
}

/// Whether the client takes what it is given. One that took nothing for `client_write_timeout` was
/// dropped by the kernel.
pub struct Taking {
    limit: Duration,
    /// When the client was last given bytes, while it has not come back for more.
    offered: Option<Instant>,
}

impl Taking {
    /// With this limit.
    pub fn within(limit: Duration) -> Self {
        Taking {
            limit,
            offered: None,
        }
    }

    /// The client came for more, and got this.
    pub fn note<E>(&mut self, next: &Poll<Option<Result<Bytes, E>>>) {
        self.offered = matches!(next, Poll::Ready(Some(Ok(_)))).then(now);
    }

    /// The answer is dropped, perhaps before its end: counts it if that is why.
    pub fn count_stall(&self, is_unfinished: bool) {
        let stalled = self.offered.map(|at| now().saturating_duration_since(at));
        if is_unfinished && stalled.is_some_and(|time| time >= self.limit) {
            counter!(names::CLIENT_WRITE_TIMEOUTS).increment(1);
        }
    }
}

impl AnswerBody {
    fn poll_bytes(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, BrokenAnswer>>> {
        let this = self;
        loop {
            if let Some(first) = this.first.take() {
                this.last_chunk = now();
                let out = this.pass(first);
                if !out.is_empty() {
                    return Poll::Ready(Some(Ok(out)));
                }
            }
            let Some(running) = &mut this.running else {
                return Poll::Ready(None);
            };
            match running.body.poll_chunk(cx) {
                Poll::Ready(Some(Ok(chunk))) => {
                    this.took_chunk();
                    let out = this.pass(chunk);
                    if !out.is_empty() {
                        return Poll::Ready(Some(Ok(out)));
                    }
                }
                Poll::Ready(Some(Err(_))) if this.is_done() => return Poll::Ready(this.end()),
                Poll::Ready(Some(Err(_))) => {
                    let what = "closed the connection within its answer";
                    return Poll::Ready(this.fail(ErrorKind::StreamCut, what));
                }
                Poll::Ready(None) => return Poll::Ready(this.end()),
                Poll::Pending => {
                    let cutting = this.cutting.as_mut().poll(cx).is_ready();
                    let idle = this.poll_idle(cx).is_ready();
                    if (cutting || idle) && this.is_done() {
                        // everything was said; only the end of the framing is missing
                        return Poll::Ready(this.end());
                    }
                    if cutting {
                        return Poll::Ready(this.cut());
                    }
                    if idle {
                        let limit = this.idle_timeout.as_secs_f64();
                        let what = format!("sent nothing for {limit} s");
                        return Poll::Ready(this.fail(ErrorKind::IdleTimeout, &what));
                    }
                    return Poll::Pending;
                }
            }
        }
    }
}

/// Breaks the connection to the client off, so that a cut answer does not look whole.
#[derive(Debug, thiserror::Error)]
#[error("the backend's answer broke off")]
pub struct BrokenAnswer;
