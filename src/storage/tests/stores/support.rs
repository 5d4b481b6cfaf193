//! Stores to test, and short ways to say keys and values.

use s3_server::{Config, Server};
use std::any::Any;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use storage::{
    Credentials, DiskSettings, DiskStore, Key, MemoryStore, S3Settings, S3Store, Store, StoreError,
    Value,
};

/// Longer than any call takes here, so that running out of time is a failure.
pub const PATIENCE: Duration = Duration::from_secs(20);
/// For calls that are to run out of time.
pub const SOON: Duration = Duration::from_millis(300);
/// Room for what tests store.
pub const VALUE_BYTES_MAX: usize = 16 << 20;

/// A store, and what must live as long.
pub struct Opened {
    pub store: Box<dyn Store>,
    _with: Box<dyn Any>,
}

pub async fn memory() -> Opened {
    Opened {
        store: Box::new(MemoryStore::default()),
        _with: Box::new(()),
    }
}

pub async fn disk() -> Opened {
    let directory = tempfile::tempdir().unwrap();
    let store = DiskStore::open(disk_settings(directory.path()))
        .await
        .unwrap();
    Opened {
        store: Box::new(store),
        _with: Box::new(directory),
    }
}

pub async fn s3() -> Opened {
    let server = Server::start(Config::default()).await.unwrap();
    let store = S3Store::open(s3_settings(&server.url())).unwrap();
    Opened {
        store: Box::new(store),
        _with: Box::new(server),
    }
}

pub fn disk_settings(directory: &Path) -> DiskSettings {
    DiskSettings {
        directory: directory.join("cache"),
        bytes_max: 256 << 20,
        value_bytes_max: VALUE_BYTES_MAX,
        request_timeout: PATIENCE,
    }
}

/// For a server with the defaults of [`Config`].
pub fn s3_settings(endpoint: &str) -> S3Settings {
    let server = Config::default();
    S3Settings {
        endpoint: endpoint.into(),
        bucket: server.bucket.unwrap(),
        key_prefix: "response-cache/".into(),
        region: "us-east-1".into(),
        credentials: Credentials::new(server.access_key, server.secret_key),
        ca_file: None,
        connect_timeout: PATIENCE,
        request_timeout: PATIENCE,
        value_bytes_max: VALUE_BYTES_MAX,
        requests_max: 32,
    }
}

pub fn key(text: &str) -> Key {
    Key::new(text).unwrap()
}

/// A value with an expiry that no clock of a test reaches.
pub fn value(bytes: impl Into<Vec<u8>>) -> Value {
    Value {
        bytes: bytes.into().into(),
        expires_at: at_ms(4_000_000_000_123),
    }
}

pub fn at_ms(ms: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(ms)
}

/// The error of every kind of call, with its name.
pub async fn errors_of_all_calls(store: &dyn Store) -> Vec<(&'static str, StoreError)> {
    use storage::Page;
    let key = key("a/b");
    vec![
        ("get", store.get(&key).await.unwrap_err()),
        ("put", store.put(&key, value("x")).await.unwrap_err()),
        ("delete", store.delete(&key).await.unwrap_err()),
        ("list", store.list("a/", Page::first()).await.unwrap_err()),
        (
            "delete_prefix",
            store.delete_prefix("a/", Page::first()).await.unwrap_err(),
        ),
    ]
}
