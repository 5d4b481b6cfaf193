//! The response cache beyond one thread: the order of its tiers, what goes into which, promotion, and
//! the short lock by which gateways make an equal call once. Each tier is an actor of its own; all of
//! them live on one thread, apart from the HTTP workers. Memory is read by anybody ([`Memory`]).

pub mod gate;
mod handle;
pub mod memory_tier;
mod outcome;
pub mod scope;
pub mod stats;
pub mod store_tier;
mod walk;

pub use handle::ResponseCacheHandle;
pub use memory_tier::{Kept, Memory};
pub use outcome::{Outcome, Step};
pub use scope::Scope;
pub use stats::TierStats;
pub use store_tier::StoreTierSettings;

use crate::support::mailbox::Queued;
use crate::support::published::Published;
use crate::support::supervise::{Root, RootExited, supervise};
use crate::support::watch::Watch;
use actix::{Actor, Addr, Context, Handler, Message, ResponseFuture};
use actix_rt::Arbiter;
use memory_tier::MemoryTier;
use routing::cache_key::CacheKey;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use storage::Lock;
use store_tier::StoreTier;
use walk::Shared;
use wire::cache_entry::Entry;

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

/// Taking the lock may take so long; a store that is slower is no help.
const LOCK_BUDGET: Duration = Duration::from_millis(50);

/// See the module.
pub struct ResponseCache {
    settings: Arc<ResponseCacheSettings>,
    tiers: Tiers,
    purges: Arc<AtomicU64>,
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
    let purges = Arc::<AtomicU64>::default();
    let start = move |warden: Addr<_>| {
        let cache = ResponseCache {
            settings: settings.clone(),
            tiers: tiers.clone(),
            purges: purges.clone(),
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
    /// Its place in the mailbox.
    pub queued: Queued,
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
    /// Its place in the mailbox.
    pub queued: Queued,
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
            purges: self.purges.clone(),
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
