//! The order of the tiers, what goes into which, and what tiers that fail cost.

#![allow(clippy::unwrap_used)] // all of this is a test

use actors::response_cache::gate::{FAILURES_MAX, REST};
use actors::response_cache::{
    Clear, Find, Found, LockSettings, Memory, MemoryUse, Outcome, Release, ResponseCache,
    ResponseCacheHandle, ResponseCacheSettings, Scope, StoreTierSettings, TierStats,
};
use actors::support::mailbox::Mailbox;
use bytes::Bytes;
use routing::cache_key::{CacheKey, KeyParts, path};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use storage::{
    Act, Answer, Deleted, ErrorKind, Key, Listing, Lock, MemoryStore, Page, Store, StoreError,
    Value,
};
use tokio::time::Instant;
use wire::answer::Form;
use wire::cache_entry::Entry;

/// A store that does what the test says.
#[derive(Debug, Default)]
struct Scripted {
    inner: MemoryStore,
    mood: Mutex<Mood>,
    calls: AtomicUsize,
}

#[derive(Debug, Clone, Copy, Default)]
enum Mood {
    #[default]
    Good,
    Hangs,
    Fails(ErrorKind),
    PutsFail(ErrorKind),
    /// Puts take half a second.
    Slow,
}

impl Scripted {
    fn be(&self, mood: Mood) {
        *self.mood.lock().unwrap() = mood;
    }

    async fn obey(&self, act: Act) -> Result<(), StoreError> {
        self.calls.fetch_add(1, Relaxed);
        let mood = *self.mood.lock().unwrap();
        let error = |kind| {
            Err(StoreError {
                act,
                kind,
                detail: "as the test says".into(),
            })
        };
        match mood {
            Mood::Good => Ok(()),
            Mood::Hangs => std::future::pending().await,
            Mood::Fails(kind) => error(kind),
            Mood::PutsFail(kind) if act == Act::Put => error(kind),
            Mood::PutsFail(_) => Ok(()),
            Mood::Slow => {
                if act == Act::Put {
                    tokio::time::sleep(Duration::from_millis(500)).await;
                }
                Ok(())
            }
        }
    }
}

impl Store for Scripted {
    fn name(&self) -> &'static str {
        "scripted"
    }
    fn get<'a>(&'a self, key: &'a Key) -> Answer<'a, Option<Value>> {
        Box::pin(async move {
            self.obey(Act::Get).await?;
            self.inner.get(key).await
        })
    }
    fn put<'a>(&'a self, key: &'a Key, value: Value) -> Answer<'a, ()> {
        Box::pin(async move {
            self.obey(Act::Put).await?;
            self.inner.put(key, value).await
        })
    }
    fn delete<'a>(&'a self, key: &'a Key) -> Answer<'a, ()> {
        Box::pin(async move {
            self.obey(Act::Delete).await?;
            self.inner.delete(key).await
        })
    }
    fn list<'a>(&'a self, prefix: &'a str, page: Page) -> Answer<'a, Listing> {
        Box::pin(async move {
            self.obey(Act::List).await?;
            self.inner.list(prefix, page).await
        })
    }
    fn delete_prefix<'a>(&'a self, prefix: &'a str, page: Page) -> Answer<'a, Deleted> {
        Box::pin(async move {
            self.obey(Act::Delete).await?;
            self.inner.delete_prefix(prefix, page).await
        })
    }
}

#[derive(Debug, Default)]
struct Locks(Mutex<Vec<String>>);

impl Lock for Locks {
    fn lock<'a>(&'a self, name: &'a str, _: Duration) -> Answer<'a, bool> {
        let mut held = self.0.lock().unwrap();
        let free = !held.iter().any(|held| held == name);
        if free {
            held.push(name.to_owned());
        }
        Box::pin(async move { Ok(free) })
    }
    fn unlock<'a>(&'a self, name: &'a str) -> Answer<'a, ()> {
        self.0.lock().unwrap().retain(|held| held != name);
        Box::pin(async { Ok(()) })
    }
}

