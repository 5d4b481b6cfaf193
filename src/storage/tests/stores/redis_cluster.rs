//! A cluster of Redis: keys wherever they are, slots that move, and nodes that go and come.

use crate::support::{PATIENCE, REDIS_PREFIX, key, redis_settings, redis_store, value};
use futures_util::future::join_all;
use redis_servers::{Cluster, Single};
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use storage::{ErrorKind, Page, Redis, RedisSettings, RedisStore, Store, pipe};

/// So many that each node has some.
const KEYS: usize = 300;

fn names() -> Vec<String> {
    (0..KEYS).map(|i| format!("v1/{i}")).collect()
}

async fn put_all(store: &RedisStore) {
    for name in names() {
        store.put(&key(&name), value(&*name)).await.unwrap();
    }
}

fn size(cluster: &Cluster, node: usize) -> usize {
    let size = cluster.ask(node, &["DBSIZE"]);
    size.trim_start_matches(':').parse().unwrap()
}

#[tokio::test]
async fn keys_of_all_nodes_are_written_read_listed_and_removed() {
    let cluster = Cluster::start();
    let store = redis_store(&redis_settings(&cluster.url()));
    put_all(&store).await;
    let sizes: Vec<usize> = (0..3).map(|node| size(&cluster, node)).collect();
    assert_eq!(sizes.iter().sum::<usize>(), KEYS);
    assert!(sizes.iter().all(|size| *size > KEYS / 6), "{sizes:?}");
    for name in names() {
        assert_eq!(store.get(&key(&name)).await.unwrap(), Some(value(&*name)));
    }
    store.put(&key("v2/other"), value("x")).await.unwrap();
    let (mut removed, mut after) = (0, None);
    loop {
        let page = Page { after, limit: 70 };
        let deleted = store.delete_prefix("v1/", page).await.unwrap();
        assert_eq!(deleted.kept, 0);
        removed += deleted.removed;
        after = deleted.next;
        if after.is_none() {
            break;
        }
    }
    assert_eq!(removed, KEYS);
    let left: usize = (0..3).map(|node| size(&cluster, node)).sum();
    assert_eq!(left, 1);
}

#[tokio::test]
async fn a_walk_goes_on_elsewhere_when_the_node_where_it_was_is_no_more() {
    let (server, cluster) = (Single::start(), Cluster::start());
    let before = redis_store(&redis_settings(&server.url()));
    let store = redis_store(&redis_settings(&cluster.url()));
    put_all(&before).await;
    put_all(&store).await;
    let begin = Page {
        after: None,
        limit: 10,
    };
    let mut after = before.list("v1/", begin).await.unwrap().next;
    assert!(after.is_some());
    let mut met = HashSet::new();
    while after.is_some() {
        let page = Page { after, limit: 100 };
        let listing = store.list("v1/", page).await.unwrap();
        met.extend(listing.values.into_iter().map(|listed| listed.key));
        after = listing.next;
    }
    assert_eq!(met.len(), KEYS);
}

#[tokio::test]
async fn commands_for_one_slot_are_sent_in_one_go() {
    let cluster = Cluster::start();
    let redis = Redis::open(&redis_settings(&cluster.url())).unwrap();
    let mut commands = pipe();
    commands
        .set("{kv}a", "1")
        .ignore()
        .set("{kv}b", "2")
        .ignore();
    commands.get("{kv}a").get("{kv}b");
    let got: (String, String) = redis.run(commands).await.unwrap();
    assert_eq!(got, ("1".into(), "2".into()));
}

#[tokio::test]
async fn a_slot_that_moves_during_traffic_is_served_all_the_time() {
    let cluster = Cluster::start();
    let store = redis_store(&redis_settings(&cluster.url()));
    let store = &store;
    // names of one slot, by their hash tag
    let names: Vec<String> = (0..40).map(|i| format!("{{moving}}/{i}")).collect();
    for name in &names {
        store.put(&key(name), value(&**name)).await.unwrap();
    }
    let in_redis = |name: &String| format!("{REDIS_PREFIX}{name}");
    let from = cluster.owner(&in_redis(&names[0]));
    let to = (from + 1) % cluster.nodes();
    let moved = AtomicBool::new(false);
    let traffic = async {
        let mut rounds = 0;
        while !moved.load(Ordering::Relaxed) || rounds < 3 {
            let asked = names.iter().map(|name| async move {
                assert_eq!(store.get(&key(name)).await.unwrap(), Some(value(&**name)));
                store.put(&key(name), value(&**name)).await.unwrap();
            });
            join_all(asked).await;
            rounds += 1;
        }
    };
    let moving = async {
        let (slot, port) = (
            cluster.slot(&in_redis(&names[0])),
            cluster.port(to).to_string(),
        );
        let (source, target) = (cluster.id(from), cluster.id(to));
        let set = |node: usize, state: &str, of: &str| {
            let set = cluster.ask(node, &["CLUSTER", "SETSLOT", &slot, state, of]);
            assert_eq!(set, "+OK");
        };
        set(to, "IMPORTING", &source);
        set(from, "MIGRATING", &target);
        for name in &names {
            let name = in_redis(name);
            let migrate = ["MIGRATE", "127.0.0.1", &port, &name, "0", "5000"];
            assert_eq!(cluster.ask(from, &migrate), "+OK");
            tokio::task::yield_now().await;
        }
        for node in [to, from] {
            set(node, "NODE", &target);
        }
        moved.store(true, Ordering::Relaxed);
    };
    tokio::join!(traffic, moving);
    assert_eq!(cluster.owner(&in_redis(&names[0])), to);
}

