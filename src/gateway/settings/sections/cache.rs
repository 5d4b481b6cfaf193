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
    /// What L1 is.
    pub l1_type: CacheBackend,
    /// Bytes of a value in L1.
    pub l1_max_value_size: u64,
    /// Redis.
    pub redis: RedisSettings,
    /// The object store.
    pub l2: ObjectStoreSettings,
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

/// `response_cache.l2`.
#[derive(Debug, Clone)]
pub struct ObjectStoreSettings {
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
        let l1 = s.section("l1", "The hot tier.");
        let l1_type = l1.choice("type", &l1_types, "memory", "memory or redis.");
        let l1_max_value_size = l1.size("max_value_size", 1 << 20, "Larger values go to L2 only.");
        let redis = RedisSettings::read(&s.section(
            "redis",
            "Redis, for backend redis, l1.type redis and kv_cache_index.backend redis.",
        ));
        let l2 =
            ObjectStoreSettings::read(&s.section("l2", "The warm tier: VAST Data S3, or any S3."));
        let tiered = s.section("tiered", "How the tiers work together.");
        CacheSettings {
            enabled,
            backend,
            ttl,
            max_response_size,
            max_stream_buffer_size,
            l1_type,
            l1_max_value_size,
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
        let l2 = [
            ("endpoint", self.l2.endpoint.is_none()),
            ("bucket", self.l2.bucket.is_none()),
        ];
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

impl ObjectStoreSettings {
    fn read(s: &Section<'_>) -> Self {
        s.choice("type", &[("s3", ())], "s3", "s3.");
        let endpoint = s.url_or_none("endpoint", "The S3 endpoint, http:// or https://.");
        if let Some(url) = &endpoint
            && !["http://", "https://"]
                .iter()
                .any(|scheme| url.starts_with(scheme))
        {
            s.fault("endpoint", "must begin with http:// or https://");
        }
        ObjectStoreSettings {
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
        }
    }
}
