//! A question of the router's own to an engine: JSON there, an answer of bounded size back.

use super::{Client, Outgoing, bearer};
use actors::backend::Backend;
use bytes::Bytes;
use hyper::Method;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue};

/// Why there is no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unanswered {
    /// It could not be sent.
    Unreachable,
    /// No 2xx, or not all of it, or too much.
    Refused,
}

/// Posts JSON with the backend's own key; answers the body of a 2xx. How long that may take is the
/// caller's.
///
/// # Errors
/// When there is no such answer.
pub async fn ask(
    client: &Client,
    backend: &Backend,
    (path, body): (&str, String),
    bytes_max: usize,
) -> Result<Vec<u8>, Unanswered> {
    let spec = &backend.spec;
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let Some(key) = bearer(spec) {
        headers.insert(AUTHORIZATION, key);
    }
    let outgoing = Outgoing {
        method: Method::POST,
        path: spec.url.path(path),
        headers,
        body: Bytes::from(body),
    };
    let counts = &backend.live.counters.connections;
    let sent = client.send(&spec.url, &outgoing, counts).await;
    let mut reply = sent.map_err(|_| Unanswered::Unreachable)?;
    if !reply.status.is_success() {
        return Err(Unanswered::Refused);
    }
    let whole = reply.body.whole(bytes_max).await;
    whole.map_err(|_| Unanswered::Refused)
}
