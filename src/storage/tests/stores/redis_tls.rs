//! Redis over TLS: whom it trusts.

use crate::support::{Authority, SOON, key, redis_settings, redis_store, value};
use redis_servers::Single;
use storage::{ErrorKind, Redis, RedisSettings, Store};

#[tokio::test]
async fn a_certificate_of_an_unknown_authority_is_a_fault_of_the_settings() {
    let (authority, other) = (Authority::new("127.0.0.1"), Authority::new("127.0.0.1"));
    let server = Single::start_tls(&authority.tls());
    let settings = redis_settings(&server.url());
    for settings in [settings.clone(), other.trusted(settings)] {
        let error = redis_store(&settings).get(&key("a")).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Misconfigured, "{error}");
        assert!(error.detail.contains("ca_file"), "{error}");
    }
}

#[tokio::test]
async fn a_certificate_for_another_host_is_not_trusted() {
    let authority = Authority::new("redis.example");
    let server = Single::start_tls(&authority.tls());
    let store = redis_store(&authority.trusted(redis_settings(&server.url())));
    let error = store.get(&key("a")).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Misconfigured, "{error}");
}

#[tokio::test]
async fn tls_and_no_tls_do_not_meet() {
    let authority = Authority::new("127.0.0.1");
    let server = Single::start_tls(&authority.tls());
    let plain = format!("rediss://127.0.0.1:{}", server.port());
    let encrypted = server.url().replace("rediss", "redis");
    for url in [plain, encrypted] {
        let settings = RedisSettings {
            connect_timeout: SOON,
            ..authority.trusted(redis_settings(&url))
        };
        let error = redis_store(&settings).get(&key("a")).await.unwrap_err();
        // one side may close, or wait for the rest of what it takes for a line
        let kinds = [ErrorKind::Unavailable, ErrorKind::TooSlow];
        assert!(kinds.contains(&error.kind), "{error}");
        println!("{error}");
    }
}

#[tokio::test]
async fn a_host_by_its_name_is_trusted_by_its_name() {
    let authority = Authority::new("localhost");
    let server = Single::start_tls(&authority.tls());
    let url = server.url().replace("127.0.0.1", "localhost");
    let store = redis_store(&authority.trusted(redis_settings(&url)));
    store.put(&key("a"), value("x")).await.unwrap();
    assert_eq!(store.get(&key("a")).await.unwrap(), Some(value("x")));
}

#[test]
fn a_file_without_certificates_is_told_when_the_store_is_opened() {
    let directory = tempfile::tempdir().unwrap();
    let empty = directory.path().join("empty.pem");
    std::fs::write(&empty, "nothing here\n").unwrap();
    for path in [directory.path().join("absent.pem"), empty] {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let settings = RedisSettings {
            ca_file: Some(path),
            ..redis_settings("rediss://localhost")
        };
        let error = Redis::open(&settings).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Misconfigured);
        assert!(error.detail.contains(&name), "{error}");
    }
}
