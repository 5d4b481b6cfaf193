//! The terms in which the index is told what happened, and what it may hold.

use super::tier::Tier;
use crate::block::Realm;

/// A backend's memory, or a storage namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HolderId(pub u32);

/// Seconds since an arbitrary start; the caller's clock.
pub type Seconds = u32;

/// What an index may hold.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Pairs of block and holder.
    pub max_entries: usize,
    /// Unused for so long, an entry expires.
    pub ttl: Seconds,
}

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

impl Applied {
    pub(super) fn unknown(blocks: usize) -> Self {
        Applied {
            blocks: 0,
            unknown: blocks,
        }
    }
}

/// What becomes of blocks of which an engine has removed the last copy from a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Afterwards {
    /// Nothing more.
    Gone,
    /// This holder has them now, or is assumed to.
    KeptBy(HolderId, Tier),
    /// They are no longer in this storage namespace either.
    GoneFrom(HolderId),
}
