//! A tier outside of this process: Redis, an object store, a disk. The actor decides whether the store
//! is worth a call and counts what comes of it; the calls themselves run beside it, each within its
//! time, so that nothing waits in the mailbox for a slow store.

use super::gate::{Gate, REST};
use super::stats::TierStats;
use super::{Outcome, Scope};
use crate::support::supervise::RootExited;
use crate::support::watch::Watch;
use actix::{
    Actor, ActorFutureExt, AsyncContext, Context, Handler, Message, ResponseFuture, WrapFuture,
};
use routing::breaker::Era;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime};
use storage::{ErrorKind, Key, Page, Store, StoreError, Value};
use tokio::time::timeout;
use tracing::{debug, warn};

/// Bytes that wait to be written, over all calls: beyond it answers are not kept.
const WAITING_BYTES_MAX: usize = 64 << 20;
/// Calls that wait to be written.
const WAITING_PUTS_MAX: usize = 1024;
/// Below it are the keys that show whether the store is back. No answer is kept there. There are several, since in a
/// cluster the node of any one of them may be the one that is away.
const TRIAL_PREFIX: &str = "v1/trial/";
const TRIAL_KEYS: u32 = 64;
/// How often it is looked whether a rest is over: often, so that it lasts little longer than it should.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);
/// How long the value of a trial lives, should it not be removed at once.
const TRIAL_TTL: Duration = Duration::from_secs(60);
/// Keys of one page of a sweep, and the pause after each, so that sweeping is no load.
const SWEEP_PAGE: usize = 100;
const SWEEP_PAUSE: Duration = Duration::from_millis(200);
/// A purge ends after this; what is left is told.
const PURGE_TIME_MAX: Duration = Duration::from_secs(60);

/// One tier.
#[derive(Debug, Clone)]
pub struct StoreTierSettings {
    /// Where values are.
    pub store: Arc<dyn Store>,
    /// How long a lookup may take.
    pub budget: Duration,
    /// How long a write may take.
    pub put_timeout: Duration,
    /// Stores that forget nothing by themselves are swept this often of what is older than the
    /// second.
    pub sweep: Option<(Duration, Duration)>,
    /// Where that is, for the log: the setting and its value, without secrets.
    pub place: Arc<str>,
    /// What is counted.
    pub stats: Arc<TierStats>,
}

/// Looks a value up.
#[derive(Debug, Message)]
#[rtype(result = "(Outcome, Option<Value>)")]
pub struct Get(pub Key);

/// Keeps a value.
#[derive(Debug, Message)]
#[rtype(result = "Outcome")]
pub struct Put(pub Key, pub Value);

/// Forgets one value.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Remove(pub Key);

/// Forgets values; answers how many, and why not all.
#[derive(Debug, Message)]
#[rtype(result = "(usize, Option<String>)")]
pub struct Purge(pub Scope);

/// How a call ended.
#[derive(Debug, Message)]
#[rtype(result = "()")]
struct Ended {
    is_read: bool,
    era: Era,
    failure: Option<String>,
}

/// See the module.
pub struct StoreTier {
    settings: StoreTierSettings,
    reads: Gate,
    writes: Gate,
    waiting: Arc<Waiting>,
    /// Purges so far: what was on its way to the store when one began must not outlive it.
    purges: Arc<AtomicU64>,
    warned_of_403: bool,
    _watch: Watch<RootExited>,
}

/// Writes that have not ended.
#[derive(Debug, Default)]
struct Waiting {
    bytes: AtomicUsize,
    puts: AtomicUsize,
}

/// The place of one write; given back when dropped.
struct Place(Arc<Waiting>, usize);

impl Place {
    fn take(waiting: &Arc<Waiting>, bytes: usize) -> Option<Self> {
        let place = Place(waiting.clone(), bytes);
        let all = waiting.bytes.fetch_add(bytes, Relaxed) + bytes;
        let puts = waiting.puts.fetch_add(1, Relaxed) + 1;
        (all <= WAITING_BYTES_MAX && puts <= WAITING_PUTS_MAX).then_some(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.bytes.fetch_sub(self.1, Relaxed);
        self.0.puts.fetch_sub(1, Relaxed);
    }
}

fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

impl StoreTier {
    /// A tier that is believed to be there.
    pub fn new(settings: StoreTierSettings, watch: Watch<RootExited>) -> Self {
        let name = settings.stats.name;
        StoreTier {
            reads: Gate::new(name, "reads", settings.place.clone(), now()),
            writes: Gate::new(name, "writes", settings.place.clone(), now()),
            settings,
            waiting: Arc::default(),
            purges: Arc::default(),
            warned_of_403: false,
            _watch: watch,
        }
    }

