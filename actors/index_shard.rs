//! Owns the prefix index of some backends: takes in what their engines announce, in order, and
//! answers how much of a prompt each holder has. Runs on a thread of its own.

use crate::support::bounded::Permit;
use crate::support::mailbox::Queued;
use crate::support::published::Published;
use crate::support::watch::Watch;
use actix::{Actor, ActorContext, AsyncContext, Context, Handler, Message};
use routing::block::{BlockHash, Realm};
use routing::prefix_index::{
    Afterwards, Applied, Carried, HolderId, Limits, PrefixIndex, Run, Seconds, StoredRun, Tier,
};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;
use wire::kv_events::{KvEvent, Medium, Stored};
use wire::kv_snapshot::{Snapshot, SnapshotBlock};

/// Changes in one message: keeps an actor's turn under 100 us.
pub const OPS_PER_MESSAGE_MAX: usize = 256;
/// Messages with changes on their way to one shard: a replay must not queue up before lookups.
pub const MESSAGES_MAX: usize = 4;
/// How often expired entries are looked for, and how many at a time.
const SWEEP_INTERVAL: std::time::Duration = std::time::Duration::from_millis(100);
const SWEEP_BUDGET: usize = 500;

/// An engine whose events this shard takes in.
#[derive(Debug, Clone)]
pub struct SourceSpec {
    /// The model that its blocks are of, where no adapter is named.
    pub model: Arc<str>,
    /// The storage namespace that it writes to, if any.
    pub writes: Option<HolderId>,
    /// `treat_eviction_as_offload`: what it evicts is taken to be in storage, unless it announces
    /// offloads itself.
    pub assume_offload: bool,
    /// `storage_offloading.enabled`: storage copies count.
    pub storage: bool,
}

/// One change, in the order of the engine's stream.
#[derive(Debug, Clone, PartialEq)]
pub enum Op {
    /// An event.
    Event(KvEvent),
    /// What this engine announced so far is void.
    Forget,
    /// What another gateway knew of this engine.
    TakeOver(Snapshot),
}

/// Takes changes in. Those of an older epoch than the source's latest are dropped.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct ApplyEvents {
    /// Whose.
    pub source: HolderId,
    /// Counts the source's connections and restarts.
    pub epoch: u64,
    /// At most [`OPS_PER_MESSAGE_MAX`].
    pub ops: Vec<Op>,
    /// The frame that ends with these; none in the middle of one.
    pub up_to: Option<u64>,
    /// Bounds these messages; absent in tests only.
    pub permit: Option<Permit>,
    /// Its place in the mailbox.
    pub queued: Queued,
}

/// These are the sources from now on. What others told stays until it expires, but for those that
/// are gone with their engines.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct SetSources {
    /// All of them.
    pub specs: HashMap<HolderId, SourceSpec>,
    /// Memories that are no more.
    pub gone: Vec<HolderId>,
}

/// A hand-off has finished: storage has the blocks of this prompt.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct HandedOver {
    /// The namespace that the prefill worker writes.
    pub namespace: HolderId,
    /// The prompt's blocks.
    pub chain: Arc<[BlockHash]>,
}

/// Asks who has how much of a prompt: one answer for each way in which it was cut into blocks.
#[derive(Debug, Clone, Message)]
#[rtype(result = "Vec<Vec<Run>>")]
pub struct FindOverlap {
    /// The prompt's blocks.
    pub chains: Vec<Arc<[BlockHash]>>,
    /// Its place in the mailbox.
    pub queued: Queued,
}

/// A prompt was sent to a holder; until `hold` has passed it counts as held there.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct Dispatched {
    /// Where to.
    pub holder: HolderId,
    /// Its blocks.
    pub chain: Arc<[BlockHash]>,
    /// In whole seconds, at least 1.
    pub hold: std::time::Duration,
    /// Its place in the mailbox.
    pub queued: Queued,
}

/// Asks for all that an engine has announced up to which frame, for another gateway. None in the
/// middle of a frame, and of an engine that has announced nothing.
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "Option<(u64, Vec<SnapshotBlock>)>")]
pub struct CarrySource {
    /// Whose.
    pub source: HolderId,
    /// Up to this frame it is known already: then without the blocks.
    pub unless: Option<u64>,
}

