//! The ways in which engines' KV events come: one file per transport, chosen by the scheme of
//! `event_sources[].endpoint`.

mod sse;
mod websocket;
mod zeromq;

use super::Client;
use crate::settings::EventSource;
use actors::backend::BackendUrl;
use actors::kv_subscriber::{EventConnection, EventTransport, Frame};
use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use std::rc::Rc;
use std::time::Duration;
use wire::kv_events::{Batch, Undecodable};

/// For one connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// One frame or message; 100,000 blocks of 16 tokens are about 8 MiB.
const FRAME_BYTES_MAX: usize = 32 << 20;

type Connecting = LocalBoxFuture<'static, Result<Box<dyn EventConnection>, String>>;

/// The transport of an event source.
pub fn transport(source: &EventSource, client: &Client) -> Rc<dyn EventTransport> {
    let endpoint = source.endpoint.clone();
    if endpoint.starts_with("tcp://") {
        return Rc::new(zeromq::ZeroMq::new(source));
    }
    Rc::new(Http {
        endpoint,
        client: client.clone(),
    })
}

/// `ws://`: WebSocket. `http://`: WebSocket if the engine upgrades, else server-sent events.
struct Http {
    endpoint: String,
    client: Client,
}

impl EventTransport for Http {
    fn connect(&self) -> Connecting {
        let (endpoint, client) = (self.endpoint.clone(), self.client.clone());
        async move {
            let connecting = connect_http(&endpoint, client);
            let connected = tokio::time::timeout(CONNECT_TIMEOUT, connecting).await;
            connected.unwrap_or_else(|_| Err(format!("{endpoint} did not answer in time")))
        }
        .boxed_local()
    }

    /// Every connection begins with all that the engine keeps: there is nothing to ask for.
    fn can_replay(&self) -> bool {
        false
    }
}

async fn connect_http(endpoint: &str, client: Client) -> Result<Box<dyn EventConnection>, String> {
    let (scheme, rest) = endpoint
        .split_once("://")
        .ok_or("the endpoint has no scheme")?;
    if matches!(scheme, "https" | "wss") {
        return Err(format!("{scheme}:// is not supported yet"));
    }
    match websocket::connect(&format!("ws://{rest}")).await {
        Ok(connection) => Ok(Box::new(connection)),
        Err(reason) if scheme == "ws" => Err(reason),
        Err(_) => {
            let connection = sse::connect(&format!("http://{rest}"), client).await?;
            Ok(Box::new(connection))
        }
    }
}

/// The host and the whole path of an HTTP endpoint.
fn split(endpoint: &str) -> Result<(BackendUrl, String), String> {
    let rest = endpoint.strip_prefix("http://").unwrap_or(endpoint);
    let (authority, path) = match rest.find('/') {
        Some(at) => rest.split_at(at),
        None => (rest, "/"),
    };
    let url = BackendUrl::parse(&format!("http://{authority}"));
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
