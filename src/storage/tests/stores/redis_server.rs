//! Redis as it fails: away, slow, full, read-only, and closed to us. Against real servers.

use crate::support::{
    PATIENCE, REDIS_PREFIX, SOON, errors_of_all_calls, key, redis_settings, redis_store, value,
};
use futures_util::future::join_all;
use redis_servers::{Single, wait_until};
use std::time::{Duration, Instant, SystemTime};
use storage::{
    ErrorKind, Lock, Page, Redis, RedisSettings, RedisStore, Store, StoreError, Value, pipe,
};

fn open(server: &Single) -> RedisStore {
    redis_store(&redis_settings(&server.url()))
}

async fn put(store: &RedisStore, name: &str) -> Result<(), StoreError> {
    store.put(&key(name), value(name)).await
}

/// Asks until it is answered as it should be.
async fn until_served(store: &RedisStore, name: &str) {
    let end = Instant::now() + PATIENCE;
    while let Err(error) = put(store, name).await {
        assert!(Instant::now() < end, "{error}");
    }
    assert_eq!(store.get(&key(name)).await.unwrap(), Some(value(name)));
}

#[tokio::test]
async fn a_server_that_is_away_at_the_start_is_used_once_it_is_there() {
    let mut server = Single::start();
    server.kill();
    let store = open(&server);
    for (call, error) in errors_of_all_calls(&store).await {
        assert_eq!(error.kind, ErrorKind::Unavailable, "{call}: {error}");
        assert!(error.detail.contains("is the server up"), "{error}");
    }
    server.start_again();
    put(&store, "a").await.unwrap();
    assert_eq!(store.get(&key("a")).await.unwrap(), Some(value("a")));
}

#[tokio::test]
async fn a_server_that_died_is_unavailable_and_no_call_fails_once_it_is_back() {
    let mut server = Single::start();
    let store = open(&server);
    let all = || join_all((0..8).map(|_| put(&store, "a")));
    assert!(all().await.iter().all(Result::is_ok)); // several connections
    server.kill();
    for (call, error) in errors_of_all_calls(&store).await {
        assert_eq!(error.kind, ErrorKind::Unavailable, "{call}: {error}");
    }
    server.start_again();
    for answer in all().await {
        answer.unwrap();
    }
    // and if nobody has noticed that it was away
    server.kill();
    server.start_again();
    for answer in all().await {
        answer.unwrap();
    }
    // nor may the next of those that lay beside the dead one be taken for alive
    server.kill();
    server.start_again();
    put(&store, "a").await.unwrap();
}

#[tokio::test]
async fn connections_that_the_server_closes_while_idle_cost_no_error() {
    let server = Single::start_with(&["--timeout", "1"]);
    let store = open(&server);
    for _ in 0..2 {
        let puts = join_all((0..4).map(|_| put(&store, "a"))).await;
        assert!(puts.iter().all(Result::is_ok), "{puts:?}");
        // this very question is one of the connections
        wait_until("the server closes them", || {
            server.info("connected_clients") == 1
        });
    }
    put(&store, "a").await.unwrap();
}

#[tokio::test]
async fn a_password_that_is_missing_or_wrong_is_refused_and_named_in_no_error() {
    let server = Single::start_with(&["--requirepass", "right"]);
    let missing = open(&server);
    let wrong = server.url().replace("://", "://:hush-hush@");
    let wrong = redis_store(&redis_settings(&wrong));
    for store in [&missing, &wrong] {
        for (call, error) in errors_of_all_calls(store).await {
            assert_eq!(error.kind, ErrorKind::Refused, "{call}: {error}");
            let told = format!("{error} {error:?} {store:?}");
            assert!(!told.contains("hush") && !told.contains("a/b"), "{told}");
            assert!(error.detail.contains("password"), "{error}");
        }
    }
    let right = server.url().replace("://", "://:right@");
    put(&redis_store(&redis_settings(&right)), "a")
        .await
        .unwrap();
}

