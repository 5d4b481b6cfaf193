//! `kv_cache_index`.

use crate::settings::fault::Fault;
use crate::settings::reader::Section;
use actors::kv_subscriber::RANKS_MAX;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// `kv_cache_index`.
#[derive(Debug, Clone)]
pub struct KvIndexSettings {
    /// Whether it is used.
    pub enabled: bool,
    /// Whether gateways share it through Redis.
    pub shared: bool,
    /// Pairs of block and holder.
    pub max_entries: u64,
    /// How long an entry lives.
    pub entry_ttl: Duration,
    /// How overlap, load and health weigh.
    pub scoring: ScoringSettings,
    /// Whether storage copies count.
    pub storage_offloading: bool,
    /// Whether an eviction means an offload.
    pub treat_eviction_as_offload: bool,
    /// Where events come from.
    pub event_sources: Vec<EventSource>,
    /// Whether the caches of backends that announce nothing are guessed.
    pub approximate: bool,
    /// Whether a probe prompt is compared when an event stream opens.
    pub parity_check: bool,
    /// Where the tokens of a model's prompts come from, by model; else from its backends.
    pub tokenizers: BTreeMap<Arc<str>, Tokenizer>,
}

/// Where the tokens of a model's prompts come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tokenizer {
    /// A backend's `/tokenize` is asked.
    Backend,
    /// A `tokenizer.json`, or the directory where it stands with its chat template.
    Local(PathBuf),
    /// Nowhere: prompts go by their text.
    None,
}

/// `kv_cache_index.scoring`.
#[derive(Debug, Clone)]
pub struct ScoringSettings {
    /// Of overlap.
    pub overlap_weight: f64,
    /// Of low load.
    pub load_weight: f64,
    /// Of health.
    pub health_weight: f64,
    /// Coverage below which overlap does not count.
    pub min_overlap_threshold: f64,
    /// Of a block in GPU memory.
    pub gpu_tier_weight: f64,
    /// Of a block in CPU memory.
    pub cpu_tier_weight: f64,
    /// Of a block in storage.
    pub storage_tier_weight: f64,
}

impl ScoringSettings {
    fn read(s: &Section<'_>) -> Self {
        let weight = |key, default, doc| s.number(key, (default, 0.0, 1.0), doc);
        ScoringSettings {
            overlap_weight: weight(
                "overlap_weight",
                0.6,
                "Of the prompt's share that is cached there.",
            ),
            load_weight: weight("load_weight", 0.3, "Of low load."),
            health_weight: weight("health_weight", 0.1, "Of health."),
            min_overlap_threshold: weight(
                "min_overlap_threshold",
                0.3,
                "Overlap counts when some backend covers at least this share of the prompt.",
            ),
            gpu_tier_weight: weight("gpu_tier_weight", 1.0, "Of a block in GPU memory."),
            cpu_tier_weight: weight("cpu_tier_weight", 0.8, "Of a block in CPU memory."),
            storage_tier_weight: weight(
                "storage_tier_weight",
                0.6,
                "Of a block in external storage.",
            ),
        }
    }
}

/// One of `kv_cache_index.event_sources`.
#[derive(Debug, Clone)]
pub struct EventSource {
    /// Whose events.
    pub backend_name: String,
    /// Where they come from.
    pub endpoint: String,
    /// Before the first reconnect.
    pub reconnect_interval: Duration,
    /// ZeroMQ: where missed frames are asked for.
    pub replay_endpoint: Option<String>,
    /// ZeroMQ: what is subscribed to.
    pub topic: String,
    /// ZeroMQ: whether the engine connects to us.
    pub bind: bool,
    /// Data-parallel ranks behind the backend.
    pub dp_size: u32,
}

/// The schemes of [`EventSource::endpoint`].
const EVENT_SCHEMES: [&str; 5] = ["tcp://", "ws://", "wss://", "http://", "https://"];

impl KvIndexSettings {
    // top to bottom: this is also the order of the reference file
    pub(in crate::settings) fn read(s: &Section<'_>) -> Self {
        let enabled = s.flag("enabled", false, "Whether the index is kept and used.");
        let shared = s.choice(
            "backend",
            &[("memory", false), ("redis", true)],
            "memory",
            "memory, or redis to share it between gateways (uses response_cache.redis).",
        );
        let max_entries = s.int(
            "max_entries",
            (500_000, 1..=u64::MAX),
            "Pairs of block and holder.",
        );
        let entry_ttl_seconds = s.int(
            "entry_ttl_seconds",
            (900, 1..=31_536_000),
            "How long an entry lives, in seconds.",
        );
        let scoring = ScoringSettings::read(
            &s.section("scoring", "How a backend's overlap, load and health weigh."),
        );
        let offloading = s.section(
            "storage_offloading",
            "Blocks that left the GPU for external storage.",
        );
        let storage_offloading = offloading.flag("enabled", true, "Whether storage copies count.");
        let treat_eviction_as_offload = offloading.flag(
            "treat_eviction_as_offload",
            false,
            "For engines that announce evictions but no offloads.",
        );
        let sources = s.list("event_sources", "Where each backend's KV events come from.");
        KvIndexSettings {
            enabled,
            shared,
            max_entries,
            entry_ttl: Duration::from_secs(entry_ttl_seconds),
            scoring,
            storage_offloading,
            treat_eviction_as_offload,
            event_sources: sources.iter().map(EventSource::read).collect(),
            approximate: s.flag("approximate", true, "Whether the caches of backends that announce nothing, or whose prompts cannot be tokenised, are guessed from what was sent there."),
            parity_check: s.flag("parity_check", true, "Whether every backend with events is sent one short probe prompt when its stream opens, to see that its tokens and blocks are as expected here."),
            tokenizers: tokenizers(s),
        }
    }

