//! Which holder has which blocks: what engines announced, what storage is known or assumed to
//! have, and what was just sent somewhere. Answers how much of a prompt each holder has.
//!
//! A holder is a backend's memory (one per data-parallel rank) or a storage namespace. An engine
//! announces a block once, so the way from its hash to ours is kept until it removes the block,
//! also when our entry has expired; else every child of an expired block would have no parent.
//!
//! Blocks of a chain stand side by side where they can (`slab`, `blocks`); each names the set of
//! its holders (`holder_sets`), so that a lookup compares numbers along a stretch; a record per
//! block and holder (`holding`) has the engine's hash, and four bytes in a `table` lead from that
//! hash to the record. `ledger` keeps these in step.

mod blocks;
mod carry;
mod changes;
mod guesses;
mod holder_sets;
mod holders;
mod holding;
mod ledger;
mod overlap;
mod room;
mod slab;
mod speculations;
mod table;
mod terms;
mod tier;
mod turns;

use crate::block::{BlockHash, next};
pub use carry::Carried;
use guesses::Guesses;
use holders::HolderNumber;
use ledger::{Ledger, RECORDS_MAX};
pub use overlap::Run;
use slab::Place;
use speculations::{Due, Speculations};
use std::sync::Arc;
pub use terms::{Afterwards, Applied, HolderId, Limits, Seconds, StoredRun};
pub use tier::Tier;

/// Engines' hashes that are looked up ahead: enough to wait for memory side by side, few enough to
/// be in the cache still when their turn comes.
const WARMED: usize = 32;

fn batch(hashes: &[u64], from: usize) -> &[u64] {
    &hashes[from..hashes.len().min(from + WARMED)]
}

/// So much of a prompt counts as held where it was sent: 128,000 tokens in blocks of 16. More of it takes
/// a turn too long, and may be refused by the engine.
const HOPED_BLOCKS_MAX: usize = 8192;

fn hoped(chain: &Arc<[BlockHash]>) -> Arc<[BlockHash]> {
    if chain.len() <= HOPED_BLOCKS_MAX {
        return chain.clone();
    }
    chain[..HOPED_BLOCKS_MAX].into()
}

/// Blocks of dispatches whose time is over that one sweep ends, for each block of its budget.
const DUE_PER_BUDGET: usize = 20;

/// See the module.
#[derive(Debug)]
pub struct PrefixIndex {
    limits: Limits,
    ledger: Ledger,
    speculations: Speculations,
    guesses: Guesses,
    evicted: Evicted,
}

/// Pairs of block and holder that went by themselves.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Evicted {
    /// Not used for too long.
    pub expired: u64,
    /// To make room for others.
    pub crowded_out: u64,
    /// Guessed to be there, of more than the memory turned out to hold.
    pub disproved: u64,
}

impl PrefixIndex {
    /// An index that knows nothing.
    pub fn new(limits: Limits) -> Self {
        let max_entries = limits.max_entries.min(RECORDS_MAX);
        PrefixIndex {
            limits: Limits {
                max_entries,
                ..limits
            },
            ledger: Ledger::default(),
            speculations: Speculations::default(),
            guesses: Guesses::default(),
            evicted: Evicted::default(),
        }
    }

    /// Pairs of block and holder.
    pub fn entries(&self) -> usize {
        self.ledger.entries()
    }

    /// Dispatches whose time is not over.
    pub fn dispatches(&self) -> usize {
        self.speculations.dispatches()
    }

    /// Different blocks.
    pub fn blocks(&self) -> usize {
        self.ledger.held_blocks()
    }

    /// Memory that blocks and records take, in bytes.
    pub fn bytes(&self) -> usize {
        self.ledger.bytes()
    }

    /// What went by itself so far.
    pub fn evicted(&self) -> Evicted {
        self.evicted
    }

    /// An engine stored blocks.
    pub fn store(&mut self, holder: HolderId, run: &StoredRun<'_>, now: Seconds) -> Applied {
        let Some(holder) = self.ledger.holders.number(holder) else {
            return Applied::unknown(run.hashes.len());
        };
        let applied = if run.tokens.is_empty() {
            self.store_copies(holder, run, now)
        } else {
            self.store_run(holder, run, now)
        };
        self.make_room(now);
        applied
    }

    fn store_copies(&mut self, holder: HolderNumber, run: &StoredRun<'_>, now: Seconds) -> Applied {
        let mut applied = Applied::default();
        for hash in run.hashes {
            match self.ledger.named(holder, *hash) {
                Some(place) => {
                    self.ledger.copied(place, run.tier, now);
                    applied.blocks += 1;
                }
                None => applied.unknown += 1,
            }
        }
        applied
    }

