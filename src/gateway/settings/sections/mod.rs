//! The sections of the settings: what each key means, its default, and its limits.

mod cache;
mod cors;
mod disagg;
mod keys;
mod kv_index;
mod placement;
mod quotas;
mod server;
mod tls;
mod tracing;

pub use cache::{CacheBackend, CacheSettings, L2Settings, L2Type, RedisSettings};
pub use cors::{ANY_ORIGIN, CorsSettings};
pub use disagg::{ConnectorKind, DisaggSettings, ExternalStorage, KvPeerSettings};
pub use keys::{ApiKeySettings, check_unique};
pub use kv_index::{EventSource, KvIndexSettings, ScoringSettings, Tokenizer};
pub use placement::{
    BreakerSettings, HealthCheckSettings, PrefixSettings, RetrySettings, UpstreamSettings,
};
pub use quotas::QuotaSettings;
pub use server::{
    AdminSettings, DrainSettings, HostPort, LogFormat, LoggingSettings, MetricSettings,
    ReloadSettings, ServerSettings,
};
pub use tls::{BackendTls, CertificateFiles};
pub use tracing::TracingSettings;