const BUDGET: Duration = Duration::from_millis(50);
const TTL: Duration = Duration::from_secs(3600);

struct Bench {
    cache: ResponseCacheHandle,
    redis: Arc<Scripted>,
    s3: Arc<Scripted>,
}

/// Memory that stands in for a first tier, and both others.
fn bench(change: impl FnOnce(&mut ResponseCacheSettings)) -> Bench {
    let (redis, s3) = (Arc::<Scripted>::default(), Arc::<Scripted>::default());
    let tier = |store: &Arc<Scripted>, name: &'static str| StoreTierSettings {
        store: store.clone(),
        budget: BUDGET,
        put_timeout: Duration::from_secs(1),
        sweep: None,
        place: name.into(),
        stats: Arc::new(TierStats::new(name)),
    };
    let stats = Arc::new(TierStats::new("memory"));
    let mut settings = ResponseCacheSettings {
        memory: Some(MemoryUse {
            memory: Memory::new(1 << 20, stats.clone()),
            stats,
            stands_in: true,
        }),
        l1: Some(tier(&redis, "redis")),
        l2: Some(tier(&s3, "s3")),
        ttl: TTL,
        l2_ttl: TTL * 2,
        l1_value_max: 10_000,
        promotion_ttl: Some(Duration::from_secs(60)),
        lock: None,
    };
    change(&mut settings);
    Bench {
        cache: ResponseCache::supervised_here(settings),
        redis,
        s3,
    }
}

fn key(name: &str) -> (CacheKey, Arc<str>) {
    let parts = KeyParts {
        route: "chat",
        model: "m",
        key_version: 1,
        tenant: "t",
        body: name.as_bytes(),
    };
    let key = parts.key();
    (key, path(parts.model, parts.tenant, &key).into())
}

fn entry(length: usize) -> Arc<Entry> {
    Arc::new(Entry {
        form: Form::Json,
        made_ms: 1,
        tokens: Some((1, 2)),
        content_type: "application/json".into(),
        body: Bytes::from(vec![b'x'; length]),
    })
}

impl Bench {
    async fn keep(&self, name: &str, entry: &Arc<Entry>) {
        let (key, path) = key(name);
        self.cache.keep(key, &path, entry.clone()).await;
        settle().await;
    }

    async fn find(&self, name: &str) -> Found {
        self.find_to(name, false).await
    }

    async fn find_to(&self, name: &str, leads: bool) -> Found {
        let (key, path) = key(name);
        self.address()
            .send(Find {
                key,
                path,
                leads,
                queued: Mailbox::ResponseCache.enter(),
            })
            .await
            .unwrap()
    }

    fn address(&self) -> actix::Addr<ResponseCache> {
        self.cache.address.load().as_ref().clone().unwrap()
    }

    fn in_memory(&self, name: &str) -> bool {
        self.cache
            .in_memory(&key(name).0)
            .is_some_and(|(_, kept)| kept.is_some())
    }
}

/// Lets what runs beside the actors come to its end: none of it waits for anything but turns.
async fn settle() {
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
}

fn steps(found: &Found) -> Vec<(&'static str, Outcome)> {
    found
        .steps
        .iter()
        .map(|step| (step.tier, step.outcome))
        .collect()
}

#[actix::test]
async fn entries_go_into_both_tiers_and_are_found_in_the_first() {
    tokio::time::pause();
    let bench = bench(|_| {});
    let entry = entry(100);
    bench.keep("a", &entry).await;
    assert_eq!((bench.redis.inner.count(), bench.s3.inner.count()), (1, 1));
    let found = bench.find("a").await;
    assert_eq!(found.entry, Some((entry, "redis")));
    assert_eq!(steps(&found), [("redis", Outcome::Hit)]);
    let none = bench.find("b").await;
    assert_eq!(
        steps(&none),
        [("redis", Outcome::Miss), ("s3", Outcome::Miss)]
    );
    assert!(!bench.in_memory("a"), "memory only stands in");
}