    pub(in crate::settings) fn check(
        &self,
        backends: &[&str],
        redis: bool,
        faults: &mut Vec<Fault>,
    ) {
        for (i, source) in self.event_sources.iter().enumerate() {
            let path = |key: &str| format!("kv_cache_index.event_sources[{i}].{key}");
            if !source.backend_name.is_empty() && !backends.contains(&&*source.backend_name) {
                let names = backends.join(", ");
                faults.push(Fault::new(
                    path("backend_name"),
                    format!(
                        "no backend is named `{}`; there are: {names}",
                        source.backend_name
                    ),
                ));
            }
            for (key, endpoint) in [
                ("endpoint", Some(&source.endpoint)),
                ("replay_endpoint", source.replay_endpoint.as_ref()),
            ] {
                let last = source.dp_size - 1;
                if let Some(endpoint) = endpoint.filter(|e| e.starts_with("tcp://"))
                    && last > 0
                    && of_rank(endpoint, last).is_none()
                {
                    let message =
                        format!("needs a port to which {last} can be added for the last rank");
                    faults.push(Fault::new(path(key), message));
                }
            }
            let earlier = &self.event_sources[..i];
            if earlier
                .iter()
                .any(|e| e.backend_name == source.backend_name)
            {
                let message = "has a source already; for several data-parallel ranks behind one backend set dp_size";
                faults.push(Fault::new(path("backend_name"), message));
            }
        }
        for (model, from) in &self.tokenizers {
            if let Tokenizer::Local(path) = from
                && !path.exists()
            {
                faults.push(Fault::new(
                    format!("kv_cache_index.tokenizers.{model}"),
                    format!("there is nothing at {}; give the path of a tokenizer.json or its directory, backend, or none", path.display()),
                ));
            }
        }
        if self.enabled && self.shared && !redis {
            faults.push(Fault::new(
                "response_cache.redis.url",
                "is required by kv_cache_index.backend: redis",
            ));
        }
    }
}

/// The ZeroMQ endpoint of a rank: at the port of rank 0, plus the rank.
fn of_rank(endpoint: &str, rank: u32) -> Option<String> {
    let (host, port) = endpoint.rsplit_once(':')?;
    let port = port.parse::<u16>().ok()?;
    let port = port.checked_add(u16::try_from(rank).ok()?)?;
    Some(format!("{host}:{port}"))
}

fn tokenizers(s: &Section<'_>) -> BTreeMap<Arc<str>, Tokenizer> {
    let given = s.map("tokenizers", "Where the tokens of a model's prompts come from, by model: the path of its tokenizer.json (or of the directory with it and its chat template), backend (its /tokenize is asked; the default), or none (prompts go by their text).");
    let tokenizer = |value: &str| match value {
        "backend" => Tokenizer::Backend,
        "none" => Tokenizer::None,
        path => Tokenizer::Local(path.into()),
    };
    let given = given.into_iter();
    given
        .map(|(model, from)| (model, tokenizer(&from)))
        .collect()
}

impl EventSource {
    /// Whether every rank has a stream of its own.
    pub fn per_rank(&self) -> bool {
        self.dp_size > 1 && self.endpoint.starts_with("tcp://")
    }

    /// The source of one rank's own stream.
    pub fn of_rank(&self, rank: u32) -> EventSource {
        let at = |endpoint: &String| of_rank(endpoint, rank).unwrap_or_else(|| endpoint.clone());
        EventSource {
            endpoint: at(&self.endpoint),
            replay_endpoint: self.replay_endpoint.as_ref().map(at),
            ..self.clone()
        }
    }

    fn read(s: &Section<'_>) -> Self {
        let endpoint = s.required("endpoint", "tcp:// (ZeroMQ), ws://, wss://, http:// or https:// (WebSocket or server-sent events).");
        if !endpoint.is_empty()
            && !EVENT_SCHEMES
                .iter()
                .any(|scheme| endpoint.starts_with(scheme))
        {
            s.fault(
                "endpoint",
                format!("must begin with one of {}", EVENT_SCHEMES.join(", ")),
            );
        }
        EventSource {
            backend_name: s.required("backend_name", "The backend's name."),
            endpoint,
            reconnect_interval: Duration::from_millis(s.int(
                "reconnect_interval_ms",
                (5000, 1..=600_000),
                "Before the first reconnect, in milliseconds.",
            )),
            replay_endpoint: s.text_or_none("replay_endpoint", "ZeroMQ only: where missed events are asked for, such as tcp://vllm-1:5558; without it a gap forgets what the backend holds."),
            topic: s.text("topic", "", "ZeroMQ only: the topic that is subscribed to; empty: all."),
            bind: s.flag("bind", false, "ZeroMQ only: listen at endpoint, for engines that connect (their endpoint has no *)."),
            dp_size: s.int(
                "dp_size",
                (1, 1..=RANKS_MAX as u64),
                "Data-parallel ranks behind the backend, told apart. ZeroMQ: rank r is read at the endpoints' ports + r. Other streams name the rank in each message.",
            ) as u32,
        }
    }
}
