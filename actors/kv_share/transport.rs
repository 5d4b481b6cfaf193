//! An event stream that begins with what another gateway has left, and goes on with the engine's own
//! replay and frames. For engines that keep little or nothing for those who come late.

use super::SharedStore;
use crate::kv_subscriber::{EventConnection, EventTransport, Frame};
use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use routing::event_stream::Recovery;
use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;
use tokio::time::Instant;
use wire::kv_snapshot::Snapshot;

/// How long a snapshot is waited for that leaves no gap, and how often it is looked for. Whoever
/// leads the stream says at least every five seconds that it is up to date, mostly every second.
const SNAPSHOT_WAIT: Duration = Duration::from_secs(6);
const SNAPSHOT_LOOK: Duration = Duration::from_millis(100);

/// See the module.
pub struct SharedTransport {
    /// The engine's own stream.
    pub inner: Rc<dyn EventTransport>,
    /// Where gateways leave what they know.
    pub store: Rc<dyn SharedStore>,
    /// The stream's name there.
    pub stream: Rc<str>,
    /// Whether this gateway leads the stream: then the store knows no more than it.
    pub led: Rc<Cell<bool>>,
    /// Whether the last snapshot was of another process than the one that is heard now.
    pub misled: Rc<Cell<bool>>,
}

impl EventTransport for SharedTransport {
    fn connect(&self) -> LocalBoxFuture<'static, Result<Box<dyn EventConnection>, String>> {
        let connecting = self.inner.connect();
        let (store, stream) = (self.store.clone(), self.stream.clone());
        let (led, misled) = (self.led.clone(), self.misled.clone());
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
                covered: None,
                started: misled.take(),
                led,
                misled,
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
    /// What the snapshot covers: frames up to this number, of a process whose last event was then.
    covered: Option<(u64, f64)>,
    led: Rc<Cell<bool>>,
    misled: Rc<Cell<bool>>,
}

impl EventConnection for Shared {
    fn next(&mut self) -> LocalBoxFuture<'_, Result<Frame, String>> {
        async move {
            if let Some(frame) = self.ready.pop_front() {
                return Ok(frame);
            }
            loop {
                let frame = self.inner.next().await?;
                if !self.is_covered(&frame)? {
                    return Ok(frame);
                }
            }
        }
        .boxed_local()
    }

    fn replay(&mut self, from: u64) -> LocalBoxFuture<'_, Result<(), String>> {
        async move {
            let first = !std::mem::replace(&mut self.started, true);
            let enough = match (from, first, self.replays) {
                _ if self.led.get() => None,
                (0, true, _) => Some(0),
                (0, false, _) | (_, _, true) => None,
                // the engine keeps nothing: somebody else has heard what is missing
                (from, _, false) => Some(self.seen.map_or(from, |seen| seen.saturating_sub(1))),
            };
            let snapshot = match enough {
                Some(enough) => self.load_fresh(enough).await,
                None => None,
            };
            let after = |snapshot: &Snapshot| snapshot.seq.saturating_add(1);
            let from = snapshot.as_ref().map_or(from, after);
            self.covered = snapshot
                .as_ref()
                .map(|snapshot| (snapshot.seq, snapshot.ts));
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
    /// Whether a live frame is one that the snapshot has. One with such a number that was made later
    /// is of another process, which the snapshot says nothing of.
    fn is_covered(&mut self, frame: &Frame) -> Result<bool, String> {
        let Frame::Live(seq, batch) = frame else {
            return Ok(false);
        };
        self.seen = Some(*seq);
        match (self.covered, batch) {
            (Some((up_to, ts)), Ok(batch)) if *seq <= up_to && batch.ts > ts => {
                self.misled.set(true);
                Err("the engine is another one than that of the snapshot".into())
            }
            (Some((up_to, _)), _) if *seq <= up_to => Ok(true),
            _ => {
                self.covered = None;
                Ok(false)
            }
        }
    }

    /// A snapshot of frames up to `enough` at least that was up to date after this was asked, so that
    /// nothing is missing behind it. None at once if there is none at all, and after a while if nobody
    /// keeps it up to date.
    async fn load_fresh(&self, enough: u64) -> Option<Snapshot> {
        let asked = Instant::now();
        loop {
            let age = self.store.age(&self.stream).await.ok()??;
            let since = asked.elapsed();
            if since >= SNAPSHOT_WAIT {
                return None;
            }
            if age < since {
                let stored = self.store.load(&self.stream).await.ok()??;
                let snapshot = Snapshot::from_bytes(&stored).ok()?;
                if snapshot.seq >= enough {
                    return Some(snapshot);
                }
            }
            tokio::time::sleep(SNAPSHOT_LOOK).await;
        }
    }
}