#[actix::test]
async fn large_entries_go_to_the_second_tier_only_and_are_never_promoted() {
    tokio::time::pause();
    let bench = bench(|_| {});
    bench.keep("large", &entry(20_000)).await;
    assert_eq!((bench.redis.inner.count(), bench.s3.inner.count()), (0, 1));
    for _ in 0..2 {
        assert_eq!(bench.find("large").await.entry.unwrap().1, "s3");
        settle().await;
    }
    assert_eq!(bench.cache.promotions.load(Relaxed), 0);
}

#[actix::test]
async fn what_is_found_in_the_second_tier_is_promoted_and_not_for_longer_than_it_lives() {
    tokio::time::pause();
    let bench = bench(|_| {});
    bench.keep("a", &entry(100)).await;
    let at = Key::new(&*key("a").1).unwrap();
    bench.redis.inner.delete(&at).await.unwrap();
    assert_eq!(bench.find("a").await.entry.unwrap().1, "s3");
    settle().await;
    let promoted = bench.redis.inner.get(&at).await.unwrap().unwrap();
    let left = promoted
        .expires_at
        .duration_since(std::time::SystemTime::now())
        .unwrap();
    assert!(
        left <= Duration::from_secs(60) && left > Duration::from_secs(50),
        "{left:?}"
    );
    assert_eq!(bench.find("a").await.entry.unwrap().1, "redis");
    // one that ends sooner
    let mut value = bench.s3.inner.get(&at).await.unwrap().unwrap();
    value.expires_at = std::time::SystemTime::now() + Duration::from_secs(5);
    bench.s3.inner.put(&at, value).await.unwrap();
    bench.redis.inner.delete(&at).await.unwrap();
    bench.find("a").await;
    settle().await;
    let promoted = bench.redis.inner.get(&at).await.unwrap().unwrap();
    assert!(promoted.expires_at <= std::time::SystemTime::now() + Duration::from_secs(5));
}

#[actix::test]
async fn without_promotion_the_first_tier_stays_as_it_is() {
    tokio::time::pause();
    let bench = bench(|settings| settings.promotion_ttl = None);
    bench.redis.be(Mood::PutsFail(ErrorKind::Unavailable));
    bench.keep("a", &entry(100)).await;
    bench.redis.be(Mood::Good);
    assert_eq!(bench.find("a").await.entry.unwrap().1, "s3");
    settle().await;
    assert_eq!(bench.redis.inner.count(), 0);
}

#[actix::test]
async fn tiers_that_hang_cost_their_budget_a_few_times_and_then_nothing() {
    tokio::time::pause();
    let bench = bench(|_| {});
    bench.redis.be(Mood::Hangs);
    bench.s3.be(Mood::Hangs);
    for _ in 0..FAILURES_MAX {
        let begun = Instant::now();
        let found = bench.find("a").await;
        assert_eq!(
            steps(&found),
            [("redis", Outcome::Slow), ("s3", Outcome::Slow)]
        );
        assert!(begun.elapsed() <= 2 * BUDGET + Duration::from_millis(10));
    }
    settle().await;
    let begun = Instant::now();
    let found = bench.find("a").await;
    assert_eq!(
        steps(&found),
        [("redis", Outcome::Skipped), ("s3", Outcome::Skipped)]
    );
    assert_eq!(begun.elapsed(), Duration::ZERO);
    let up = || {
        bench
            .cache
            .tiers
            .iter()
            .map(|tier| tier.up.load(Relaxed))
            .collect::<Vec<bool>>()
    };
    assert_eq!(up(), [false, true, false], "redis, memory, s3");
    // they come back, and nobody's request is the trial
    bench.redis.be(Mood::Good);
    bench.s3.be(Mood::Good);
    tokio::time::sleep(3 * REST).await;
    assert_eq!(up(), [true; 3]);
    assert_eq!(
        steps(&bench.find("a").await),
        [("redis", Outcome::Miss), ("s3", Outcome::Miss)]
    );
    assert_eq!(bench.cache.tiers[0].changes.load(Relaxed), 2);
}