#[tokio::test]
async fn a_user_needs_no_more_than_the_commands_that_are_sent() {
    let server = Single::start();
    let keys = format!("~{}*", REDIS_PREFIX.replace('[', "\\[").replace(']', "\\]"));
    let commands = "+get +set +unlink +getrange +scan +ping +eval +del";
    let mut rule = vec!["ACL", "SETUSER", "tide", "on", ">p@ss", "resetkeys", &keys];
    rule.extend(commands.split(' '));
    assert_eq!(server.ask(&rule), "+OK");
    let url = server.url().replace("://", "://tide:p%40ss@");
    let store = redis_store(&redis_settings(&url));
    put(&store, "a").await.unwrap();
    assert_eq!(store.get(&key("a")).await.unwrap(), Some(value("a")));
    assert_eq!(store.list("", Page::first()).await.unwrap().values.len(), 1);
    assert!(store.lock("l", PATIENCE).await.unwrap());
    store.unlock("l").await.unwrap();
    let deleted = store.delete_prefix("", Page::first()).await.unwrap();
    assert_eq!(deleted.removed, 1);

    let elsewhere = RedisStore::open(&redis_settings(&url), "other:", 1000).unwrap();
    let error = put(&elsewhere, "a").await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Refused);
    assert!(error.detail.contains("ACL"), "{error}");
    assert!(!error.to_string().contains("other"), "{error}");
}

#[tokio::test]
async fn a_full_server_takes_nothing_and_still_gives() {
    let server = Single::start();
    let store = open(&server);
    put(&store, "a").await.unwrap();
    server.ask(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    server.ask(&["CONFIG", "SET", "maxmemory", "1mb"]);
    let large = store.put(&key("b"), value(vec![1; 1 << 20])).await;
    let error = match large {
        Err(error) => error,
        Ok(()) => put(&store, "c").await.unwrap_err(),
    };
    assert_eq!(error.kind, ErrorKind::Full, "{error}");
    assert!(error.detail.contains("maxmemory"), "{error}");
    assert_eq!(store.get(&key("a")).await.unwrap(), Some(value("a")));
    store.delete(&key("a")).await.unwrap();
}

#[tokio::test]
async fn a_replica_gives_and_takes_nothing() {
    let server = Single::start();
    let store = open(&server);
    put(&store, "a").await.unwrap();
    server.ask(&["REPLICAOF", "127.0.0.1", "1"]); // nobody is there, so it keeps what it has
    let error = put(&store, "b").await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::ReadOnly, "{error}");
    assert!(error.detail.contains("replica"), "{error}");
    assert_eq!(store.get(&key("a")).await.unwrap(), Some(value("a")));
    server.ask(&["REPLICAOF", "NO", "ONE"]);
    put(&store, "b").await.unwrap();
}

#[tokio::test]
async fn a_server_that_hangs_is_too_slow_and_recovers() {
    let server = Single::start();
    let store = redis_store(&RedisSettings {
        command_timeout: SOON,
        connect_timeout: SOON,
        ..redis_settings(&server.url())
    });
    put(&store, "a").await.unwrap();
    server.pause();
    for (call, error) in errors_of_all_calls(&store).await {
        assert_eq!(error.kind, ErrorKind::TooSlow, "{call}: {error}");
    }
    let began = Instant::now();
    put(&store, "a").await.unwrap_err();
    assert!(began.elapsed() < SOON * 5, "{:?}", began.elapsed());
    server.resume();
    until_served(&store, "b").await;
}

#[tokio::test]
async fn a_pool_in_use_is_told_from_a_server_that_hangs() {
    let server = Single::start();
    let redis = Redis::open(&RedisSettings {
        pool_size: 1,
        connect_timeout: SOON,
        ..redis_settings(&server.url())
    })
    .unwrap();
    let mut blocked = pipe();
    blocked
        .cmd("BLPOP")
        .arg("nobody")
        .arg(SOON.as_secs_f64() * 4.0);
    let mut ping = pipe();
    ping.cmd("PING");
    let asked = tokio::join!(redis.run::<()>(blocked), async {
        redis.run::<(String,)>(ping.clone()).await
    });
    let error = asked.1.unwrap_err();
    assert_eq!(error.kind, ErrorKind::TooSlow);
    assert!(error.detail.contains("pool_size"), "{error}");
    assert_eq!(redis.run::<(String,)>(ping).await.unwrap().0, "PONG");
}