/// How a dispatch went on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It failed or was cancelled before its first byte: it proves nothing.
    Withdrawn,
    /// It was served: what it used is in use.
    Served,
    /// It was served where nothing is announced: its blocks are believed to be there until they
    /// expire, or the memory turns out to hold less.
    Believed,
}

/// A dispatch that was announced with [`Dispatched`] has ended.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct DispatchEnded {
    /// Where it was sent to.
    pub holder: HolderId,
    /// Its blocks.
    pub chain: Arc<[BlockHash]>,
    /// How it went.
    pub fate: Fate,
}

/// A prompt was believed to find something at a holder that announces nothing, and the engine said what it found.
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "()")]
pub struct Checked {
    /// Where.
    pub holder: HolderId,
    /// Whether that was about as much.
    pub found: bool,
}

/// What the shard holds and has seen, for metrics.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ShardGauges {
    /// Pairs of block and holder.
    pub entries: usize,
    /// Different blocks.
    pub blocks: usize,
    /// Memory that they take, in bytes.
    pub bytes: usize,
    /// Pairs that expired, that made room for others, and guesses that were found wrong; of all shards so far.
    pub evicted: [u64; 3],
    /// Blocks that were stored or removed.
    pub applied: u64,
    /// Blocks that nothing was known of: their parent, or themselves.
    pub unknown: u64,
    /// Events that were of no use, by [`Odd`].
    pub odd: [u64; 5],
    /// Messages of an older epoch.
    pub stale: u64,
}

impl ShardGauges {
    fn count(&mut self, applied: Applied) {
        self.applied += applied.blocks as u64;
        self.unknown += applied.unknown as u64;
    }
}

/// See the module.
pub struct IndexShard {
    index: PrefixIndex,
    sources: HashMap<HolderId, Source>,
    gauges: ShardGauges,
    evicted_before: [u64; 3],
    published: Published<ShardGauges>,
    started: Instant,
    _watch: Option<Watch<ShardExited>>,
}

/// Ends a shard whose root is gone: the next root has one of its own.
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "()")]
pub struct RetireShard;

impl Handler<RetireShard> for IndexShard {
    type Result = ();
    fn handle(&mut self, _: RetireShard, ctx: &mut Self::Context) {
        ctx.stop();
    }
}

/// The shard has ended, by a panic: what it knew is gone.
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "()")]
pub struct ShardExited;

struct Source {
    spec: SourceSpec,
    epoch: u64,
    announces_offloads: bool,
    up_to: Option<u64>,
}

impl Source {
    fn new(spec: SourceSpec) -> Self {
        Source {
            spec,
            epoch: 0,
            announces_offloads: false,
            up_to: None,
        }
    }

    /// What becomes of the last copy that was removed from a medium.
    fn after_removal(&self, holder: HolderId, medium: Medium) -> Afterwards {
        let assume = self.spec.assume_offload && self.spec.storage && !self.announces_offloads;
        match (medium, self.spec.writes) {
            (Medium::Storage, Some(namespace)) => Afterwards::GoneFrom(namespace),
            // into the namespace that it writes, else a copy that only itself can reach
            (Medium::Gpu, writes) if assume => {
                Afterwards::KeptBy(writes.unwrap_or(holder), Tier::Assumed)
            }
            _ => Afterwards::Gone,
        }
    }
}

impl IndexShard {
    /// An empty index for these sources.
    pub fn new(
        limits: Limits,
        sources: HashMap<HolderId, SourceSpec>,
        published: Published<ShardGauges>,
    ) -> Self {
        let sources = sources.into_iter();
        let sources = sources.map(|(holder, spec)| (holder, Source::new(spec)));
        IndexShard {
            index: PrefixIndex::new(limits),
            sources: sources.collect(),
            // counts go on where an earlier shard has left them
            gauges: *published.load(),
            evicted_before: published.load().evicted,
            published,
            started: now(),
            _watch: None,
        }
    }

    /// Tells `watch`'s owner when it ends.
    pub fn watched(self, watch: Watch<ShardExited>) -> Self {
        IndexShard {
            _watch: Some(watch),
            ..self
        }
    }

