//! Stores to test, and short ways to say keys and values.

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use redis_servers::{Cluster, Single, Tls};
use s3_server::{Config, Server};
use std::any::Any;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use storage::{
    Credentials, DiskSettings, DiskStore, Key, MemoryStore, RedisSettings, RedisStore, S3Settings,
    S3Store, Store, StoreError, Value,
};
use tempfile::TempDir;

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

pub async fn redis() -> Opened {
    let server = Single::start();
    opened_redis(redis_settings(&server.url()), server)
}

pub async fn redis_cluster() -> Opened {
    let cluster = Cluster::start();
    opened_redis(redis_settings(&cluster.url()), cluster)
}

pub async fn redis_tls() -> Opened {
    let authority = Authority::new("127.0.0.1");
    let server = Single::start_tls(&authority.tls());
    opened_redis(
        authority.trusted(redis_settings(&server.url())),
        (server, authority),
    )
}

pub async fn redis_cluster_tls() -> Opened {
    let authority = Authority::new("127.0.0.1");
    let cluster = Cluster::start_tls(&authority.tls());
    opened_redis(
        authority.trusted(redis_settings(&cluster.url())),
        (cluster, authority),
    )
}

fn opened_redis(settings: RedisSettings, with: impl Any) -> Opened {
    Opened {
        store: Box::new(redis_store(&settings)),
        _with: Box::new(with),
    }
}

pub fn redis_store(settings: &RedisSettings) -> RedisStore {
    RedisStore::open(settings, REDIS_PREFIX, VALUE_BYTES_MAX).unwrap()
}

/// Before every key, with what is a pattern to Redis.
pub const REDIS_PREFIX: &str = "cr:resp[*]:";

pub fn redis_settings(url: &str) -> RedisSettings {
    RedisSettings {
        url: url.into(),
        pool_size: 8,
        connect_timeout: PATIENCE,
        command_timeout: PATIENCE,
        connection_max_age: Duration::from_secs(600),
        ca_file: None,
    }
}

/// An authority of a test's own, and a certificate that it has signed.
pub struct Authority {
    directory: TempDir,
}

impl Authority {
    pub fn new(host: &str) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // OpenSSL takes a certificate for one that signed itself when both names are the same
        let name = &mut params.distinguished_name;
        name.push(DnType::CommonName, "authority of a test");
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new([host.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &authority).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let files = [
            ("ca.pem", authority.pem()),
            ("key.pem", key.serialize_pem()),
            ("server.pem", certificate.pem()),
        ];
        for (name, pem) in files {
            std::fs::write(directory.path().join(name), pem).unwrap();
        }
        Authority { directory }
    }

    pub fn tls(&self) -> Tls {
        let file = |name| self.directory.path().join(name);
        Tls {
            certificate: file("server.pem"),
            key: file("key.pem"),
            authority: file("ca.pem"),
        }
    }

    pub fn trusted(&self, settings: RedisSettings) -> RedisSettings {
        let ca_file = Some(self.tls().authority);
        RedisSettings {
            ca_file,
            ..settings
        }
    }
}

/// Whether keys are listed in the order of their bytes.
pub fn is_ordered(store: &dyn Store) -> bool {
    store.name() != "redis"
}

/// Whether it lets go of a value by itself when it has expired.
pub fn forgets(store: &dyn Store) -> bool {
    store.name() == "redis"
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
