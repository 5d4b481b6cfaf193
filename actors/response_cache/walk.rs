//! The walks over the tiers: looking up, keeping, promoting, clearing, and waiting for another gateway.
//! They run beside the actor, one for each message.

use super::memory_tier::{MemoryTier, PurgeMemory};
use super::store_tier::{Get, Purge, Put, Remove, StoreTier};
use super::{Find, Found, Keep, LOCK_BUDGET, Outcome, Purged, ResponseCacheSettings, Scope, Step};
use crate::support::mailbox::Mailbox;
use actix::Addr;
use routing::cache_key::CacheKey;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime};
use storage::{Key, Value};
use tokio::time::Instant;
use wire::cache_entry::Entry;

/// How often a gateway looks whether another's answer has come.
const LOCK_POLL: Duration = Duration::from_millis(25);

/// What a handler needs once it has returned.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) settings: Arc<ResponseCacheSettings>,
    pub(super) memory: Option<Addr<MemoryTier>>,
    pub(super) l1: Option<(&'static str, Addr<StoreTier>)>,
    pub(super) l2: Option<(&'static str, Addr<StoreTier>)>,
    /// Purges so far: what was read before one must not be kept after it.
    pub(super) purges: Arc<AtomicU64>,
    pub(super) promotions: Arc<AtomicU64>,
}

type Tier = (&'static str, Addr<StoreTier>);

impl Shared {
    pub(super) async fn find(&self, find: Find) -> Found {
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
        let purges = self.purges.load(Relaxed);
        if let Some(tier) = &self.l1
            && let Some((entry, _)) = read(tier, key, found).await
        {
            found.entry = Some((entry, tier.0));
            return;
        }
        if let Some(tier) = &self.l2
            && let Some((entry, expires_at)) = read(tier, key, found).await
        {
            self.promote(find, &entry, expires_at, purges);
            found.entry = Some((entry, tier.0));
        }
    }

    /// Puts an entry of L2 into L1, without anybody waiting for it.
    fn promote(&self, find: &Find, entry: &Arc<Entry>, expires_at: SystemTime, purges: u64) {
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
            shared.keep_in_l1((key, &path), &entry, ttl, purges).await;
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

    pub(super) async fn keep(&self, keep: Keep) {
        let Keep {
            key,
            path,
            entry,
            queued,
        } = keep;
        drop(queued); // what follows is a task of its own
        let purges = self.purges.load(Relaxed);
        if let (Some(tier), Ok(at)) = (&self.l2, Key::new(&*path)) {
            let expires_at = SystemTime::now() + self.settings.l2_ttl;
            let value = Value {
                bytes: entry.encode(),
                expires_at,
            };
            let writing = Mailbox::StoreTier.enter();
            let put = tier.1.send(Put(at, value));
            if self.fits_l1(&entry) {
                // nobody waits for L2, once L1 has it
                actix_rt::spawn(async move {
                    let _ = put.await;
                    drop(writing);
                });
            } else {
                let _ = put.await;
            }
        }
        if self.l1.is_some() {
            // memory, where it is L1, has it already
            self.keep_in_l1((key, &path), &entry, self.settings.ttl, purges)
                .await;
        }
    }

    fn fits_l1(&self, entry: &Entry) -> bool {
        entry.encoded_length() as u64 <= self.settings.l1_value_max
    }

    async fn keep_in_l1(
        &self,
        (key, path): (CacheKey, &Arc<str>),
        entry: &Arc<Entry>,
        ttl: Duration,
        purges: u64,
    ) {
        if self.purges.load(Relaxed) != purges {
            return;
        }
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
            let _writing = Mailbox::StoreTier.enter();
            let outcome = tier.1.send(Put(at, value)).await;
            if outcome.is_ok_and(|outcome| outcome == Outcome::Stored) {
                return;
            }
        }
        if let Some(used) = memory
            .as_ref()
            .filter(|_| self.purges.load(Relaxed) == purges)
        {
            used.keep(key, path, entry, ttl);
        }
    }

    pub(super) async fn clear(&self, scope: Scope) -> Vec<Purged> {
        self.purges.fetch_add(1, Relaxed);
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
