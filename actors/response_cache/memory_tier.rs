//! The tier in this process's memory. Any thread reads it and puts into it, since neither a hit nor a
//! miss may wait for another thread; the actor does what takes longer: it lets go of what has expired,
//! counts, and purges.

use super::Scope;
use super::stats::TierStats;
use crate::support::supervise::RootExited;
use crate::support::watch::Watch;
use actix::{Actor, AsyncContext, Context, Handler, Message};
use moka::Expiry;
use moka::notification::RemovalCause;
use moka::sync::Cache;
use routing::cache_key::CacheKey;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use wire::cache_entry::Entry;

/// What an entry takes beside its own bytes: key, path, pointers, and the cache's own nodes.
const ENTRY_OVERHEAD: usize = 400;
/// How often what has expired is let go, and sizes are told.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(1);

/// An entry in memory.
#[derive(Debug)]
pub struct Kept {
    /// The answer.
    pub entry: Arc<Entry>,
    /// `v1/MODEL/TENANT/DIGEST`.
    pub path: Arc<str>,
    /// How long it may be used from now on.
    pub ttl: Duration,
    /// Until when it may be used.
    pub until: Instant,
}

/// The readers' side; clones read the same memory.
#[derive(Debug, Clone)]
pub struct Memory {
    cache: Cache<CacheKey, Arc<Kept>>,
}

struct OwnTime;

impl Expiry<CacheKey, Arc<Kept>> for OwnTime {
    fn expire_after_create(&self, _: &CacheKey, kept: &Arc<Kept>, _: Instant) -> Option<Duration> {
        Some(kept.ttl)
    }

    fn expire_after_update(
        &self,
        _: &CacheKey,
        kept: &Arc<Kept>,
        _: Instant,
        _: Option<Duration>,
    ) -> Option<Duration> {
        Some(kept.ttl)
    }
}

fn weight(kept: &Kept) -> u32 {
    let bytes = kept.entry.encoded_length() + kept.path.len() + ENTRY_OVERHEAD;
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

impl Memory {
    /// An empty one of at most so many bytes.
    pub fn new(bytes_max: u64, stats: Arc<TierStats>) -> Self {
        let cache = Cache::builder()
            .max_capacity(bytes_max)
            .weigher(|_, kept: &Arc<Kept>| weight(kept))
            .expire_after(OwnTime)
            .eviction_listener(move |_, _, cause| match cause {
                RemovalCause::Size => {
                    stats.crowded_out.fetch_add(1, Relaxed);
                }
                RemovalCause::Expired => {
                    stats.expired.fetch_add(1, Relaxed);
                }
                RemovalCause::Explicit | RemovalCause::Replaced => {}
            })
            .build();
        Memory { cache }
    }

    /// Keeps an entry for so long.
    pub fn put(&self, key: CacheKey, path: Arc<str>, entry: Arc<Entry>, ttl: Duration) {
        let until = now() + ttl;
        let kept = Kept {
            entry,
            path,
            ttl,
            until,
        };
        self.cache.insert(key, Arc::new(kept));
    }

    /// The entry of a key, if it may still be used.
    pub fn get(&self, key: &CacheKey) -> Option<Arc<Kept>> {
        self.cache.get(key).filter(|kept| now() < kept.until)
    }
}

/// Forgets entries; answers how many.
#[derive(Debug, Message)]
#[rtype(result = "usize")]
pub struct PurgeMemory(pub Scope);

/// See the module.
pub struct MemoryTier {
    memory: Memory,
    stats: Arc<TierStats>,
    _watch: Watch<RootExited>,
}

impl MemoryTier {
    /// The one who changes `memory`.
    pub fn new(memory: Memory, stats: Arc<TierStats>, watch: Watch<RootExited>) -> Self {
        MemoryTier {
            memory,
            stats,
            _watch: watch,
        }
    }

    fn tell_sizes(&self) {
        self.memory.cache.run_pending_tasks();
        let (bytes, entries) = (
            self.memory.cache.weighted_size(),
            self.memory.cache.entry_count(),
        );
        self.stats.bytes.store(bytes, Relaxed);
        self.stats.entries.store(entries, Relaxed);
    }
}

impl Actor for MemoryTier {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.run_interval(UPKEEP_INTERVAL, |this, _| this.tell_sizes());
    }
}

impl Handler<PurgeMemory> for MemoryTier {
    type Result = usize;

    fn handle(&mut self, PurgeMemory(scope): PurgeMemory, _: &mut Self::Context) -> usize {
        let matching = self
            .memory
            .cache
            .iter()
            .filter(|(_, kept)| scope.holds(&kept.path));
        let keys: Vec<CacheKey> = matching.map(|(key, _)| *key).collect();
        keys.iter()
            .for_each(|key| self.memory.cache.invalidate(key));
        self.tell_sizes();
        keys.len()
    }
}

crate::support::fault::panics_on_request!(MemoryTier);
