//! Stores of the response cache, as tests start them, and settings that name them.

use s3_server::{Config, Server};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;
use tokio::runtime::Runtime;

/// For tests that are not about time: a noisy machine must not turn a hit into a miss.
pub const PATIENT: &str = "lookup_budget_ms: 20000";

/// `response_cache.redis` of one server.
pub fn redis(url: &str) -> String {
    format!("url: '{url}', pool_size: 4, key_prefix: 'cr:resp:', fallback_to_memory: true")
}

/// `response_cache` with Redis alone; `more` are further lines of it.
pub fn redis_only(url: &str, more: &str) -> String {
    let redis = redis(url);
    format!(
        "response_cache:\n  enabled: true\n  backend: redis\n  redis: {{ {redis} }}\n  l1: {{ {PATIENT} }}\n{more}"
    )
}

/// `response_cache` with two tiers; `more` are further lines of it.
pub fn tiered(l1: &str, redis: &str, l2: &str, more: &str) -> String {
    format!(
        "response_cache:\n  enabled: true\n  backend: tiered\n  l1: {{ {l1} }}\n  redis: {{ {redis} }}\n  l2: {{ {l2} }}\n{more}"
    )
}

/// `response_cache.l2` of a directory.
pub fn disk(directory: &Path) -> String {
    let directory = directory.display();
    format!("type: disk, directory: '{directory}', max_bytes: 100000000, {PATIENT}")
}

/// An S3 server of a test's own. Killed when dropped; what it keeps outlives [`ObjectStore::kill`].
pub struct ObjectStore {
    pub address: SocketAddr,
    directory: TempDir,
    running: Option<(Server, Runtime)>,
}

impl ObjectStore {
    pub fn start() -> Self {
        let mut store = ObjectStore {
            address: ([127, 0, 0, 1], 0).into(),
            directory: tempfile::tempdir().unwrap(),
            running: None,
        };
        store.start_again();
        store
    }

    /// At the same address, with what it has kept.
    pub fn start_again(&mut self) {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let config = Config {
            port: self.address.port(),
            root: Some(self.directory.path().into()),
            ..Config::default()
        };
        let server = runtime.block_on(Server::start(config)).unwrap();
        self.address = server.address();
        self.running = Some((server, runtime));
    }

    /// Connections are closed and refused.
    pub fn kill(&mut self) {
        if let Some((server, runtime)) = self.running.take() {
            drop(server);
            runtime.shutdown_timeout(Duration::from_secs(1));
        }
    }

    /// `response_cache.l2` of it.
    pub fn yaml(&self) -> String {
        Self::yaml_at(self.address)
    }

    /// The same by way of another address.
    pub fn yaml_at(address: SocketAddr) -> String {
        let limit = PATIENT;
        format!("{}, {limit}", Self::impatient_yaml_at(address))
    }

    /// With the default limit of a lookup.
    pub fn impatient_yaml_at(address: SocketAddr) -> String {
        let Config {
            access_key,
            secret_key,
            ..
        } = Config::default();
        format!(
            "type: s3, endpoint: 'http://{address}', bucket: tidegate, key_prefix: 'response-cache/', region: us-east-1, access_key: '{access_key}', secret_key: '{secret_key}', connect_timeout_ms: 30000, request_timeout_ms: 30000"
        )
    }

    /// Files of the objects of the cache.
    pub fn objects(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let mut left = vec![self.directory.path().join("tidegate/response-cache")];
        while let Some(path) = left.pop() {
            match std::fs::read_dir(&path) {
                Ok(inside) => left.extend(inside.map(|entry| entry.unwrap().path())),
                Err(_) if path.is_file() => found.push(path),
                Err(_) => {} // nothing was kept yet
            }
        }
        found
    }
}

impl Drop for ObjectStore {
    fn drop(&mut self) {
        self.kill();
    }
}
