//! `/health`, `/ready` and `/metrics`: for orchestrators and Prometheus, never for clients.

use super::worker;
use crate::gateway::Phase;
use crate::telemetry::export;
use actix_web::{HttpRequest, HttpResponse};
use routing::view::BackendView;
use serde_json::json;

/// The process lives.
pub async fn health() -> HttpResponse {
    HttpResponse::Ok().json(json!({"status": "ok"}))
}

/// At least one backend can take requests, and the process is not ending.
pub async fn ready(request: HttpRequest) -> HttpResponse {
    let worker = worker(&request);
    let snapshot = worker.gateway.directory.load();
    let backends = &snapshot.view.backends;
    // one whose models nobody knows gets no requests
    let has_models =
        |backend: &&BackendView| backend.models.iter().any(|models| !models.is_empty());
    let can_serve = backends.iter().filter(|backend| backend.can_serve());
    let serving = can_serve.filter(has_models).count();
    let draining = worker.gateway.phase.now() != Phase::Serving;
    let body = json!({
        "ready": serving > 0 && !draining,
        "draining": draining,
        "backends": {"serving": serving, "all": backends.len()},
    });
    if serving > 0 && !draining {
        HttpResponse::Ok().json(body)
    } else {
        HttpResponse::ServiceUnavailable().json(body)
    }
}

/// The numbers of docs/metrics.md.
pub async fn metrics(request: HttpRequest) -> HttpResponse {
    let text = export::render(&worker(&request).gateway);
    HttpResponse::Ok()
        .content_type("text/plain; version=0.0.4; charset=utf-8")
        .body(text)
}
