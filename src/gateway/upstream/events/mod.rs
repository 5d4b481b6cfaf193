//! The ways in which engines' KV events come: one file per transport, chosen by the scheme of
//! `event_sources[].endpoint`.

mod sse;
mod websocket;
mod zeromq;

use super::{Client, bearer};
use crate::settings::EventSource;
use actors::backend::{BackendSpec, BackendUrl};
use actors::kv_subscriber::{EventConnection, EventTransport, Frame};
use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use hyper::header::HeaderValue;
use routing::event_stream::Recovery;
use std::rc::Rc;
use std::time::Duration;
use wire::kv_events::{Batch, Undecodable};

/// For one connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// One frame or message; 100,000 blocks of 16 tokens are about 8 MiB.
const FRAME_BYTES_MAX: usize = 32 << 20;

type Connecting = LocalBoxFuture<'static, Result<Box<dyn EventConnection>, String>>;

/// The transport of an event source.
pub fn transport(
    source: &EventSource,
    client: &Client,
    backend: &BackendSpec,
) -> Rc<dyn EventTransport> {
    let endpoint = source.endpoint.clone();
    if endpoint.starts_with("tcp://") {
        return Rc::new(zeromq::ZeroMq::new(source));
    }
    // the backend's key, for its own endpoint and no other
    let own = split(&endpoint).is_ok_and(|(url, _)| {
        let is_as_safe = url.is_encrypted() == backend.url.is_encrypted();
        is_as_safe && url.authority() == backend.url.authority()
    });
    Rc::new(Http {
        key: bearer(backend).filter(|_| own),
        endpoint,
        client: client.clone(),
    })
}

/// `ws://`: WebSocket. `http://`: WebSocket if the engine upgrades, else server-sent events. `wss://` and `https://`: the same
/// within TLS.
struct Http {
    endpoint: String,
    client: Client,
    key: Option<HeaderValue>,
}

impl EventTransport for Http {
    fn connect(&self) -> Connecting {
        let (endpoint, client) = (self.endpoint.clone(), self.client.clone());
        let key = self.key.clone();
        async move {
            let connecting = connect_http(&endpoint, client, key);
            let connected = tokio::time::timeout(CONNECT_TIMEOUT, connecting).await;
            connected.unwrap_or_else(|_| Err(format!("{endpoint} did not answer in time")))
        }
        .boxed_local()
    }

    /// Every connection begins with all that the engine keeps.
    fn recovery(&self) -> Recovery {
        Recovery::Reconnect
    }
}

async fn connect_http(
    endpoint: &str,
    client: Client,
    key: Option<HeaderValue>,
) -> Result<Box<dyn EventConnection>, String> {
    let (scheme, rest) = endpoint
        .split_once("://")
        .ok_or("the endpoint has no scheme")?;
    let socket = if is_encrypted(scheme) { "wss" } else { "ws" };
    match websocket::connect(&format!("{socket}://{rest}"), &client, key.as_ref()).await {
        Ok(connection) => Ok(Box::new(connection)),
        Err(reason) if scheme == socket => Err(reason),
        Err(_) => {
            let connection = sse::connect(endpoint, client, key).await?;
            Ok(Box::new(connection))
        }
    }
}

fn is_encrypted(scheme: &str) -> bool {
    matches!(scheme, "https" | "wss")
}

/// The host and the whole path of an HTTP endpoint.
fn split(endpoint: &str) -> Result<(BackendUrl, String), String> {
    let (scheme, rest) = endpoint.split_once("://").unwrap_or(("http", endpoint));
    let scheme = if is_encrypted(scheme) {
        "https"
    } else {
        "http"
    };
    let (authority, path) = match rest.find('/') {
        Some(at) => rest.split_at(at),
        None => (rest, "/"),
    };
    let url = BackendUrl::parse(&format!("{scheme}://{authority}"));
    let url = url.map_err(|fault| format!("{endpoint} {fault}"))?;
    Ok((url, path.to_owned()))
}

/// A message of the HTTP form, which carries its own number.
fn numbered(message: Result<Batch, Undecodable>) -> Frame {
    match message {
        Ok(batch) => match batch.seq {
            Some(seq) => Frame::Live(seq, Ok(batch)),
            None => Frame::Live(0, Err(Undecodable::without_seq())),
        },
        Err(undecodable) => Frame::Live(0, Err(undecodable)),
    }
}
