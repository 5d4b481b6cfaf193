//! What holds for every store. Each test runs against memory, a directory, an S3 server that checks signatures, and
//! Redis: one server, a cluster of three, and both over TLS.

use crate::support::{at_ms, forgets, is_ordered, key, value};
use bytes::Bytes;
use futures_util::future::join_all;
use std::time::{Duration, SystemTime};
use storage::{Page, Store, Value};

macro_rules! for_every_store {
    ($($test:ident),* $(,)?) => {
        for_every_store!(@ memory: $($test),*);
        for_every_store!(@ disk: $($test),*);
        for_every_store!(@ s3: $($test),*);
        for_every_store!(@ redis: $($test),*);
        for_every_store!(@ redis_tls: $($test),*);
        for_every_store!(@ redis_cluster: $($test),*);
        for_every_store!(@ redis_cluster_tls: $($test),*);
    };
    (@ $store:ident: $($test:ident),*) => {
        mod $store {
            $(#[tokio::test]
            async fn $test() {
                let opened = crate::support::$store().await;
                super::$test(opened.store.as_ref()).await;
            })*
        }
    };
}

for_every_store!(
    a_value_comes_back_as_it_was_stored_with_its_expiry,
    a_key_without_a_value_is_absent_and_no_error,
    a_later_value_replaces_an_earlier_one,
    an_expired_value_is_given_with_its_expiry_or_forgotten_with_what_it_replaced,
    a_deleted_value_is_absent_and_deleting_it_again_is_no_error,
    empty_values_and_values_of_8_mib_come_back_whole,
    keys_with_spaces_plus_signs_accents_and_slashes_stay_apart,
    pages_give_every_key_of_a_prefix_once_and_in_order_where_there_is_one,
    a_prefix_without_keys_is_an_empty_page,
    a_listed_value_has_its_size_and_a_time,
    deleting_a_prefix_page_by_page_leaves_the_others,
    calls_at_the_same_time_do_not_mix_values,
);

async fn a_value_comes_back_as_it_was_stored_with_its_expiry(store: &dyn Store) {
    let stored = Value {
        bytes: Bytes::from_static(b"{\"a\":1}\0\xff"),
        expires_at: at_ms(1_900_000_000_456),
    };
    store.put(&key("v1/m/t/0f"), stored.clone()).await.unwrap();
    assert_eq!(store.get(&key("v1/m/t/0f")).await.unwrap(), Some(stored));
}

async fn a_key_without_a_value_is_absent_and_no_error(store: &dyn Store) {
    assert_eq!(store.get(&key("v1/nobody")).await.unwrap(), None);
}

async fn a_later_value_replaces_an_earlier_one(store: &dyn Store) {
    store
        .put(&key("a"), value("a long value that came first"))
        .await
        .unwrap();
    store.put(&key("a"), value("short")).await.unwrap();
    assert_eq!(store.get(&key("a")).await.unwrap(), Some(value("short")));
    let listing = store.list("", Page::first()).await.unwrap();
    assert_eq!(listing.values.len(), 1);
    assert_eq!(listing.values[0].bytes, 5);
}

async fn an_expired_value_is_given_with_its_expiry_or_forgotten_with_what_it_replaced(
    store: &dyn Store,
) {
    let expired = Value {
        bytes: Bytes::from_static(b"old"),
        expires_at: at_ms(1),
    };
    store.put(&key("a"), value("older")).await.unwrap();
    store.put(&key("a"), expired.clone()).await.unwrap();
    let left = (!forgets(store)).then_some(expired);
    assert_eq!(store.get(&key("a")).await.unwrap(), left);
}

async fn a_deleted_value_is_absent_and_deleting_it_again_is_no_error(store: &dyn Store) {
    store.put(&key("a"), value("x")).await.unwrap();
    store.delete(&key("a")).await.unwrap();
    assert_eq!(store.get(&key("a")).await.unwrap(), None);
    store.delete(&key("a")).await.unwrap();
}

async fn empty_values_and_values_of_8_mib_come_back_whole(store: &dyn Store) {
    let large: Vec<u8> = (0..8_u32 << 20).map(|i| (i % 251) as u8).collect();
    for (name, bytes) in [("empty", Vec::new()), ("large", large)] {
        store.put(&key(name), value(bytes.clone())).await.unwrap();
        let got = store.get(&key(name)).await.unwrap().unwrap();
        assert!(got.bytes == bytes, "{name}: {} bytes", got.bytes.len());
    }
}

