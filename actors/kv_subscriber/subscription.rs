//! What a subscriber does all the time: one stream over all its connections, in order, into the
//! shard.

use super::{EventConnection, EventTransport, Frame, RANKS_MAX, StreamState};
use crate::backend::Standing;
use crate::index_shard::{ApplyEvents, OPS_PER_MESSAGE_MAX, Op};
use crate::support::bounded::Permits;
use crate::support::mailbox::Mailbox;
use crate::support::published::Published;
use actix::Recipient;
use routing::event_stream::{Action, EventStream, Tally};
use routing::prefix_index::HolderId;
use routing::view::Memory;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::time::Instant;
use tracing::{info, warn};
use wire::kv_events::{Batch, KvEvent, Medium, Stored};
use wire::kv_snapshot::Snapshot;

/// A replay that sends nothing for so long is over: engines drop replies, the end marker too, when
/// a queue is full.
const REPLAY_IDLE: Duration = Duration::from_secs(2);
/// The longest wait between two attempts to connect.
const RECONNECT_MAX: Duration = Duration::from_secs(60);

/// A peer that vanished without a word is found out by what it serves: after so much silence, with so
/// many requests served meanwhile, the connection is made anew. How often that is looked at.
const SILENCE_MAX: Duration = Duration::from_secs(60);
const SERVED_IN_SILENCE_MAX: u64 = 50;
const SILENCE_LOOK: Duration = Duration::from_secs(10);

/// Adapters that are told apart, per engine.
const ADAPTERS_MAX: usize = 256;

/// Counts forgettings over all subscribers, so that a fresh subscriber of a source never begins
/// below the one before it.
static EPOCHS: AtomicU64 = AtomicU64::new(0);

/// What the ordering puts in order.
enum Content {
    Batch(Batch),
    Snapshot(Snapshot),
}

/// What a subscriber needs to know.
#[derive(Clone)]
pub struct Subscription {
    /// For logs.
    pub backend: Arc<str>,
    /// The engine's memory, by data-parallel rank; never empty.
    pub memories: Arc<[Memory]>,
    /// The rank whose stream this is, where each rank has its own.
    pub rank: Option<u32>,
    /// What is believed of the backend.
    pub standing: Arc<Standing>,
    /// Before the first reconnect; doubles up to a minute.
    pub reconnect: Duration,
    /// How to connect.
    pub transport: Rc<dyn EventTransport>,
    /// Where changes go.
    pub shard: Recipient<ApplyEvents>,
    /// Shared by all subscribers of that shard.
    pub permits: Permits,
    /// Where the state is seen.
    pub state: Published<StreamState>,
}

/// What is known of the stream, over all connections.
struct Session {
    stream: EventStream<Content>,
    before: Tally,
    epoch: u64,
    /// Changes that wait, all of one memory.
    ops: Vec<Op>,
    /// The frame at whose end the shard stands; none in the middle of one.
    sent_up_to: Option<u64>,
    holder: HolderId,
    /// The memories that this stream may have told of.
    told_of: Vec<HolderId>,
    state: StreamState,
}

impl Subscription {
    /// Runs until it is dropped: connects, reads, and connects again.
    pub(super) async fn run(self) {
        // counts go on where an earlier subscriber of this source has left them
        let state = self.state.load().as_ref().clone();
        let mut session = Session {
            stream: EventStream::new(self.transport.recovery()),
            before: state.tally,
            epoch: 0,
            ops: Vec::new(),
            sent_up_to: None,
            holder: self.memory(None),
            told_of: self.own_memories(),
            state,
        };
        let mut failures = 0u32;
        loop {
            match self.transport.connect().await {
                Ok(connection) => {
                    failures = 0;
                    let reason = self.read(connection, &mut session).await;
                    warn!(backend = %self.backend, reason, "KV event stream ended");
                }
                // each attempt fails alike: the first one is news
                Err(reason) if failures == 0 => {
                    warn!(backend = %self.backend, reason, "KV event stream cannot be opened");
                }
                Err(_) => {}
            }
            session.stream.disconnected();
            // from here on it is not known what the engine has announced
            self.flush_up_to(&mut session, None).await;
            session.state.connected = false;
            session.state.live = false;
            self.state.publish(session.state.clone());
            let wait = self.reconnect.saturating_mul(1 << failures.min(10));
            failures += 1;
            let spread = 0.75 + 0.5 * fastrand::f64();
            tokio::time::sleep(wait.min(RECONNECT_MAX).mul_f64(spread)).await;
        }
    }

