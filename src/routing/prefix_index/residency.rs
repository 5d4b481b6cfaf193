//! Blocks and who has them where, with the time of the last use; expiry and room.

use super::{HolderId, Seconds};
use crate::block::BlockHash;
use std::collections::hash_map::Entry as MapEntry;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

/// Where a block is, and how surely. In the order in which they make room for others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// A request for it was sent there a moment ago.
    Speculative,
    /// External storage, as an eviction suggests.
    Assumed,
    /// External storage, as was said.
    Storage,
    /// The host's memory.
    Cpu,
    /// GPU memory.
    Gpu,
}

impl Tier {
    /// From the least to the most sure and near.
    pub const ALL: [Tier; 5] = [
        Tier::Speculative,
        Tier::Assumed,
        Tier::Storage,
        Tier::Cpu,
        Tier::Gpu,
    ];

    fn bit(self) -> u8 {
        1 << self as u8
    }
}

/// What an index may hold.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Pairs of block and holder.
    pub max_entries: usize,
    /// Unused for so long, an entry expires.
    pub ttl: Seconds,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    holder: HolderId,
    tiers: u8,
    touched: Seconds,
}

impl Entry {
    fn best(&self) -> Option<Tier> {
        let highest = self.tiers.checked_ilog2()?;
        Tier::ALL.get(highest as usize).copied()
    }
}

/// Most blocks have one holder, which then needs no allocation of its own.
#[derive(Debug)]
struct Block {
    depth: u32,
    first: Entry,
    #[expect(
        clippy::box_collection,
        reason = "a word instead of three in every block"
    )]
    more: Option<Box<Vec<Entry>>>,
}

impl Block {
    fn iter(&self) -> impl Iterator<Item = &Entry> {
        let more = self.more.iter().flat_map(|more| more.iter());
        std::iter::once(&self.first).chain(more)
    }

    fn get_mut(&mut self, holder: HolderId) -> Option<&mut Entry> {
        if self.first.holder == holder {
            return Some(&mut self.first);
        }
        let more = self.more.as_mut()?;
        more.iter_mut().find(|entry| entry.holder == holder)
    }

    fn push(&mut self, entry: Entry) {
        self.more.get_or_insert_default().push(entry);
    }

    /// Removes the entries that `gone` says; answers how many are left.
    fn drop_where(&mut self, gone: impl Fn(&Entry) -> bool) -> (usize, usize) {
        let mut removed = 0;
        if let Some(more) = &mut self.more {
            let before = more.len();
            more.retain(|entry| !gone(entry));
            removed = before - more.len();
        }
        let left = self.more.as_ref().map_or(0, |more| more.len());
        if gone(&self.first) {
            removed += 1;
            match self.more.as_mut().and_then(|more| more.pop()) {
                Some(next) => self.first = next,
                None => return (removed, 0),
            }
        }
        if self.more.as_ref().is_some_and(|more| more.is_empty()) {
            self.more = None;
        }
        (removed, left.max(1))
    }
}

/// Block hashes are hashes already.
#[derive(Debug, Default)]
pub(super) struct AsIs(u64);

impl Hasher for AsIs {
    fn write(&mut self, bytes: &[u8]) {
        // not called for whole numbers; right, if slow, for anything else
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }
    fn write_u64(&mut self, n: u64) {
        self.0 = n;
    }
    fn finish(&self) -> u64 {
        self.0
    }
}

/// Blocks that the search for room looks at.
const VICTIMS_SAMPLED: usize = 16;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    map: HashMap<BlockHash, Block, BuildHasherDefault<AsIs>>,
    // every block once; turned by sweeps and by the search for room
    clock: VecDeque<BlockHash>,
    entries: usize,
}

impl Blocks {
    pub(super) fn len(&self) -> usize {
        self.map.len()
    }

    pub(super) fn entries(&self) -> usize {
        self.entries
    }

    #[cfg(test)]
    pub(super) fn clock_len(&self) -> usize {
        self.clock.len()
    }

    pub(super) fn depth(&self, own: BlockHash) -> Option<u32> {
        self.map.get(&own).map(|block| block.depth)
    }

