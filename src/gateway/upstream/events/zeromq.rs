//! KV events over ZeroMQ, as vLLM and SGLang send them: a SUB socket for live frames
//! `[topic, seq, payload]`, a DEALER per replay against the engine's ROUTER.
//!
//! Sockets are made anew for each connection: the library's own reconnect waits up to 30 s and
//! cannot be set.

use super::{CONNECT_TIMEOUT, Connecting, FRAME_BYTES_MAX};
use crate::settings::EventSource;
use actors::kv_subscriber::{EventConnection, EventTransport, Frame};
use bytes::Bytes;
use futures_util::future::LocalBoxFuture;
use futures_util::{FutureExt, StreamExt};
use routing::event_stream::Recovery;
use wire::kv_events::from_msgpack;
use zeromq::{DealerSocket, Socket, SocketEvent, SocketRecv, SocketSend, SubSocket, ZmqMessage};

/// The number of the frame that ends a replay.
const REPLAY_END: u64 = u64::MAX;

/// Settings of one source.
#[derive(Clone)]
pub struct ZeroMq {
    endpoint: String,
    replay_endpoint: Option<String>,
    topic: String,
    bind: bool,
}

impl ZeroMq {
    pub fn new(source: &EventSource) -> Self {
        ZeroMq {
            endpoint: source.endpoint.clone(),
            replay_endpoint: source.replay_endpoint.clone(),
            topic: source.topic.clone(),
            bind: source.bind,
        }
    }

    async fn open(self) -> Result<Box<dyn EventConnection>, String> {
        let mut live = SubSocket::new();
        let monitor = live.monitor();
        let failed = |error: zeromq::ZmqError| format!("{}: {error}", self.endpoint);
        if self.bind {
            live.bind(&self.endpoint).await.map_err(failed)?;
        } else {
            live.connect(&self.endpoint).await.map_err(failed)?;
        }
        live.subscribe(&self.topic).await.map_err(failed)?;
        Ok(Box::new(Open {
            live,
            monitor: monitor.boxed(),
            replay: None,
            settings: self,
        }))
    }
}

impl EventTransport for ZeroMq {
    fn connect(&self) -> Connecting {
        let settings = self.clone();
        async move {
            let late = format!("{} did not answer in time", settings.endpoint);
            let opened = tokio::time::timeout(CONNECT_TIMEOUT, settings.open()).await;
            opened.unwrap_or(Err(late))
        }
        .boxed_local()
    }

    fn recovery(&self) -> Recovery {
        match self.replay_endpoint {
            Some(_) => Recovery::Replay,
            None => Recovery::None,
        }
    }
}

struct Open {
    settings: ZeroMq,
    live: SubSocket,
    monitor: futures_util::stream::BoxStream<'static, SocketEvent>,
    replay: Option<DealerSocket>,
}

impl EventConnection for Open {
    fn next(&mut self) -> LocalBoxFuture<'_, Result<Frame, String>> {
        async move {
            loop {
                let replaying = self.replay.is_some();
                let replayed = async {
                    match &mut self.replay {
                        Some(socket) => socket.recv().await,
                        None => std::future::pending().await,
                    }
                };
                tokio::select! {
                    // a replay first: what it sends comes before what waits
                    biased;
                    message = replayed, if replaying => {
                        let frame = self.replayed(message.map_err(|e| e.to_string())?);
                        if let Some(frame) = frame {
                            return Ok(frame);
                        }
                    }
                    message = self.live.recv() => {
                        let message = message.map_err(|e| e.to_string())?;
                        if let Some(frame) = live(message) {
                            return Ok(frame);
                        }
                    }
                    event = self.monitor.next() => {
                        if let Some(SocketEvent::Disconnected(_) | SocketEvent::Closed) = event {
                            return Err("the engine's socket is gone".into());
                        }
                    }
                }
            }
        }
        .boxed_local()
    }

    fn replay(&mut self, from: u64) -> LocalBoxFuture<'_, Result<(), String>> {
        async move {
            let Some(endpoint) = self.settings.replay_endpoint.clone() else {
                return Err("there is no replay_endpoint".into());
            };
            let asking = async {
                let mut socket = DealerSocket::new();
                socket.connect(&endpoint).await?;
                let mut ask = ZmqMessage::from(Bytes::new());
                ask.push_back(Bytes::copy_from_slice(&from.to_be_bytes()));
                socket.send(ask).await?;
                Ok::<_, zeromq::ZmqError>(socket)
            };
            let asked = tokio::time::timeout(CONNECT_TIMEOUT, asking).await;
            let asked = asked.map_err(|_| format!("{endpoint} did not answer in time"))?;
            self.replay = Some(asked.map_err(|error| format!("{endpoint}: {error}"))?);
            Ok(())
        }
        .boxed_local()
    }
}

impl Open {
    /// `["", (topic,) seq, payload]`; none of what is no such message.
    fn replayed(&mut self, message: ZmqMessage) -> Option<Frame> {
        let (seq, payload) = numbered(message)?;
        if seq == REPLAY_END && payload.is_empty() {
            self.replay = None;
            return Some(Frame::ReplayEnd);
        }
        Some(Frame::Replayed(seq, decode(&payload)))
    }
}

/// `[topic, seq, payload]`.
fn live(message: ZmqMessage) -> Option<Frame> {
    let (seq, payload) = numbered(message)?;
    Some(Frame::Live(seq, decode(&payload)))
}

fn decode(payload: &[u8]) -> Result<wire::kv_events::Batch, wire::kv_events::Undecodable> {
    let bounded = if payload.len() > FRAME_BYTES_MAX {
        &[]
    } else {
        payload
    };
    from_msgpack(bounded)
}

/// The last two parts, of which the first is a number of 8 bytes.
fn numbered(message: ZmqMessage) -> Option<(u64, Bytes)> {
    let mut parts = message.into_vec();
    let payload = parts.pop()?;
    let seq = parts.pop()?;
    let seq: [u8; 8] = seq.as_ref().try_into().ok()?;
    Some((u64::from_be_bytes(seq), payload))
}
