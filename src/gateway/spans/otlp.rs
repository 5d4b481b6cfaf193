//! Sends spans to an OpenTelemetry collector: OTLP over HTTP, as JSON, by the same client as engines are asked.
//! <https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding>
//!
//! Written here rather than taken from OpenTelemetry's own crates: those bring a runtime of their own thread, a protobuf stack
//! and a second HTTP client, for one document that is sent now and then.

use super::{Attribute, Item, Kind, Recorded};
use crate::telemetry::names;
use crate::upstream::{Client, Outgoing};
use actors::backend::{BackendUrl, ConnectionCounts};
use bytes::Bytes;
use hyper::Method;
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use metrics::counter;
use serde_json::{Value, json};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc::Receiver;
use tokio::sync::oneshot;
use tracing::{info, warn};

/// Spans in one message.
const SPANS_PER_EXPORT_MAX: usize = 512;
/// How long the first of them waits for others.
const GATHERED_WITHIN: Duration = Duration::from_secs(1);
/// For one message to be taken.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(5);
/// Of a collector's answer; only its status counts.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// See the module.
pub(super) struct Exporter {
    client: Client,
    endpoint: BackendUrl,
    service: String,
    fails: bool,
}

impl Exporter {
    pub(super) fn new(client: Client, endpoint: BackendUrl, service: &str) -> Self {
        Exporter {
            client,
            endpoint,
            service: service.to_owned(),
            fails: false,
        }
    }

    /// Until nobody makes spans any more.
    pub(super) async fn run(mut self, mut items: Receiver<Item>) {
        while let Some(item) = items.recv().await {
            let mut spans = Vec::new();
            let mut waiting: Vec<oneshot::Sender<()>> = Vec::new();
            let mut take = |item, spans: &mut Vec<Recorded>| match item {
                Item::Span(span) => {
                    spans.push(*span);
                    false
                }
                Item::Flush(done) => {
                    waiting.push(done);
                    true
                }
            };
            let mut is_urgent = take(item, &mut spans);
            let until = tokio::time::Instant::now() + GATHERED_WITHIN;
            while !is_urgent && spans.len() < SPANS_PER_EXPORT_MAX {
                match tokio::time::timeout_at(until, items.recv()).await {
                    Ok(Some(item)) => is_urgent = take(item, &mut spans),
                    Ok(None) | Err(_) => break,
                }
            }
            if !spans.is_empty() {
                self.export(&spans).await;
            }
            for done in waiting {
                let _ = done.send(());
            }
        }
    }

    async fn export(&mut self, spans: &[Recorded]) {
        let sent = tokio::time::timeout(EXPORT_TIMEOUT, self.send(spans)).await;
        let sent = sent.unwrap_or_else(|_| Err("no answer in time".into()));
        let result = match &sent {
            Ok(()) => "exported",
            Err(_) => "failed",
        };
        counter!(names::SPANS, "result" => result).increment(spans.len() as u64);
        match sent {
            Err(error) if !self.fails => {
                warn!(endpoint = %self.endpoint, %error, "spans cannot be exported, they are dropped");
            }
            Ok(()) if self.fails => info!(endpoint = %self.endpoint, "spans are exported again"),
            _ => {}
        }
        self.fails = result == "failed";
    }

    async fn send(&self, spans: &[Recorded]) -> Result<(), String> {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let outgoing = Outgoing {
            method: Method::POST,
            path: self.endpoint.path("/v1/traces"),
            headers,
            body: Bytes::from(document(&self.service, spans).to_string()),
        };
        let counts = ConnectionCounts::default();
        let sent = self.client.send(&self.endpoint, &outgoing, &counts).await;
        let mut reply = sent.map_err(|error| error.to_string())?;
        if !reply.status.is_success() {
            return Err(format!("the collector answered {}", reply.status));
        }
        let _ = reply.body.whole(ANSWER_BYTES_MAX).await; // so that the connection can be used again
        Ok(())
    }
}

fn document(service: &str, spans: &[Recorded]) -> Value {
    json!({"resourceSpans": [{
        "resource": {"attributes": [
            {"key": "service.name", "value": {"stringValue": service}},
            {"key": "service.version", "value": {"stringValue": env!("CARGO_PKG_VERSION")}},
        ]},
        "scopeSpans": [{
            "scope": {"name": "tidegate", "version": env!("CARGO_PKG_VERSION")},
            "spans": spans.iter().map(told).collect::<Vec<Value>>(),
        }],
    }]})
}

fn told(span: &Recorded) -> Value {
    let attributes = span.attributes.iter().map(|(key, value)| {
        let value = match value {
            Attribute::Text(text) => json!({"stringValue": &**text}),
            Attribute::Word(word) => json!({"stringValue": word}),
            // 64-bit numbers are texts in JSON of protobuf
            Attribute::Number(number) => json!({"intValue": number.to_string()}),
        };
        json!({"key": key, "value": value})
    });
    let kind = match span.kind {
        Kind::Internal => 1,
        Kind::Server => 2,
        Kind::Client => 3,
    };
    let mut told = json!({
        "traceId": span.trace.to_string(),
        "spanId": span.id.to_string(),
        "name": span.name,
        "kind": kind,
        "startTimeUnixNano": nanos(span.begun),
        "endTimeUnixNano": nanos(span.ended),
        "attributes": attributes.collect::<Vec<Value>>(),
        "status": {"code": if span.failed { 2 } else { 0 }},
    });
    if let Some(parent) = span.parent {
        told["parentSpanId"] = parent.to_string().into();
    }
    told
}

fn nanos(at: SystemTime) -> String {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_nanos().to_string()
}