    pub(super) fn put(
        &mut self,
        (own, depth): (BlockHash, u32),
        holder: HolderId,
        tier: Tier,
        now: Seconds,
    ) {
        let fresh = Entry {
            holder,
            tiers: tier.bit(),
            touched: now,
        };
        let block = match self.map.entry(own) {
            MapEntry::Occupied(block) => block.into_mut(),
            MapEntry::Vacant(vacant) => {
                self.clock.push_back(own);
                self.entries += 1;
                vacant.insert(Block {
                    depth,
                    first: fresh,
                    more: None,
                });
                return;
            }
        };
        match block.get_mut(holder) {
            Some(entry) => {
                entry.tiers |= tier.bit();
                entry.touched = now;
            }
            None => {
                block.push(fresh);
                self.entries += 1;
            }
        }
    }

    pub(super) fn touch(&mut self, own: BlockHash, holder: HolderId, now: Seconds) {
        if let Some(entry) = self
            .map
            .get_mut(&own)
            .and_then(|block| block.get_mut(holder))
        {
            entry.touched = now;
        }
    }

    pub(super) fn take(&mut self, own: BlockHash, holder: HolderId, tier: Tier) {
        self.take_bits(own, holder, tier.bit());
    }

    pub(super) fn take_all(&mut self, own: BlockHash, holder: HolderId) {
        self.take_bits(own, holder, u8::MAX);
    }

    fn take_bits(&mut self, own: BlockHash, holder: HolderId, bits: u8) {
        let Some(block) = self.map.get_mut(&own) else {
            return;
        };
        let Some(entry) = block.get_mut(holder) else {
            return;
        };
        entry.tiers &= !bits;
        if entry.tiers == 0 {
            self.entries -= 1;
            if block.drop_where(|entry| entry.holder == holder).1 == 0 {
                self.map.remove(&own); // its place on the clock goes when the hand comes by
                self.shrink_clock();
            }
        }
    }

    /// Places of blocks that are gone: not more of them than of blocks.
    fn shrink_clock(&mut self) {
        if self.clock.len() > 64 && self.clock.len() > 2 * self.map.len() {
            let map = &self.map;
            self.clock.retain(|own| map.contains_key(own));
            self.clock.shrink_to(2 * self.clock.len());
        }
    }

    /// Turns the clock by `budget` blocks and drops what has expired.
    pub(super) fn sweep(&mut self, now: Seconds, ttl: Seconds, budget: usize) {
        for _ in 0..budget.min(self.clock.len()) {
            let Some(own) = self.clock.pop_front() else {
                return;
            };
            let Some(block) = self.map.get_mut(&own) else {
                continue;
            };
            let expired = |entry: &Entry| now.saturating_sub(entry.touched) >= ttl;
            let (removed, left) = block.drop_where(expired);
            self.entries -= removed;
            if left == 0 {
                self.map.remove(&own);
            } else {
                self.clock.push_back(own);
            }
        }
    }

    /// Who makes room: of some blocks under the hand, the least sure and near entry, of these the
    /// longest unused, of these the deepest in its chain. Expired ones go first of all.
    pub(super) fn victim(&mut self, now: Seconds, ttl: Seconds) -> Option<(BlockHash, HolderId)> {
        let mut worst: Option<(Rank, BlockHash, HolderId)> = None;
        let mut seen = 0;
        while seen < VICTIMS_SAMPLED {
            let Some(own) = self.clock.pop_front() else {
                break;
            };
            let Some(block) = self.map.get(&own) else {
                continue;
            };
            self.clock.push_back(own);
            seen += 1;
            for entry in block.iter() {
                let fresh = now.saturating_sub(entry.touched) < ttl;
                let rank = (fresh, entry.best(), entry.touched, u32::MAX - block.depth);
                if worst.is_none_or(|(least, ..)| rank < least) {
                    worst = Some((rank, own, entry.holder));
                }
            }
            if seen >= self.map.len() {
                break;
            }
        }
        worst.map(|(_, own, holder)| (own, holder))
    }

    /// The best tier of every holder of a block.
    pub(super) fn holders(&self, own: BlockHash) -> impl Iterator<Item = (HolderId, Tier)> {
        let entries = self.map.get(&own).into_iter().flat_map(Block::iter);
        entries.filter_map(|entry| entry.best().map(|tier| (entry.holder, tier)))
    }
}

type Rank = (bool, Option<Tier>, Seconds, u32);