    fn seconds(&self) -> Seconds {
        let elapsed = now().saturating_duration_since(self.started).as_secs();
        Seconds::try_from(elapsed).unwrap_or(Seconds::MAX)
    }

    fn apply(&mut self, holder: HolderId, op: Op) {
        let now = self.seconds();
        match op {
            Op::Forget => self.forget(holder),
            Op::TakeOver(snapshot) => {
                let blocks: Vec<Carried> = snapshot.blocks.iter().map(carried).collect();
                self.index.take_over(holder, &blocks, now);
            }
            Op::Event(KvEvent::Stored(stored)) => self.stored(holder, &stored, now),
            Op::Event(KvEvent::Removed { hashes, medium }) => {
                self.removed(holder, &hashes, (medium, now));
            }
            Op::Event(KvEvent::Offloaded { hashes }) => self.offloaded(holder, &hashes, now),
            Op::Event(KvEvent::Cleared) => self.forget(holder),
            Op::Event(KvEvent::Odd(odd)) => self.gauges.odd[odd as usize] += 1,
        }
    }

    /// All that is known of an engine's own memory is void, what is only assumed of it as well.
    fn forget(&mut self, holder: HolderId) {
        self.index.forget(holder);
        self.index.forget_assumed(holder);
    }

    fn stored(&mut self, holder: HolderId, stored: &Stored, now: Seconds) {
        let Some(source) = self.sources.get_mut(&holder) else {
            return;
        };
        let tier = tier(stored.medium);
        if tier == Tier::Storage && !source.spec.storage {
            return;
        }
        let run = StoredRun {
            realm: Realm {
                model: stored.lora.as_deref().unwrap_or(&source.spec.model),
                cache_salt: stored.cache_salt.as_deref(),
                block_size: stored.block_size,
            },
            hashes: &stored.hashes,
            parent: stored.parent,
            tokens: &stored.tokens,
            tier,
        };
        let applied = self.index.store(holder, &run, now);
        self.gauges.count(applied);
        if tier == Tier::Storage {
            // an announced offload: others find it in the namespace
            source.announces_offloads = true;
            if let Some(namespace) = source.spec.writes {
                let named = (holder, &stored.hashes[..]);
                self.index.put_named(namespace, named, Tier::Storage, now);
            }
        }
    }

    fn removed(&mut self, holder: HolderId, hashes: &[u64], (medium, now): (Medium, Seconds)) {
        let afterwards = match self.sources.get(&holder) {
            Some(source) => source.after_removal(holder, medium),
            None => Afterwards::Gone,
        };
        let then = (afterwards, now);
        let (applied, _) = self.index.remove(holder, hashes, tier(medium), then);
        self.gauges.count(applied);
    }

    fn offloaded(&mut self, holder: HolderId, hashes: &[u64], now: Seconds) {
        let Some(source) = self.sources.get_mut(&holder) else {
            return;
        };
        source.announces_offloads = true;
        let afterwards = if source.spec.storage {
            let keeper = source.spec.writes.unwrap_or(holder);
            Afterwards::KeptBy(keeper, Tier::Storage)
        } else {
            Afterwards::Gone
        };
        let then = (afterwards, now);
        let (applied, _) = self.index.remove(holder, hashes, Tier::Gpu, then);
        self.gauges.count(applied);
    }

    fn publish(&mut self) {
        self.gauges.entries = self.index.entries();
        self.gauges.blocks = self.index.blocks();
        self.gauges.bytes = self.index.bytes();
        let evicted = self.index.evicted();
        let evicted = [evicted.expired, evicted.crowded_out, evicted.disproved];
        self.gauges.evicted = [0, 1, 2].map(|kind| self.evicted_before[kind] + evicted[kind]);
        self.published.publish(self.gauges);
    }
}

fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

fn tier(medium: Medium) -> Tier {
    match medium {
        Medium::Gpu => Tier::Gpu,
        Medium::Cpu => Tier::Cpu,
        Medium::Storage => Tier::Storage,
    }
}

impl Actor for IndexShard {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.run_interval(SWEEP_INTERVAL, |this, _| {
            let now = this.seconds();
            this.index.sweep(now, SWEEP_BUDGET);
            this.publish();
        });
    }
}

