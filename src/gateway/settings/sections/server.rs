//! `server`, `drain` and `logging`.

use super::cors::CorsSettings;
use super::tls::CertificateFiles;
use crate::settings::reader::Section;
use actors::backend::Secret;
use std::time::Duration;
use tracing_subscriber::EnvFilter;

/// `server`.
#[derive(Debug, Clone)]
pub struct ServerSettings {
    /// Address to bind.
    pub host: String,
    /// Port to bind; 0 lets the system choose.
    pub port: u16,
    /// HTTP worker threads.
    pub workers: usize,
    /// Bytes of one request body.
    pub max_request_body: usize,
    /// For reading one request body.
    pub request_body_timeout: Duration,
    /// Bytes of all request bodies held at one time.
    pub max_buffered_request_bytes: usize,
    /// Client connections per worker.
    pub max_connections: usize,
    /// Between two requests on one client connection.
    pub keep_alive: Duration,
    /// How long a client may read nothing of what was sent to it.
    pub client_write_timeout: Duration,
    /// Web pages that may call from a browser.
    pub cors: CorsSettings,
    /// With them it speaks TLS.
    pub tls: Option<CertificateFiles>,
}

impl ServerSettings {
    pub(in crate::settings) fn read(s: &Section<'_>) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let workers = s.int(
            "workers",
            (0, 0..=1024),
            "HTTP worker threads; 0 means one per core.",
        ) as usize;
        ServerSettings {
            host: s.text("host", "0.0.0.0", "Address to listen on."),
            port: s.int("port", (8080, 0..=65535), "TCP port to listen on.") as u16,
            workers: if workers == 0 { cores } else { workers },
            max_request_body: s.size("max_request_body", 32 << 20, "The largest request body; a larger one is refused with 413.") as usize,
            request_body_timeout: s.duration("request_body_timeout", "30s", "How long a client may take to send its body; then 408."),
            max_buffered_request_bytes: s.size("max_buffered_request_bytes", 1 << 30, "All request bodies held at one time; beyond it new ones are refused with 503.") as usize,
            max_connections: s.int("max_connections", (25_000, 1..=u64::MAX), "Client connections per worker thread.") as usize,
            keep_alive: s.duration("keep_alive", "75s", "How long an idle client connection is kept."),
            client_write_timeout: s.duration("client_write_timeout", "60s", "A client that reads nothing of what was sent to it for this long is dropped, and its backend slot freed (Linux)."),
            cors: CorsSettings::read(&s.section("cors", "Web pages that may call the API from a browser. Nothing of this holds for /admin.")),
            tls: CertificateFiles::read(&s.section("tls", "Clients speak TLS (https) when both files are given; HTTP/1.1 within.")),
        }
    }
}

/// An address as settings name it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostPort {
    /// A name, or an address; IPv6 without brackets.
    pub host: String,
    /// 0 lets the system choose.
    pub port: u16,
}

impl HostPort {
    fn parse(text: &str) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        let bare = host.strip_prefix('[').map(|rest| rest.strip_suffix(']'));
        let host = match bare {
            Some(inner) => inner?,
            None if host.contains(':') => return None, // IPv6 stands in brackets
            None => host,
        };
        let is_host = |c: char| !c.is_whitespace() && !"/[]@".contains(c);
        let is_given = !host.is_empty() && host.chars().all(is_host);
        let port = port.parse().ok().filter(|_| is_given)?;
        Some(HostPort {
            host: host.into(),
            port,
        })
    }
}

/// `admin`.
#[derive(Debug, Clone)]
pub struct AdminSettings {
    /// Who has it may ask; none: who is on this machine.
    pub token: Option<Secret>,
    /// A listener of its own; none: that of the API.
    pub listen: Option<HostPort>,
    /// With them that listener speaks TLS.
    pub tls: Option<CertificateFiles>,
}

impl AdminSettings {
    pub(in crate::settings) fn read(s: &Section<'_>) -> Self {
        let doc = "Clients send it as `Authorization: Bearer`. Without it /admin answers only to clients on this machine; set it when another program on this machine, such as a proxy, passes on requests of others.";
        let token = s.secret("token", doc).map(Secret);
        let listen = s.text_or_none("listen", "A listener of its own for /admin, as host:port, such as 127.0.0.1:9091. /health, /ready and /metrics answer there too, and /admin no longer where the API is.");
        let parsed = listen.as_deref().map(HostPort::parse);
        if parsed == Some(None) {
            s.fault("listen", "must be host:port, for example 127.0.0.1:9091");
        }
        let tls = CertificateFiles::read(&s.section("tls", "The listener of /admin speaks TLS when both files are given. Without a listener of its own, server.tls counts."));
        if tls.is_some() && listen.is_none() {
            s.fault("tls", "needs admin.listen: without it /admin is on the listener of the API, which has server.tls");
        }
        AdminSettings {
            tls,
            token,
            listen: parsed.flatten(),
        }
    }
}

/// Up to the minutes that a long answer takes.
const LATENCY_BUCKETS: [f64; 19] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    120.0, 300.0, 600.0, 1800.0,
];

/// `metrics`.
#[derive(Debug, Clone)]
pub struct MetricSettings {
    /// In seconds.
    pub latency_buckets: Vec<f64>,
}

impl MetricSettings {
    pub(in crate::settings) fn read(s: &Section<'_>) -> Self {
        MetricSettings {
            latency_buckets: s.growing("latency_buckets", &LATENCY_BUCKETS, "The upper bounds, in seconds, in which durations of requests, times to first token, of legs and of waits are counted."),
        }
    }
}

/// `reload`.
#[derive(Debug, Clone)]
pub struct ReloadSettings {
    /// Whether changes of the files are taken in by themselves.
    pub watch: bool,
}

impl ReloadSettings {
    pub(in crate::settings) fn read(s: &Section<'_>) -> Self {
        ReloadSettings {
            watch: s.flag("watch", true, "Whether changes of the settings files, and of api_keys.file, are taken in by themselves, within a few seconds."),
        }
    }
}

/// `drain`.
#[derive(Debug, Clone)]
pub struct DrainSettings {
    /// Between `/ready` turning 503 and new requests being refused.
    pub delay: Duration,
    /// For requests that are still running.
    pub timeout: Duration,
}

impl DrainSettings {
    pub(in crate::settings) fn read(s: &Section<'_>) -> Self {
        DrainSettings {
            delay: s.pause("delay", "0s", "How long /ready answers 503 while requests are still accepted, so that load balancers can look away. Set it to two probe intervals of your balancer."),
            timeout: s.pause("timeout", "30s", "How long running requests may go on; streams still open then end with an error event."),
        }
    }
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// For machines.
    Json,
}

/// `logging`.
#[derive(Debug, Clone)]
pub struct LoggingSettings {
    /// A `tracing` filter.
    pub level: String,
    /// How lines look.
    pub format: LogFormat,
    /// One line per request.
    pub access: bool,
}

impl LoggingSettings {
    pub(in crate::settings) fn read(s: &Section<'_>) -> Self {
        let settings = LoggingSettings {
            level: s.text("level", "info", "error, warn, info, debug or trace; also per module, for example \"info,actors=debug\"."),
            format: s.choice("format", &[("text", LogFormat::Text), ("json", LogFormat::Json)], "text", "text or json."),
            access: s.flag("access", true, "One line per request."),
        };
        if let Err(error) = EnvFilter::try_new(&settings.level) {
            s.fault("level", error.to_string());
        }
        settings
    }
}