    /// A store that says 403 for whatever is absent, to those who may not list: absent, as long as
    /// writing is allowed.
    fn is_absence(&mut self, error: &StoreError) -> bool {
        if error.kind != ErrorKind::RefusedOrAbsent || !self.writes.is_up() {
            return false;
        }
        if !self.warned_of_403 {
            self.warned_of_403 = true;
            warn!(
                tier = self.settings.stats.name,
                error = %error,
                "the store refuses to read a key, taken as absent as long as writes succeed: allow listing to tell the two apart"
            );
        }
        true
    }

    fn ended(&mut self, ended: &Ended) {
        let gate = if ended.is_read {
            &mut self.reads
        } else {
            &mut self.writes
        };
        if gate.ended(ended.era, ended.failure.as_deref(), now()) {
            self.settings.stats.changes.fetch_add(1, Relaxed);
        }
        let up = self.reads.is_up() && self.writes.is_up();
        self.settings.stats.up.store(up, Relaxed);
    }

    /// Where the store knows them.
    fn tell_holdings(&self) {
        if let Some(holdings) = self.settings.store.holdings() {
            let stats = &self.settings.stats;
            stats.bytes.store(holdings.bytes, Relaxed);
            stats.entries.store(holdings.entries, Relaxed);
            stats.crowded_out.store(holdings.crowded_out, Relaxed);
        }
    }

    /// Asks a store that is left alone whether it is back, so that no request has to.
    fn try_again(&mut self, ctx: &mut Context<Self>) {
        self.try_to_read(ctx);
        self.try_to_write(ctx);
    }

    fn try_to_read(&mut self, ctx: &mut Context<Self>) {
        if self.reads.is_up() {
            return;
        }
        let Some(era) = self.reads.admit(true, now()) else {
            return;
        };
        let (store, budget) = (self.settings.store.clone(), self.settings.budget);
        let trial = async move {
            let read = timeout(budget, store.get(&trial_key())).await;
            match read {
                Ok(read) => read.err(),
                Err(_) => {
                    // connections that a firewall has forgotten hang, one after the other
                    store.begin_anew();
                    Some(too_slow(storage::Act::Get, budget))
                }
            }
        };
        ctx.spawn(trial.into_actor(self).map(move |error, this, _| {
            let error = error.filter(|error| !this.is_absence(error));
            this.tried(true, era, error);
        }));
    }

    /// Answers that are to be kept try it too. But there may be none for long, when whatever is asked for is found
    /// here or in memory.
    fn try_to_write(&mut self, ctx: &mut Context<Self>) {
        if self.writes.is_up() {
            return;
        }
        let Some(era) = self.writes.admit(true, now()) else {
            return;
        };
        let store = self.settings.store.clone();
        let limit = self.settings.put_timeout.min(REST); // the next one comes then
        let trial = async move {
            let (key, value) = (
                trial_key(),
                Value {
                    bytes: Default::default(),
                    expires_at: SystemTime::now() + TRIAL_TTL,
                },
            );
            match timeout(limit, store.put(&key, value)).await {
                Ok(Ok(())) => {
                    let _ = timeout(limit, store.delete(&key)).await;
                    None
                }
                Ok(Err(error)) => Some(error),
                Err(_) => Some(too_slow(storage::Act::Put, limit)),
            }
        };
        ctx.spawn(trial.into_actor(self).map(move |error, this, _| {
            this.tried(false, era, error);
        }));
    }

