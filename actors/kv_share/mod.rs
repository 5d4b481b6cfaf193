//! What gateways share of what they know: for each event stream one of them, by a lease, leaves
//! snapshots for those who come later; and all tell each other how many requests each has sent where,
//! so that they do not all choose the same idle backend. Every gateway decides from its own memory:
//! without the store it goes on alone.

mod transport;

pub use transport::SharedTransport;

use crate::backend::Standing;
use crate::directory::Directory;
use crate::index_shard::{CarrySource, IndexShard};
use crate::kv_subscriber::StreamState;
use crate::support::published::Published;
use crate::support::supervise::{Root, RootExited, supervise};
use crate::support::watch::Watch;
use actix::{Actor, Addr, AsyncContext, Context, WrapFuture};
use futures_util::future::LocalBoxFuture;
use routing::prefix_index::HolderId;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::time::Instant;
use tracing::{info, warn};
use wire::kv_snapshot::Snapshot;

/// How often loads are told.
const HEARTBEAT: Duration = Duration::from_millis(500);
/// How long a gateway's loads count without another heartbeat.
pub const LOAD_LAPSES: Duration = Duration::from_secs(3);
/// How long a gateway leads a stream without renewing that.
pub const LEASE_LAPSES: Duration = Duration::from_secs(3);
/// How long a snapshot is good for: whoever leads renews it long before.
pub const SNAPSHOT_LAPSES: Duration = Duration::from_secs(10);
/// For the shard to answer.
const SHARD_TIMEOUT: Duration = Duration::from_secs(1);
/// Between two snapshots of one stream.
const SNAPSHOT_INTERVAL: Duration = Duration::from_secs(1);
/// Snapshots of all streams together, in bytes a second: with more, each comes less often.
const SNAPSHOT_RATE_MAX: u64 = 8 << 20;

/// Where gateways leave what they know. Every call ends by itself in bounded time.
pub trait SharedStore {
    /// The snapshot of a stream, if there is one.
    fn load(&self, stream: &str) -> LocalBoxFuture<'static, Result<Option<Vec<u8>>, String>>;
    /// Leads a stream, or goes on leading it; false when another does.
    fn lead(&self, stream: &str) -> LocalBoxFuture<'static, Result<bool, String>>;
    /// Leaves a snapshot; lapses after [`SNAPSHOT_LAPSES`].
    fn save(&self, stream: &str, bytes: Vec<u8>) -> LocalBoxFuture<'static, Result<(), String>>;
    /// Says that the snapshot is still up to date; false when it is gone.
    fn keep(&self, stream: &str) -> LocalBoxFuture<'static, Result<bool, String>>;
    /// How long ago that was said, if there is a snapshot.
    fn age(&self, stream: &str) -> LocalBoxFuture<'static, Result<Option<Duration>, String>>;
    /// Tells this gateway's loads, which lapse after [`LOAD_LAPSES`]; answers the others'.
    fn exchange(&self, mine: Vec<Load>) -> LocalBoxFuture<'static, Result<Vec<Load>, String>>;
}

/// What one gateway has sent to one backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Load {
    /// The backend's name.
    pub backend: String,
    /// Requests that have not ended.
    pub in_flight: u32,
    /// Prompt tokens that wait to be computed.
    pub queued_tokens: u64,
}

/// A stream of which snapshots are left.
#[derive(Clone)]
pub struct SharedStream {
    /// Its name in the store.
    pub name: Rc<str>,
    /// Whose blocks they are.
    pub holder: HolderId,
    /// What is known of the engine.
    pub standing: Arc<Standing>,
    /// How the stream is doing here.
    pub state: Published<StreamState>,
    /// Whether this gateway leads it: then nobody else knows more.
    pub led: Rc<Cell<bool>>,
}

/// What sharing is made of.
#[derive(Clone)]
pub struct ShareSettings {
    /// Where.
    pub store: Rc<dyn SharedStore>,
    /// What of; others may come and go.
    pub streams: Rc<RefCell<Vec<SharedStream>>>,
}

/// How sharing is doing, for metrics.
#[derive(Debug, Default)]
pub struct ShareState {
    /// Whether the store answered the last time: 1 or 0.
    pub connected: AtomicU64,
    /// Snapshots that were left.
    pub snapshots: AtomicU64,
    /// Their bytes.
    pub bytes: AtomicU64,
    /// Calls that failed.
    pub failures: AtomicU64,
    /// Streams that this gateway leads.
    pub leads: AtomicU64,
    /// Fresh starts of the actor.
    pub restarts: AtomicU64,
}

/// See the module. Holds one future, which does the waiting.
pub struct KvShare {
    sharing: Option<Sharing>,
    _watch: Watch<RootExited>,
}

impl KvShare {
    /// Starts sharing that is kept alive, and what everybody may know of it.
    pub fn supervised(
        settings: ShareSettings,
        shard: Published<Option<Addr<IndexShard>>>,
        directory: Directory,
    ) -> (Root<Self>, Arc<ShareState>) {
        let state = Arc::<ShareState>::default();
        let (seen, counted) = (state.clone(), state.clone());
        let root = supervise(
            "kv_share",
            move |warden| {
                let share = KvShare {
                    sharing: Some(Sharing {
                        settings: settings.clone(),
                        shard: shard.clone(),
                        directory: directory.clone(),
                        state: seen.clone(),
                        left: HashMap::new(),
                    }),
                    _watch: Watch::new(warden.recipient(), RootExited),
                };
                share.start()
            },
            move || {
                counted.restarts.fetch_add(1, Relaxed);
            },
        );
        (root, state)
    }
}

