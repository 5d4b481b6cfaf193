//! `/admin/backends`: how each backend is doing; taking one out of rotation, and back in.

use crate::gateway::Gateway;
use crate::http::error::Refusal;
use actix_web::HttpResponse;
use actors::cluster::SetDraining;
use actors::directory::Snapshot;
use serde_json::{Value, json};
use std::time::Duration;

/// For the cluster to answer.
const ASK_TIMEOUT: Duration = Duration::from_secs(1);

/// `GET /admin/backends`.
pub(super) fn show(gateway: &Gateway) -> HttpResponse {
    let snapshot = gateway.directory.load();
    let all = (0..snapshot.entries.len()).map(|at| told(&snapshot, at));
    HttpResponse::Ok().json(json!({"backends": all.collect::<Vec<Value>>()}))
}

fn told(snapshot: &Snapshot, at: usize) -> Value {
    let (view, backend) = (&snapshot.view.backends[at], &snapshot.entries[at].backend);
    let load = backend.load(tokio::time::Instant::now().into_std());
    let models = view
        .models
        .as_deref()
        .map(|models| models.iter().map(|model| &**model).collect::<Vec<&str>>());
    json!({
        "name": &*view.name,
        "url": backend.spec.url.to_string(),
        "role": view.role.to_string(),
        "weight": view.weight,
        "models": models,
        "health": view.health.as_str(),
        "breaker": view.passage.as_str(),
        "draining": view.draining,
        "resting": load.resting,
        "kv_knowledge": load.mode.as_str(),
        "in_flight": backend.live.in_flight(),
        "queued_tokens": backend.live.queued_tokens(),
        "held_kv_tokens": backend.live.held_tokens(),
        "success": load.success,
        "time_to_first_token_ms": load.ttft_us.map(|us| us as f64 / 1000.0),
    })
}

/// `POST /admin/backends/NAME/drain` and `/undrain`: requests that run go on, and no new ones come.
pub(super) async fn drain(
    gateway: &Gateway,
    name: &str,
    draining: bool,
) -> Result<HttpResponse, Refusal> {
    let snapshot = gateway.directory.load();
    let Some(cluster) = &snapshot.drain else {
        return Err(Refusal::NoRouter);
    };
    let set = SetDraining {
        backend: name.into(),
        draining,
    };
    let asked = tokio::time::timeout(ASK_TIMEOUT, cluster.send(set)).await;
    match asked {
        Ok(Ok(true)) => {}
        Ok(Ok(false)) => return Err(Refusal::NoSuchBackend(name.to_owned())),
        _ => return Err(Refusal::NoRouter),
    }
    let snapshot = gateway.directory.load();
    let mut views = snapshot.view.backends.iter();
    let at = views.position(|view| *view.name == *name);
    Ok(HttpResponse::Ok().json(at.map_or(Value::Null, |at| told(&snapshot, at))))
}
