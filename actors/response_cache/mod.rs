//! The response cache beyond one thread: the order of its tiers, what goes into which, promotion, and
//! the short lock by which gateways make an equal call once. Each tier is an actor of its own; all of
//! them live on one thread, apart from the HTTP workers. Memory is read by anybody ([`Memory`]).

pub mod gate;
pub mod memory_tier;
pub mod scope;
pub mod stats;
pub mod store_tier;

pub use memory_tier::{Kept, Memory};
pub use scope::Scope;
pub use stats::TierStats;
pub use store_tier::StoreTierSettings;

use crate::support::published::Published;
use crate::support::supervise::{Root, RootExited, supervise};
use crate::support::watch::Watch;
use actix::{Actor, Addr, Context, Handler, Message, ResponseFuture};
use actix_rt::Arbiter;
use memory_tier::{MemoryTier, PurgeMemory};
use routing::cache_key::CacheKey;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime};
use storage::{Key, Lock, Value};
use store_tier::{Get, Purge, Put, Remove, StoreTier};
use tokio::time::Instant;
use wire::cache_entry::Entry;

/// How a call to a tier ended; a label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The entry was there.
    Hit,
    /// It was not.
    Miss,
    /// It did not come in time.
    Slow,
    /// The tier failed.
    Failed,
    /// The tier was left alone, since it fails.
    Skipped,
    /// The entry is kept.
    Stored,
    /// It is larger than the tier takes.
    TooLarge,
    /// Too many entries wait to be written.
    Dropped,
}

impl Outcome {
    /// How keeping an entry can end.
    pub const STORES: [Outcome; 6] = [
        Outcome::Stored,
        Outcome::TooLarge,
        Outcome::Slow,
        Outcome::Failed,
        Outcome::Skipped,
        Outcome::Dropped,
    ];

    /// The word used in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Outcome::Hit => "hit",
            Outcome::Miss => "miss",
            Outcome::Slow => "slow",
            Outcome::Failed => "error",
            Outcome::Skipped => "skipped",
            Outcome::Stored => "stored",
            Outcome::TooLarge => "too_large",
            Outcome::Dropped => "dropped",
        }
    }
}

/// A call to a tier.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    /// The tier.
    pub tier: &'static str,
    /// How it ended.
    pub outcome: Outcome,
    /// How long it took.
    pub took: Duration,
}

/// What the cache is made of.
#[derive(Clone)]
pub struct ResponseCacheSettings {
    /// The tier in memory: as L1, or in place of another L1 that fails.
    pub memory: Option<MemoryUse>,
    /// The hot tier outside of this process.
    pub l1: Option<StoreTierSettings>,
    /// The warm tier.
    pub l2: Option<StoreTierSettings>,
    /// How long entries live in L1.
    pub ttl: Duration,
    /// How long entries live in L2.
    pub l2_ttl: Duration,
    /// The largest entry in L1, in bytes.
    pub l1_value_max: u64,
    /// How long an entry of L2 stays in L1 once it was asked for; none: it does not get there.
    pub promotion_ttl: Option<Duration>,
    /// Shared by gateways: who makes an equal call.
    pub lock: Option<LockSettings>,
}

/// What memory is for.
#[derive(Debug, Clone)]
pub struct MemoryUse {
    /// The memory.
    pub memory: Memory,
    /// What is counted.
    pub stats: Arc<TierStats>,
    /// Whether it only stands in for an L1 that fails.
    pub stands_in: bool,
}

impl MemoryUse {
    fn keep(&self, key: CacheKey, path: &Arc<str>, entry: &Arc<Entry>, ttl: Duration) {
        self.memory.put(key, path.clone(), entry.clone(), ttl);
        self.stats.stored(Outcome::Stored);
    }
}

/// A lock that gateways share.
#[derive(Clone)]
pub struct LockSettings {
    /// The lock.
    pub lock: Arc<dyn Lock>,
    /// How long a gateway waits for another's answer.
    pub wait: Duration,
}

/// How often a gateway looks whether another's answer has come.
const LOCK_POLL: Duration = Duration::from_millis(25);
/// Taking the lock may take so long; a store that is slower is no help.
const LOCK_BUDGET: Duration = Duration::from_millis(50);

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
            let _ = address.send(Keep { key, path, entry }).await;
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

/// See the module.
pub struct ResponseCache {
    settings: Arc<ResponseCacheSettings>,
    tiers: Tiers,
    promotions: Arc<AtomicU64>,
    _watch: Watch<RootExited>,
}

