//! What a request spent its time on, as spans of a trace that goes on in engines and came from clients. Recorded only where
//! `tracing.otlp_endpoint` is set; whatever becomes of a span, its request never waits for it.

mod context;
mod otlp;

pub use context::{SpanId, TraceId, TraceParent};

use crate::settings::TracingSettings;
use crate::telemetry::names;
use crate::upstream::Client;
use actix_web::http::header::HeaderMap;
use context::is_sampled;
use metrics::counter;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::sync::mpsc::{Sender, channel};
use tokio::sync::oneshot;

/// Spans that wait to be exported; more are dropped and counted.
const SPANS_WAITING_MAX: usize = 4096;
/// For the last spans to be exported at the end.
const FLUSH_TIME_MAX: Duration = Duration::from_secs(2);

/// What waits for the exporter.
enum Item {
    Span(Box<Recorded>),
    /// Told when all before it is exported.
    Flush(oneshot::Sender<()>),
}

/// Text or number.
#[derive(Debug, Clone, PartialEq)]
enum Attribute {
    Text(Arc<str>),
    Word(&'static str),
    Number(u64),
}

/// A span that has ended.
#[derive(Debug)]
struct Recorded {
    trace: TraceId,
    id: SpanId,
    parent: Option<SpanId>,
    name: &'static str,
    kind: Kind,
    begun: SystemTime,
    ended: SystemTime,
    failed: bool,
    attributes: Vec<(&'static str, Attribute)>,
}

/// Which side of a call a span is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Within the router.
    Internal,
    /// A client's request.
    Server,
    /// A call to an engine.
    Client,
}

/// Begins traces.
#[derive(Debug, Clone)]
pub struct Tracer {
    ratio: f64,
    waiting: Sender<Item>,
}

impl Tracer {
    /// Exports in the background, within a running actix system; none when nothing is to be exported.
    pub fn start(settings: &TracingSettings, client: &Client) -> Option<Self> {
        let endpoint = settings.otlp_endpoint.clone()?;
        let (waiting, items) = channel(SPANS_WAITING_MAX);
        let exporter = otlp::Exporter::new(client.clone(), endpoint, &settings.service_name);
        actix_rt::spawn(exporter.run(items));
        Some(Tracer {
            ratio: settings.sample_ratio,
            waiting,
        })
    }

    /// The trace that a request belongs to: the client's, or a fresh one. Where a client says whether it records, so do we.
    pub fn begin(&self, given: Option<TraceParent>) -> Trace {
        let id = SpanId(fastrand::u64(1..));
        let fresh = || TraceId(fastrand::u128(1..));
        let trace = given.map_or_else(fresh, |given| given.trace);
        let by_lot = || is_sampled(trace, self.ratio);
        let sampled = given.map_or_else(by_lot, |given| given.sampled);
        Trace(Arc::new(Begun {
            trace,
            root: id,
            parent: given.map(|given| given.span),
            sampled,
            waiting: self.waiting.clone(),
        }))
    }

    /// Waits until what has ended is exported, briefly.
    pub async fn flush(&self) {
        let (done, told) = oneshot::channel();
        let flush = async {
            if self.waiting.send(Item::Flush(done)).await.is_ok() {
                let _ = told.await;
            }
        };
        let _ = tokio::time::timeout(FLUSH_TIME_MAX, flush).await;
    }
}

/// What a client says of its trace; none when that is nothing, or not as the standard says.
pub fn given(headers: &HeaderMap) -> Option<TraceParent> {
    let mut lines = headers.get_all("traceparent");
    let (first, second) = (lines.next(), lines.next());
    TraceParent::parse(first.filter(|_| second.is_none())?.as_bytes())
}

struct Begun {
    trace: TraceId,
    root: SpanId,
    parent: Option<SpanId>,
    sampled: bool,
    waiting: Sender<Item>,
}

/// The trace of one request.
#[derive(Clone)]
pub struct Trace(Arc<Begun>);

impl Trace {
    /// Its id.
    pub fn id(&self) -> TraceId {
        self.0.trace
    }

    /// Whether it begins here.
    pub fn is_ours(&self) -> bool {
        self.0.parent.is_none()
    }

    /// A part of the request; ends when it is dropped.
    pub fn span(&self, name: &'static str, kind: Kind) -> Span {
        let id = SpanId(fastrand::u64(1..));
        Span::new(self, name, (id, Some(self.0.root)), kind)
    }

    /// The request itself, which has taken so long; ends when it is dropped.
    pub fn request(&self, took: Duration) -> Span {
        let ids = (self.0.root, self.0.parent);
        let mut span = Span::new(self, "request", ids, Kind::Server);
        span.begun = span.begun.checked_sub(took).unwrap_or(span.begun);
        span
    }
}

/// Part of a trace that is under way.
pub struct Span {
    trace: Trace,
    id: SpanId,
    parent: Option<SpanId>,
    name: &'static str,
    kind: Kind,
    begun: SystemTime,
    failed: bool,
    attributes: Vec<(&'static str, Attribute)>,
}

impl Span {
    fn new(
        trace: &Trace,
        name: &'static str,
        (id, parent): (SpanId, Option<SpanId>),
        kind: Kind,
    ) -> Self {
        Span {
            trace: trace.clone(),
            id,
            parent,
            name,
            kind,
            begun: SystemTime::now(),
            failed: false,
            attributes: Vec::new(),
        }
    }

    /// The `traceparent` of a call that this span is.
    pub fn header(&self) -> String {
        TraceParent {
            trace: self.trace.0.trace,
            span: self.id,
            sampled: self.trace.0.sampled,
        }
        .to_string()
    }

    /// Notes a name.
    pub fn text(&mut self, key: &'static str, value: &Arc<str>) {
        self.note(key, Attribute::Text(value.clone()));
    }

    /// Notes a word of ours.
    pub fn word(&mut self, key: &'static str, value: &'static str) {
        self.note(key, Attribute::Word(value));
    }

    /// Notes a number.
    pub fn number(&mut self, key: &'static str, value: u64) {
        self.note(key, Attribute::Number(value));
    }

    /// What it is of has failed.
    pub fn fail(&mut self) {
        self.failed = true;
    }

    fn note(&mut self, key: &'static str, value: Attribute) {
        if self.trace.0.sampled {
            self.attributes.push((key, value));
        }
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        if !self.trace.0.sampled {
            return;
        }
        let recorded = Box::new(Recorded {
            trace: self.trace.0.trace,
            id: self.id,
            parent: self.parent,
            name: self.name,
            kind: self.kind,
            begun: self.begun,
            ended: SystemTime::now(),
            failed: self.failed,
            attributes: std::mem::take(&mut self.attributes),
        });
        if self.trace.0.waiting.try_send(Item::Span(recorded)).is_err() {
            counter!(names::SPANS, "result" => "dropped").increment(1);
        }
    }
}
