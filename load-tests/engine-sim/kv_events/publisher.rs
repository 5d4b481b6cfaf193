//! vLLM's ZeroMQ publisher: a PUB socket with each batch as it comes, and a ROUTER socket that repeats what is kept. On a thread of
//! its own, as in vLLM, so that encoding delays neither the engine's steps nor the HTTP server.

use super::endpoint::{Endpoint, reachable};
use super::feed::Feed;
use super::msgpack::Encoder;
use super::{KvEventQuirks, KvEvents, ReplayFraming};
use crate::event_log::EventBatch;
use bytes::Bytes;
use futures_util::StreamExt;
use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, timeout};
use zeromq::{
    PubSocket, RouterSocket, Socket, SocketEvent, SocketOptions, SocketRecv, SocketSend, ZmqError,
    ZmqMessage,
};

/// The number of the last answer to a replay, which has no payload.
const END_SEQ: [u8; 8] = [0xff; 8];
/// How long one answer may wait for a peer that does not read; the rest of its replay is then dropped, as at a high-water mark.
const REPLAY_PATIENCE: Duration = Duration::from_secs(5);
/// One attempt to reach a subscriber that listens itself; short, because the library waits ever longer between its own attempts.
const CONNECT_ATTEMPT: Duration = Duration::from_secs(1);

/// A running publisher. It stops when this is dropped.
#[derive(Debug)]
pub struct Publisher {
    endpoint: String,
    replay_endpoint: Option<String>,
    stop: Option<oneshot::Sender<()>>,
    /// Ends, without a value, when the thread has closed its sockets.
    stopped: oneshot::Receiver<()>,
}

struct Wire {
    topic: Bytes,
    encoder: Encoder,
    framing: ReplayFraming,
}

impl Publisher {
    /// Takes the addresses and starts the thread; none when the settings want no ZeroMQ.
    ///
    /// # Errors
    /// An address that is wrong (`InvalidInput`) or not free; no thread.
    pub fn start(
        settings: &KvEvents,
        quirks: &KvEventQuirks,
        feed: &Arc<Feed>,
    ) -> io::Result<Option<Self>> {
        if !settings.publishes() {
            return Ok(None);
        }
        let invalid = |fault| io::Error::new(io::ErrorKind::InvalidInput, fault);
        let live = settings.live().map_err(invalid)?;
        let listener = live.listen()?;
        let replay_listener = match settings.replay().map_err(invalid)? {
            Some(replay) => replay.listen()?,
            None => None,
        };
        let endpoint = match &listener {
            Some(listener) => reachable(listener)?,
            None => live.to_string(),
        };
        let replay_endpoint = replay_listener.as_ref().map(reachable).transpose()?;
        let wire = Arc::new(Wire {
            topic: settings.topic.clone().into(),
            encoder: Encoder::new(quirks),
            framing: quirks.replay_framing,
        });
        let (stop, on_stop) = oneshot::channel();
        let (alive, stopped) = oneshot::channel::<()>();
        let batches = feed.attach_publisher(settings.max_queue_size);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let feed = feed.clone();
        let work = async move {
            if let Some(listener) = replay_listener {
                let wire = wire.clone();
                tokio::spawn(async move { report("replay", replay(listener, &feed, &wire).await) });
            }
            let publish = async {
                match listener {
                    Some(listener) => publish_bound(listener, batches, &wire).await,
                    None => publish_connected(&live, batches, &wire).await,
                }
            };
            tokio::select! {
                ended = publish => report("publish", ended),
                _ = on_stop => {}
            }
        };
        std::thread::Builder::new()
            .name("sim-kv-events".into())
            .spawn(move || {
                runtime.block_on(work);
                drop(runtime); // closes the sockets
                drop(alive);
            })?;
        Ok(Some(Self {
            endpoint,
            replay_endpoint,
            stop: Some(stop),
            stopped,
        }))
    }

    /// Where subscribers connect to, or where this one connects to.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Where replays are asked for.
    pub fn replay_endpoint(&self) -> Option<&str> {
        self.replay_endpoint.as_deref()
    }

    /// Closes the sockets. Returns when the ports are free.
    pub async fn stop(mut self) {
        drop(self.stop.take());
        let _ = (&mut self.stopped).await; // an error is what it ends with
    }
}