async fn keys_with_spaces_plus_signs_accents_and_slashes_stay_apart(store: &dyn Store) {
    let names = [
        "a b/c",
        "a+b/c",
        "a%20b/c",
        "aéb/c",
        "aéb/é é+",
        "a&b<c>/\"d'",
        "a~b!(c)*/$,;=:@",
        "a?b#c/d",
    ];
    for name in names {
        store.put(&key(name), value(name)).await.unwrap();
    }
    for name in names {
        assert_eq!(
            store.get(&key(name)).await.unwrap(),
            Some(value(name)),
            "{name}"
        );
    }
    assert_eq!(keys_below(store, "a", 3).await.len(), names.len());
    assert_eq!(keys_below(store, "aé", 3).await, ["aéb/c", "aéb/é é+"]);
    assert_eq!(keys_below(store, "a+", 3).await, ["a+b/c"]);
    store.delete(&key("a b/c")).await.unwrap();
    assert_eq!(
        store.get(&key("a+b/c")).await.unwrap(),
        Some(value("a+b/c"))
    );
}

/// All keys of a prefix, page by page; in order, if the store has none.
async fn keys_below(store: &dyn Store, prefix: &str, limit: usize) -> Vec<String> {
    let mut keys = Vec::new();
    let mut page = Page { after: None, limit };
    loop {
        let listing = store.list(prefix, page).await.unwrap();
        assert!(listing.values.len() <= limit);
        keys.extend(listing.values.iter().map(|listed| listed.key.to_string()));
        match listing.next {
            Some(after) => {
                page = Page {
                    after: Some(after),
                    limit,
                }
            }
            None => break,
        }
    }
    if !is_ordered(store) {
        keys.sort();
    }
    keys
}

async fn put_all(store: &dyn Store, names: &[String]) {
    for name in names {
        store.put(&key(name), value(name.as_bytes())).await.unwrap();
    }
}

async fn pages_give_every_key_of_a_prefix_once_and_in_order_where_there_is_one(store: &dyn Store) {
    let below: Vec<String> = (0..25).map(|i| format!("v1/model/t/{i:02}")).collect();
    put_all(store, &below).await;
    put_all(
        store,
        &["v1/model-2/t/00".into(), "v1/mode".into(), "v0".into()],
    )
    .await;
    for limit in [1, 7, 25, 100] {
        assert_eq!(
            keys_below(store, "v1/model/", limit).await,
            below,
            "{limit} at a time"
        );
    }
    assert_eq!(keys_below(store, "", 10).await.len(), below.len() + 3);
}

async fn a_prefix_without_keys_is_an_empty_page(store: &dyn Store) {
    store.put(&key("v1/a"), value("x")).await.unwrap();
    let listing = store.list("v2/", Page::first()).await.unwrap();
    assert!(listing.values.is_empty() && listing.next.is_none());
    let deleted = store.delete_prefix("v2/", Page::first()).await.unwrap();
    assert_eq!((deleted.removed, deleted.kept, deleted.next), (0, 0, None));
}

async fn a_listed_value_has_its_size_and_a_time(store: &dyn Store) {
    let before = SystemTime::now();
    store.put(&key("a"), value(vec![7; 12_345])).await.unwrap();
    let listing = store.list("a", Page::first()).await.unwrap();
    assert_eq!(listing.values[0].bytes, 12_345);
    // to the second
    let (from, to) = (
        before - Duration::from_secs(1),
        SystemTime::now() + Duration::from_secs(1),
    );
    let stored_at = listing.values[0].stored_at;
    assert!(from <= stored_at && stored_at <= to, "{stored_at:?}");
}

async fn deleting_a_prefix_page_by_page_leaves_the_others(store: &dyn Store) {
    let below: Vec<String> = (0..12).map(|i| format!("v1/m é+/t/{i:02}")).collect();
    put_all(store, &below).await;
    put_all(store, &["v1/m/t/00".into()]).await;
    let (mut removed, mut pages) = (0, 0);
    let mut page = Page {
        after: None,
        limit: 5,
    };
    loop {
        let deleted = store.delete_prefix("v1/m é+/", page).await.unwrap();
        assert_eq!(deleted.kept, 0);
        removed += deleted.removed;
        pages += 1;
        let Some(after) = deleted.next else { break };
        page = Page {
            after: Some(after),
            limit: 5,
        };
    }
    assert_eq!((removed, pages), (12, 3));
    assert_eq!(keys_below(store, "", 100).await, ["v1/m/t/00"]);
}

async fn calls_at_the_same_time_do_not_mix_values(store: &dyn Store) {
    let text = |key: usize, round: usize| format!("{key}/{round} ").repeat(500 + 100 * round);
    let calls = (0..64).map(|i| async move {
        let (name, round) = (i % 4, i / 4);
        let shared = key(&format!("k/{name}"));
        store.put(&shared, value(text(name, round))).await.unwrap();
        let got = store.get(&shared).await.unwrap().unwrap();
        assert!(
            (0..16).any(|round| got == value(text(name, round))),
            "key {name}"
        );
    });
    join_all(calls).await;
    assert_eq!(keys_below(store, "k/", 100).await.len(), 4);
}