    /// Reads one connection to its end; answers why it ended.
    async fn read(
        &self,
        mut connection: Box<dyn EventConnection>,
        session: &mut Session,
    ) -> String {
        let _open = self.standing.open_stream();
        session.state.connected = true;
        session.state.connections += 1;
        info!(backend = %self.backend, "KV event stream open");
        let mut heard = self.heard_now();
        // when a replay that is under way is taken for ended
        let mut replaying: Option<Instant> = None;
        let actions = session.stream.connected();
        if let Err(reason) = self
            .act(actions, &mut connection, (session, &mut replaying))
            .await
        {
            return reason;
        }
        loop {
            let next = connection.next();
            let frame = match replaying {
                Some(deadline) => tokio::time::timeout_at(deadline, next)
                    .await
                    .unwrap_or(Ok(Frame::ReplayEnd)),
                None => match tokio::time::timeout(SILENCE_LOOK, next).await {
                    Ok(frame) => frame,
                    Err(_) if self.is_deaf(&heard) => {
                        return "requests are served there and no event comes".into();
                    }
                    Err(_) => continue,
                },
            };
            heard = self.heard_now();
            let frame = match frame {
                Ok(frame) => frame,
                Err(reason) => return reason,
            };
            let actions = session.take(frame, &mut replaying);
            if let Err(reason) = self
                .act(actions, &mut connection, (session, &mut replaying))
                .await
            {
                return reason;
            }
        }
    }

    async fn act(
        &self,
        actions: Vec<Action<Content>>,
        connection: &mut Box<dyn EventConnection>,
        (session, replaying): (&mut Session, &mut Option<Instant>),
    ) -> Result<(), String> {
        for action in actions {
            match action {
                Action::Forget => self.forget(session).await,
                Action::Reconnect => return Err("frames were missed".into()),
                Action::Replay(from) => {
                    // nobody may take what is void for what is known while this waits
                    self.flush(session).await;
                    session.state.replays += 1;
                    // without a replay the live frames are still worth something
                    let wait = match connection.replay(from).await {
                        Ok(()) => REPLAY_IDLE,
                        Err(reason) => {
                            warn!(backend = %self.backend, reason, "missed KV events cannot be asked for");
                            Duration::ZERO
                        }
                    };
                    *replaying = Some(Instant::now() + wait);
                }
                Action::Apply(Content::Snapshot(snapshot)) => {
                    self.take_over(snapshot, session).await
                }
                Action::Apply(Content::Batch(batch)) => {
                    session.note(&batch);
                    self.note(&batch, session);
                    self.turn_to(self.memory(batch.rank), session).await;
                    for event in batch.events {
                        session.ops.push(Op::Event(event));
                        if session.ops.len() >= OPS_PER_MESSAGE_MAX {
                            self.flush(session).await;
                        }
                    }
                }
            }
        }
        self.flush_up_to(session, session.stream.last()).await;
        session.state.tally = session.before + session.stream.tally;
        session.state.last_seq = session.stream.last();
        session.state.live = session.stream.is_live();
        self.state.publish(session.state.clone());
        Ok(())
    }

    fn heard_now(&self) -> (Instant, u64) {
        (Instant::now(), self.standing.served())
    }

    /// Whether the engine has served so many requests since its last frame, and for so long, that
    /// its connection must be dead, though nobody said so.
    fn is_deaf(&self, (since, served): &(Instant, u64)) -> bool {
        since.elapsed() >= SILENCE_MAX && self.standing.served() - served >= SERVED_IN_SILENCE_MAX
    }

    /// The memory that a frame tells of: of the rank that it names, else of the stream's own.
    fn memory(&self, named: Option<u32>) -> HolderId {
        let of = |rank: Option<u32>| {
            let mut memories = self.memories.iter();
            memories.find(|memory| rank.is_some() && memory.rank == rank)
        };
        let memory = of(named).or_else(|| of(self.rank));
        let memory = memory.or(self.memories.first());
        memory.expect("a backend has a memory").holder
    }

    /// The memories that nobody but this stream tells of.
    fn own_memories(&self) -> Vec<HolderId> {
        let memories = self.memories.iter();
        let own = memories.filter(|memory| self.rank.is_none() || memory.rank == self.rank);
        own.map(|memory| memory.holder).collect()
    }

    /// What this stream has told so far is void.
    async fn forget(&self, session: &mut Session) {
        self.flush(session).await;
        session.epoch = EPOCHS.fetch_add(1, Ordering::Relaxed) + 1;
        session.state.resyncs += 1;
        for holder in session.told_of.clone() {
            self.turn_to(holder, session).await;
            session.ops.push(Op::Forget);
        }
    }

