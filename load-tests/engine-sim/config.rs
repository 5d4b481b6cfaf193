//! What one simulated engine is: the validated form of its command line, and the library's way to describe one.

use crate::args::Args;
use crate::failure::FaultSettings;
use crate::kv_events::{KvEventQuirks, KvEvents};
use crate::kv_transfer::KvSharing;
use crate::speed::{Speed, figures_for};
use clap::Parser;
use serde::Deserialize;
use std::ffi::OsString;
use std::fmt;
use std::time::Duration;

/// Blocks of [`SimConfig::default`]: 16,384 tokens, so that tests can fill the cache.
const DEFAULT_BLOCKS: usize = 1024;

/// One engine. [`Default`] is a small fast one for tests; [`SimConfig::from_args`] takes vLLM's command line.
#[derive(Debug, Clone)]
pub struct SimConfig {
    /// The names that requests may use; the first one stands in answers.
    pub models: Vec<String>,
    /// Address to listen on.
    pub host: String,
    /// Port; 0 takes a free one.
    pub port: u16,
    /// Longest prompt plus answer in tokens. No more than the pool holds.
    pub max_model_len: usize,
    /// Tokens per KV block.
    pub block_size: usize,
    /// KV blocks in the pool.
    pub num_blocks: usize,
    /// Whether prompts reuse blocks.
    pub prefix_caching: bool,
    /// Tokens that one step may compute.
    pub max_num_batched_tokens: usize,
    /// Sequences that may run at once.
    pub max_num_seqs: usize,
    /// Bearer tokens of which requests under `/v1` need one; empty lets everybody in.
    pub api_keys: Vec<String>,
    /// Whether `usage` tells the cached tokens.
    pub prompt_tokens_details: bool,
    /// Whether a model may choose to call a tool by itself (`tool_choice: "auto"`).
    pub auto_tool_choice: bool,
    /// How this engine shares KV blocks with others.
    pub kv_transfer: Option<KvTransfer>,
    /// GPUs that share the model; other engines are told.
    pub tensor_parallel_size: u32,
    /// What the simulator has to know about it besides.
    pub kv_sharing: KvSharing,
    /// Type of keys and values; blocks of different types are never shared.
    pub kv_cache_dtype: String,
    /// Keys and values of one token over all layers, in this type.
    pub kv_bytes_per_token: u64,
    /// How KV events are kept and published.
    pub kv_events: KvEvents,
    /// In which form they go out, and what goes wrong with them.
    pub kv_event_quirks: KvEventQuirks,
    /// Times, before the time scale.
    pub speed: Speed,
    /// Multiplies every simulated time: 1.0 is real time, 0.1 is ten times faster.
    pub time_scale: f64,
    /// Time before the engine listens. Connections are refused until then.
    pub startup_delay: Duration,
    /// Tokens of an answer that no limit ends, on average.
    pub answer_tokens: usize,
    /// Chooses the answers, the block hashes and the random failures.
    pub seed: u64,
    /// Failures from the start; they can be changed while it runs.
    pub faults: FaultSettings,
}

impl Default for SimConfig {
    fn default() -> Self {
        Self {
            models: vec!["sim-model".to_owned()],
            host: "127.0.0.1".to_owned(),
            port: 0,
            max_model_len: 8192,
            block_size: 16,
            num_blocks: DEFAULT_BLOCKS,
            prefix_caching: true,
            max_num_batched_tokens: 8192,
            max_num_seqs: 256,
            api_keys: Vec::new(),
            prompt_tokens_details: true,
            auto_tool_choice: true,
            kv_transfer: None,
            tensor_parallel_size: 1,
            kv_sharing: KvSharing::default(),
            kv_cache_dtype: "auto".to_owned(),
            kv_bytes_per_token: figures_for("sim-model").kv_bytes_per_token(2.0),
            kv_events: KvEvents::default(),
            kv_event_quirks: KvEventQuirks::default(),
            speed: figures_for("sim-model").speed,
            time_scale: 0.05,
            startup_delay: Duration::ZERO,
            answer_tokens: 64,
            seed: 0,
            faults: FaultSettings::default(),
        }
    }
}

