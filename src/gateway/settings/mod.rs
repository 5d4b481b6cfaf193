//! What the operator configures: read once at the start, checked whole, and then unchanged.
//! Every key is named in exactly one place, the `read` function of its section, together with its
//! default and its description; the reference file and `print-config` come from there.

mod backends;
pub mod difference;
mod fault;
mod layers;
mod reader;
mod reference;
mod sections;
mod suggest;
mod units;

pub use backends::BackendExtras;
pub use fault::{Fault, Faults, Known};
pub use layers::{Environment, Source};
pub use reference::{effective_yaml, reference_yaml};
pub use sections::{
    ANY_ORIGIN, AdminSettings, ApiKeySettings, BackendTls, BreakerSettings, CacheBackend,
    CacheSettings, CertificateFiles, ConnectorKind, CorsSettings, DisaggSettings, DrainSettings,
    EventSource, ExternalStorage, HealthCheckSettings, HostPort, KvIndexSettings, KvPeerSettings,
    L2Settings, L2Type, LogFormat, LoggingSettings, MetricSettings, PrefixSettings, QuotaSettings,
    RedisSettings, ReloadSettings, RetrySettings, ScoringSettings, ServerSettings, Tokenizer,
    TracingSettings, UpstreamSettings,
};

use actix_web::http::header::HeaderName;
use actors::backend::BackendSpec;
use reader::{Reader, Section};
use routing::access::ApiKey;
use routing::strategy::Strategy;
use routing::view::Role;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;

/// All settings, valid together.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The listener and its limits.
    pub server: ServerSettings,
    /// Who may ask what the router knows.
    pub admin: AdminSettings,
    /// Who may ask for the rest.
    pub api_keys: ApiKeySettings,
    /// What clients may ask for.
    pub quotas: QuotaSettings,
    /// Whether changes of the files are taken in.
    pub reload: ReloadSettings,
    /// What happens at SIGTERM.
    pub drain: DrainSettings,
    /// Log level and format.
    pub logging: LoggingSettings,
    /// Spans for a collector.
    pub tracing: TracingSettings,
    /// How what is seen is counted.
    pub metrics: MetricSettings,
    /// What decides when nothing better is known.
    pub selection_strategy: Strategy,
    /// The header that names a session, for `ConsistentHash`.
    pub session_header: String,
    /// The prefix ring.
    pub prefix_routing: PrefixSettings,
    /// Names that clients may use for models, and the models behind them.
    pub model_aliases: BTreeMap<Arc<str>, Arc<str>>,
    /// Models that stand in for others, in this order.
    pub fallback_chains: BTreeMap<Arc<str>, Vec<Arc<str>>>,
    /// Connections to backends.
    pub upstream: UpstreamSettings,
    /// Second attempts.
    pub retry: RetrySettings,
    /// The response cache.
    pub response_cache: CacheSettings,
    /// The KV index.
    pub kv_cache_index: KvIndexSettings,
    /// Split serving.
    pub disaggregated_serving: DisaggSettings,
    /// The engines.
    pub backends: Vec<BackendSpec>,
    /// What backends say of themselves beside that.
    pub backend_extras: BackendExtras,
    /// Probes.
    pub health_checks: HealthCheckSettings,
    /// Circuit breakers.
    pub circuit_breaker: BreakerSettings,
}

/// The keys of a key file, beside those that are known already.
///
/// # Errors
/// What is wrong with it.
pub fn keys_of(name: &str, text: &str, known: &[ApiKey]) -> Result<Vec<ApiKey>, Faults> {
    let source = Source {
        name: name.into(),
        text: text.into(),
    };
    let (tree, mut faults) = layers::merge(&[source], &Environment::new())?;
    let reader = Reader::new(&tree, Default::default());
    // a section of its own, so that paths read as in the settings
    let keys = ApiKeySettings::read(&Section::root(&reader)).keys;
    let schema = Value::Null;
    let paths = Reader::for_schema(&schema);
    ApiKeySettings::read(&Section::root(&paths));
    let paths: Vec<String> = paths
        .finish(&[])
        .1
        .into_iter()
        .map(|known| known.path)
        .collect();
    faults.extend(reader.finish(&paths).0);
    let all: Vec<ApiKey> = known.iter().chain(&keys).cloned().collect();
    sections::check_unique(&all, &mut faults);
    match faults.is_empty() {
        true => Ok(keys),
        false => Err(Faults(faults)),
    }
}

