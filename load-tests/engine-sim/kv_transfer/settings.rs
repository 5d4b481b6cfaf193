//! How hand-offs behave beyond what `--kv-transfer-config` says: where the store is, how fast links are, how long things wait.

use crate::kv_store::StoreSettings;
use crate::kv_store::link::LinkSpeed;
use std::time::Duration;

/// The simulator's own settings of KV transfer. Times are simulated ones.
#[derive(Debug, Clone, PartialEq)]
pub struct KvSharing {
    /// The storage behind a shared-storage connector; without one such a connector does nothing.
    pub store: Option<StoreAt>,
    /// Figures of a store in this process; its time scale is that of the engine which asks first.
    pub store_settings: StoreSettings,
    /// From engine to engine.
    pub link: LinkSpeed,
    /// How long a request waits for keys and values that should be there.
    pub load_timeout: Duration,
    /// How long blocks are kept for another engine that does not come.
    pub lease: Duration,
    /// How long the two legs of one request wait for each other.
    pub partner_timeout: Duration,
    /// What follows when keys and values of another engine are missing.
    pub load_failure: LoadFailurePolicy,
    /// The host by which other engines reach this one; else the one that it listens on.
    pub advertise_host: Option<String>,
    /// A port of its own for other engines, 0 for a free one; else they come to the HTTP port.
    pub port: Option<u16>,
}

impl Default for KvSharing {
    fn default() -> Self {
        Self {
            store: None,
            store_settings: StoreSettings::default(),
            // 8 us per token of a 70B model, as measured over 400 Gb/s.
            link: LinkSpeed {
                bytes_per_second: 40e9,
                latency: Duration::from_millis(1),
            },
            load_timeout: Duration::from_secs(15),
            lease: Duration::from_secs(30),
            partner_timeout: Duration::from_secs(30),
            load_failure: LoadFailurePolicy::default(),
            advertise_host: None,
            port: None,
        }
    }
}

/// Where a shared store is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreAt {
    /// In this process, under the name of the connector's endpoint.
    InProcess,
    /// Behind a URL.
    Url(String),
}

impl std::str::FromStr for StoreAt {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.trim_end_matches('/') {
            "in-process" => Ok(Self::InProcess),
            url if url.len() > "http://".len() && url.starts_with("http://") => {
                Ok(Self::Url(url.to_owned()))
            }
            _ => Err("give in-process, or a URL such as http://127.0.0.1:8080".to_owned()),
        }
    }
}

/// vLLM's `kv_load_failure_policy`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LoadFailurePolicy {
    /// The request fails.
    #[default]
    Fail,
    /// The prompt is computed.
    Recompute,
}