impl Actor for KvShare {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        if let Some(sharing) = self.sharing.take() {
            ctx.spawn(sharing.run().into_actor(self));
        }
    }
}

crate::support::fault::panics_on_request!(KvShare);

struct Sharing {
    settings: ShareSettings,
    shard: Published<Option<Addr<IndexShard>>>,
    directory: Directory,
    state: Arc<ShareState>,
    left: HashMap<Rc<str>, Left>,
}

/// The last snapshot of a stream.
#[derive(Default)]
struct Left {
    seq: Option<u64>,
    next: Option<Instant>,
}

impl Sharing {
    async fn run(mut self) {
        let mut failing = false;
        loop {
            let turn = self.turn().await;
            let failed = turn.is_err();
            self.state.connected.store(u64::from(!failed), Relaxed);
            match turn {
                Err(reason) => {
                    self.state.failures.fetch_add(1, Relaxed);
                    if !failing {
                        warn!(
                            reason,
                            "cannot share what is known with other gateways, going on alone"
                        );
                    }
                    // what is there now may be anybody's
                    self.left.values_mut().for_each(|left| left.seq = None);
                    let streams = self.settings.streams.borrow();
                    streams.iter().for_each(|stream| stream.led.set(false));
                }
                Ok(()) if failing => info!("sharing what is known with other gateways again"),
                Ok(()) => {}
            }
            failing = failed;
            tokio::time::sleep(HEARTBEAT).await;
        }
    }

    async fn turn(&mut self) -> Result<(), String> {
        self.exchange_loads().await?;
        let mut leads = 0;
        let streams = self.settings.streams.borrow().clone();
        self.left
            .retain(|name, _| streams.iter().any(|of| of.name == *name));
        for stream in &streams {
            // who does not hear the engine has nothing to say of it
            let hears = stream.state.load().connected;
            let leads_it = hears && self.settings.store.lead(&stream.name).await?;
            stream.led.set(leads_it);
            if leads_it {
                leads += 1;
                self.leave_snapshot(stream).await?;
            } else {
                self.left.remove(&stream.name);
            }
        }
        self.state.leads.store(leads, Relaxed);
        Ok(())
    }

    async fn exchange_loads(&self) -> Result<(), String> {
        let snapshot = self.directory.load();
        let mine = snapshot.entries.iter().map(|entry| Load {
            backend: entry.backend.spec.name.to_string(),
            in_flight: entry.backend.live.in_flight(),
            queued_tokens: entry.backend.live.queued_tokens(),
        });
        let others = self.settings.store.exchange(mine.collect()).await?;
        for entry in &snapshot.entries {
            let theirs = others
                .iter()
                .filter(|l| *l.backend == *entry.backend.spec.name);
            let (requests, tokens) = theirs.fold((0u32, 0u64), |(requests, tokens), load| {
                (
                    requests.saturating_add(load.in_flight),
                    tokens.saturating_add(load.queued_tokens),
                )
            });
            entry.backend.live.others(requests, tokens);
        }
        Ok(())
    }

    /// Leaves what is known of a stream, when it is time and something has changed.
    async fn leave_snapshot(&mut self, stream: &SharedStream) -> Result<(), String> {
        let now = Instant::now();
        let left = self.left.entry(stream.name.clone()).or_default();
        if left.next.is_some_and(|next| now < next) {
            return Ok(());
        }
        let shard = self.shard.load();
        let Some(shard) = shard.as_ref().clone() else {
            return Ok(());
        };
        let known = left.seq;
        let ask = shard.send(CarrySource {
            source: stream.holder,
            unless: known,
        });
        let carried = tokio::time::timeout(SHARD_TIMEOUT, ask).await;
        let Some((seq, blocks)) = carried.ok().and_then(Result::ok).flatten() else {
            return Ok(()); // in the middle of a frame: the next turn comes soon
        };
        let bytes = if known == Some(seq) {
            if !self.settings.store.keep(&stream.name).await? {
                self.left.remove(&stream.name);
                return Ok(()); // it is gone: the next turn leaves another
            }
            0
        } else {
            let block_size = stream.standing.block_size().unwrap_or(0);
            let snapshot = Snapshot {
                seq,
                ts: stream.state.load().last_ts,
                block_size,
                blocks,
            };
            let bytes = snapshot.to_bytes();
            let length = bytes.len() as u64;
            self.settings.store.save(&stream.name, bytes).await?;
            self.state.snapshots.fetch_add(1, Relaxed);
            self.state.bytes.fetch_add(length, Relaxed);
            length
        };
        let streams = self.settings.streams.borrow().len() as u64;
        let pause = Duration::from_millis(bytes * streams * 1000 / SNAPSHOT_RATE_MAX);
        let longest = SNAPSHOT_LAPSES / 2; // or it would lapse
        let left = Left {
            seq: Some(seq),
            next: Some(now + pause.clamp(SNAPSHOT_INTERVAL, longest)),
        };
        self.left.insert(stream.name.clone(), left);
        Ok(())
    }
}