#[actix::test]
async fn memory_stands_in_for_a_first_tier_that_fails_and_is_left_when_it_is_back() {
    tokio::time::pause();
    let bench = bench(|_| {});
    bench.redis.be(Mood::Fails(ErrorKind::Unavailable));
    for name in ["a", "b", "c", "d", "e"] {
        bench.keep(name, &entry(10)).await;
    }
    assert!(bench.in_memory("a") && bench.in_memory("e"));
    bench.redis.be(Mood::Good);
    // writes are tried again with the next entries
    tokio::time::sleep(2 * REST).await;
    bench.keep("f", &entry(10)).await;
    tokio::time::sleep(2 * REST).await;
    assert!(!bench.in_memory("a"));
    assert_eq!(bench.find("f").await.entry.unwrap().1, "redis");
}

#[actix::test]
async fn a_full_tier_is_still_read() {
    tokio::time::pause();
    let bench = bench(|_| {});
    bench.keep("before", &entry(10)).await;
    bench.redis.be(Mood::PutsFail(ErrorKind::Full));
    for name in ["a", "b", "c", "d", "e", "f", "g"] {
        bench.keep(name, &entry(10)).await;
    }
    assert_eq!(bench.find("before").await.entry.unwrap().1, "redis");
    assert!(bench.in_memory("g"));
    let puts = bench.redis.calls.load(Relaxed);
    assert!(puts <= 8, "no write is tried again and again: {puts}");
}

#[actix::test]
async fn a_store_that_hides_absent_keys_is_taken_as_empty_as_long_as_it_can_be_written() {
    tokio::time::pause();
    let bench = bench(|settings| settings.l1 = None);
    bench.s3.be(Mood::Fails(ErrorKind::RefusedOrAbsent));
    for _ in 0..3 * FAILURES_MAX {
        assert_eq!(steps(&bench.find("a").await), [("s3", Outcome::Miss)]);
    }
    for _ in 0..FAILURES_MAX {
        bench.keep("a", &entry(10)).await; // refused as well
    }
    assert_eq!(steps(&bench.find("a").await), [("s3", Outcome::Failed)]);
}

#[actix::test]
async fn what_cannot_be_read_is_a_miss_and_is_removed() {
    tokio::time::pause();
    let bench = bench(|_| {});
    let at = Key::new(&*key("a").1).unwrap();
    let later = std::time::SystemTime::now() + TTL;
    let noise = Value {
        bytes: Bytes::from_static(b"of another version"),
        expires_at: later,
    };
    bench.redis.inner.put(&at, noise).await.unwrap();
    let old = Value {
        bytes: entry(5).encode(),
        expires_at: std::time::SystemTime::UNIX_EPOCH,
    };
    bench.s3.inner.put(&at, old).await.unwrap();
    let found = bench.find("a").await;
    assert_eq!(
        steps(&found),
        [("redis", Outcome::Miss), ("s3", Outcome::Miss)]
    );
    settle().await;
    assert_eq!((bench.redis.inner.count(), bench.s3.inner.count()), (0, 0));
    assert_eq!(bench.cache.tiers[2].expired.load(Relaxed), 1);
}

#[actix::test]
async fn what_was_on_its_way_to_a_tier_when_it_was_cleared_does_not_outlive_that() {
    tokio::time::pause();
    let bench = bench(|settings| settings.l1 = None);
    bench.s3.be(Mood::Slow);
    let (key, path) = key("a");
    let cache = bench.cache.clone();
    let kept = actix_rt::spawn(async move { cache.keep(key, &path, entry(10)).await });
    settle().await; // the write is under way
    bench.address().send(Clear(Scope::All)).await.unwrap();
    kept.await.unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await;
    settle().await;
    assert_eq!(bench.s3.inner.count(), 0);
}

