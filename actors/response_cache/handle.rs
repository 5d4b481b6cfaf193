//! What everybody has of the cache: memory at once, and the way to the actor for the rest.

use super::{Keep, Kept, MemoryUse, Outcome, ResponseCache, Step, TierStats};
use crate::support::mailbox::Mailbox;
use crate::support::published::Published;
use actix::Addr;
use routing::cache_key::CacheKey;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use wire::cache_entry::Entry;

/// The cache as everybody sees it; clones are the same cache.
#[derive(Clone)]
pub struct ResponseCacheHandle {
    /// Whom to ask. None until the actors have started.
    pub address: Published<Option<Addr<ResponseCache>>>,
    /// The tier in memory.
    pub memory: Option<MemoryUse>,
    /// Numbers of all tiers.
    pub tiers: Arc<[Arc<TierStats>]>,
    /// Whether there are tiers outside of this process.
    pub is_tiered: bool,
    /// How long entries live in L1, and how large they may be there.
    pub l1: (Duration, u64),
    /// Entries of L2 that were put into L1.
    pub promotions: Arc<AtomicU64>,
    /// Fresh starts of the actor.
    pub restarts: Arc<AtomicU64>,
}

impl ResponseCacheHandle {
    /// Keeps an entry in every tier that it belongs into. Comes back when L1 has it: at once, where
    /// that is memory.
    pub async fn keep(&self, key: CacheKey, path: &Arc<str>, entry: Arc<Entry>) {
        let (ttl, largest) = self.l1;
        if let Some(used) = self.memory.as_ref().filter(|used| !used.stands_in) {
            if entry.encoded_length() as u64 <= largest {
                used.keep(key, path, &entry, ttl);
            } else {
                used.stats.stored(Outcome::TooLarge);
            }
        }
        if !self.is_tiered {
            return;
        }
        let address = self.address.load();
        if let Some(address) = address.as_ref() {
            let path = path.clone();
            let keep = Keep {
                key,
                path,
                entry,
                queued: Mailbox::ResponseCache.enter(),
            };
            let _ = address.send(keep).await;
        }
    }

    /// Looks into memory, where memory is asked: at once, on any thread.
    pub fn in_memory(&self, key: &CacheKey) -> Option<(Step, Option<Arc<Kept>>)> {
        let used = self.memory.as_ref()?;
        if used.stands_in && self.tiers[0].up.load(Relaxed) {
            return None; // what others removed from L1 must not come back from here
        }
        let kept = used.memory.get(key);
        let step = Step {
            tier: "memory",
            outcome: if kept.is_some() {
                Outcome::Hit
            } else {
                Outcome::Miss
            },
            took: Duration::ZERO,
        };
        Some((step, kept))
    }
}
