//! `/admin/cache`: what the response cache holds and how its tiers are doing; removing entries; and the
//! key of a request, with what keeps it from being cached.

use crate::access;
use crate::cache::wish::wish;
use crate::cache::{AnswerCache, wish::Wish};
use crate::gateway::Gateway;
use crate::http::body::read_all;
use crate::http::error::Refusal;
use crate::http::worker;
use actix_web::web::{Payload, Query};
use actix_web::{HttpRequest, HttpResponse};
use actors::response_cache::stats::TierStats;
use actors::response_cache::{Clear, Outcome, Purged, Scope};
use routing::access::Scope as AccessScope;
use routing::cache_key::{folder, short_digest};
use routing::cache_policy::Why;
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use wire::request::{BodyFault, RequestView};

/// Beyond the tiers' own limit for a purge.
const CLEAR_LIMIT: Duration = Duration::from_secs(150);

/// `GET /admin/cache`.
pub(super) fn show(gateway: &Gateway) -> HttpResponse {
    let Some(cache) = &gateway.cache else {
        return HttpResponse::Ok().json(json!({"enabled": false}));
    };
    let settings = gateway.settings();
    let settings = &settings.response_cache;
    HttpResponse::Ok().json(json!({
        "enabled": true,
        "backend": format!("{:?}", settings.backend).to_lowercase(),
        "ttl_s": settings.ttl.as_secs_f64(),
        "key_version": cache.rules.key_version,
        "tiers": cache.tiers.tiers.iter().map(|of| tier(of)).collect::<Vec<Value>>(),
        "flights": {
            "running": cache.flights.running(),
            "bytes": cache.flights.held(),
            "handovers": cache.handovers.load(Relaxed),
        },
        "promotions": cache.tiers.promotions.load(Relaxed),
        "bypassed": Why::ALL.into_iter().zip(cache.bypassed.all()).map(|(why, n)| (why.as_str().to_owned(), n.into())).collect::<Map<String, Value>>(),
    }))
}

fn tier(of: &TierStats) -> Value {
    let is_counted = matches!(of.name, "memory" | "disk");
    let count = |number: &std::sync::atomic::AtomicU64| is_counted.then(|| number.load(Relaxed));
    let stores = Outcome::STORES.into_iter().zip(&of.stores);
    json!({
        "tier": of.name,
        "up": of.up.load(Relaxed),
        "entries": count(&of.entries),
        "bytes": count(&of.bytes),
        "evicted": {"size": of.crowded_out.load(Relaxed), "expired": of.expired.load(Relaxed)},
        "stores": stores.map(|(outcome, n)| (outcome.as_str().to_owned(), n.load(Relaxed).into())).collect::<Map<String, Value>>(),
    })
}

/// `DELETE /admin/cache`: all, or by `model`, `tenant` or `key`.
pub(super) async fn clear(request: &HttpRequest) -> Result<HttpResponse, Refusal> {
    let worker = worker(request);
    let Some(cache) = worker.gateway.cache.clone() else {
        return Ok(HttpResponse::Ok().json(json!({"enabled": false})));
    };
    let scope = scope(request.query_string())?;
    // first, so that nothing that is being made now is kept behind our back
    cache.flights.purge();
    let address = cache.tiers.address.load();
    let Some(address) = address.as_ref() else {
        return Err(Refusal::NoRouter);
    };
    let cleared = tokio::time::timeout(CLEAR_LIMIT, address.send(Clear(scope))).await;
    let Ok(Ok(cleared)) = cleared else {
        return Err(Refusal::NoRouter);
    };
    let complete = cleared.iter().all(|tier| tier.failure.is_none());
    let tier = |of: &Purged| json!({"tier": of.tier, "removed": of.removed, "failure": of.failure});
    let mut answer = match complete {
        true => HttpResponse::Ok(),
        false => HttpResponse::BadGateway(),
    };
    Ok(answer.json(json!({
        "complete": complete,
        "tiers": cleared.iter().map(tier).collect::<Vec<Value>>(),
    })))
}

fn fault(param: &'static str, message: String) -> Refusal {
    Refusal::Body(BodyFault {
        param: Some(param),
        message,
    })
}

