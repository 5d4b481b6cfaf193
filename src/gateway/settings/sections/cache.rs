//! `response_cache`.

use crate::settings::fault::Fault;
use crate::settings::reader::Section;
use actors::backend::Secret;
use std::path::PathBuf;
use std::time::Duration;

/// Where the hot cache keeps its entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheBackend {
    /// In this process.
    Memory,
    /// In Redis.
    Redis,
    /// L1, then L2.
    Tiered,
}

/// `response_cache`.
#[derive(Debug, Clone)]
pub struct CacheSettings {
    /// Whether it is used.
    pub enabled: bool,
    /// Which tiers.
    pub backend: CacheBackend,
    /// How long an entry lives.
    pub ttl: Duration,
    /// Bytes of an answer that is cached.
    pub max_response_size: u64,
    /// Bytes of a stream that is kept to be cached.
    pub max_stream_buffer_size: u64,
    /// Raised to make all that was kept before unreachable.
    pub key_version: u32,
    /// Whether clients may have answers cached that are not deterministic.
    pub allow_force: bool,
    /// Whether answers are cached that ended at their limit of tokens.
    pub cache_truncated: bool,
    /// How long a gateway waits for the equal call of another one.
    pub other_gateway_wait: Duration,
    /// What L1 is.
    pub l1_type: CacheBackend,
    /// Bytes of a value in L1.
    pub l1_max_value_size: u64,
    /// Bytes of the tier in memory.
    pub l1_max_bytes: u64,
    /// How long a lookup in L1 may take.
    pub l1_lookup_budget: Duration,
    /// Redis.
    pub redis: RedisSettings,
    /// The warm tier.
    pub l2: L2Settings,
    /// Whether an L2 hit goes into L1.
    pub promote_on_hit: bool,
    /// How long it stays there.
    pub l1_promotion_ttl: Duration,
}

/// `response_cache.redis`.
#[derive(Debug, Clone)]
pub struct RedisSettings {
    /// `redis://…`; may hold a password.
    pub url: Option<Secret>,
    /// Connections.
    pub pool_size: usize,
    /// Before every key.
    pub key_prefix: String,
    /// For one connection.
    pub connect_timeout: Duration,
    /// For one command.
    pub command_timeout: Duration,
    /// Older connections are replaced.
    pub connection_max_age: Duration,
    /// Authorities trusted over TLS, instead of the public ones.
    pub ca_file: Option<PathBuf>,
    /// Whether memory stands in while Redis is away.
    pub fallback_to_memory: bool,
}

/// What the warm tier is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum L2Type {
    /// An object store.
    S3,
    /// A directory of this machine.
    Disk,
}

/// `response_cache.l2`.
#[derive(Debug, Clone)]
pub struct L2Settings {
    /// What it is.
    pub kind: L2Type,
    /// The directory, for disk.
    pub directory: Option<String>,
    /// Bytes on the disk.
    pub max_bytes: u64,
    /// Certificates that are trusted, for an S3 endpoint with https.
    pub ca_file: Option<String>,
    /// For one connection.
    pub connect_timeout: Duration,
    /// For one call.
    pub request_timeout: Duration,
    /// How long a lookup may take.
    pub lookup_budget: Duration,
    /// How often what has expired is looked for; none: never.
    pub sweep_interval: Option<Duration>,
    /// The S3 endpoint.
    pub endpoint: Option<String>,
    /// The bucket.
    pub bucket: Option<String>,
    /// Before every key.
    pub key_prefix: String,
    /// The region.
    pub region: String,
    /// Static key, with `secret_key`.
    pub access_key: Option<Secret>,
    /// Static secret.
    pub secret_key: Option<Secret>,
    /// How long an L2 entry lives; none: `ttl`.
    pub ttl_override: Option<Duration>,
}

