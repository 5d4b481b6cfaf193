//! An event stream that begins with what another gateway has left, and goes on with the engine's own
//! replay and frames. For engines that keep little or nothing for those who come late.

use super::SharedStore;
use crate::kv_subscriber::{EventConnection, EventTransport, Frame};
use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use routing::event_stream::Recovery;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;
use tokio::time::Instant;
use wire::kv_snapshot::Snapshot;

/// How long a snapshot is waited for that leaves no gap, and how often it is looked for. Whoever
/// leads the stream writes about once a second.
const SNAPSHOT_WAIT: Duration = Duration::from_millis(2500);
const SNAPSHOT_LOOK: Duration = Duration::from_millis(100);

/// See the module.
pub struct SharedTransport {
    /// The engine's own stream.
    pub inner: Rc<dyn EventTransport>,
    /// Where gateways leave what they know.
    pub store: Rc<dyn SharedStore>,
    /// The stream's name there.
    pub stream: Rc<str>,
}

impl EventTransport for SharedTransport {
    fn connect(&self) -> LocalBoxFuture<'static, Result<Box<dyn EventConnection>, String>> {
        let connecting = self.inner.connect();
        let (store, stream) = (self.store.clone(), self.stream.clone());
        let replays = self.inner.recovery() == Recovery::Replay;
        async move {
            let inner = connecting.await?;
            Ok(Box::new(Shared {
                inner,
                replays,
                store,
                stream,
                ready: VecDeque::new(),
                seen: None,
                started: false,
            }) as Box<dyn EventConnection>)
        }
        .boxed_local()
    }

    fn recovery(&self) -> Recovery {
        Recovery::Replay
    }
}

struct Shared {
    inner: Box<dyn EventConnection>,
    /// Whether the engine can be asked for frames.
    replays: bool,
    store: Rc<dyn SharedStore>,
    stream: Rc<str>,
    /// Frames that come before the engine's.
    ready: VecDeque<Frame>,
    /// The last live frame that came.
    seen: Option<u64>,
    /// Whether this connection has begun already: what is asked for from the start later on is
    /// asked for because the engine is another one now, of which the others know no more.
    started: bool,
}

impl EventConnection for Shared {
    fn next(&mut self) -> LocalBoxFuture<'_, Result<Frame, String>> {
        async move {
            if let Some(frame) = self.ready.pop_front() {
                return Ok(frame);
            }
            let frame = self.inner.next().await?;
            if let Frame::Live(seq, _) = &frame {
                self.seen = Some(*seq);
            }
            Ok(frame)
        }
        .boxed_local()
    }

    fn replay(&mut self, from: u64) -> LocalBoxFuture<'_, Result<(), String>> {
        async move {
            let first = !std::mem::replace(&mut self.started, true);
            let snapshot = match (from, first, self.replays) {
                (0, true, _) => self.load_fresh().await,
                (0, false, _) | (_, _, true) => None,
                // the engine keeps nothing: somebody else has heard what is missing
                (from, _, false) => self.load_later(from).await,
            };
            let from = snapshot.as_ref().map_or(from, |snapshot| snapshot.seq + 1);
            self.ready.extend(snapshot.map(Frame::Snapshot));
            if self.replays {
                return self.inner.replay(from).await;
            }
            self.ready.push_back(Frame::ReplayEnd);
            Ok(())
        }
        .boxed_local()
    }
}

impl Shared {
    /// The snapshot, and how long ago it was up to date.
    async fn load(&self) -> Option<(Snapshot, Duration)> {
        let stored = self.store.load(&self.stream).await.ok()??;
        let snapshot = Snapshot::from_bytes(&stored.bytes).ok()?;
        Some((snapshot, stored.age))
    }

    /// A snapshot that was up to date after this connection stood, so that nothing is missing
    /// between the two; an older one if there is no other in time, none at once if there is none.
    async fn load_fresh(&self) -> Option<Snapshot> {
        let connected = Instant::now();
        loop {
            let (snapshot, age) = self.load().await?;
            let since = connected.elapsed();
            if age < since || since >= SNAPSHOT_WAIT {
                return Some(snapshot);
            }
            tokio::time::sleep(SNAPSHOT_LOOK).await;
        }
    }

    /// A snapshot that reaches up to the last live frame, or beyond `from` at least.
    async fn load_later(&self, from: u64) -> Option<Snapshot> {
        let until = Instant::now() + SNAPSHOT_WAIT;
        let enough = self.seen.map_or(from, |seen| seen.saturating_sub(1));
        loop {
            let loaded = self.load().await.map(|(snapshot, _)| snapshot);
            let found = loaded.filter(|snapshot| snapshot.seq >= enough);
            if found.is_some() || Instant::now() >= until {
                return found;
            }
            tokio::time::sleep(SNAPSHOT_LOOK).await;
        }
    }
}