#[derive(Clone)]
struct Tiers {
    memory: Option<Root<MemoryTier>>,
    l1: Option<(&'static str, Root<StoreTier>)>,
    l2: Option<(&'static str, Root<StoreTier>)>,
}

impl ResponseCache {
    /// Starts a cache that is kept alive, on a thread of its own.
    pub fn supervised(settings: ResponseCacheSettings) -> ResponseCacheHandle {
        let handle = handle(&settings);
        let seen = handle.clone();
        let arbiter = Arbiter::new();
        arbiter.spawn_fn(move || start(settings, &seen));
        // the thread lives as long as the process
        std::mem::forget(arbiter);
        handle
    }

    /// The same on this thread, for tests that control time.
    pub fn supervised_here(settings: ResponseCacheSettings) -> ResponseCacheHandle {
        let handle = handle(&settings);
        start(settings, &handle);
        handle
    }
}

fn handle(settings: &ResponseCacheSettings) -> ResponseCacheHandle {
    let stats = [
        settings.l1.as_ref().map(|l1| l1.stats.clone()),
        settings.memory.as_ref().map(|memory| memory.stats.clone()),
        settings.l2.as_ref().map(|l2| l2.stats.clone()),
    ];
    ResponseCacheHandle {
        address: Published::new(None),
        memory: settings.memory.clone(),
        tiers: stats.into_iter().flatten().collect(),
        is_tiered: settings.l1.is_some() || settings.l2.is_some(),
        l1: (settings.ttl, settings.l1_value_max),
        promotions: Arc::default(),
        restarts: Arc::default(),
    }
}

fn start(settings: ResponseCacheSettings, handle: &ResponseCacheHandle) {
    let store = |role: &'static str, settings: &Option<StoreTierSettings>| {
        let settings = settings.clone()?;
        let (name, counted) = (settings.stats.name, settings.stats.clone());
        let start = move |warden: Addr<_>| {
            let watch = Watch::new(warden.recipient(), RootExited);
            StoreTier::new(settings.clone(), watch).start()
        };
        let restarted = move || {
            counted.restarts.fetch_add(1, Relaxed);
        };
        Some((name, supervise(role, start, restarted)))
    };
    let memory = settings.memory.clone().map(|used| {
        let counted = used.stats.clone();
        let start = move |warden: Addr<_>| {
            let watch = Watch::new(warden.recipient(), RootExited);
            MemoryTier::new(used.memory.clone(), used.stats.clone(), watch).start()
        };
        let restarted = move || {
            counted.restarts.fetch_add(1, Relaxed);
        };
        supervise("memory_tier", start, restarted)
    });
    let tiers = Tiers {
        memory,
        l1: store("redis_tier", &settings.l1),
        l2: store("object_tier", &settings.l2),
    };
    let settings = Arc::new(settings);
    let (seen, promotions) = (handle.address.clone(), handle.promotions.clone());
    let restarts = handle.restarts.clone();
    let start = move |warden: Addr<_>| {
        let cache = ResponseCache {
            settings: settings.clone(),
            tiers: tiers.clone(),
            promotions: promotions.clone(),
            _watch: Watch::new(warden.recipient(), RootExited),
        };
        let address = cache.start();
        seen.publish(Some(address.clone()));
        address
    };
    let restarted = move || {
        restarts.fetch_add(1, Relaxed);
    };
    // what keeps it alive holds itself
    let _root = supervise("response_cache", start, restarted);
}

impl Actor for ResponseCache {
    type Context = Context<Self>;
}

crate::support::fault::panics_on_request!(ResponseCache);

/// Looks an entry up in the tiers outside of this process, in their order. When it is in none, and
/// gateways share a lock, says who makes the call.
#[derive(Debug, Message)]
#[rtype(result = "Found")]
pub struct Find {
    /// Its key.
    pub key: CacheKey,
    /// Where it is kept.
    pub path: Arc<str>,
    /// Whether the answer will be made by the asker, and kept.
    pub leads: bool,
}

/// What came of a lookup.
#[derive(Debug, Default)]
pub struct Found {
    /// The entry, and the tier that had it.
    pub entry: Option<(Arc<Entry>, &'static str)>,
    /// Calls to tiers.
    pub steps: Vec<Step>,
    /// Whether another gateway was waited for, and if so, whether its answer came.
    pub waited: Option<bool>,
    /// Whether this gateway holds the lock: to be given back with [`Release`].
    pub locked: bool,
}

/// Keeps an entry in the tiers outside of this process; the answer comes when L1 has it, or L2 what is
/// too large for L1.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Keep {
    /// Its key.
    pub key: CacheKey,
    /// Where it is kept.
    pub path: Arc<str>,
    /// The answer.
    pub entry: Arc<Entry>,
}

/// Gives the lock of a key back.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Release(pub CacheKey);

/// Removes entries from every tier.
#[derive(Debug, Message)]
#[rtype(result = "Vec<Purged>")]
pub struct Clear(pub Scope);

/// What a tier removed.
#[derive(Debug)]
pub struct Purged {
    /// The tier.
    pub tier: &'static str,
    /// How many entries.
    pub removed: usize,
    /// Why that may not be all.
    pub failure: Option<String>,
}

/// What a handler needs once it has returned.
#[derive(Clone)]
struct Shared {
    settings: Arc<ResponseCacheSettings>,
    memory: Option<Addr<MemoryTier>>,
    l1: Option<(&'static str, Addr<StoreTier>)>,
    l2: Option<(&'static str, Addr<StoreTier>)>,
    promotions: Arc<AtomicU64>,
}

impl ResponseCache {
    fn shared(&self) -> Shared {
        let of = |tier: &Option<(&'static str, Root<StoreTier>)>| {
            tier.as_ref().map(|(name, root)| (*name, root.addr()))
        };
        Shared {
            settings: self.settings.clone(),
            memory: self.tiers.memory.as_ref().map(Root::addr),
            l1: of(&self.tiers.l1),
            l2: of(&self.tiers.l2),
            promotions: self.promotions.clone(),
        }
    }
}

impl Handler<Find> for ResponseCache {
    type Result = ResponseFuture<Found>;

    fn handle(&mut self, find: Find, _: &mut Self::Context) -> Self::Result {
        let shared = self.shared();
        Box::pin(async move { shared.find(find).await })
    }
}

impl Handler<Keep> for ResponseCache {
    type Result = ResponseFuture<()>;

    fn handle(&mut self, keep: Keep, _: &mut Self::Context) -> Self::Result {
        let shared = self.shared();
        Box::pin(async move { shared.keep(keep).await })
    }
}

impl Handler<Release> for ResponseCache {
    type Result = ();

    fn handle(&mut self, Release(key): Release, _: &mut Self::Context) {
        if let Some(settings) = &self.settings.lock {
            let lock = settings.lock.clone();
            actix_rt::spawn(async move {
                // one that cannot be given back lapses
                let _ = tokio::time::timeout(LOCK_BUDGET, lock.unlock(&key.to_string())).await;
            });
        }
    }
}

impl Handler<Clear> for ResponseCache {
    type Result = ResponseFuture<Vec<Purged>>;

    fn handle(&mut self, Clear(scope): Clear, _: &mut Self::Context) -> Self::Result {
        let shared = self.shared();
        Box::pin(async move { shared.clear(scope).await })
    }
}

type Tier = (&'static str, Addr<StoreTier>);

impl Shared {
    async fn find(&self, find: Find) -> Found {
        let mut found = Found::default();
        let Ok(key) = Key::new(&*find.path) else {
            return found;
        };
        self.look(&key, &find, &mut found).await;
        if found.entry.is_none() && find.leads {
            self.lead_or_wait(&key, &find, &mut found).await;
        }
        found
    }

    async fn look(&self, key: &Key, find: &Find, found: &mut Found) {
        if let Some(tier) = &self.l1
            && let Some((entry, _)) = read(tier, key, found).await
        {
            found.entry = Some((entry, tier.0));
            return;
        }
        if let Some(tier) = &self.l2
            && let Some((entry, expires_at)) = read(tier, key, found).await
        {
            self.promote(find, &entry, expires_at);
            found.entry = Some((entry, tier.0));
        }
    }

    /// Puts an entry of L2 into L1, without anybody waiting for it.
    fn promote(&self, find: &Find, entry: &Arc<Entry>, expires_at: SystemTime) {
        let left = expires_at
            .duration_since(SystemTime::now())
            .unwrap_or_default();
        let Some(ttl) = self.settings.promotion_ttl.map(|ttl| ttl.min(left)) else {
            return;
        };
        if !self.fits_l1(entry) || ttl.is_zero() {
            return;
        }
        self.promotions.fetch_add(1, Relaxed);
        let (shared, key, path, entry) = (self.clone(), find.key, find.path.clone(), entry.clone());
        actix_rt::spawn(async move {
            shared.keep_in_l1(key, &path, &entry, ttl).await;
        });
    }

    /// One gateway at a time makes an equal call; others wait a little for its answer.
    async fn lead_or_wait(&self, key: &Key, find: &Find, found: &mut Found) {
        let (Some(settings), Some(tier)) = (&self.settings.lock, &self.l1) else {
            return;
        };
        if found
            .steps
            .first()
            .is_none_or(|step| step.outcome != Outcome::Miss)
        {
            return; // a store that does not answer lookups is not asked for locks
        }
        let name = find.key.to_string();
        let deadline = Instant::now() + settings.wait;
        loop {
            let taking = settings.lock.lock(&name, settings.wait);
            match tokio::time::timeout(LOCK_BUDGET, taking).await {
                Ok(Ok(true)) => {
                    found.locked = true;
                    if found.waited.is_some() {
                        // whoever held it may have ended between our last look and now
                        self.look_again(tier, key, found).await;
                    }
                    return;
                }
                Ok(Ok(false)) => {}
                _ => return,
            }
            found.waited.get_or_insert(false);
            if Instant::now() >= deadline {
                return;
            }
            tokio::time::sleep(LOCK_POLL).await;
            self.look_again(tier, key, found).await;
            if found.entry.is_some() {
                return;
            }
        }
    }

    async fn look_again(&self, tier: &Tier, key: &Key, found: &mut Found) {
        let steps = found.steps.len();
        if let Some((entry, _)) = read(tier, key, found).await {
            found.entry = Some((entry, tier.0));
            found.waited = Some(true);
        }
        // only a hit counts: waiting is counted by itself
        if found.entry.is_none() {
            found.steps.truncate(steps);
        }
    }

    async fn keep(&self, keep: Keep) {
        let Keep { key, path, entry } = keep;
        if let (Some(tier), Ok(at)) = (&self.l2, Key::new(&*path)) {
            let expires_at = SystemTime::now() + self.settings.l2_ttl;
            let value = Value {
                bytes: entry.encode(),
                expires_at,
            };
            let put = tier.1.send(Put(at, value));
            if self.fits_l1(&entry) {
                // nobody waits for L2, once L1 has it
                actix_rt::spawn(async move {
                    let _ = put.await;
                });
            } else {
                let _ = put.await;
            }
        }
        if self.l1.is_some() {
            // memory, where it is L1, has it already
            self.keep_in_l1(key, &path, &entry, self.settings.ttl).await;
        }
    }

    fn fits_l1(&self, entry: &Entry) -> bool {
        entry.encoded_length() as u64 <= self.settings.l1_value_max
    }

    async fn keep_in_l1(&self, key: CacheKey, path: &Arc<str>, entry: &Arc<Entry>, ttl: Duration) {
        let (l1, memory) = (&self.settings.l1, &self.settings.memory);
        if !self.fits_l1(entry) {
            let l1 = l1.as_ref().map(|l1| &l1.stats);
            let first = l1.or(memory.as_ref().map(|memory| &memory.stats));
            if let Some(stats) = first {
                stats.stored(Outcome::TooLarge);
            }
            return;
        }
        if let (Some(tier), Ok(at)) = (&self.l1, Key::new(&**path)) {
            let value = Value {
                bytes: entry.encode(),
                expires_at: SystemTime::now() + ttl,
            };
            let outcome = tier.1.send(Put(at, value)).await;
            if outcome.is_ok_and(|outcome| outcome == Outcome::Stored) {
                return;
            }
        }
        if let Some(used) = memory {
            used.keep(key, path, entry, ttl);
        }
    }

    async fn clear(&self, scope: Scope) -> Vec<Purged> {
        let mut all = Vec::new();
        // the slowest first: what it still serves would be promoted again
        for (name, tier) in [&self.l2, &self.l1].into_iter().flatten() {
            let (removed, failure) = match tier.send(Purge(scope.clone())).await {
                Ok(purged) => purged,
                Err(_) => (0, Some("the tier's actor is restarting".into())),
            };
            all.push(Purged {
                tier: name,
                removed,
                failure,
            });
        }
        if let Some(memory) = &self.memory {
            let removed = memory.send(PurgeMemory(scope)).await;
            let failure = removed
                .is_err()
                .then(|| "the tier's actor is restarting".into());
            all.push(Purged {
                tier: "memory",
                removed: removed.unwrap_or(0),
                failure,
            });
        }
        all
    }
}

/// Reads an entry from a tier; one that cannot be read is removed.
async fn read(tier: &Tier, key: &Key, found: &mut Found) -> Option<(Arc<Entry>, SystemTime)> {
    let begun = Instant::now();
    let (mut outcome, value) = match tier.1.send(Get(key.clone())).await {
        Ok(answer) => answer,
        Err(_) => (Outcome::Failed, None),
    };
    let read = value.and_then(|value| {
        let entry = Entry::decode(value.bytes);
        if entry.is_none() {
            outcome = Outcome::Miss;
            tier.1.do_send(Remove(key.clone()));
        }
        Some((Arc::new(entry?), value.expires_at))
    });
    found.steps.push(Step {
        tier: tier.0,
        outcome,
        took: begun.elapsed(),
    });
    read
}