    fn store_run(&mut self, holder: HolderNumber, run: &StoredRun<'_>, now: Seconds) -> Applied {
        let ledger = &mut self.ledger;
        let mut parent = match run.parent {
            None => None,
            Some(hash) => match ledger.named(holder, hash) {
                None => return Applied::unknown(run.hashes.len()),
                known => known,
            },
        };
        let mut own = match parent {
            None => run.realm.root(),
            Some(parent) => ledger.key(parent).1,
        };
        let mut applied = Applied::default();
        let size = run.realm.block_size.max(1) as usize;
        let blocks = run.hashes.iter().zip(run.tokens.chunks_exact(size));
        for (at, (hash, tokens)) in blocks.enumerate() {
            if at % WARMED == 0 {
                ledger.warm(holder, batch(run.hashes, at));
            }
            let known = ledger.named(holder, *hash);
            if known.is_none() && ledger.names_of(holder) >= self.limits.max_entries {
                applied.unknown += 1;
                break; // its children would have no parent
            }
            own = next(own, tokens);
            let named = (*hash, known);
            parent = ledger.stored((holder, run.tier), (parent, own), named, now);
            if parent.is_none() {
                applied.unknown += 1;
                break;
            }
            applied.blocks += 1;
        }
        applied
    }

    /// An engine removed blocks from one tier. `afterwards` is for those of which no copy is left
    /// there; answers their number, too.
    pub fn remove(
        &mut self,
        holder: HolderId,
        hashes: &[u64],
        tier: Tier,
        (afterwards, now): (Afterwards, Seconds),
    ) -> (Applied, usize) {
        let Some(number) = self.ledger.holders.find(holder) else {
            return (Applied::unknown(hashes.len()), 0);
        };
        let other = match afterwards {
            Afterwards::KeptBy(other, _) => self.ledger.holders.number(other),
            Afterwards::GoneFrom(other) => self.ledger.holders.find(other),
            Afterwards::Gone => None,
        };
        let (mut applied, mut gone) = (Applied::default(), 0);
        for (at, hash) in hashes.iter().enumerate() {
            if at % WARMED == 0 {
                self.ledger.warm(number, batch(hashes, at));
            }
            let removed = self.ledger.removed((number, tier), *hash, |ledger, block| {
                match (afterwards, other) {
                    (Afterwards::KeptBy(_, tier), Some(other)) => {
                        ledger.put((other, tier), block, (None, None), now);
                    }
                    (Afterwards::GoneFrom(_), Some(other)) => ledger.take_stored(other, block),
                    _ => {}
                }
            });
            match removed {
                None => applied.unknown += 1,
                Some(left) => {
                    applied.blocks += 1;
                    gone += usize::from(left == 0);
                }
            }
        }
        self.make_room(now);
        (applied, gone)
    }

    /// Everything that this engine announced is void: it cleared its cache, or is another
    /// process now. Storage namespaces keep what they have.
    pub fn forget(&mut self, holder: HolderId) {
        if let Some(number) = self.ledger.holders.find(holder) {
            self.ledger.forget(number);
        }
    }

    /// What is only assumed of a holder is void: its memory was cleared, or is another one now.
    pub fn forget_assumed(&mut self, holder: HolderId) {
        if let Some(number) = self.ledger.holders.find(holder) {
            self.ledger.forget_assumed(number);
        }
        self.guesses.forget(holder);
    }

    /// A namespace has what an engine calls so: the engine announced an offload.
    pub fn put_named(
        &mut self,
        namespace: HolderId,
        (holder, hashes): (HolderId, &[u64]),
        tier: Tier,
        now: Seconds,
    ) {
        let ledger = &mut self.ledger;
        let Some(namespace) = ledger.holders.number(namespace) else {
            return;
        };
        let Some(holder) = ledger.holders.find(holder) else {
            return;
        };
        let mut before: Option<Place> = None;
        for hash in hashes {
            if let Some(named) = ledger.named(holder, *hash) {
                let block = ledger.holdings[named].block;
                before = Some(ledger.put_behind((namespace, tier), block, before, now));
            }
        }
        self.make_room(now);
    }

    /// A namespace has the blocks of a chain from `from` on; `Tier::Storage` when an event or a
    /// finished transfer says so, `Tier::Assumed` when something only suggests it.
    pub fn put_stored(
        &mut self,
        namespace: HolderId,
        (chain, from): (&[BlockHash], usize),
        tier: Tier,
        now: Seconds,
    ) {
        if let Some(namespace) = self.ledger.holders.number(namespace) {
            let put = (namespace, tier);
            self.ledger.put_chain(put, (chain, from), now, |_| {});
        }
        self.make_room(now);
    }

    /// A namespace no longer has the blocks of a chain from `from` on.
    pub fn take_stored(&mut self, namespace: HolderId, (chain, from): (&[BlockHash], usize)) {
        let Some(namespace) = self.ledger.holders.find(namespace) else {
            return;
        };
        let mut before = None;
        for (at, own) in chain.iter().enumerate() {
            let block = self.ledger.blocks.find(before, *own);
            if let Some(block) = block.filter(|_| at >= from) {
                self.ledger.take_stored(namespace, block);
            }
            before = block;
        }
    }