fn scope(query: &str) -> Result<Scope, Refusal> {
    let given = Query::<HashMap<String, String>>::from_query(query);
    let given = given
        .map_err(|_| fault("query", "the query cannot be read".into()))?
        .0;
    if let Some(other) = given
        .keys()
        .find(|key| !["model", "tenant", "key"].contains(&key.as_str()))
    {
        // a misspelt filter must not remove everything
        return Err(fault(
            "query",
            format!("`{other}` is not one of model, tenant, key"),
        ));
    }
    let said = |name: &str| given.get(name).filter(|value| !value.is_empty()).cloned();
    if let Some(empty) = given.iter().find(|(_, value)| value.is_empty()) {
        return Err(fault("query", format!("`{}` is empty", empty.0)));
    }
    Ok(match (said("key"), said("model"), said("tenant")) {
        (Some(key), None, None) if key.starts_with(Scope::ALL_PREFIX) => Scope::Key(key.into()),
        (Some(_), None, None) => {
            let message = "`key` is the `path` that GET /admin/cache/key shows".into();
            return Err(fault("key", message));
        }
        (Some(_), ..) => return Err(fault("key", "stands alone".into())),
        (None, Some(model), None) => Scope::Model(folder(&model).into()),
        (None, None, Some(tenant)) => Scope::Tenant(tenant.into()),
        (None, Some(model), Some(tenant)) => Scope::ModelOfTenant {
            model: folder(&model).into(),
            tenant: tenant.into(),
        },
        (None, None, None) => Scope::All,
    })
}

/// `GET` or `POST /admin/cache/key` with the body of a request: its key, or why it has none.
pub(super) async fn key(request: &HttpRequest, payload: Payload) -> Result<HttpResponse, Refusal> {
    let worker = worker(request);
    let Some(body) = read_all(request, payload, &worker.gateway).await? else {
        return Ok(HttpResponse::BadRequest().finish()); // nobody reads this
    };
    let Some(cache) = &worker.gateway.cache else {
        return Ok(HttpResponse::Ok().json(json!({"enabled": false})));
    };
    let route = super::explain::route(request.query_string(), &body.bytes)?;
    let view = RequestView::parse(&body.bytes).map_err(Refusal::Body)?;
    let asked = view.model().map_err(Refusal::Body)?;
    let settings = worker.gateway.settings();
    let alias = settings.model_aliases.get(&*asked);
    let model: Arc<str> = alias.cloned().unwrap_or_else(|| Arc::from(&*asked));
    // the admin's own token says nothing of the client whose request this is
    let has_token = settings.admin.token.is_some();
    let mut headers = request.headers().clone();
    if has_token {
        headers.remove("authorization");
        headers.remove("x-api-key");
    }
    if let Some(client) = headers.get("x-client-authorization").cloned() {
        headers.insert("authorization".try_into().expect("is a name"), client);
    }
    let client = access::admit(&worker.gateway, &headers, AccessScope::Inference);
    let tenant = access::tenant(client.ok().flatten().as_deref(), &headers);
    let wished = wish(
        &cache.rules,
        route,
        &headers,
        (&body.bytes, &view),
        (&model, tenant.clone()),
    );
    Ok(HttpResponse::Ok().json(explained(cache, wished, (&model, &tenant))))
}

fn explained(
    cache: &AnswerCache,
    wished: Result<Wish, Why>,
    (model, tenant): (&str, &str),
) -> Value {
    let folders = json!({"model": folder(model), "tenant": short_digest(tenant)});
    match wished {
        Err(why) => json!({
            "cacheable": false,
            "why": why.as_str(),
            "because": why.in_words(),
            "model": model,
            "folders": folders,
        }),
        Ok(wish) => {
            let kept = cache
                .tiers
                .memory
                .as_ref()
                .and_then(|used| used.memory.get(&wish.key));
            json!({
                "cacheable": true,
                "key": wish.key.to_string(),
                "path": &*wish.path(),
                "may_be_read": wish.may_read,
                "model": model,
                "folders": folders,
                "in_memory": kept.map(|kept| json!({
                    "bytes": kept.entry.body.len(),
                    "form": format!("{:?}", kept.entry.form).to_lowercase(),
                })),
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scope_is_named_by_model_tenant_or_key_and_nothing_misspelt_removes_all() {
        assert_eq!(scope("").unwrap(), Scope::All);
        assert_eq!(scope("model=m").unwrap(), Scope::Model(folder("m").into()));
        assert_eq!(scope("tenant=ab").unwrap(), Scope::Tenant("ab".into()));
        assert_eq!(
            scope("key=v1/a/b/c").unwrap(),
            Scope::Key("v1/a/b/c".into())
        );
        assert!(matches!(
            scope("model=m&tenant=t"),
            Ok(Scope::ModelOfTenant { .. })
        ));
        for wrong in ["modell=m", "model=", "key=abc", "key=v1/a&model=m"] {
            assert!(scope(wrong).is_err(), "{wrong}");
        }
    }
}
