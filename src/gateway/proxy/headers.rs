//! Which headers pass, in both directions.

use actix_web::http::header::HeaderMap as ClientHeaders;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use std::time::Duration;

/// Between two neighbours only (RFC 9110, 7.6.1), and what each side writes itself.
const HOP_BY_HOP: [&str; 11] = [
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "content-length",
    "host",
];
/// Not for engines: compressed answers could not be read along with, an expectation was met when
/// the body was read, and a rank is not the client's to choose.
const NOT_FOR_BACKENDS: [&str; 4] = ["accept-encoding", "expect", RANK, "x-request-id"];
/// Where clients put their keys.
const CREDENTIALS: [&str; 2] = ["authorization", "x-api-key"];
/// Which data-parallel rank of an engine shall serve a request.
pub const RANK: &str = "x-data-parallel-rank";
/// Written by our own server; and cookies, which the next engine would not know.
const NOT_FOR_CLIENTS: [&str; 4] = ["date", "server", "set-cookie", "x-request-id"];
/// Which web pages may read an answer is the router's to say: engines allow all of them by default.
const CORS_PREFIX: &str = "access-control-";
/// Ours: a client does not set them, and an engine does not answer with them.
const OWN_PREFIX: &str = "x-tidegate-";

/// The headers that a backend gets; its own `Authorization` is set later. `has_our_key`: the client's credentials
/// are a key of ours, which is for nobody else.
pub fn to_backend(client: &ClientHeaders, request_id: &str, has_our_key: bool) -> HeaderMap {
    let named = named_in_connection(client.get_all("connection").map(|value| value.as_bytes()));
    let mut headers = HeaderMap::with_capacity(client.len() + 2);
    for (name, value) in client {
        let name = name.as_str();
        let is_ours = has_our_key && CREDENTIALS.contains(&name);
        if is_ours || is_dropped(name, &named) || NOT_FOR_BACKENDS.contains(&name) {
            continue;
        }
        let (name, value) = (
            HeaderName::from_bytes(name.as_bytes()),
            HeaderValue::from_bytes(value.as_bytes()),
        );
        if let (Ok(name), Ok(value)) = (name, value) {
            headers.append(name, value);
        }
    }
    if let Ok(value) = HeaderValue::from_str(request_id) {
        headers.insert("x-request-id", value);
    }
    headers
}

/// Calls `pass` with each header of a backend's answer that the client gets.
pub fn to_client(backend: &HeaderMap, mut pass: impl FnMut(&str, &[u8])) {
    let named = named_in_connection(
        backend
            .get_all("connection")
            .iter()
            .map(HeaderValue::as_bytes),
    );
    for (name, value) in backend {
        let name = name.as_str();
        let is_ours = NOT_FOR_CLIENTS.contains(&name) || name.starts_with(CORS_PREFIX);
        if !is_dropped(name, &named) && !is_ours {
            pass(name, value.as_bytes());
        }
    }
}

fn is_dropped(name: &str, named: &[String]) -> bool {
    HOP_BY_HOP.contains(&name)
        || name.starts_with(OWN_PREFIX)
        || named.iter().any(|other| other == name)
}

fn named_in_connection<'a>(lines: impl Iterator<Item = &'a [u8]>) -> Vec<String> {
    let lines = lines.filter_map(|line| std::str::from_utf8(line).ok());
    lines
        .flat_map(|line| line.split(','))
        .map(|name| name.trim().to_ascii_lowercase())
        .filter(|name| !name.is_empty())
        .collect()
}

/// `Retry-After` in seconds; dates are not read.
pub fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers
        .get("retry-after")?
        .to_str()
        .ok()?
        .trim()
        .parse()
        .ok()?;
    Some(Duration::from_secs(seconds))
}

/// Whether an answer is a stream of events.
pub fn is_event_stream(headers: &HeaderMap) -> bool {
    let kind = headers.get("content-type").map(HeaderValue::as_bytes);
    kind.is_some_and(|kind| kind.to_ascii_lowercase().starts_with(b"text/event-stream"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use actix_web::http::header::{HeaderName as Name, HeaderValue as Value};

    #[test]
    fn only_end_to_end_headers_reach_a_backend() {
        let mut client = ClientHeaders::new();
        for (name, value) in [
            ("connection", "close, X-Secret-Hop"),
            ("connection", "x-second-line"),
            ("x-secret-hop", "1"),
            ("x-second-line", "1"),
            ("host", "gateway"),
            ("content-length", "5"),
            ("transfer-encoding", "chunked"),
            ("accept-encoding", "gzip"),
            ("proxy-authorization", "p"),
            ("x-data-parallel-rank", "1"),
            ("x-tidegate-anything", "1"),
            ("x-request-id", "client's"),
            ("authorization", "Bearer engine-key"),
            ("traceparent", "00-1"),
        ] {
            client.append(Name::from_static(name), Value::from_static(value));
        }
        client.append(Name::from_static("x-two"), Value::from_static("a"));
        client.append(
            Name::from_static("x-two"),
            Value::from_bytes(b"caf\xc3\xa9 \xff").unwrap(),
        );
        client.append(Name::from_static("x-api-key"), Value::from_static("k"));
        let sent = to_backend(&client, "id-1", true);
        assert!(!sent.contains_key("authorization") && !sent.contains_key("x-api-key"));
        client.remove("x-api-key");
        let sent = to_backend(&client, "id-1", false);
        let mut names: Vec<&str> = sent.keys().map(|n| n.as_str()).collect();
        names.sort_unstable();
        assert_eq!(
            names,
            ["authorization", "traceparent", "x-request-id", "x-two"]
        );
        assert_eq!(sent["x-request-id"], "id-1");
        assert_eq!(sent.get_all("x-two").iter().count(), 2);
    }

    #[test]
    fn a_retry_after_in_seconds_is_read_and_a_date_is_not() {
        let mut headers = HeaderMap::new();
        headers.insert("retry-after", HeaderValue::from_static(" 7 "));
        assert_eq!(retry_after(&headers), Some(Duration::from_secs(7)));
        headers.insert(
            "retry-after",
            HeaderValue::from_static("Wed, 21 Oct 2026 07:28:00 GMT"),
        );
        assert_eq!(retry_after(&headers), None);
    }
}
