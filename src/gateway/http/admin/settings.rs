//! `GET /admin/config`: what is in effect, secrets masked. `POST /admin/reload`: reads the settings again.

use crate::gateway::Gateway;
use crate::http::error::Refusal;
use crate::reload::NotReloaded;
use crate::settings::difference::by_name;
use actix_web::HttpResponse;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// `GET /admin/config`.
pub(super) fn show(gateway: &Gateway) -> HttpResponse {
    let known = by_name(&gateway.reload.effective());
    let settings: Map<String, Value> = known
        .into_iter()
        .map(|(path, (value, _))| (path, value))
        .collect();
    HttpResponse::Ok().json(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "settings": settings,
    }))
}

/// `POST /admin/reload`.
pub(super) async fn reload(gateway: &Gateway) -> Result<HttpResponse, Refusal> {
    let outcome = gateway.reload.reload().await.map_err(|why| match why {
        NotReloaded::Faulty(faults) => Refusal::FaultySettings(faults),
        NotReloaded::Interrupted => Refusal::NoRouter,
        NotReloaded::Unable => Refusal::NoReload,
    })?;
    let names = |of: &[Arc<str>]| {
        of.iter()
            .map(|name| Value::from(&**name))
            .collect::<Vec<Value>>()
    };
    Ok(HttpResponse::Ok().json(json!({
        "result": if outcome.is_change() { "applied" } else { "unchanged" },
        "applied": outcome.applied,
        "needs_restart": outcome.needs_restart,
        "key_file_changed": outcome.key_file_changed,
        "backends": {
            "added": names(&outcome.backends.added),
            "changed": names(&outcome.backends.changed),
            "removed": names(&outcome.backends.removed),
        },
    })))
}
