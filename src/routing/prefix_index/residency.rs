//! Blocks and who has them where, with the time of the last use; expiry and room.

use super::{HolderId, Seconds};
use crate::block::BlockHash;
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
        let mut tiers = Tier::ALL.into_iter().rev();
        tiers.find(|tier| self.tiers & tier.bit() != 0)
    }
}

#[derive(Debug, Default)]
struct Block {
    depth: u32,
    entries: Vec<Entry>,
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
        let clock = &mut self.clock;
        let block = self.map.entry(own).or_insert_with(|| {
            clock.push_back(own);
            Block {
                depth,
                entries: Vec::with_capacity(1),
            }
        });
        match block
            .entries
            .iter_mut()
            .find(|entry| entry.holder == holder)
        {
            Some(entry) => {
                entry.tiers |= tier.bit();
                entry.touched = now;
            }
            None => {
                block.entries.push(Entry {
                    holder,
                    tiers: tier.bit(),
                    touched: now,
                });
                self.entries += 1;
            }
        }
    }

    pub(super) fn touch(&mut self, own: BlockHash, holder: HolderId, now: Seconds) {
        let entries = self.map.get_mut(&own).map(|block| &mut block.entries);
        let mut entries = entries.into_iter().flatten();
        if let Some(entry) = entries.find(|entry| entry.holder == holder) {
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
        let Some(at) = block
            .entries
            .iter()
            .position(|entry| entry.holder == holder)
        else {
            return;
        };
        block.entries[at].tiers &= !bits;
        if block.entries[at].tiers == 0 {
            block.entries.swap_remove(at);
            self.entries -= 1;
            if block.entries.is_empty() {
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
            let before = block.entries.len();
            block
                .entries
                .retain(|entry| now.saturating_sub(entry.touched) < ttl);
            self.entries -= before - block.entries.len();
            if block.entries.is_empty() {
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
            for entry in &block.entries {
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
        let entries = self.map.get(&own).map(|block| block.entries.iter());
        let entries = entries.into_iter().flatten();
        entries.filter_map(|entry| entry.best().map(|tier| (entry.holder, tier)))
    }
}

type Rank = (bool, Option<Tier>, Seconds, u32);