#[actix::test]
async fn clearing_reaches_every_tier_and_says_what_it_could_not_reach() {
    tokio::time::pause();
    let bench = bench(|_| {});
    bench.keep("a", &entry(10)).await;
    bench.keep("b", &entry(10)).await;
    let clear = |scope: Scope| {
        let address = bench.address();
        async move { address.send(Clear(scope)).await.unwrap() }
    };
    let by_key = clear(Scope::Key(key("a").1)).await;
    assert_eq!(
        by_key.iter().map(|tier| tier.removed).collect::<Vec<_>>(),
        [1, 1, 0]
    );
    bench.s3.be(Mood::Fails(ErrorKind::Unavailable));
    let rest = clear(Scope::All).await;
    assert!(rest[0].tier == "s3" && rest[0].failure.is_some());
    assert_eq!((rest[1].removed, &rest[1].failure), (1, &None));
    bench.s3.be(Mood::Good);
    let tenant = key("b").1.split('/').nth(2).unwrap().to_owned();
    assert_eq!(clear(Scope::Tenant(tenant.into())).await[0].removed, 1);
    assert_eq!(bench.s3.inner.count(), 0);
}

#[actix::test]
async fn what_is_older_than_anything_may_be_is_swept_out_of_stores_that_forget_nothing() {
    tokio::time::pause();
    let every = Duration::from_secs(600);
    let bench = bench(|settings| {
        settings.l1 = None;
        let l2 = settings.l2.as_mut().unwrap();
        l2.sweep = Some((every, Duration::ZERO));
    });
    for number in 0..250 {
        bench.keep(&number.to_string(), &entry(10)).await;
    }
    assert_eq!(bench.s3.inner.count(), 250);
    // pages of it, with pauses between them
    tokio::time::sleep(2 * every).await;
    settle().await;
    assert_eq!(bench.s3.inner.count(), 0);
    assert_eq!(
        bench.cache.tiers[1].expired.load(Relaxed),
        250,
        "memory, s3"
    );
    let kept = self::bench(|settings| {
        settings.l2.as_mut().unwrap().sweep = Some((every, TTL));
    });
    kept.keep("young", &entry(10)).await;
    tokio::time::sleep(2 * every).await;
    settle().await;
    assert_eq!(kept.s3.inner.count(), 1);
}

#[actix::test]
async fn gateways_wait_for_each_others_answer_and_not_for_ever() {
    tokio::time::pause();
    let wait = Duration::from_secs(2);
    let locks = Arc::<Locks>::default();
    let held = locks.clone();
    let bench = bench(move |settings| {
        settings.lock = Some(LockSettings { lock: held, wait });
    });
    let mine = bench.find_to("a", true).await;
    assert!(mine.locked && mine.waited.is_none());
    // another one asks while we make the call, and finds what we keep
    let address = bench.address();
    let (k, path) = key("a");
    let other = actix_rt::spawn(address.send(Find {
        key: k,
        path,
        leads: true,
        queued: Mailbox::ResponseCache.enter(),
    }));
    tokio::time::sleep(Duration::from_millis(300)).await;
    bench.keep("a", &entry(10)).await;
    let other = other.await.unwrap().unwrap();
    assert_eq!((other.waited, other.locked), (Some(true), false));
    assert!(other.entry.is_some());
    // one whose owner never ends is waited for no longer than said
    locks.0.lock().unwrap().push(key("b").0.to_string());
    let begun = Instant::now();
    let alone = bench.find_to("b", true).await;
    assert_eq!((alone.waited, alone.locked), (Some(false), false));
    assert!(begun.elapsed() >= wait && begun.elapsed() < wait + Duration::from_millis(200));
    // what was given back is free again
    bench.address().send(Release(key("a").0)).await.unwrap();
    settle().await;
    assert_eq!(*locks.0.lock().unwrap(), [key("b").0.to_string()]);
}

#[actix::test]
async fn tiers_and_the_cache_itself_are_replaced_when_they_die() {
    use actors::support::fault::Panic;
    let bench = bench(|_| {});
    bench.keep("a", &entry(10)).await;
    let before = bench.address();
    before.do_send(Panic);
    let deadline = Instant::now() + Duration::from_secs(10);
    while bench.address() == before {
        assert!(Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(bench.find("a").await.entry.unwrap().1, "redis");
    assert_eq!(bench.cache.restarts.load(Relaxed), 1);
}
