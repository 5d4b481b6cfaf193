//! The status page, and what only it asks for: `GET /admin/decisions` and `GET /admin/info`.
//!
//! The page is one file without data: it asks `/admin` for that, as any other client does, and so needs no token itself.

use crate::gateway::{Gateway, Phase};
use crate::telemetry::recent::{DECISIONS_MAX, Decision};
use actix_web::HttpResponse;
use serde_json::{Value, json};
use std::time::{Duration, UNIX_EPOCH};

const PAGE: &str = include_str!("status.html");
/// Stands in the page for a number that each answer has its own of: only what carries it is run or applied.
const NONCE: &str = "NONCE";

/// `GET /admin/`, and `GET /` on the listener of `/admin`.
pub(in crate::http) async fn page() -> HttpResponse {
    let nonce = format!("{:032x}", fastrand::u128(..));
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    HttpResponse::Ok()
        .content_type("text/html; charset=utf-8")
        .insert_header(("content-security-policy", policy))
        .insert_header(("x-content-type-options", "nosniff"))
        .insert_header(("x-frame-options", "DENY"))
        .insert_header(("referrer-policy", "no-referrer"))
        .insert_header(("cache-control", "no-store"))
        .body(PAGE.replace(NONCE, &nonce))
}

/// `GET /admin/info`.
pub(super) fn info(gateway: &Gateway) -> HttpResponse {
    let now = tokio::time::Instant::now().into_std();
    let uptime = now.saturating_duration_since(gateway.recent.started);
    HttpResponse::Ok().json(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "uptime_s": uptime.as_secs(),
        "draining": gateway.phase.now() != Phase::Serving,
        "in_flight": gateway.requests.count(),
    }))
}

/// `GET /admin/decisions`.
pub(super) fn decisions(gateway: &Gateway) -> HttpResponse {
    let all = gateway.recent.all();
    HttpResponse::Ok().json(json!({
        "decisions": all.iter().map(told).collect::<Vec<Value>>(),
        "shown_at_most": DECISIONS_MAX,
    }))
}

fn told(of: &Decision) -> Value {
    let at = of.at.duration_since(UNIX_EPOCH).unwrap_or_default();
    json!({
        "at_ms": at.as_millis() as u64,
        "request_id": &*of.request_id,
        "route": of.route,
        "model": of.model.as_deref(),
        "reason": of.reason,
        "backend": of.backend.as_deref(),
        "prefill_backend": of.prefill_backend.as_deref(),
        "overlap": of.overlap.map(|(blocks, all)| json!({"blocks": blocks, "of": all})),
        "path": of.path,
        "cache": of.cache,
        "status": of.status,
        "outcome": of.outcome,
        "attempts": of.attempts,
        "first_byte_ms": of.first_byte.map(millis),
        "ms": millis(of.took),
    })
}

fn millis(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 10_000.0).round() / 10.0
}
