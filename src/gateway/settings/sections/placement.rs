//! `prefix_routing`, `upstream`, `retry`, `health_checks` and `circuit_breaker`.

use crate::settings::reader::Section;
use std::time::Duration;

/// `prefix_routing`.
#[derive(Debug, Clone)]
pub struct PrefixSettings {
    /// Whether it is used.
    pub enabled: bool,
    /// Bytes of the first message that count.
    pub max_prefix_length: usize,
    /// Slack above a fair share.
    pub load_factor_epsilon: f64,
    /// Ring points per unit of weight.
    pub virtual_nodes: u32,
}

impl PrefixSettings {
    pub(in crate::settings) fn read(s: &Section<'_>) -> Self {
        PrefixSettings {
            enabled: s.flag("enabled", true, "Whether requests with a prompt go by their prefix first."),
            max_prefix_length: s.int("max_prefix_length", (2048, 1..=1 << 20), "Bytes of the first non-system message (or prompt) that count; system prompt and tools always count whole.") as usize,
            load_factor_epsilon: s.number("load_factor_epsilon", (0.20, 0.01, 10.0), "How far above its fair share of running requests a backend may go before its prefixes move on (0.2 = 20 %)."),
            virtual_nodes: s.int("virtual_nodes", (200, 1..=10_000), "Points on the ring per unit of weight: more spread better and cost memory.") as u32,
        }
    }
}

/// `upstream`.
#[derive(Debug, Clone)]
pub struct UpstreamSettings {
    /// For a TCP connection.
    pub connect_timeout: Duration,
    /// To the first byte of a streamed answer.
    pub first_byte_timeout: Duration,
    /// To the first byte of any other answer.
    pub first_byte_timeout_non_streaming: Duration,
    /// Between two chunks.
    pub idle_timeout: Duration,
    /// An idle connection is not used again after this.
    pub pool_idle_timeout: Duration,
    /// A connection of this age is not used again.
    pub connection_max_age: Duration,
    /// Idle connections per backend and worker thread.
    pub max_idle_per_backend: usize,
    /// Whether usage is asked of engines for streams whose client did not ask.
    pub request_stream_usage: bool,
    /// Authorities that are trusted for `https://` backends (PEM); none: the public ones.
    pub ca_file: Option<String>,
}

impl UpstreamSettings {
    pub(in crate::settings) fn read(s: &Section<'_>) -> Self {
        UpstreamSettings {
            connect_timeout: s.duration("connect_timeout", "2s", "For one connection, name resolution and TLS handshake included."),
            first_byte_timeout: s.duration("first_byte_timeout", "60s", "From sending a streamed request to the first byte of its answer; then 504, and no second attempt."),
            first_byte_timeout_non_streaming: s.duration("first_byte_timeout_non_streaming", "600s", "The same for other requests, whose first byte comes when all of the answer is there."),
            idle_timeout: s.duration("idle_timeout", "120s", "The longest silence within an answer."),
            pool_idle_timeout: s.duration("pool_idle_timeout", "4s", "Idle connections are closed after this; keep it below the engines' own limit (uvicorn: 5 s)."),
            connection_max_age: s.duration("connection_max_age", "60s", "Connections are not used again after this, so that a changed DNS name is followed."),
            max_idle_per_backend: s.int("max_idle_per_backend", (64, 0..=100_000), "Idle connections kept per backend and worker thread.") as usize,
            request_stream_usage: s.flag("request_stream_usage", false, "Asks engines for token counts of every stream, for the token metrics; the extra chunk is hidden from clients that did not ask for it."),
            ca_file: s.section("tls", "Backends behind https://, and their event streams behind https:// and wss://.").text_or_none("ca_file", "Certificates (PEM) of the authorities that are trusted in place of the public ones. A changed file is taken over without a restart."),
        }
    }
}

/// `retry`.
#[derive(Debug, Clone)]
pub struct RetrySettings {
    /// Attempts in all.
    pub max_attempts: u32,
    /// Retries as a share of requests.
    pub budget_ratio: f64,
    /// The longest pause before a second attempt.
    pub backoff_max: Duration,
}

impl RetrySettings {
    pub(in crate::settings) fn read(s: &Section<'_>) -> Self {
        RetrySettings {
            max_attempts: s.int(
                "max_attempts",
                (2, 1..=10),
                "Attempts in all; 1 means no retries.",
            ) as u32,
            budget_ratio: s.number(
                "budget_ratio",
                (0.2, 0.0, 1.0),
                "Retries allowed as a share of requests, per worker thread.",
            ),
            backoff_max: s.pause(
                "backoff_max",
                "25ms",
                "A second attempt waits a random time up to this.",
            ),
        }
    }
}

/// `health_checks`.
#[derive(Debug, Clone)]
pub struct HealthCheckSettings {
    /// Whether backends are probed.
    pub enabled: bool,
    /// Between two probes.
    pub interval: Duration,
    /// For one probe.
    pub timeout: Duration,
    /// Failures in a row that take a backend out.
    pub unhealthy_threshold: u32,
    /// Successes in a row that bring it back.
    pub healthy_threshold: u32,
    /// The path that is asked.
    pub path: String,
}

impl HealthCheckSettings {
    pub(in crate::settings) fn read(s: &Section<'_>) -> Self {
        let settings = HealthCheckSettings {
            enabled: s.flag(
                "enabled",
                true,
                "Without probes every backend counts as healthy.",
            ),
            interval: s.duration("interval", "15s", "Between two probes of a backend."),
            timeout: s.duration(
                "timeout",
                "5s",
                "For one probe. A timeout does not count while the backend is sending tokens.",
            ),
            unhealthy_threshold: s.int(
                "unhealthy_threshold",
                (3, 1..=1000),
                "Failed probes in a row that take a backend out.",
            ) as u32,
            healthy_threshold: s.int(
                "healthy_threshold",
                (2, 1..=1000),
                "Good probes in a row that bring it back.",
            ) as u32,
            path: s.text(
                "path",
                "/health",
                "The path that is probed; any 2xx answer is good.",
            ),
        };
        if !settings.path.starts_with('/') {
            s.fault("path", "must begin with /");
        }
        if settings.interval < Duration::from_millis(10) {
            s.fault("interval", "must be at least 10ms");
        }
        settings
    }
}

/// `circuit_breaker`.
#[derive(Debug, Clone)]
pub struct BreakerSettings {
    /// Whether there are breakers.
    pub enabled: bool,
    /// Failures in a row that open one.
    pub failure_threshold: u32,
    /// How long it stays open.
    pub recovery_timeout: Duration,
}

impl BreakerSettings {
    pub(in crate::settings) fn read(s: &Section<'_>) -> Self {
        BreakerSettings {
            enabled: s.flag("enabled", true, "Whether failing backends are taken out."),
            failure_threshold: s.int("failure_threshold", (5, 1..=1000), "Failures in a row that open the breaker. Client errors, clients that leave, and requests for patience (429, 503 with Retry-After or in the engine's own JSON) do not count.") as u32,
            recovery_timeout: s.duration("recovery_timeout", "30s", "How long it stays open before one request is tried."),
        }
    }
}
