//! What was sent somewhere and is believed to be there soon: per block how many requests are under
//! way, and until when it counts.

use super::{HolderId, Seconds};
use crate::block::BlockHash;
use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

/// A block at a holder.
pub(super) type Key = (HolderId, BlockHash);

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
pub(super) struct Due {
    pub(super) until: Seconds,
    pub(super) holder: HolderId,
    pub(super) chain: Arc<[BlockHash]>,
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

/// Block hashes are hashes already; a holder's number is mixed in.
#[derive(Debug, Default)]
pub(super) struct Mixed(u64);

impl Hasher for Mixed {
    fn write(&mut self, bytes: &[u8]) {
        // not called for whole numbers; right, if slow, for anything else
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }
    fn write_u32(&mut self, n: u32) {
        self.write_u64(u64::from(n));
    }
    fn write_u64(&mut self, n: u64) {
        self.0 = (self.0.rotate_left(5) ^ n).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
    fn finish(&self) -> u64 {
        self.0 ^ self.0 >> 32
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Speculations {
    by_block: HashMap<Key, Speculation, BuildHasherDefault<Mixed>>,
    due: BinaryHeap<Due>,
}

impl Speculations {
    /// Dispatches whose time is not over.
    pub(super) fn dispatches(&self) -> usize {
        self.due.len()
    }

    pub(super) fn dispatched(&mut self, due: Due) {
        for own in due.chain.iter() {
            let key = (due.holder, *own);
            let speculation = self.by_block.entry(key).or_insert(Speculation {
                until: due.until,
                pending: 0,
                proven: false,
            });
            speculation.pending += 1;
            speculation.until = speculation.until.max(due.until);
        }
        self.due.push(due);
    }

    /// The next dispatch whose time is over.
    pub(super) fn next_due(&mut self, now: Seconds) -> Option<Due> {
        let next = self.due.peek()?;
        if next.until > now {
            return None;
        }
        self.due.pop()
    }

    /// One of a speculation's requests is no longer under way. The last one ends it, unless one
    /// was served and its time is not over. Answers whether it has ended.
    pub(super) fn request_ended(&mut self, key: Key, served: bool, now: Seconds) -> bool {
        let Some(speculation) = self.by_block.get_mut(&key) else {
            return false;
        };
        speculation.pending = speculation.pending.saturating_sub(1);
        speculation.proven |= served;
        let ended = speculation.pending == 0 && (!speculation.proven || speculation.until <= now);
        if ended {
            self.by_block.remove(&key);
        }
        ended
    }

    /// A dispatch's time is over; answers whether that of this block is. While requests of it are
    /// under way it is remembered, so that their endings are not taken for those of later ones.
    pub(super) fn time_over(&mut self, key: Key, now: Seconds) -> bool {
        let Some(speculation) = self.by_block.get_mut(&key) else {
            return false;
        };
        if speculation.until > now {
            return false;
        }
        speculation.proven = false;
        if speculation.pending == 0 {
            self.by_block.remove(&key);
        }
        true
    }

    /// The block made room.
    pub(super) fn forget(&mut self, key: Key) {
        if !self.by_block.is_empty() {
            self.by_block.remove(&key);
        }
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.by_block.is_empty()
    }
}