#[tokio::test]
async fn while_a_node_is_away_the_others_serve_and_it_is_used_again_once_it_is_back() {
    let mut cluster = Cluster::start();
    let settings = RedisSettings {
        connect_timeout: Duration::from_secs(2),
        command_timeout: Duration::from_secs(1),
        ..redis_settings(&cluster.url())
    };
    let store = redis_store(&settings);
    put_all(&store).await;
    let owners: Vec<usize> = names()
        .iter()
        .take(30)
        .map(|name| cluster.owner(&format!("{REDIS_PREFIX}{name}")))
        .collect();
    cluster.kill(0); // the one that the url names
    for (name, owner) in names().iter().zip(&owners) {
        let began = Instant::now();
        let got = store.get(&key(name)).await;
        match owner {
            0 => {
                let kind = got.unwrap_err().kind;
                let away = [ErrorKind::Unavailable, ErrorKind::TooSlow];
                assert!(away.contains(&kind), "{kind:?}");
            }
            _ => assert_eq!(got.unwrap(), Some(value(&**name))),
        }
        assert!(began.elapsed() < Duration::from_secs(6));
    }
    cluster.start_again(0);
    for name in names() {
        let end = Instant::now() + PATIENCE;
        while let Err(error) = store.put(&key(&name), value(&*name)).await {
            assert!(Instant::now() < end, "{error}");
        }
    }
}

/// One of the names that a node has.
fn owned_by(cluster: &Cluster, node: usize) -> String {
    let of = |name: &&String| cluster.owner(&format!("{REDIS_PREFIX}{name}")) == node;
    names().iter().find(of).unwrap().clone()
}

#[tokio::test]
async fn a_cluster_whose_named_node_hangs_or_is_gone_is_entered_by_another() {
    let mut cluster = Cluster::start();
    let store = redis_store(&RedisSettings {
        connection_max_age: Duration::ZERO, // each call makes its own
        connect_timeout: Duration::from_secs(4),
        ..redis_settings(&cluster.url())
    });
    put_all(&store).await;
    let name = owned_by(&cluster, 2);
    cluster.pause(0);
    assert_eq!(store.get(&key(&name)).await.unwrap(), Some(value(&*name)));
    cluster.kill(0);
    assert_eq!(store.get(&key(&name)).await.unwrap(), Some(value(&*name)));
    store.put(&key(&name), value("later")).await.unwrap();
}

#[tokio::test]
async fn while_a_node_hangs_the_others_serve() {
    let cluster = Cluster::start();
    let settings = RedisSettings {
        connect_timeout: Duration::from_secs(2),
        command_timeout: Duration::from_millis(500),
        ..redis_settings(&cluster.url())
    };
    let store = redis_store(&settings);
    put_all(&store).await;
    let (hangs, serves) = (owned_by(&cluster, 1), owned_by(&cluster, 2));
    cluster.pause(1);
    for _ in 0..3 {
        let error = store.get(&key(&hangs)).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::TooSlow, "{error}");
        let began = Instant::now();
        assert_eq!(
            store.get(&key(&serves)).await.unwrap(),
            Some(value(&*serves))
        );
        println!("served after {:?}", began.elapsed());
    }
    cluster.resume(1);
    let end = Instant::now() + PATIENCE;
    while let Err(error) = store.get(&key(&hangs)).await {
        assert!(Instant::now() < end, "{error}");
    }
}

#[tokio::test]
async fn a_supposed_single_server_that_sends_us_elsewhere_is_used_as_a_cluster() {
    let cluster = Cluster::start();
    let all_nodes = |rule: &[&str]| {
        for node in 0..cluster.nodes() {
            assert_eq!(cluster.ask(node, rule), "+OK");
        }
    };
    // who may not ask for the slots does not know that there are any
    let user = ["ACL", "SETUSER", "tide", "on", ">pw", "~*", "+@all"];
    all_nodes(&[&user[..], &["-cluster"]].concat());
    let url = cluster.url().replace("://", "://tide:pw@");
    let store = redis_store(&redis_settings(&url));
    let mut taken = Vec::new();
    for name in names() {
        match store.put(&key(&name), value(&*name)).await {
            Ok(()) => taken.push(name),
            Err(error) => {
                assert_eq!(error.kind, ErrorKind::Unavailable, "{error}");
                let said = ["MOVED", "CLUSTER SLOTS"];
                assert!(said.iter().all(|said| error.detail.contains(said)));
            }
        }
    }
    assert!((1..KEYS).contains(&taken.len()));
    // so that a connection lies in the pool that is taken for one to a single server
    let got = store.get(&key(&taken[0])).await.unwrap();
    assert_eq!(got, Some(value(&*taken[0])));
    all_nodes(&[&user[..], &["+cluster"]].concat());
    put_all(&store).await;
    assert!((0..3).all(|node| size(&cluster, node) > 0));
}
