//! Which holder has which blocks: what engines announced, what storage is known or assumed to
//! have, and what was just sent somewhere. Answers how much of a prompt each holder has.
//!
//! A holder is a backend's memory (one per data-parallel rank) or a storage namespace. An engine
//! announces a block once, so the way from its hash to ours is kept until it removes the block,
//! also when our entry has expired; else every child of an expired block would have no parent.

mod engine;
mod overlap;
mod residency;

use crate::block::{BlockHash, Realm, next};
use engine::EngineMap;
pub use overlap::Run;
use residency::Blocks;
pub use residency::{Limits, Tier};
use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, HashMap};
use std::sync::Arc;

/// A backend's memory, or a storage namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HolderId(pub u32);

/// Seconds since an arbitrary start; the caller's clock.
pub type Seconds = u32;

/// A run of blocks that an engine stored.
#[derive(Debug, Clone, Copy)]
pub struct StoredRun<'a> {
    /// Model or adapter, salt, and block size.
    pub realm: Realm<'a>,
    /// The engine's hashes, one per block.
    pub hashes: &'a [u64],
    /// The engine's hash of the block before; none at the start of a prompt.
    pub parent: Option<u64>,
    /// `hashes.len() * block_size` ids; or none, for a copy of blocks that are known.
    pub tokens: &'a [u32],
    /// Where the blocks are.
    pub tier: Tier,
}

/// What an event came to.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Applied {
    /// Blocks that it named and that were taken in.
    pub blocks: usize,
    /// Blocks whose parent, or which themselves, are not known.
    pub unknown: usize,
}

/// See the module.
#[derive(Debug)]
pub struct PrefixIndex {
    limits: Limits,
    blocks: Blocks,
    engines: HashMap<HolderId, EngineMap>,
    speculations: HashMap<(HolderId, BlockHash), Speculation>,
    due: BinaryHeap<Due>,
}

#[derive(Debug, Clone, Copy)]
struct Speculation {
    until: Seconds,
    /// Requests that were sent and of which nothing more is known.
    pending: u32,
    /// Whether one of them was served: then it holds until its time, whatever others do.
    proven: bool,
}

/// A dispatch whose time will be over.
#[derive(Debug)]
struct Due {
    until: Seconds,
    holder: HolderId,
    chain: Arc<[BlockHash]>,
}

impl Ord for Due {
    /// The soonest is the greatest: a heap gives that first.
    fn cmp(&self, other: &Self) -> Ordering {
        Reverse(self.until).cmp(&Reverse(other.until))
    }
}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.until == other.until
    }
}

impl Eq for Due {}

/// Blocks of dispatches whose time is over that one sweep ends, for each block of its budget.
const DUE_PER_BUDGET: usize = 20;

impl PrefixIndex {
    /// An index that knows nothing.
    pub fn new(limits: Limits) -> Self {
        PrefixIndex {
            limits,
            blocks: Blocks::default(),
            engines: HashMap::new(),
            speculations: HashMap::new(),
            due: BinaryHeap::new(),
        }
    }

    /// Pairs of block and holder.
    pub fn entries(&self) -> usize {
        self.blocks.entries()
    }

    /// Dispatches whose time is not over.
    pub fn dispatches(&self) -> usize {
        self.due.len()
    }

    /// Different blocks.
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// An engine stored blocks.
    pub fn store(&mut self, holder: HolderId, run: &StoredRun<'_>, now: Seconds) -> Applied {
        let engine = self.engines.entry(holder).or_default();
        let mut applied = Applied::default();
        if run.tokens.is_empty() {
            for hash in run.hashes {
                match engine.copy(*hash, run.tier) {
                    Some((own, depth)) => {
                        self.blocks.put((own, depth), holder, run.tier, now);
                        applied.blocks += 1;
                    }
                    None => applied.unknown += 1,
                }
            }
        } else {
            let start = match run.parent {
                None => Some((run.realm.root(), 0)),
                Some(parent) => engine.own(parent).map(|(own, depth)| (own, depth + 1)),
            };
            let Some((mut parent, mut depth)) = start else {
                return Applied {
                    blocks: 0,
                    unknown: run.hashes.len(),
                };
            };
            let size = run.realm.block_size.max(1) as usize;
            for (hash, tokens) in run.hashes.iter().zip(run.tokens.chunks_exact(size)) {
                if engine.len() >= self.limits.max_entries && engine.own(*hash).is_none() {
                    applied.unknown += 1;
                    break; // its children would have no parent
                }
                parent = next(parent, tokens);
                engine.add(*hash, (parent, depth), run.tier);
                self.blocks.put((parent, depth), holder, run.tier, now);
                applied.blocks += 1;
                depth += 1;
            }
        }
        self.make_room(now);
        applied
    }

    /// An engine removed blocks from one tier. Answers our hashes of those of which no copy is
    /// left there.
    pub fn remove(
        &mut self,
        holder: HolderId,
        hashes: &[u64],
        tier: Tier,
    ) -> (Applied, Vec<BlockHash>) {
        let mut applied = Applied::default();
        let mut gone = Vec::new();
        let Some(engine) = self.engines.get_mut(&holder) else {
            applied.unknown = hashes.len();
            return (applied, gone);
        };
        for hash in hashes {
            match engine.remove(*hash, tier) {
                None => applied.unknown += 1,
                Some((own, left)) => {
                    applied.blocks += 1;
                    if left == 0 {
                        self.blocks.take(own, holder, tier);
                        gone.push(own);
                    }
                }
            }
        }
        (applied, gone)
    }

