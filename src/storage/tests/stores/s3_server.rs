//! The object store against a server that checks signatures: credentials, buckets, prefixes, and a server that goes and comes.

use crate::support::{PATIENCE, SOON, errors_of_all_calls, key, s3_settings, value};
use s3_server::{Config, Server};
use std::time::Instant;
use storage::{Credentials, ErrorKind, Page, S3Settings, S3Store, Store};

async fn server() -> Server {
    Server::start(Config::default()).await.unwrap()
}

#[tokio::test]
async fn a_wrong_secret_is_refused_and_named_in_no_error() {
    let server = server().await;
    let wrong = [
        Credentials::new("test-access-key", "hush-hush"),
        Credentials::new("hush-hush", "test-secret-key"),
    ];
    for credentials in wrong {
        let settings = S3Settings {
            credentials,
            ..s3_settings(&server.url())
        };
        let store = S3Store::open(settings).unwrap();
        for (call, error) in errors_of_all_calls(&store).await {
            assert_eq!(error.kind, ErrorKind::Refused, "{call}: {error}");
            assert!(
                !format!("{error} {error:?} {store:?}").contains("hush"),
                "{call}"
            );
        }
    }
}

#[tokio::test]
async fn a_missing_bucket_is_a_fault_of_the_settings() {
    let server = server().await;
    let store = S3Store::open(S3Settings {
        bucket: "elsewhere".into(),
        ..s3_settings(&server.url())
    })
    .unwrap();
    let put = store.put(&key("a"), value("x")).await.unwrap_err();
    let list = store.list("", Page::first()).await.unwrap_err();
    assert_eq!(
        (put.kind, list.kind),
        (ErrorKind::Misconfigured, ErrorKind::Misconfigured)
    );
    assert!(put.detail.contains("NoSuchBucket"), "{put}");
}

#[tokio::test]
async fn stores_with_different_prefixes_share_a_bucket_and_see_nothing_of_each_other() {
    let server = server().await;
    let open = |prefix: &str| {
        S3Store::open(S3Settings {
            key_prefix: prefix.into(),
            ..s3_settings(&server.url())
        })
        .unwrap()
    };
    let (ours, theirs, all) = (open("a é/"), open("b/"), open(""));
    ours.put(&key("k"), value("ours")).await.unwrap();
    theirs.put(&key("k"), value("theirs")).await.unwrap();
    assert_eq!(ours.get(&key("k")).await.unwrap(), Some(value("ours")));
    assert_eq!(all.list("", Page::first()).await.unwrap().values.len(), 2);
    assert_eq!(
        ours.delete_prefix("", Page::first()).await.unwrap().removed,
        1
    );
    assert_eq!(theirs.get(&key("k")).await.unwrap(), Some(value("theirs")));
}

#[tokio::test]
async fn any_region_and_a_bucket_with_dots_work() {
    let config = Config {
        bucket: Some("cache.team.x".into()),
        ..Config::default()
    };
    let server = Server::start(config).await.unwrap();
    let settings = S3Settings {
        bucket: "cache.team.x".into(),
        region: "eu-somewhere-7".into(),
        ..s3_settings(&server.url())
    };
    let store = S3Store::open(settings).unwrap();
    store.put(&key("a"), value("x")).await.unwrap();
    assert_eq!(store.get(&key("a")).await.unwrap(), Some(value("x")));
}

#[tokio::test]
async fn an_object_that_is_not_ours_is_broken_when_read_and_can_be_removed() {
    let server = server().await;
    let store = S3Store::open(s3_settings(&server.url())).unwrap();
    let below = server.root().join("tidegate/response-cache");
    std::fs::create_dir_all(&below).unwrap();
    std::fs::write(below.join("foreign"), "somebody else's").unwrap();
    assert_eq!(
        store.get(&key("foreign")).await.unwrap_err().kind,
        ErrorKind::Broken
    );
    store.delete(&key("foreign")).await.unwrap();
    assert_eq!(store.get(&key("foreign")).await.unwrap(), None);
}

#[tokio::test]
async fn an_object_that_was_cut_short_in_the_store_is_broken() {
    let server = server().await;
    let store = S3Store::open(s3_settings(&server.url())).unwrap();
    store.put(&key("a"), value(vec![1; 1000])).await.unwrap();
    std::fs::write(server.root().join("tidegate/response-cache/a"), [1; 600]).unwrap();
    let error = store.get(&key("a")).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Broken, "{error}");
}

#[tokio::test]
async fn a_value_beyond_the_limit_is_neither_sent_nor_taken() {
    let server = server().await;
    let open = |value_bytes_max| {
        S3Store::open(S3Settings {
            value_bytes_max,
            ..s3_settings(&server.url())
        })
        .unwrap()
    };
    let (small, large) = (open(1000), open(10_000));
    assert_eq!(
        small
            .put(&key("a"), value(vec![0; 1001]))
            .await
            .unwrap_err()
            .kind,
        ErrorKind::TooLarge
    );
    assert_eq!(small.get(&key("a")).await.unwrap(), None);
    large.put(&key("a"), value(vec![0; 1001])).await.unwrap();
    assert_eq!(
        small.get(&key("a")).await.unwrap_err().kind,
        ErrorKind::TooLarge
    );
}

#[tokio::test]
async fn a_server_slower_than_the_limit_is_too_slow() {
    let config = Config {
        delay: PATIENCE,
        ..Config::default()
    };
    let server = Server::start(config).await.unwrap();
    let store = S3Store::open(S3Settings {
        request_timeout: SOON,
        ..s3_settings(&server.url())
    })
    .unwrap();
    let began = Instant::now();
    for (call, error) in errors_of_all_calls(&store).await {
        assert_eq!(error.kind, ErrorKind::TooSlow, "{call}: {error}");
    }
    assert!(began.elapsed() < PATIENCE / 2);
}

#[tokio::test]
async fn a_server_that_died_is_unavailable_and_is_used_again_once_it_is_back() {
    let objects = tempfile::tempdir().unwrap();
    let config = Config {
        root: Some(objects.path().to_owned()),
        ..Config::default()
    };
    let server = Server::start(config.clone()).await.unwrap();
    let port = server.address().port();
    let store = S3Store::open(s3_settings(&server.url())).unwrap();
    store.put(&key("a"), value("x")).await.unwrap();

    drop(server);
    for (call, error) in errors_of_all_calls(&store).await {
        assert_eq!(error.kind, ErrorKind::Unavailable, "{call}: {error}");
    }
    let _again = Server::start(Config { port, ..config }).await.unwrap();
    assert_eq!(store.get(&key("a")).await.unwrap(), Some(value("x")));
}

#[tokio::test]
async fn a_value_that_somebody_moved_to_another_key_is_not_taken_for_that_key() {
    let server = server().await;
    let store = S3Store::open(s3_settings(&server.url())).unwrap();
    store.put(&key("a"), value("of a")).await.unwrap();
    let below = server.root().join("tidegate/response-cache");
    std::fs::rename(below.join("a"), below.join("b")).unwrap();
    assert_eq!(
        store.get(&key("b")).await.unwrap_err().kind,
        ErrorKind::Broken
    );
}