impl CacheSettings {
    // top to bottom: this is also the order of the reference file
    pub(in crate::settings) fn read(s: &Section<'_>) -> Self {
        let l1_types = [
            ("memory", CacheBackend::Memory),
            ("redis", CacheBackend::Redis),
        ];
        let backends = [l1_types[0], l1_types[1], ("tiered", CacheBackend::Tiered)];
        let enabled = s.flag("enabled", false, "Whether answers are cached.");
        let backend = s.choice(
            "backend",
            &backends,
            "memory",
            "memory, redis, or tiered (l1 before l2).",
        );
        let ttl = s.duration("ttl", "24h", "How long an entry lives.");
        let max_response_size = s.size(
            "max_response_size",
            1 << 20,
            "The largest answer that is cached.",
        );
        let max_stream_buffer_size = s.size(
            "max_stream_buffer_size",
            10 << 20,
            "The most of one stream that is kept to be cached.",
        );
        let key_version = s.int(
            "key_version",
            (1, 0..=u64::from(u32::MAX)),
            "Part of every key: another number makes all that was kept unreachable, for example after the weights behind a model's name have changed.",
        ) as u32;
        let allow_force = s.flag(
            "allow_force",
            true,
            "Whether `x-tidegate-cache: force` has answers cached though temperature is not given as 0.",
        );
        let cache_truncated = s.flag(
            "cache_truncated",
            true,
            "Whether answers are cached that ended at max_tokens (finish_reason length).",
        );
        let other_gateway_wait = Duration::from_millis(s.int(
            "other_gateway_wait_ms",
            (2000, 0..=60_000),
            "With Redis: how long a request waits for the answer to an equal one that another gateway has sent, before it is sent too; 0: not at all.",
        ));
        let l1 = s.section("l1", "The hot tier.");
        let l1_type = l1.choice("type", &l1_types, "memory", "memory or redis.");
        let l1_max_value_size = l1.size("max_value_size", 1 << 20, "Larger values go to L2 only.");
        let l1_max_bytes = l1.size(
            "max_bytes",
            256 << 20,
            "All values in memory, for type memory or where memory stands in for Redis; those not used for longest go first.",
        );
        let l1_lookup_budget = lookup_budget(&l1, 50);
        let redis = RedisSettings::read(&s.section(
            "redis",
            "Redis, for backend redis, l1.type redis and kv_cache_index.backend redis.",
        ));
        let l2 = L2Settings::read(
            &s.section("l2", "The warm tier: VAST Data S3, any S3, or a directory."),
        );
        let tiered = s.section("tiered", "How the tiers work together.");
        CacheSettings {
            enabled,
            backend,
            ttl,
            max_response_size,
            max_stream_buffer_size,
            key_version,
            allow_force,
            cache_truncated,
            other_gateway_wait,
            l1_type,
            l1_max_value_size,
            l1_max_bytes,
            l1_lookup_budget,
            redis,
            l2,
            promote_on_hit: tiered.flag(
                "promote_on_hit",
                true,
                "Whether an L2 hit is put into L1.",
            ),
            l1_promotion_ttl: tiered.duration(
                "l1_promotion_ttl",
                "30m",
                "How long a promoted entry stays in L1.",
            ),
        }
    }

    /// What the hot tier is.
    pub fn l1(&self) -> CacheBackend {
        match self.backend {
            CacheBackend::Tiered => self.l1_type,
            backend => backend,
        }
    }

    pub(in crate::settings) fn check(&self, faults: &mut Vec<Fault>) {
        if !self.enabled {
            return;
        }
        let tiered = self.backend == CacheBackend::Tiered;
        let needs_redis =
            self.backend == CacheBackend::Redis || tiered && self.l1_type == CacheBackend::Redis;
        if needs_redis && self.redis.url.is_none() {
            faults.push(Fault::new(
                "response_cache.redis.url",
                "is required by the chosen backend",
            ));
        }
        let l2 = match self.l2.kind {
            L2Type::S3 => vec![
                ("endpoint", self.l2.endpoint.is_none()),
                ("bucket", self.l2.bucket.is_none()),
            ],
            L2Type::Disk => vec![("directory", self.l2.directory.is_none())],
        };
        for (key, _) in l2.iter().filter(|(_, missing)| tiered && *missing) {
            faults.push(Fault::new(
                format!("response_cache.l2.{key}"),
                "is required by backend tiered",
            ));
        }
        if self.l2.access_key.is_some() != self.l2.secret_key.is_some() {
            faults.push(Fault::new(
                "response_cache.l2",
                "access_key and secret_key must be given together",
            ));
        }
    }
}