    /// What comes next is of this memory.
    async fn turn_to(&self, holder: HolderId, session: &mut Session) {
        if session.holder != holder {
            self.flush(session).await;
            session.holder = holder;
            if !session.told_of.contains(&holder) {
                session.told_of.push(holder);
            }
        }
    }

    fn note(&self, batch: &Batch, session: &mut Session) {
        if let Some(size) = session.state.block_size
            && self.standing.block_size() != Some(size)
        {
            self.standing.saw_block_size(size);
        }
        let Some(rank) = batch.rank else { return };
        let known = &session.state.ranks;
        if known.contains(&rank) || known.len() >= RANKS_MAX {
            return;
        }
        session.state.ranks = known.iter().copied().chain([rank]).collect();
        if session.state.ranks.len() > 1 && self.memories.len() == 1 {
            warn!(backend = %self.backend, ranks = ?session.state.ranks, "several data-parallel ranks share one event stream, set event_sources[].dp_size to tell them apart");
        }
    }

    /// Takes in what another gateway has left of this engine.
    async fn take_over(&self, snapshot: Snapshot, session: &mut Session) {
        self.turn_to(self.memory(None), session).await;
        session.state.block_size = Some(snapshot.block_size).filter(|size| *size > 0);
        session.state.snapshots += 1;
        if let Some(size) = session.state.block_size {
            self.standing.saw_block_size(size);
        }
        info!(backend = %self.backend, seq = snapshot.seq, blocks = snapshot.blocks.len(), "took over what another gateway knew of this engine");
        session.ops.push(Op::TakeOver(snapshot));
    }

    /// Sends what has gathered, in the middle of a frame.
    async fn flush(&self, session: &mut Session) {
        if !session.ops.is_empty() {
            self.send(session, None).await;
        }
    }

    /// Sends what has gathered, at the end of a frame.
    async fn flush_up_to(&self, session: &mut Session, seq: Option<u64>) {
        if !session.ops.is_empty() || session.sent_up_to != seq {
            self.send(session, seq).await;
        }
    }

    /// While the shard's permits are out, nothing more is read.
    async fn send(&self, session: &mut Session, up_to: Option<u64>) {
        let permit = self.permits.acquire().await;
        session.sent_up_to = up_to;
        self.shard.do_send(ApplyEvents {
            source: session.holder,
            epoch: session.epoch,
            ops: std::mem::take(&mut session.ops),
            up_to,
            permit: Some(permit),
            queued: Mailbox::IndexShard.enter(),
        });
    }
}

impl Session {
    fn take(&mut self, frame: Frame, replaying: &mut Option<Instant>) -> Vec<Action<Content>> {
        // live frames say nothing of whether the replay goes on
        if let (Frame::Replayed(..), Some(deadline)) = (&frame, replaying.as_mut()) {
            *deadline = Instant::now() + REPLAY_IDLE;
        }
        match frame {
            Frame::Live(seq, Ok(batch)) => self.stream.live(seq, Content::Batch(batch)),
            Frame::Replayed(seq, Ok(batch)) => self.stream.replayed(seq, Content::Batch(batch)),
            Frame::Snapshot(snapshot) => self
                .stream
                .snapshot(snapshot.seq, Content::Snapshot(snapshot)),
            Frame::Live(_, Err(_)) | Frame::Replayed(_, Err(_)) => {
                self.state.undecodable += 1;
                *replaying = None;
                self.stream.undecodable()
            }
            Frame::ReplayEnd => {
                *replaying = None;
                self.stream.replay_ended()
            }
        }
    }

    fn note(&mut self, batch: &Batch) {
        self.state.last_ts = batch.ts;
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.map_or(0.0, |now| now.as_secs_f64());
        self.state.lag = (now - batch.ts).max(0.0);
        let size = batch.events.iter().find_map(|event| match event {
            // copies elsewhere may be announced in larger pieces
            KvEvent::Stored(s) if s.medium == Medium::Gpu && !s.tokens.is_empty() => {
                Some(s.block_size)
            }
            _ => None,
        });
        self.state.block_size = size.or(self.state.block_size);
        for event in &batch.events {
            if let KvEvent::Stored(Stored {
                lora: Some(name), ..
            }) = event
            {
                self.note_adapter(name);
            }
        }
    }

    fn note_adapter(&mut self, name: &str) {
        let known = &self.state.adapters;
        if known.len() < ADAPTERS_MAX && !known.iter().any(|adapter| **adapter == *name) {
            let more = known.iter().cloned().chain([Arc::from(name)]);
            self.state.adapters = more.collect();
        }
    }
}
