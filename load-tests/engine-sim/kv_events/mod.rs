//! How the engine tells others what its KV cache holds: vLLM's ZeroMQ form (`publisher`, `msgpack`) and this project's HTTP form
//! (`json`, served by `api::kv_events`). Both read one [`feed::Feed`]. The settings are here.

pub mod endpoint;
pub mod feed;
pub mod flags;
pub mod json;
pub mod msgpack;
pub mod publisher;

use endpoint::Endpoint;
use serde::Deserialize;

/// There is one rank: the simulator does not split into data-parallel ones.
pub const DP_RANK: u64 = 0;

/// vLLM's `--kv-events-config`, with vLLM's names and defaults. Members that are not known are ignored.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct KvEvents {
    /// Publish over ZeroMQ. The HTTP form is served without it.
    pub enable_kv_cache_events: bool,
    /// Where to; `zmq` unless it says `null`.
    pub publisher: KvPublisher,
    /// The PUB socket: bound when this has `*` or `::` in it (or port 0), else connected.
    pub endpoint: String,
    /// The ROUTER socket that repeats what is kept; always bound.
    pub replay_endpoint: Option<String>,
    /// Steps whose events are kept.
    pub buffer_steps: usize,
    /// Messages that may wait for a slow subscriber. Taken and not applied: the ZeroMQ library has 100,000, vLLM's default, built in.
    pub hwm: usize,
    /// Batches that may wait for the publisher; one that does not fit is not sent live (vLLM would halt the engine instead).
    pub max_queue_size: usize,
    /// The first frame of each message.
    pub topic: String,
}

impl Default for KvEvents {
    fn default() -> Self {
        Self {
            enable_kv_cache_events: false,
            publisher: KvPublisher::Zmq,
            endpoint: "tcp://*:5557".to_owned(),
            replay_endpoint: None,
            buffer_steps: 10_000,
            hwm: 100_000,
            max_queue_size: 100_000,
            topic: String::new(),
        }
    }
}

impl KvEvents {
    /// Whether there are sockets at all.
    pub fn publishes(&self) -> bool {
        self.enable_kv_cache_events && self.publisher == KvPublisher::Zmq
    }

    /// The PUB socket's address.
    ///
    /// # Errors
    /// One sentence about what is wrong with it.
    pub(crate) fn live(&self) -> Result<Endpoint, String> {
        Endpoint::parse(&self.endpoint)
    }

    /// The ROUTER socket's address.
    ///
    /// # Errors
    /// One sentence about what is wrong with it.
    pub(crate) fn replay(&self) -> Result<Option<Endpoint>, String> {
        self.replay_endpoint
            .as_deref()
            .map(|text| Endpoint::parse(text).map(Endpoint::bound))
            .transpose()
    }

    pub(crate) fn validate(&self) -> Result<(), String> {
        if !self.publishes() {
            return Ok(());
        }
        if self.max_queue_size == 0 {
            return Err("max_queue_size of the KV events must be at least 1".into());
        }
        self.live()?;
        self.replay()?;
        Ok(())
    }
}

/// vLLM's publishers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvPublisher {
    /// ZeroMQ.
    #[default]
    Zmq,
    /// None.
    Null,
}

/// In which era's form events go out, and what goes wrong with them. [`Default`] is today's vLLM without faults.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KvEventQuirks {
    /// Form of the events in ZeroMQ messages.
    pub encoding: EventEncoding,
    /// Form of the block hashes in ZeroMQ messages.
    pub hashes: HashForm,
    /// Form of the replay socket's answers.
    pub replay_framing: ReplayFraming,
    /// Every Nth batch is not sent live, over ZeroMQ and over HTTP; who asks for a replay gets it.
    pub drop_every: Option<u64>,
    /// The batch with this number is neither sent nor kept.
    pub lose_seq: Option<u64>,
    /// Every Nth batch is sent after the one that follows it, as soon as there is one.
    pub reorder_every: Option<u64>,
    /// After this many batches the events start over, once; see [`crate::SimHandle::restart_events`].
    pub restart_after: Option<u64>,
    /// Blocks that leave the GPU are announced as moved to shared storage.
    pub offload: bool,
    /// Each stored and each removed event comes twice, as of two physical copies.
    pub duplicate: bool,
}

/// Eras of vLLM's event encoding.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum EventEncoding {
    /// Arrays without medium; batches without rank. Nothing about storage can be said in it.
    Oldest,
    /// Arrays with all fields.
    #[default]
    Array,
    /// Maps with the field names.
    Map,
}

/// Forms of a block hash.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum HashForm {
    /// Unsigned 64-bit integers.
    #[default]
    Int,
    /// 32 bytes; the last eight, big-endian, are the integer.
    Bytes,
}

/// Forms of the replay socket's answers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum ReplayFraming {
    /// `["", seq, payload]`.
    Old,
    /// `["", topic, seq, payload]`.
    #[default]
    New,
}