impl SimConfig {
    /// Reads a command line as vLLM takes it, program name first: `["vllm", "serve", "MODEL", "--port", "8000"]`.
    ///
    /// # Errors
    /// What clap says about it, `--help` and `--version` included: print it with [`clap::Error::exit`].
    pub fn from_args<I, T>(words: I) -> Result<Self, clap::Error>
    where
        I: IntoIterator<Item = T>,
        T: Into<OsString>,
    {
        let words = words
            .into_iter()
            .map(|word| crate::args::with_dashes(word.into()));
        Args::try_parse_from(words)?.into_config()
    }

    /// Rejects what cannot run.
    ///
    /// # Errors
    /// One sentence for the person who wrote the settings.
    pub fn validate(&self) -> Result<(), String> {
        let pool = self.num_blocks.saturating_mul(self.block_size);
        if self.models.is_empty() {
            return Err("an engine needs a model name".into());
        }
        if self.block_size == 0 || self.max_num_seqs == 0 || self.max_model_len < 2 {
            return Err(
                "block size and max_num_seqs must be at least 1, max_model_len at least 2".into(),
            );
        }
        if self.max_num_batched_tokens < self.max_num_seqs {
            return Err(format!(
                "max_num_batched_tokens ({}) must be greater than or equal to max_num_seqs ({})",
                self.max_num_batched_tokens, self.max_num_seqs
            ));
        }
        if self.max_model_len > pool {
            return Err(format!(
                "max_model_len ({}) is larger than the KV cache ({} blocks of {} = {pool} tokens); lower --max-model-len or give more \
                 blocks with --num-gpu-blocks-override",
                self.max_model_len, self.num_blocks, self.block_size
            ));
        }
        if !self.time_scale.is_finite() || self.time_scale < 0.0 {
            return Err("the time scale must be 0 or more".into());
        }
        self.kv_events.validate()
    }

    /// The name that answers carry.
    pub fn model(&self) -> &str {
        self.models.first().map_or("", String::as_str)
    }

    /// A simulated time as wall time.
    pub(crate) fn scaled(&self, time: Duration) -> Duration {
        time.mul_f64(self.time_scale)
    }
}

/// vLLM's `--kv-transfer-config`. Members that the simulator does not use are kept as they came.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct KvTransfer {
    /// The connector, for example `VastKVConnector`.
    pub kv_connector: String,
    /// What this engine does.
    pub kv_role: KvRole,
    /// Where the buffer lies, for example `cpu`.
    #[serde(default)]
    pub kv_buffer_device: Option<String>,
    /// Bytes; people write `4e9`.
    #[serde(default)]
    pub kv_buffer_size: Option<f64>,
    /// The connector's own settings.
    #[serde(default)]
    pub kv_connector_extra_config: serde_json::Map<String, serde_json::Value>,
    /// Everything else.
    #[serde(flatten)]
    pub other: serde_json::Map<String, serde_json::Value>,
}

/// The part that an engine plays when KV blocks are shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvRole {
    /// Prefill.
    KvProducer,
    /// Decode.
    KvConsumer,
    /// Both.
    KvBoth,
}

impl KvRole {
    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::KvProducer => "kv_producer",
            Self::KvConsumer => "kv_consumer",
            Self::KvBoth => "kv_both",
        }
    }
}

/// One line for people: what is served, and how large and fast it is.
impl fmt::Display for SimConfig {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "{} ({} KV blocks of {}, {} tokens per prompt and answer, {} ms per prompt token, {} ms per step, time ×{}",
            self.models.join(", "),
            self.num_blocks,
            self.block_size,
            self.max_model_len,
            self.speed.prefill_ms_per_token,
            self.speed.itl_ms,
            self.time_scale
        )?;
        if let Some(kv) = &self.kv_transfer {
            write!(
                formatter,
                ", {} over {}",
                kv.kv_role.name(),
                kv.kv_connector
            )?;
        }
        if !self.startup_delay.is_zero() {
            write!(
                formatter,
                ", loading for {:?}",
                self.scaled(self.startup_delay)
            )?;
        }
        formatter.write_str(")")
    }
}