    fn tried(&mut self, is_read: bool, era: Era, error: Option<StoreError>) {
        let failure = error.filter(is_failure).map(|error| error.to_string());
        self.ended(&Ended {
            is_read,
            era,
            failure,
        });
    }
}

fn trial_key() -> Key {
    let number = fastrand::u32(..TRIAL_KEYS);
    Key::new(format!("{TRIAL_PREFIX}{number}")).expect("is a key")
}

fn too_slow(act: storage::Act, limit: Duration) -> StoreError {
    StoreError {
        act,
        kind: ErrorKind::TooSlow,
        detail: format!("no answer within {limit:?}"),
    }
}

/// Whether an error speaks against the store, and not against one value.
fn is_failure(error: &StoreError) -> bool {
    !matches!(error.kind, ErrorKind::Broken | ErrorKind::TooLarge)
}

impl Actor for StoreTier {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        self.settings.stats.up.store(true, Relaxed);
        ctx.run_interval(LOOK_INTERVAL, |this, ctx| {
            this.try_again(ctx);
            this.tell_holdings();
        });
        if let Some((every, older_than)) = self.settings.sweep {
            let (store, stats) = (self.settings.store.clone(), self.settings.stats.clone());
            ctx.spawn(sweep(store, every, older_than, stats).into_actor(self));
        }
    }
}

impl Handler<Get> for StoreTier {
    type Result = ResponseFuture<(Outcome, Option<Value>)>;

    fn handle(&mut self, Get(key): Get, ctx: &mut Self::Context) -> Self::Result {
        let Some(era) = self.reads.admit(false, now()) else {
            return Box::pin(async { (Outcome::Skipped, None) });
        };
        let (store, budget) = (self.settings.store.clone(), self.settings.budget);
        let (me, expired) = (ctx.address(), self.settings.stats.clone());
        let allowed_to_write = self.writes.is_up();
        Box::pin(async move {
            let read = timeout(budget, store.get(&key)).await;
            let ended = |failure: Option<String>| {
                me.do_send(Ended {
                    is_read: true,
                    era,
                    failure,
                })
            };
            match read {
                Ok(Ok(Some(value))) if value.expires_at <= SystemTime::now() => {
                    ended(None);
                    expired.expired.fetch_add(1, Relaxed);
                    me.do_send(Remove(key));
                    (Outcome::Miss, None)
                }
                Ok(Ok(Some(value))) => {
                    ended(None);
                    (Outcome::Hit, Some(value))
                }
                Ok(Ok(None)) => {
                    ended(None);
                    (Outcome::Miss, None)
                }
                Ok(Err(error)) if error.kind == ErrorKind::RefusedOrAbsent && allowed_to_write => {
                    ended(None);
                    me.do_send(Hidden(error));
                    (Outcome::Miss, None)
                }
                Ok(Err(error)) => {
                    debug!(tier = expired.name, %error);
                    ended(is_failure(&error).then(|| error.to_string()));
                    if error.kind == ErrorKind::Broken {
                        me.do_send(Remove(key));
                    }
                    let slow = error.kind == ErrorKind::TooSlow;
                    (if slow { Outcome::Slow } else { Outcome::Failed }, None)
                }
                Err(_) => {
                    ended(Some(format!("no answer within {budget:?}")));
                    (Outcome::Slow, None)
                }
            }
        })
    }
}

/// A read was refused that was taken for a miss.
#[derive(Debug, Message)]
#[rtype(result = "()")]
struct Hidden(StoreError);

impl Handler<Hidden> for StoreTier {
    type Result = ();

    fn handle(&mut self, Hidden(error): Hidden, _: &mut Self::Context) {
        self.is_absence(&error);
    }
}

impl Handler<Ended> for StoreTier {
    type Result = ();

    fn handle(&mut self, ended: Ended, _: &mut Self::Context) {
        self.ended(&ended);
    }
}

impl Handler<Put> for StoreTier {
    type Result = ResponseFuture<Outcome>;

    fn handle(&mut self, Put(key, value): Put, ctx: &mut Self::Context) -> Self::Result {
        let Some(place) = Place::take(&self.waiting, value.bytes.len()) else {
            self.settings.stats.stored(Outcome::Dropped);
            return Box::pin(async { Outcome::Dropped });
        };
        let Some(era) = self.writes.admit(true, now()) else {
            self.settings.stats.stored(Outcome::Skipped);
            return Box::pin(async { Outcome::Skipped });
        };
        let (store, limit) = (self.settings.store.clone(), self.settings.put_timeout);
        let (me, stats) = (ctx.address(), self.settings.stats.clone());
        let (purges, begun) = (self.purges.clone(), self.purges.load(Relaxed));
        Box::pin(async move {
            let _place = place;
            let written = timeout(limit, store.put(&key, value)).await;
            let (outcome, failure) = match written {
                Ok(Ok(())) if purges.load(Relaxed) != begun => {
                    let _ = timeout(limit, store.delete(&key)).await;
                    (Outcome::Dropped, None)
                }
                Ok(Ok(())) => (Outcome::Stored, None),
                Ok(Err(error)) => {
                    debug!(tier = stats.name, %error);
                    let outcome = match error.kind {
                        ErrorKind::TooLarge => Outcome::TooLarge,
                        ErrorKind::TooSlow => Outcome::Slow,
                        _ => Outcome::Failed,
                    };
                    (outcome, is_failure(&error).then(|| error.to_string()))
                }
                Err(_) => (Outcome::Slow, Some(format!("no answer within {limit:?}"))),
            };
            me.do_send(Ended {
                is_read: false,
                era,
                failure,
            });
            stats.stored(outcome);
            outcome
        })
    }
}

