//! A request that has ended, as a span and as a line of `/admin/decisions`.

use super::{CacheNote, Report};
use crate::telemetry::recent::Decision;
use routing::disagg::Path;
use std::time::{Duration, SystemTime};

impl Report {
    /// As a span, where it is traced.
    pub(super) fn trace_request(&self, took: Duration) {
        let Some(trace) = &self.trace else {
            return;
        };
        let mut span = trace.request(took);
        span.word("tidegate.route", self.route.as_str());
        span.word("tidegate.reason", self.reason());
        span.word("tidegate.outcome", self.outcome());
        span.text("tidegate.request_id", &self.request_id);
        if let Some(model) = &self.model {
            span.text("gen_ai.request.model", model);
        }
        if let Some(backend) = &self.backend {
            span.text("tidegate.backend", backend);
        }
        if let Some(cache) = self.cache {
            span.word("tidegate.cache", cache.as_str());
        }
        if let Some(path) = self.path {
            span.word("tidegate.path", path.as_str());
        }
        if let Some(status) = self.status {
            span.number("http.response.status_code", status.into());
            if status >= 500 {
                span.fail();
            }
        }
    }

    /// For operators who look.
    pub(super) fn remember(&self, took: Duration) {
        self.worker.gateway.recent.push(Decision {
            at: SystemTime::now(),
            request_id: self.request_id.clone(),
            route: self.route.as_str(),
            model: self.model.clone(),
            reason: self.reason(),
            backend: self.backend.clone(),
            prefill_backend: self.prefill_backend.clone(),
            overlap: self.overlap,
            path: self.path.map(Path::as_str),
            cache: self.cache.map_or("off", CacheNote::as_str),
            status: self.status,
            outcome: self.outcome(),
            attempts: self.attempts,
            first_byte: self.ttft,
            took,
        });
    }
}
