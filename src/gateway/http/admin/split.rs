//! `GET /admin/split`: which pairs of workers are at work, and whose hand-offs fail.

use crate::gateway::Gateway;
use actix_web::HttpResponse;
use actors::disagg_coordinator::{LEASES_LISTED_MAX, LeaseInfo, ListLeases};
use serde_json::{Value, json};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// For the coordinator to answer.
const ASK_TIMEOUT: Duration = Duration::from_secs(1);

pub(super) async fn show(gateway: &Gateway) -> HttpResponse {
    let Some(splitting) = gateway.splitting() else {
        return HttpResponse::Ok().json(json!({"enabled": false}));
    };
    let (coordinator, state) = (&splitting.coordinator, &splitting.coordinator.state);
    let address = coordinator.address.load();
    let pairs = match address.as_ref() {
        Some(address) => tokio::time::timeout(ASK_TIMEOUT, address.send(ListLeases))
            .await
            .ok(),
        None => None,
    };
    let pairs = pairs.and_then(Result::ok);
    HttpResponse::Ok().json(json!({
        "enabled": true,
        "alive": pairs.is_some(),
        "groups_suspended": state.suspended.load(Relaxed),
        "in_prefill": state.steps.prefill.load(Relaxed),
        "in_decode": state.steps.decode.load(Relaxed),
        "pairs": pairs.map(|pairs| pairs.iter().map(told).collect::<Vec<Value>>()),
        "pairs_shown_at_most": LEASES_LISTED_MAX,
    }))
}

fn told(lease: &LeaseInfo) -> Value {
    json!({
        "path": lease.path.as_str(),
        "prefill": lease.prefill.as_deref(),
        "worker": &*lease.worker,
        "seconds": (lease.age.as_secs_f64() * 1000.0).round() / 1000.0,
    })
}