impl Handler<Remove> for StoreTier {
    type Result = ();

    /// Best effort: what stays is found expired or broken again, at worst.
    fn handle(&mut self, Remove(key): Remove, _: &mut Self::Context) {
        let (store, limit) = (self.settings.store.clone(), self.settings.put_timeout);
        let Some(place) = Place::take(&self.waiting, 0) else {
            return;
        };
        actix_rt::spawn(async move {
            let _place = place;
            let _ = timeout(limit, store.delete(&key)).await;
        });
    }
}

impl Handler<Purge> for StoreTier {
    type Result = ResponseFuture<(usize, Option<String>)>;

    fn handle(&mut self, Purge(scope): Purge, _: &mut Self::Context) -> Self::Result {
        self.purges.fetch_add(1, Relaxed);
        let store = self.settings.store.clone();
        Box::pin(async move {
            let removed = Arc::new(AtomicU64::new(0));
            let purge = purge(&*store, &scope, &removed);
            let failure = match timeout(PURGE_TIME_MAX, purge).await {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some(format!("not finished within {PURGE_TIME_MAX:?}: ask again")),
            };
            (removed.load(Relaxed) as usize, failure)
        })
    }
}

crate::support::fault::panics_on_request!(StoreTier);

async fn purge(store: &dyn Store, scope: &Scope, removed: &AtomicU64) -> Result<(), StoreError> {
    if let Scope::Key(path) = scope {
        let Ok(key) = Key::new(&**path) else {
            return Ok(());
        };
        let there = store.get(&key).await?.is_some();
        store.delete(&key).await?;
        removed.fetch_add(u64::from(there), Relaxed);
        return Ok(());
    }
    let mut page = Page::first();
    loop {
        let next = match scope.prefix() {
            Some(prefix) => {
                let deleted = store.delete_prefix(&prefix, page).await?;
                removed.fetch_add(deleted.removed as u64, Relaxed);
                deleted.next
            }
            // tenants stand below models: every key is looked at
            None => {
                let listing = store.list(Scope::ALL_PREFIX, page).await?;
                for listed in &listing.values {
                    if scope.holds(listed.key.as_str()) {
                        store.delete(&listed.key).await?;
                        removed.fetch_add(1, Relaxed);
                    }
                }
                listing.next
            }
        };
        match next {
            None => return Ok(()),
            Some(after) => {
                page = Page {
                    after: Some(after),
                    ..Page::first()
                }
            }
        }
    }
}

/// Removes what is older than anything may be, page by page, for ever. Object stores expire nothing.
async fn sweep(
    store: Arc<dyn Store>,
    every: Duration,
    older_than: Duration,
    stats: Arc<TierStats>,
) {
    loop {
        // gateways that started together do not sweep together
        tokio::time::sleep(every.mul_f64(0.5 + fastrand::f64())).await;
        let mut page = Page {
            after: None,
            limit: SWEEP_PAGE,
        };
        loop {
            let listing = match store.list(Scope::ALL_PREFIX, page).await {
                Ok(listing) => listing,
                Err(error) => {
                    debug!(tier = stats.name, %error, "sweep");
                    break;
                }
            };
            let now = SystemTime::now();
            let old = listing.values.iter().filter(|listed| {
                now.duration_since(listed.stored_at)
                    .is_ok_and(|age| age > older_than)
            });
            for listed in old {
                if store.delete(&listed.key).await.is_ok() {
                    stats.expired.fetch_add(1, Relaxed);
                }
            }
            match listing.next {
                None => break,
                Some(after) => {
                    page = Page {
                        after: Some(after),
                        limit: SWEEP_PAGE,
                    }
                }
            }
            tokio::time::sleep(SWEEP_PAUSE).await;
        }
    }
}