#[tokio::test]
async fn connections_are_used_again_and_replaced_when_they_are_old() {
    let server = Single::start();
    let made = || server.info("total_connections_received");
    let own = 1; // each question of ours is one
    let young = open(&server);
    put(&young, "a").await.unwrap();
    let before = made();
    for _ in 0..20 {
        put(&young, "a").await.unwrap();
    }
    assert_eq!(made() - before, own);

    let old = redis_store(&RedisSettings {
        connection_max_age: Duration::ZERO,
        ..redis_settings(&server.url())
    });
    let before = made();
    for _ in 0..20 {
        put(&old, "a").await.unwrap();
    }
    assert_eq!(made() - before, 20 + own);
    drop(old);
    wait_until("old ones are closed", || {
        server.info("connected_clients") <= 3
    });
}

#[tokio::test]
async fn values_that_are_not_ours_or_were_changed_or_moved_are_broken() {
    let server = Single::start();
    let store = open(&server);
    let at = |name: &str| format!("{REDIS_PREFIX}{name}");
    put(&store, "moved").await.unwrap();
    server.ask(&["RENAME", &at("moved"), &at("b")]);
    put(&store, "changed").await.unwrap();
    server.ask(&["SETRANGE", &at("changed"), "60", "!"]);
    server.ask(&["SET", &at("foreign"), "somebody else's"]);
    server.ask(&["LPUSH", &at("list"), "x"]);
    for name in ["b", "changed", "foreign", "list"] {
        let error = store.get(&key(name)).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Broken, "{name}: {error}");
    }
    put(&store, "ours").await.unwrap();
    let listed = store.list("", Page::first()).await.unwrap().values;
    let listed: Vec<&str> = listed.iter().map(|listed| listed.key.as_str()).collect();
    assert!(
        listed.contains(&"ours") && !listed.contains(&"list"),
        "{listed:?}"
    );
    store.delete_prefix("", Page::first()).await.unwrap();
    assert_eq!(server.ask(&["DBSIZE"]), ":0");
}

#[tokio::test]
async fn values_beyond_the_limit_are_neither_sent_nor_taken() {
    let server = Single::start();
    let settings = redis_settings(&server.url());
    let open = |limit| RedisStore::open(&settings, "p:", limit).unwrap();
    let (small, large) = (open(1000), open(10_000));
    let put = small.put(&key("a"), value(vec![0; 1001])).await;
    assert_eq!(put.unwrap_err().kind, ErrorKind::TooLarge);
    assert_eq!(small.get(&key("a")).await.unwrap(), None);
    large.put(&key("a"), value(vec![0; 1001])).await.unwrap();
    let got = small.get(&key("a")).await;
    assert_eq!(got.unwrap_err().kind, ErrorKind::TooLarge);
}

#[tokio::test]
async fn redis_forgets_a_value_when_it_expires() {
    let server = Single::start();
    let store = open(&server);
    let lives = Duration::from_secs(3600);
    let stored = Value {
        expires_at: SystemTime::now() + lives,
        ..value("x")
    };
    store.put(&key("a"), stored).await.unwrap();
    let left = server.ask(&["PTTL", &format!("{REDIS_PREFIX}a")]);
    let left: u128 = left.trim_start_matches(':').parse().unwrap();
    assert!(
        left <= lives.as_millis() && left + 60_000 > lives.as_millis(),
        "{left}"
    );
}

#[tokio::test]
async fn prefixes_are_no_patterns_and_stores_see_nothing_of_each_other() {
    let server = Single::start();
    let settings = redis_settings(&server.url());
    let open = |prefix: &str| RedisStore::open(&settings, prefix, 1000).unwrap();
    let (ours, theirs) = (open("a*["), open("a-b["));
    put(&ours, "k").await.unwrap();
    put(&theirs, "k").await.unwrap();
    assert_eq!(ours.list("", Page::first()).await.unwrap().values.len(), 1);
    assert_eq!(
        ours.delete_prefix("?", Page::first())
            .await
            .unwrap()
            .removed,
        0
    );
    assert_eq!(
        ours.delete_prefix("", Page::first()).await.unwrap().removed,
        1
    );
    assert_eq!(theirs.get(&key("k")).await.unwrap(), Some(value("k")));
}

