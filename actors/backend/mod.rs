//! A backend's description and its live numbers: atomics that every thread may read and that
//! guards count up and down.

mod in_flight;
mod kv_seat;
mod live;
mod url;

pub use in_flight::{BreakerLink, InFlight, Outcome, ProbeTicket};
pub use kv_seat::{KvSeat, OpenStream, Standing};
pub use live::{ConnectionCounts, Counters, LiveNumbers};
pub use url::{BackendUrl, UrlFault};

use routing::ids::BackendId;
use routing::view::{HandOffGroup, Load, Role};
use std::sync::Arc;
use std::time::Instant;

/// What the settings say of a backend.
#[derive(Debug, Clone, PartialEq)]
pub struct BackendSpec {
    /// The unique name.
    pub name: Arc<str>,
    /// Where it listens.
    pub url: BackendUrl,
    /// Its part in split serving.
    pub role: Role,
    /// Its share relative to others, at least 1.
    pub weight: u32,
    /// The models it serves; empty: ask its `/v1/models`.
    pub models: Vec<Arc<str>>,
    /// Its place in the KV index.
    pub kv: KvSeat,
    /// Whom it can hand KV to, or get it from, when serving is split.
    pub group: HandOffGroup,
    /// Sent as `Authorization: Bearer …` to this backend only; never printed.
    pub api_key: Option<Secret>,
}

/// A value that no log line shows.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub Arc<str>);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("***")
    }
}

/// A backend for as long as anybody uses it: guards keep it alive after it left the directory.
#[derive(Debug)]
pub struct Backend {
    /// Stable for the life of the process.
    pub id: BackendId,
    /// Its settings.
    pub spec: BackendSpec,
    /// Its numbers; they go on when its settings change.
    pub live: Arc<LiveNumbers>,
}

impl Backend {
    /// A backend that nothing has been sent to.
    pub fn new(id: BackendId, spec: BackendSpec) -> Self {
        Backend {
            id,
            spec,
            live: Arc::default(),
        }
    }

    /// The same engine with other settings: requests that run there go on counting.
    pub fn respecified(&self, spec: BackendSpec) -> Self {
        Backend {
            id: self.id,
            spec,
            live: self.live.clone(),
        }
    }

    /// What a decision at `at` reads.
    pub fn load(&self, at: Instant) -> Load {
        Load {
            mode: self.spec.kv.standing.mode().0,
            block_size: self.spec.kv.standing.block_size(),
            ..self.live.load(at)
        }
    }
}