    /// The blocks that an engine's hashes stand for, as far as they are known.
    pub fn own(&self, holder: HolderId, hashes: &[u64]) -> Vec<BlockHash> {
        let engine = self.engines.get(&holder);
        let known = hashes.iter().filter_map(|hash| engine?.own(*hash));
        known.map(|(own, _)| own).collect()
    }

    /// Everything that this engine announced is void: it cleared its cache, or is another
    /// process now. Storage namespaces keep what they have.
    pub fn forget(&mut self, holder: HolderId) {
        if let Some(engine) = self.engines.remove(&holder) {
            for own in engine.into_own() {
                self.blocks.take_all(own, holder);
            }
        }
    }

    /// A namespace has these blocks of a chain, which begin at `depth`; `Tier::Storage` when an
    /// event or a finished transfer says so, `Tier::Assumed` when an eviction only suggests it.
    pub fn put_stored(
        &mut self,
        namespace: HolderId,
        blocks: &[BlockHash],
        tier: Tier,
        now: Seconds,
    ) {
        for own in blocks {
            let depth = self.blocks.depth(*own).unwrap_or(0);
            self.blocks.put((*own, depth), namespace, tier, now);
        }
        self.make_room(now);
    }

    /// A namespace no longer has these blocks.
    pub fn take_stored(&mut self, namespace: HolderId, blocks: &[BlockHash]) {
        for own in blocks {
            self.blocks.take(*own, namespace, Tier::Storage);
            self.blocks.take(*own, namespace, Tier::Assumed);
        }
    }

    /// A prompt was sent to a holder: until `until` it counts as held there, so that a burst of
    /// one new prefix stays together before the first event comes.
    pub fn speculate(
        &mut self,
        holder: HolderId,
        chain: &Arc<[BlockHash]>,
        (now, until): (Seconds, Seconds),
    ) {
        self.due.push(Due {
            until,
            holder,
            chain: chain.clone(),
        });
        for (depth, own) in chain.iter().enumerate() {
            let key = (holder, *own);
            let speculation = self.speculations.entry(key).or_insert(Speculation {
                until,
                pending: 0,
                proven: false,
            });
            speculation.pending += 1;
            speculation.until = speculation.until.max(until);
            self.blocks
                .put((*own, depth as u32), holder, Tier::Speculative, now);
        }
        self.make_room(now);
    }

    /// The request that was sent failed, or was cancelled before its first byte.
    pub fn withdraw(&mut self, holder: HolderId, chain: &[BlockHash], now: Seconds) {
        for own in chain {
            self.request_ended((holder, *own), false, now);
        }
    }

    /// The request that was sent had its first byte: the holder has computed and used its blocks.
    pub fn served(&mut self, holder: HolderId, chain: &[BlockHash], now: Seconds) {
        for own in chain {
            self.request_ended((holder, *own), true, now);
        }
        self.refresh(holder, chain, now);
    }

    /// One of a speculation's requests is no longer under way. The last one ends it, unless one
    /// was served and its time is not over.
    fn request_ended(&mut self, key: (HolderId, BlockHash), served: bool, now: Seconds) {
        let Some(speculation) = self.speculations.get_mut(&key) else {
            return;
        };
        speculation.pending = speculation.pending.saturating_sub(1);
        speculation.proven |= served;
        if speculation.pending == 0 && (!speculation.proven || speculation.until <= now) {
            self.speculations.remove(&key);
            self.blocks.take(key.1, key.0, Tier::Speculative);
        }
    }

    /// A holder used these blocks: none of them expires soon.
    pub fn refresh(&mut self, holder: HolderId, chain: &[BlockHash], now: Seconds) {
        for own in chain {
            self.blocks.touch(*own, holder, now);
        }
    }

    /// How much of a prompt each holder has, as runs of blocks. Looks no further than the first
    /// block that nobody has.
    pub fn find_overlap(&self, chain: &[BlockHash]) -> Vec<Run> {
        overlap::find(&self.blocks, chain)
    }

    /// Lets go of what has expired, at most `budget` blocks of it: called often, with little.
    pub fn sweep(&mut self, now: Seconds, budget: usize) {
        let mut ended = 0;
        while ended < budget.saturating_mul(DUE_PER_BUDGET) {
            if self.due.peek().is_none_or(|due| due.until > now) {
                break;
            }
            let Some(due) = self.due.pop() else { break };
            for own in due.chain.iter() {
                self.end_speculation(due.holder, *own, now);
            }
            ended += due.chain.len().max(1);
        }
        self.blocks.sweep(now, self.limits.ttl, budget);
    }

    /// Its time is over. While requests of it are under way it is remembered, so that their
    /// endings are not taken for those of later ones.
    fn end_speculation(&mut self, holder: HolderId, own: BlockHash, now: Seconds) {
        let key = (holder, own);
        let Some(speculation) = self.speculations.get_mut(&key) else {
            return;
        };
        if speculation.until <= now {
            speculation.proven = false;
            self.blocks.take(own, holder, Tier::Speculative);
            if speculation.pending == 0 {
                self.speculations.remove(&key);
            }
        }
    }

    fn make_room(&mut self, now: Seconds) {
        while self.blocks.entries() > self.limits.max_entries {
            let Some((own, holder)) = self.blocks.victim(now, self.limits.ttl) else {
                return;
            };
            self.blocks.take_all(own, holder);
            self.speculations.remove(&(holder, own));
        }
    }
}

#[cfg(test)]
mod tests;