impl Settings {
    /// What is wrong with these together: those that were read were right, but some of them wait for a restart.
    ///
    /// # Errors
    /// All faults.
    pub fn check(&self) -> Result<(), Faults> {
        let (mut faults, mut warnings) = (Vec::new(), Vec::new());
        check_together(self, &mut faults, &mut warnings);
        match faults.is_empty() {
            true => Ok(()),
            false => Err(Faults(faults)),
        }
    }

    /// These, with what is read at the start alone as it is in `running`.
    pub fn keeping(self, running: &Settings) -> Settings {
        let of = running.clone();
        Settings {
            server: of.server,
            admin: AdminSettings {
                listen: of.admin.listen,
                tls: of.admin.tls,
                ..self.admin
            },
            logging: LoggingSettings {
                access: self.logging.access,
                level: self.logging.level,
                ..of.logging
            },
            retry: RetrySettings {
                budget_ratio: of.retry.budget_ratio,
                ..self.retry
            },
            upstream: UpstreamSettings {
                connect_timeout: of.upstream.connect_timeout,
                pool_idle_timeout: of.upstream.pool_idle_timeout,
                connection_max_age: of.upstream.connection_max_age,
                max_idle_per_backend: of.upstream.max_idle_per_backend,
                ca_file: of.upstream.ca_file,
                ..self.upstream
            },
            metrics: of.metrics,
            tracing: of.tracing,
            response_cache: of.response_cache,
            kv_cache_index: KvIndexSettings {
                enabled: of.kv_cache_index.enabled,
                shared: of.kv_cache_index.shared,
                max_entries: of.kv_cache_index.max_entries,
                entry_ttl: of.kv_cache_index.entry_ttl,
                approximate: of.kv_cache_index.approximate,
                parity_check: of.kv_cache_index.parity_check,
                tokenizers: of.kv_cache_index.tokenizers,
                ..self.kv_cache_index
            },
            disaggregated_serving: DisaggSettings {
                enabled: of.disaggregated_serving.enabled,
                ..self.disaggregated_serving
            },
            health_checks: HealthCheckSettings {
                path: of.health_checks.path,
                ..self.health_checks
            },
            reload: of.reload,
            ..self
        }
    }

    /// The storage that a backend shares KV through: its own, or what all share.
    pub fn storage_of(&self, backend: &str) -> Option<&ExternalStorage> {
        let own = self.backend_extras.storage.get(backend);
        own.or(self.disaggregated_serving.default_external_storage.as_ref())
    }

    /// How a backend hands KV over.
    pub fn connector_of(&self, backend: &str) -> ConnectorKind {
        let own = self.backend_extras.peers.get(backend);
        let own = own.and_then(|peer| peer.connector);
        own.unwrap_or(self.disaggregated_serving.connector)
    }

    /// What makes workers fit each other: their connector, and with storage in between its endpoint and namespace.
    pub fn hand_off_group(&self, backend: &str) -> (ConnectorKind, Option<(&str, &str)>) {
        let connector = self.connector_of(backend);
        let storage = self.storage_of(backend);
        let storage = storage.filter(|_| connector == ConnectorKind::SharedStorage);
        let place = storage.map(|of| (of.endpoint.as_str(), of.kv_namespace.as_str()));
        (connector, place)
    }
}

/// Settings with the values that they came from.
#[derive(Debug, Clone)]
pub struct Loaded {
    /// Valid together.
    pub settings: Settings,
    /// Every key with its effective value, secrets masked, for `print-config`.
    pub effective: Vec<Known>,
    /// What is legal but probably not meant.
    pub warnings: Vec<Fault>,
}

/// Reads layered sources: defaults < files in order < environment. All faults are reported at once.
pub fn load(sources: &[Source], environment: &Environment) -> Result<Loaded, Faults> {
    let (tree, mut faults) = layers::merge(sources, environment)?;
    let unresolved = faults.iter().map(|fault| fault.path.clone()).collect();
    let reader = Reader::new(&tree, unresolved);
    let settings = read(&Section::root(&reader));
    let (found, effective) = reader.finish(&known_paths());
    let mut warnings = Vec::new();
    if faults.is_empty() {
        // with a value missing, what joins values would only repeat that
        check_together(&settings, &mut faults, &mut warnings);
    }
    faults.extend(found);
    if faults.is_empty() {
        return Ok(Loaded {
            settings,
            effective,
            warnings,
        });
    }
    Err(Faults(faults))
}