impl Wire {
    fn live(&self, batch: &EventBatch) -> ZmqMessage {
        message([
            self.topic.clone(),
            seq_frame(batch.seq),
            self.encoder.encode(batch),
        ])
    }

    fn answer(&self, peer: &Bytes, seq: Bytes, payload: Bytes) -> ZmqMessage {
        match self.framing {
            ReplayFraming::Old => message([peer.clone(), Bytes::new(), seq, payload]),
            ReplayFraming::New => {
                message([peer.clone(), Bytes::new(), self.topic.clone(), seq, payload])
            }
        }
    }
}

async fn publish_bound(
    listener: TcpListener,
    mut batches: mpsc::Receiver<Arc<EventBatch>>,
    wire: &Wire,
) -> Result<(), ZmqError> {
    let mut socket = PubSocket::new();
    socket.bind_listener(listener).await?;
    while let Some(batch) = batches.recv().await {
        socket.send(wire.live(&batch)).await?;
    }
    Ok(())
}

/// Connects again whenever the subscriber is gone. What comes meanwhile is not sent, as PUB sockets do.
async fn publish_connected(
    endpoint: &Endpoint,
    mut batches: mpsc::Receiver<Arc<EventBatch>>,
    wire: &Wire,
) -> Result<(), ZmqError> {
    let address = endpoint.to_string();
    loop {
        let mut options = SocketOptions::default();
        options.connect_timeout(CONNECT_ATTEMPT);
        let mut socket = PubSocket::with_options(options);
        let mut events = socket.monitor();
        let connected = tokio::select! {
            connected = socket.connect(&address) => connected,
            () = discard(&mut batches) => return Ok(()),
        };
        if let Err(fault) = connected {
            tracing::debug!(%fault, address, "no KV event subscriber yet");
            tokio::select! {
                () = sleep(CONNECT_ATTEMPT) => continue,
                () = discard(&mut batches) => return Ok(()),
            }
        }
        loop {
            tokio::select! {
                event = events.next() => match event {
                    Some(SocketEvent::Disconnected(_)) | None => break,
                    Some(_) => {}
                },
                batch = batches.recv() => match batch {
                    Some(batch) => socket.send(wire.live(&batch)).await?,
                    None => return Ok(()),
                },
            }
        }
    }
}

/// Ends only with the engine.
async fn discard(batches: &mut mpsc::Receiver<Arc<EventBatch>>) {
    while batches.recv().await.is_some() {}
}

async fn replay(listener: TcpListener, feed: &Feed, wire: &Wire) -> Result<(), ZmqError> {
    let mut socket = RouterSocket::new();
    socket.bind_listener(listener).await?;
    loop {
        let request = socket.recv().await?.into_vec();
        let [peer, _, seq] = request.as_slice() else {
            tracing::warn!(frames = request.len(), "replay request is not understood");
            continue;
        };
        let Ok(seq) = <[u8; 8]>::try_from(seq.as_ref()) else {
            tracing::warn!(bytes = seq.len(), "replay request has no sequence number");
            continue;
        };
        let batches = feed.since(u64::from_be_bytes(seq));
        let end = wire.answer(peer, Bytes::from_static(&END_SEQ), Bytes::new());
        let messages = batches
            .into_iter()
            .map(|batch| wire.answer(peer, seq_frame(batch.seq), wire.encoder.encode(&batch)))
            .chain([end]);
        for message in messages {
            match timeout(REPLAY_PATIENCE, socket.send(message)).await {
                Ok(Ok(())) => {}
                Ok(Err(fault)) => {
                    tracing::debug!(%fault, "peer left during its replay");
                    break;
                }
                Err(_) => {
                    tracing::warn!("peer does not read its replay, dropped");
                    break;
                }
            }
        }
    }
}

fn report(act: &str, ended: Result<(), ZmqError>) {
    if let Err(fault) = ended {
        tracing::error!(%fault, act, "KV event socket ended");
    }
}

fn seq_frame(seq: u64) -> Bytes {
    Bytes::copy_from_slice(&seq.to_be_bytes())
}

fn message<const N: usize>(frames: [Bytes; N]) -> ZmqMessage {
    ZmqMessage::try_from(frames.to_vec()).expect("there are frames")
}