impl Handler<SetSources> for IndexShard {
    type Result = ();

    fn handle(&mut self, set: SetSources, _: &mut Self::Context) {
        // an engine whose events are read no longer may hold anything by now
        let unread = self.sources.keys().filter(|of| !set.specs.contains_key(of));
        let unread: Vec<HolderId> = unread.copied().collect();
        for holder in unread.iter().chain(&set.gone) {
            self.sources.remove(holder);
            self.forget(*holder);
        }
        for (holder, spec) in set.specs {
            match self.sources.get_mut(&holder) {
                Some(source) => source.spec = spec,
                None => {
                    self.sources.insert(holder, Source::new(spec));
                }
            }
        }
    }
}

impl Handler<ApplyEvents> for IndexShard {
    type Result = ();

    fn handle(&mut self, events: ApplyEvents, _: &mut Self::Context) {
        let Some(source) = self.sources.get_mut(&events.source) else {
            return;
        };
        if events.epoch < source.epoch {
            self.gauges.stale += 1;
            return;
        }
        if events.epoch > source.epoch {
            source.epoch = events.epoch;
            source.announces_offloads = false;
        }
        source.up_to = events.up_to;
        for op in events.ops {
            self.apply(events.source, op);
        }
    }
}

impl Handler<FindOverlap> for IndexShard {
    type Result = Vec<Vec<Run>>;

    fn handle(&mut self, find: FindOverlap, _: &mut Self::Context) -> Self::Result {
        let chains = find.chains.iter();
        chains.map(|chain| self.index.find_overlap(chain)).collect()
    }
}

impl Handler<HandedOver> for IndexShard {
    type Result = ();

    fn handle(&mut self, of: HandedOver, _: &mut Self::Context) {
        let now = self.seconds();
        let whole = (&of.chain[..], 0);
        self.index
            .put_stored(of.namespace, whole, Tier::Storage, now);
    }
}

impl Handler<CarrySource> for IndexShard {
    type Result = Option<(u64, Vec<SnapshotBlock>)>;

    fn handle(&mut self, of: CarrySource, _: &mut Self::Context) -> Self::Result {
        let seq = self.sources.get(&of.source)?.up_to?;
        if of.unless == Some(seq) {
            return Some((seq, Vec::new()));
        }
        let blocks = self.index.carry(of.source);
        Some((seq, blocks.iter().map(snapshot_block).collect()))
    }
}

fn snapshot_block(block: &Carried) -> SnapshotBlock {
    SnapshotBlock {
        name: block.name,
        own: block.own.0,
        copies: block.copies,
        held: block.held,
        follows: block.follows,
    }
}

fn carried(block: &SnapshotBlock) -> Carried {
    Carried {
        name: block.name,
        own: BlockHash(block.own),
        copies: block.copies,
        held: block.held,
        follows: block.follows,
    }
}

impl Handler<Dispatched> for IndexShard {
    type Result = ();

    fn handle(&mut self, sent: Dispatched, _: &mut Self::Context) {
        let now = self.seconds();
        let hold = Seconds::try_from(sent.hold.as_secs().max(1)).unwrap_or(Seconds::MAX);
        let until = now.saturating_add(hold);
        self.index.speculate(sent.holder, &sent.chain, (now, until));
    }
}

impl Handler<DispatchEnded> for IndexShard {
    type Result = ();

    fn handle(&mut self, ended: DispatchEnded, _: &mut Self::Context) {
        let now = self.seconds();
        match ended.fate {
            Fate::Withdrawn => self.index.withdraw(ended.holder, &ended.chain, now),
            Fate::Served => self.index.served(ended.holder, &ended.chain, now),
            Fate::Believed => {
                self.index.believe(ended.holder, &ended.chain, now);
                self.index.served(ended.holder, &ended.chain, now);
            }
        }
    }
}

impl Handler<Checked> for IndexShard {
    type Result = ();

    fn handle(&mut self, checked: Checked, _: &mut Self::Context) {
        let now = self.seconds();
        self.index.checked(checked.holder, checked.found, now);
    }
}

crate::support::fault::panics_on_request!(IndexShard);
