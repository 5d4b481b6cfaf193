//! KV events over a WebSocket: one JSON batch per message.

use super::{FRAME_BYTES_MAX, numbered, split};
use crate::upstream::{Client, Stream};
use actors::kv_subscriber::{EventConnection, Frame};
use futures_util::future::LocalBoxFuture;
use futures_util::{FutureExt, StreamExt};
use hyper::header::{AUTHORIZATION, HeaderValue};
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::{WebSocketStream, client_async_with_config};
use wire::kv_events::from_json;

pub struct WebSocket(WebSocketStream<Stream>);

pub async fn connect(
    endpoint: &str,
    client: &Client,
    key: Option<&HeaderValue>,
) -> Result<WebSocket, String> {
    let (url, _) = split(endpoint)?;
    let config = WebSocketConfig::default()
        .max_message_size(Some(FRAME_BYTES_MAX))
        .max_frame_size(Some(FRAME_BYTES_MAX));
    let request = endpoint.into_client_request();
    let mut request = request.map_err(|error| format!("{endpoint}: {error}"))?;
    if let Some(key) = key {
        request.headers_mut().insert(AUTHORIZATION, key.clone());
    }
    let stream = client.open(&url).await;
    let stream = stream.map_err(|error| format!("{endpoint}: {error}"))?;
    let connected = client_async_with_config(request, stream, Some(config)).await;
    let (stream, _) = connected.map_err(|error| format!("{endpoint}: {error}"))?;
    Ok(WebSocket(stream))
}

impl EventConnection for WebSocket {
    fn next(&mut self) -> LocalBoxFuture<'_, Result<Frame, String>> {
        async move {
            loop {
                match self.0.next().await {
                    Some(Ok(Message::Text(text))) => {
                        return Ok(numbered(from_json(text.as_bytes())));
                    }
                    Some(Ok(Message::Binary(bytes))) => return Ok(numbered(from_json(&bytes))),
                    Some(Ok(Message::Close(_))) | None => {
                        return Err("the engine closed the stream".into());
                    }
                    Some(Ok(_)) => {} // pings are answered by the library
                    Some(Err(error)) => return Err(error.to_string()),
                }
            }
        }
        .boxed_local()
    }

    fn replay(&mut self, _: u64) -> LocalBoxFuture<'_, Result<(), String>> {
        async { Err("this stream cannot replay".to_owned()) }.boxed_local()
    }
}
