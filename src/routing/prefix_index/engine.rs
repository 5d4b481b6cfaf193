//! One engine's own hashes: which of our blocks each stands for, and in how many copies.

use super::residency::Tier;
use crate::block::BlockHash;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Copies beyond this are not counted: some engines announce a block again whenever it is used.
const COPIES_MAX: u8 = 8;

#[derive(Debug, Clone, Copy)]
struct Mapped {
    own: BlockHash,
    depth: u32,
    gpu: u8,
    cpu: u8,
    storage: u8,
}

impl Mapped {
    fn copies(&mut self, tier: Tier) -> Option<&mut u8> {
        match tier {
            Tier::Gpu => Some(&mut self.gpu),
            Tier::Cpu => Some(&mut self.cpu),
            Tier::Storage => Some(&mut self.storage),
            Tier::Assumed | Tier::Speculative => None,
        }
    }

    fn is_empty(&self) -> bool {
        self.gpu == 0 && self.cpu == 0 && self.storage == 0
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct EngineMap(HashMap<u64, Mapped, BuildHasherDefault<Mixed>>);

/// Engines' hashes may be small numbers: one multiplication spreads them.
#[derive(Debug, Default)]
struct Mixed(u64);

impl Hasher for Mixed {
    fn write(&mut self, bytes: &[u8]) {
        // not called for whole numbers; right, if slow, for anything else
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }
    fn write_u64(&mut self, n: u64) {
        let wide = u128::from(self.0 ^ n) * 0x9E37_79B9_7F4A_7C15;
        self.0 = (wide >> 64) as u64 ^ wide as u64;
    }
    fn finish(&self) -> u64 {
        self.0
    }
}

impl EngineMap {
    /// The block that a hash stands for, and its place in its chain.
    pub(super) fn own(&self, hash: u64) -> Option<(BlockHash, u32)> {
        self.0.get(&hash).map(|mapped| (mapped.own, mapped.depth))
    }

    /// Hashes that are known. An engine that never removes any must not fill our memory.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The engine stored a block, perhaps once more.
    pub(super) fn add(&mut self, hash: u64, (own, depth): (BlockHash, u32), tier: Tier) {
        let fresh = Mapped {
            own,
            depth,
            gpu: 0,
            cpu: 0,
            storage: 0,
        };
        let mapped = self.0.entry(hash).or_insert(fresh);
        if mapped.own != own {
            *mapped = fresh; // the hash was reused for other tokens
        }
        if let Some(copies) = mapped.copies(tier) {
            *copies = (*copies + 1).min(COPIES_MAX);
        }
    }

    /// The engine copied a block that it stored before.
    pub(super) fn copy(&mut self, hash: u64, tier: Tier) -> Option<(BlockHash, u32)> {
        let place = self.own(hash)?;
        self.add(hash, place, tier);
        Some(place)
    }

    /// The engine removed a copy; answers how many are left in that tier.
    pub(super) fn remove(&mut self, hash: u64, tier: Tier) -> Option<(BlockHash, u8)> {
        let mapped = self.0.get_mut(&hash)?;
        let own = mapped.own;
        let copies = mapped.copies(tier)?;
        *copies = copies.saturating_sub(1);
        let left = *copies;
        if mapped.is_empty() {
            self.0.remove(&hash);
        }
        Some((own, left))
    }

    /// All blocks, perhaps some twice.
    pub(super) fn into_own(self) -> impl Iterator<Item = BlockHash> {
        self.0.into_values().map(|mapped| mapped.own)
    }
}