/// Every key there is, with default and description; list elements appear once, as `[]`.
pub(crate) fn schema() -> Vec<Known> {
    let empty = Value::Null;
    let reader = Reader::for_schema(&empty);
    read(&Section::root(&reader));
    reader.finish(&[]).1
}

fn known_paths() -> Vec<String> {
    schema().into_iter().map(|known| known.path).collect()
}

fn read(root: &Section<'_>) -> Settings {
    let server = ServerSettings::read(
        &root.section("server", "Where the gateway listens, and what it accepts."),
    );
    let admin = AdminSettings::read(
        &root.section("admin", "/admin: what the router knows, for its operators."),
    );
    let api_keys = ApiKeySettings::read(&root.section(
        "api_keys",
        "Who may send requests. Without keys everybody who reaches the router may.",
    ));
    let quotas = QuotaSettings::read(&root.section("quotas", "What clients may ask for, counted by each gateway for itself. Beyond it they are refused with 429 and told when to come back. Without any of these limits nobody is counted."));
    let reload = ReloadSettings::read(&root.section("reload", "Settings are read again at SIGHUP, by POST /admin/reload, and when their files change. Faulty ones change nothing; what needs a restart is named."));
    let drain = DrainSettings::read(&root.section(
        "drain",
        "What happens at SIGTERM or Ctrl-C. A second signal ends the process at once.",
    ));
    let logging = LoggingSettings::read(&root.section("logging", "Log lines, on standard error."));
    let tracing = TracingSettings::read(&root.section(
        "tracing",
        "What requests spend their time on, as spans for an OpenTelemetry collector.",
    ));
    let metrics = MetricSettings::read(&root.section("metrics", "/metrics, for Prometheus."));
    let selection_strategy = root.choice(
        "selection_strategy",
        &Strategy::ALL,
        "LeastConnections",
        "How a backend is picked when neither cache nor prefix says more. LeastLatency goes by the time to first token of streams; ConsistentHash by session_header, else by the request's `user`, and by load where both are missing.",
    );
    let session_header = root.text(
        "session_header",
        "x-session-id",
        "The request header that names a session, for ConsistentHash.",
    );
    if HeaderName::from_bytes(session_header.as_bytes()).is_err() {
        root.fault("session_header", "is not a header name");
    }
    let prefix_routing = PrefixSettings::read(&root.section("prefix_routing", "Requests that begin alike meet on one backend, until it has more than its share (consistent hashing with bounded loads)."));
    let model_aliases = root.map("model_aliases", "Names that clients may use, and the model that serves each. The top-level `model` of answers and chunks carries the name that the client used.");
    let fallback_chains = root.lists("fallback_chains", "Models that serve, in this order, while no backend of a model can. Answers then carry the name of the model that made them, and x-tidegate-model and x-tidegate-fallback-from; they are never cached under the name of the other. Both by their own names.");
    let upstream = UpstreamSettings::read(&root.section("upstream", "Connections to backends. There is no total timeout: a stream may last as long as it flows."));
    let retry = RetrySettings::read(&root.section(
        "retry",
        "Second attempts, always on another backend, and never once a byte has reached the client.",
    ));
    let response_cache = CacheSettings::read(&root.section("response_cache", "Answers to repeated deterministic requests, without asking an engine. Cached are whole answers to requests with temperature 0, and embeddings; every tenant has entries of its own."));
    let kv_cache_index = KvIndexSettings::read(&root.section(
        "kv_cache_index",
        "Which backend holds which KV blocks, from the engines' own events.",
    ));
    let disaggregated_serving = DisaggSettings::read(&root.section("disaggregated_serving", "Prefill on one backend, decode on another, which get the prompt's KV from each other. While it is off, roles are ignored and every backend serves whole requests."));
    let (backends, backend_extras) = backends::read(root);
    let health_checks = HealthCheckSettings::read(&root.section("health_checks", "Probes. A backend that has not answered yet is probed every 500 ms; it takes requests after its first good answer."));
    let circuit_breaker = BreakerSettings::read(&root.section("circuit_breaker", "Takes a backend out of rotation after failures in a row, then tries one request at a time."));
    Settings {
        server,
        admin,
        api_keys,
        quotas,
        reload,
        drain,
        logging,
        tracing,
        metrics,
        selection_strategy,
        session_header,
        prefix_routing,
        model_aliases,
        fallback_chains,
        upstream,
        retry,
        response_cache,
        kv_cache_index,
        disaggregated_serving,
        backends,
        backend_extras,
        health_checks,
        circuit_breaker,
    }
}

