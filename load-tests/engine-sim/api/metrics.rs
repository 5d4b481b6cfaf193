//! `/metrics` under vLLM's names, and `/load`. The names are in this file alone.

use super::App;
use crate::metrics::Histogram;
use actix_web::{HttpResponse, web};
use serde_json::json;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Requests in the server, as vLLM's load tracking counts them.
pub async fn load(app: web::Data<App>) -> HttpResponse {
    let load = app.metrics.running.load(Relaxed) + app.metrics.all_waiting();
    HttpResponse::Ok().json(json!({"server_load": load}))
}

/// All metrics as Prometheus reads them.
pub async fn serve(app: web::Data<App>) -> HttpResponse {
    HttpResponse::Ok()
        .content_type("text/plain; version=0.0.4; charset=utf-8")
        .body(render(&app))
}

fn render(app: &App) -> String {
    let metrics = &app.metrics;
    let mut text = Text {
        out: String::with_capacity(8 << 10),
        labels: format!(
            "engine=\"0\",model_name=\"{}\"",
            escaped(app.config.model())
        ),
    };
    text.value(
        "num_requests_running",
        "gauge",
        "Sequences in the batch.",
        &metrics.running,
    );
    text.value(
        "num_requests_waiting",
        "gauge",
        "Sequences waiting for a place in the batch.",
        &AtomicU64::new(metrics.all_waiting()),
    );
    let usage = metrics.blocks_used.load(Relaxed) as f64 / app.config.num_blocks as f64;
    text.head(
        "kv_cache_usage_perc",
        "gauge",
        "Share of the KV blocks in use, 1 is all.",
    );
    text.line("kv_cache_usage_perc", "", usage);
    text.value(
        "prefix_cache_queries_total",
        "counter",
        "Prompt tokens looked up in the prefix cache.",
        &metrics.prefix_queries,
    );
    text.value(
        "prefix_cache_hits_total",
        "counter",
        "Prompt tokens found in the prefix cache.",
        &metrics.prefix_hits,
    );
    text.value(
        "external_prefix_cache_hits_total",
        "counter",
        "Prompt tokens that came from storage or other engines.",
        &metrics.loaded_tokens,
    );
    text.value(
        "sim_kv_pinned_blocks",
        "gauge",
        "KV blocks that are kept for other engines.",
        &metrics.blocks_pinned,
    );
    text.value(
        "nixl_num_kv_expired_reqs_total",
        "counter",
        "Requests whose KV blocks nobody fetched in time.",
        &metrics.expired_leases,
    );
    text.value(
        "sim_kv_load_failures_total",
        "counter",
        "Failed attempts to get KV blocks from storage or another engine.",
        &metrics.load_failures,
    );
    text.value(
        "sim_kv_save_failures_total",
        "counter",
        "Failed attempts to leave KV blocks for others.",
        &metrics.save_failures,
    );
    text.value(
        "num_preemptions_total",
        "counter",
        "Sequences sent back to the queue for want of blocks.",
        &metrics.preemptions,
    );
    text.value(
        "prompt_tokens_total",
        "counter",
        "Prompt tokens processed.",
        &metrics.prompt_tokens,
    );
    text.value(
        "generation_tokens_total",
        "counter",
        "Tokens generated.",
        &metrics.generation_tokens,
    );
    text.head(
        "request_success_total",
        "counter",
        "Requests that ended, by reason.",
    );
    for (reason, counter) in [
        ("stop", &metrics.finished_stop),
        ("length", &metrics.finished_length),
        ("abort", &metrics.aborted),
    ] {
        text.line(
            "request_success_total",
            &format!(",finished_reason=\"{reason}\""),
            counter.load(Relaxed) as f64,
        );
    }
    text.histogram(
        "time_to_first_token_seconds",
        "From arrival to the first token.",
        &metrics.time_to_first_token,
    );
    text.histogram(
        "e2e_request_latency_seconds",
        "From arrival to the last token.",
        &metrics.request_latency,
    );
    text.head("cache_config_info", "gauge", "The KV cache's settings.");
    let config = &app.config;
    let _ = writeln!(
        text.out,
        "vllm:cache_config_info{{block_size=\"{}\",enable_prefix_caching=\"{}\",engine=\"0\",num_gpu_blocks=\"{}\"}} 1.0",
        config.block_size,
        if config.prefix_caching {
            "True"
        } else {
            "False"
        },
        config.num_blocks
    ); // a String takes every write
    text.out
}

struct Text {
    out: String,
    labels: String,
}

impl Text {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(
            self.out,
            "# HELP vllm:{name} {help}\n# TYPE vllm:{name} {kind}"
        );
    }

    fn line(&mut self, name: &str, more_labels: &str, value: f64) {
        let _ = writeln!(
            self.out,
            "vllm:{name}{{{}{more_labels}}} {value:?}",
            self.labels
        );
    }

    fn value(&mut self, name: &str, kind: &str, help: &str, value: &AtomicU64) {
        self.head(name, kind, help);
        self.line(name, "", value.load(Relaxed) as f64);
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.head(name, "histogram", help);
        let (buckets, count, sum) = histogram.read();
        for (bound, below) in buckets {
            self.line(
                &format!("{name}_bucket"),
                &format!(",le=\"{bound:?}\""),
                below as f64,
            );
        }
        self.line(&format!("{name}_bucket"), ",le=\"+Inf\"", count as f64);
        self.line(&format!("{name}_count"), "", count as f64);
        self.line(&format!("{name}_sum"), "", sum);
    }
}

/// A label's value as the text format wants it.
fn escaped(value: &str) -> String {
    value
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}