#[tokio::test]
async fn a_rare_prefix_is_found_among_many_keys_page_by_page() {
    let server = Single::start_with(&["--enable-debug-command", "yes"]);
    let store = open(&server);
    let others = server.ask(&["DEBUG", "POPULATE", "20000", "other"]);
    assert_eq!(others, "+OK");
    for i in 0..150 {
        put(&store, &format!("v1/{i}")).await.unwrap();
    }
    let (mut found, mut after) = (Vec::new(), None);
    loop {
        let page = Page { after, limit: 40 };
        let listing = store.list("v1/", page).await.unwrap();
        assert!(listing.values.len() <= 40);
        found.extend(listing.values.into_iter().map(|listed| listed.key));
        after = listing.next;
        if after.is_none() {
            break;
        }
    }
    found.sort();
    found.dedup();
    assert_eq!(found.len(), 150);
}

#[tokio::test]
async fn one_of_two_has_the_lock_until_it_gives_it_back_or_it_lapses() {
    let server = Single::start();
    let (one, two) = (open(&server), open(&server));
    let locks: [&dyn Lock; 2] = [&one, &two];
    assert!(locks[0].lock("sweep", PATIENCE).await.unwrap());
    assert!(!locks[1].lock("sweep", PATIENCE).await.unwrap());
    assert!(locks[1].lock("other", PATIENCE).await.unwrap());
    locks[1].unlock("sweep").await.unwrap(); // not theirs
    assert!(!locks[1].lock("sweep", PATIENCE).await.unwrap());
    locks[0].unlock("sweep").await.unwrap();
    assert!(locks[1].lock("sweep", Duration::ZERO).await.unwrap());
    let end = Instant::now() + PATIENCE;
    while !locks[0].lock("sweep", PATIENCE).await.unwrap() {
        assert!(Instant::now() < end, "it does not lapse");
    }
    locks[1].unlock("sweep").await.unwrap(); // lapsed, and taken since
    assert!(!locks[1].lock("sweep", PATIENCE).await.unwrap());
}

#[tokio::test]
async fn a_server_that_became_a_cluster_is_used_as_one() {
    let mut server = Single::start();
    let store = open(&server);
    put(&store, "a").await.unwrap();
    server.become_a_cluster();
    put(&store, "b").await.unwrap();
    assert_eq!(store.get(&key("b")).await.unwrap(), Some(value("b")));
}

#[test]
fn a_malformed_url_is_told_when_the_store_is_opened_and_not_repeated() {
    for url in [
        "hush",
        "http://hush",
        "redis://:hush@",
        "redis://h:hush",
        "redis://h/hush",
    ] {
        let error = Redis::open(&redis_settings(url)).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Misconfigured, "{url}");
        assert!(!error.to_string().contains("hush"), "{error}");
    }
    let shown = format!("{:?}", redis_settings("redis://u:hush@h"));
    assert!(!shown.contains("hush"), "{shown}");
}

/// Prints what a `GET` costs: over a connection of one's own, over the pool of deadpool-redis as it is, and over ours.
#[tokio::test]
#[ignore = "a measurement"]
async fn what_a_command_costs() {
    use deadpool_redis::redis::{Client, cmd};
    const ROUNDS: u32 = 5000;
    let server = Single::start();
    let get = cmd("GET").arg("k").to_owned();
    let own = Client::open(server.url()).unwrap();
    let mut own = own.get_multiplexed_async_connection().await.unwrap();
    let pool = deadpool_redis::Config::from_url(server.url());
    let pool = pool
        .create_pool(Some(deadpool_redis::Runtime::Tokio1))
        .unwrap();
    let ours = Redis::open(&redis_settings(&server.url())).unwrap();
    let mut piped = pipe();
    piped.add_command(get.clone());
    for _ in 0..3 {
        let began = Instant::now();
        for _ in 0..ROUNDS {
            get.query_async::<Option<String>>(&mut own).await.unwrap();
        }
        let of_own = began.elapsed() / ROUNDS;
        let began = Instant::now();
        for _ in 0..ROUNDS {
            let mut pooled = pool.get().await.unwrap();
            get.query_async::<Option<String>>(&mut pooled)
                .await
                .unwrap();
        }
        let of_pool = began.elapsed() / ROUNDS;
        let began = Instant::now();
        for _ in 0..ROUNDS {
            ours.run::<(Option<String>,)>(piped.clone()).await.unwrap();
        }
        let of_ours = began.elapsed() / ROUNDS;
        println!("own connection {of_own:?}, deadpool-redis {of_pool:?}, ours {of_ours:?}");
    }
}