/// Ring points of one backend and model: 16 bytes each, sorted whenever backends change.
const RING_POINTS_MAX: u64 = 200_000;

/// Rules that join sections.
fn check_together(settings: &Settings, faults: &mut Vec<Fault>, warnings: &mut Vec<Fault>) {
    backends::check(&settings.backends, faults);
    settings.api_keys.check(faults);
    settings.quotas.check(warnings, settings.api_keys.is_on());
    let names: Vec<&str> = settings.backends.iter().map(|b| &*b.name).collect();
    settings
        .kv_cache_index
        .check(&names, settings.response_cache.redis.url.is_some(), faults);
    settings.response_cache.check(faults);
    settings.disaggregated_serving.check(
        &settings.backends,
        &settings.backend_extras.peers,
        faults,
        warnings,
    );
    check_partners(settings, warnings);
    for (i, backend) in settings.backends.iter().enumerate() {
        if backend.models.is_empty() && !settings.health_checks.enabled {
            let path = format!("backends[{i}].models");
            faults.push(Fault::new(
                path,
                "is required when health_checks.enabled is false: nobody asks the backend",
            ));
        }
        let points = u64::from(backend.weight) * u64::from(settings.prefix_routing.virtual_nodes);
        if points > RING_POINTS_MAX {
            let path = format!("backends[{i}].weight");
            faults.push(Fault::new(path, format!("times prefix_routing.virtual_nodes makes {points} ring points, more than {RING_POINTS_MAX}")));
        }
    }
    if settings.kv_cache_index.enabled && settings.kv_cache_index.event_sources.is_empty() {
        warnings.push(Fault::new(
            "kv_cache_index.event_sources",
            "is empty: what backends hold is only guessed from what was sent there",
        ));
    }
    if settings.selection_strategy == Strategy::ConsistentHash && settings.prefix_routing.enabled {
        warnings.push(Fault::new("selection_strategy", "ConsistentHash only places requests without a prompt while prefix_routing.enabled is true: the prefix comes first"));
    }
    for (model, chain) in &settings.fallback_chains {
        let path = format!("fallback_chains.{model}");
        for other in chain.iter().chain([model]) {
            if let Some(target) = settings.model_aliases.get(other) {
                let what = format!("`{other}` is an alias, name the model: `{target}`");
                faults.push(Fault::new(path.clone(), what));
            }
        }
        if chain.contains(model) {
            faults.push(Fault::new(path, "has the model itself in its chain"));
        }
    }
    for (alias, target) in &settings.model_aliases {
        if settings.model_aliases.contains_key(target) {
            let path = format!("model_aliases.{alias}");
            faults.push(Fault::new(
                path,
                format!("points to `{target}`, which is an alias itself"),
            ));
        }
    }
}

/// A prefill or decode worker that nobody fits is of little use.
fn check_partners(settings: &Settings, warnings: &mut Vec<Fault>) {
    if !settings.disaggregated_serving.enabled {
        return;
    }
    for (i, backend) in settings.backends.iter().enumerate() {
        let other = match backend.role {
            Role::Prefill => Role::Decode,
            Role::Decode => Role::Prefill,
            Role::Unified => continue,
        };
        let group = settings.hand_off_group(&backend.name);
        let mut partners = settings.backends.iter().filter(|of| of.role == other);
        if !partners.any(|of| settings.hand_off_group(&of.name) == group) {
            let path = format!("backends[{i}]");
            let what = format!(
                "has no {other} worker of its connector, and of its endpoint and kv_namespace where that is shared_storage"
            );
            warnings.push(Fault::new(path, what));
        }
    }
}

#[cfg(test)]
mod tests;
