//! The response cache as requests meet it: what may be cached and under which key ([`wish`]), the call
//! that equal requests share ([`flight`], [`drive`]), and answers out of the cache ([`serve`]).

pub mod drive;
pub mod flight;
mod judge;
pub mod serve;
mod shape;
pub mod wiring;
pub mod wish;

use actors::response_cache::ResponseCacheHandle;
use flight::Flights;
use routing::cache_policy::{Skip, Why};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What the process has of it.
pub struct AnswerCache {
    /// The tiers.
    pub tiers: ResponseCacheHandle,
    /// Calls that requests share.
    pub flights: Arc<Flights>,
    /// What may be cached.
    pub rules: Rules,
    /// Requests that passed the cache by, by reason.
    pub bypassed: Counts<{ Why::ALL.len() }>,
    /// Answers that were not kept, by reason.
    pub unkept: Counts<{ Skip::ALL.len() }>,
    /// Flights that went on for another waiter.
    pub handovers: AtomicU64,
    /// Waits for another gateway: its answer came, or not.
    pub waits: [AtomicU64; 2],
}

/// What may be cached, from the settings.
#[derive(Debug, Clone)]
pub struct Rules {
    /// Part of every key.
    pub key_version: u32,
    /// Whether clients may force caching.
    pub allow_force: bool,
    /// Whether answers are kept that ended at their limit of tokens.
    pub keep_truncated: bool,
    /// Bytes of an answer in one piece.
    pub response_max: usize,
    /// Bytes of a stream.
    pub stream_max: usize,
}

/// Counters by a small set of reasons.
pub struct Counts<const N: usize>([AtomicU64; N]);

impl<const N: usize> Default for Counts<N> {
    fn default() -> Self {
        Counts(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl<const N: usize> Counts<N> {
    fn add(&self, at: usize) {
        self.0[at].fetch_add(1, Relaxed);
    }

    /// The counts, in the order of the reasons.
    pub fn all(&self) -> impl Iterator<Item = u64> + '_ {
        self.0.iter().map(|count| count.load(Relaxed))
    }
}

impl AnswerCache {
    /// Counts a request that passes the cache by.
    pub fn bypass(&self, why: Why) {
        self.bypassed.add(why as usize);
    }

    /// Whether memory has an answer that this request would be given.
    pub fn has_in_memory(&self, wish: &wish::Wish) -> bool {
        let kept = self.tiers.in_memory(&wish.key).and_then(|(_, kept)| kept);
        wish.may_read && kept.is_some_and(|kept| wish.is_served_by(&kept.entry))
    }

    /// Counts an answer that is not kept.
    pub fn skip(&self, why: Skip) {
        self.unkept.add(why as usize);
    }
}