impl RedisSettings {
    fn read(s: &Section<'_>) -> Self {
        let url = s.url_or_none(
            "url",
            "redis://[user:password@]host:port[/db], or rediss:// for TLS.",
        );
        if let Some(url) = &url
            && !["redis://", "rediss://"]
                .iter()
                .any(|scheme| url.starts_with(scheme))
        {
            s.fault("url", "must begin with redis:// or rediss://");
        }
        let ms = |key, default, doc| Duration::from_millis(s.int(key, (default, 1..=600_000), doc));
        RedisSettings {
            url: url.map(|url| Secret(url.into())),
            pool_size: s.int("pool_size", (16, 1..=10_000), "Connections.") as usize,
            key_prefix: s.text("key_prefix", "cr:resp:", "Before every key."),
            connect_timeout: ms(
                "connect_timeout_ms",
                3000,
                "For one connection, in milliseconds.",
            ),
            command_timeout: ms(
                "command_timeout_ms",
                1000,
                "For one command, in milliseconds.",
            ),
            connection_max_age: Duration::from_secs(s.int(
                "connection_max_age_seconds",
                (600, 1..=86_400),
                "Older connections are replaced, so that the host's name is looked up anew.",
            )),
            ca_file: s
                .text_or_none(
                    "ca_file",
                    "Certificates (PEM) of the authorities that rediss:// trusts; without it, the public ones.",
                )
                .map(PathBuf::from),
            fallback_to_memory: s.flag(
                "fallback_to_memory",
                true,
                "Whether memory stands in while Redis is away.",
            ),
        }
    }
}

impl L2Settings {
    fn read(s: &Section<'_>) -> Self {
        let types = [("s3", L2Type::S3), ("disk", L2Type::Disk)];
        let kind = s.choice("type", &types, "s3", "s3, or disk for a single machine.");
        let endpoint = s.url_or_none("endpoint", "The S3 endpoint, http:// or https://.");
        if let Some(url) = &endpoint
            && !["http://", "https://"]
                .iter()
                .any(|scheme| url.starts_with(scheme))
        {
            s.fault("endpoint", "must begin with http:// or https://");
        }
        let ms = |key, default, doc| Duration::from_millis(s.int(key, (default, 1..=600_000), doc));
        L2Settings {
            kind,
            endpoint,
            bucket: s.text_or_none("bucket", "The bucket."),
            key_prefix: s.text(
                "key_prefix",
                "response-cache/",
                "Before every object's key.",
            ),
            region: s.text(
                "region",
                "us-east-1",
                "The region that requests are signed for.",
            ),
            access_key: s
                .secret(
                    "access_key",
                    "Static key; without it the environment's credentials are used.",
                )
                .map(Secret),
            secret_key: s.secret("secret_key", "Static secret.").map(Secret),
            ttl_override: s.duration_or(
                "ttl_override",
                None,
                "How long an L2 entry lives; default: ttl.",
            ),
            ca_file: s.text_or_none(
                "ca_file",
                "Certificates (PEM) that are trusted in place of the public authorities, for an https:// endpoint.",
            ),
            connect_timeout: ms("connect_timeout_ms", 3000, "For one connection, in milliseconds."),
            request_timeout: ms("request_timeout_ms", 10_000, "For writing or removing a value, in milliseconds."),
            lookup_budget: lookup_budget(s, 150),
            sweep_interval: match s.pause("sweep_interval", "6h", "How often objects are looked for that have outlived ttl_override, since S3 expires nothing by itself; 0s: never (a lifecycle rule of the bucket does as well).") {
                Duration::ZERO => None,
                interval => Some(interval),
            },
            directory: s.text_or_none("directory", "For type disk: where values are; one gateway has it for itself."),
            max_bytes: s.size("max_bytes", 10 << 30, "For type disk: all values; those not used for longest go first."),
        }
    }
}

/// A request does not wait longer for a tier than this, whatever the tier's other limits are.
fn lookup_budget(s: &Section<'_>, default: u64) -> Duration {
    let doc = "The most that a lookup here adds to a request, in milliseconds; a tier that is slower counts as empty.";
    Duration::from_millis(s.int("lookup_budget_ms", (default, 1..=60_000), doc))
}