    /// A prompt was served by a holder that announces nothing: its blocks are assumed to be there.
    pub fn believe(&mut self, holder: HolderId, chain: &Arc<[BlockHash]>, now: Seconds) {
        let chain = hoped(chain);
        if !self.reserve(chain.len(), now) {
            return;
        }
        if let Some(number) = self.ledger.holders.number(holder) {
            let (assumed, mut records) = ((number, Tier::Assumed), Vec::with_capacity(chain.len()));
            let has = |record| records.push(record);
            self.ledger.put_chain(assumed, (&chain, 0), now, has);
            self.guesses.used(holder, &records, now);
        }
        self.make_room(now);
        self.give_up_excess(holder, now);
    }

    /// A prompt was believed to find something at a holder that announces nothing, and the engine said what it found: `found`
    /// when that was about as much. Where too often it was not, less is believed from now on.
    pub fn checked(&mut self, holder: HolderId, found: bool, now: Seconds) {
        self.guesses.checked(holder, found);
        self.give_up_excess(holder, now);
    }

    fn give_up_excess(&mut self, holder: HolderId, now: Seconds) {
        let Some(number) = self.ledger.holders.find(holder) else {
            return;
        };
        while let Some((record, is_old)) = self.guesses.excess(holder, (now, self.limits.ttl)) {
            let gone = u64::from(self.ledger.take_assumed(number, record));
            match is_old {
                true => self.evicted.expired += gone,
                false => self.evicted.disproved += gone,
            }
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
        let chain = &hoped(chain);
        if !self.reserve(chain.len(), now) {
            return;
        }
        self.speculations.dispatched(Due {
            until,
            holder,
            chain: chain.clone(),
        });
        if let Some(number) = self.ledger.holders.number(holder) {
            let speculative = (number, Tier::Speculative);
            self.ledger.put_chain(speculative, (chain, 0), now, |_| {});
        }
        self.make_room(now);
    }

    /// The request that was sent failed, or was cancelled before its first byte.
    pub fn withdraw(&mut self, holder: HolderId, chain: &[BlockHash], now: Seconds) {
        let speculations = &mut self.speculations;
        self.ledger.used(holder, chain, None, |own| {
            speculations.request_ended((holder, own), false, now)
        });
    }

    /// The request that was sent had its first byte: the holder has computed and used its blocks.
    pub fn served(&mut self, holder: HolderId, chain: &[BlockHash], now: Seconds) {
        let speculations = &mut self.speculations;
        self.ledger.used(holder, chain, Some(now), |own| {
            speculations.request_ended((holder, own), true, now)
        });
    }

    /// A holder used these blocks: none of them expires soon.
    pub fn refresh(&mut self, holder: HolderId, chain: &[BlockHash], now: Seconds) {
        self.ledger.used(holder, chain, Some(now), |_| false);
    }

    /// How much of a prompt each holder has, as runs of blocks. Looks no further than the first
    /// block that nobody has.
    pub fn find_overlap(&self, chain: &[BlockHash]) -> Vec<Run> {
        overlap::find(&self.ledger, chain)
    }

    /// Lets go of what has expired, looking at `budget` entries: called often, with little.
    pub fn sweep(&mut self, now: Seconds, budget: usize) {
        let mut ended = 0;
        while ended < budget.saturating_mul(DUE_PER_BUDGET) {
            let Some(due) = self.speculations.next_due(now) else {
                break;
            };
            let speculations = &mut self.speculations;
            self.ledger.used(due.holder, &due.chain, None, |own| {
                speculations.time_over((due.holder, own), now)
            });
            ended += due.chain.len().max(1);
        }
        self.evicted.expired += self.ledger.sweep(now, self.limits.ttl, budget);
    }

    /// Makes room for so many blocks that nobody announced, by what is not announced either; false if
    /// that is not enough. Clients must not push out what engines said once.
    fn reserve(&mut self, blocks: usize, now: Seconds) -> bool {
        while self.ledger.entries() + blocks > self.limits.max_entries {
            let Some(place) = self.ledger.victim(now, self.limits.ttl) else {
                return false;
            };
            let holding = &self.ledger.holdings[place];
            let fresh = now.saturating_sub(holding.touched) < self.limits.ttl;
            if fresh && holding.tiers().best() > Some(Tier::Assumed) {
                return false;
            }
            self.speculations.forget(self.ledger.key(place));
            self.ledger.take_all(place);
            self.evicted.crowded_out += 1;
        }
        true
    }

    fn make_room(&mut self, now: Seconds) {
        while self.ledger.entries() > self.limits.max_entries {
            let Some(place) = self.ledger.victim(now, self.limits.ttl) else {
                return;
            };
            self.speculations.forget(self.ledger.key(place));
            self.ledger.take_all(place);
            self.evicted.crowded_out += 1;
        }
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_model;
