//! `tracing`.

use crate::settings::reader::Section;
use actors::backend::BackendUrl;

/// `tracing`.
#[derive(Debug, Clone)]
pub struct TracingSettings {
    /// Where spans go; none: nowhere.
    pub otlp_endpoint: Option<BackendUrl>,
    /// Of the traces that begin here.
    pub sample_ratio: f64,
    /// What the router is called there.
    pub service_name: String,
}

impl TracingSettings {
    pub(in crate::settings) fn read(s: &Section<'_>) -> Self {
        let endpoint = s.url_or_none("otlp_endpoint", "An OpenTelemetry collector, such as http://collector:4318; spans are posted to its /v1/traces as JSON. https:// is trusted as upstream.tls says. Without it none are made, and clients' trace headers reach engines as they came.");
        let otlp_endpoint = endpoint.and_then(|text| match BackendUrl::parse(&text) {
            Ok(url) => Some(url),
            Err(fault) => {
                s.fault(
                    "otlp_endpoint",
                    fault.to_string().replace("vllm-1:8000", "collector:4318"),
                );
                None
            }
        });
        TracingSettings {
            otlp_endpoint,
            sample_ratio: s.number(
                "sample_ratio",
                (1.0, 0.0, 1.0),
                "The share of requests that are traced where the client says nothing of it; else the client decides.",
            ),
            service_name: s.text("service_name", "tidegate", "What the router is called in traces."),
        }
    }
}
