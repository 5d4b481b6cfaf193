//! `POST /admin/explain`: takes the body of a request and says where it would go and why, with
//! what speaks for and against each backend. Sends nothing to any engine but, where tokens are
//! asked of one, `/tokenize`.

use crate::gateway::Worker;
use crate::http::body::read_all;
use crate::http::error::Refusal;
use crate::http::inference;
use crate::http::routes::ApiRoute;
use crate::http::{request_id, worker};
use crate::kv::{Found, lookup};
use crate::proxy::{self, Call, SplitPlan};
use crate::quotas::Asker;
use actix_web::web::{Payload, Query};
use actix_web::{HttpRequest, HttpResponse};
use actors::router::{Explain, Explained, Route};
use routing::choose::{Plan, Reason, Terms};
use routing::disagg::Step;
use routing::ids::Slot;
use routing::score::Basis;
use serde_json::{Value, json};
use std::collections::HashMap;
use wire::request::BodyFault;

/// Explains; a body that could not be served is refused as it would be there.
pub(super) async fn explain(
    request: &HttpRequest,
    payload: Payload,
) -> Result<HttpResponse, Refusal> {
    let worker = worker(request);
    let Some(body) = read_all(request, payload, &worker.gateway).await? else {
        return Ok(HttpResponse::BadRequest().finish()); // nobody reads this
    };
    let route = route(request.query_string(), &body.bytes)?;
    let asked = (request, None, &Asker::Nobody);
    let (call, _) = inference::call(&worker, route, asked, body, &request_id(request))?;
    let found = match &worker.gateway.kv {
        Some(kv) => lookup::look(&call, &worker, kv).await,
        None => Err("off"),
    };
    let explained = ask(&worker, &call, found.as_ref().ok()).await?;
    let mut told = told(&call, &found, &explained);
    if worker.gateway.split.is_some() {
        told["split"] = split(&worker, &call, found.as_ref().ok()).await;
    }
    Ok(HttpResponse::Ok().json(told))
}

/// `?route=/v1/completions` says which path the body is for; without it, its fields do.
pub(super) fn route(query: &str, body: &[u8]) -> Result<ApiRoute, Refusal> {
    let given = Query::<HashMap<String, String>>::from_query(query).ok();
    if let Some(path) = given.and_then(|query| query.get("route").cloned()) {
        let found = ApiRoute::ALL.into_iter().find(|route| route.path() == path);
        return found.ok_or_else(|| {
            let paths = ApiRoute::ALL.map(ApiRoute::path).join(", ");
            Refusal::Body(BodyFault {
                param: Some("route"),
                message: format!("`{path}` is not one of {paths}"),
            })
        });
    }
    let fields: HashMap<String, &serde_json::value::RawValue> =
        serde_json::from_slice(body).unwrap_or_default();
    Ok(if fields.contains_key("prompt") {
        ApiRoute::Completions
    } else if fields.contains_key("input") {
        ApiRoute::Responses
    } else {
        ApiRoute::Chat
    })
}

async fn ask(worker: &Worker, call: &Call, found: Option<&Found>) -> Result<Explained, Refusal> {
    let router = worker.gateway.router.router().ok_or(Refusal::NoRouter)?;
    let route = Route {
        model: call.model.clone(),
        known: found.map(|found| found.known.clone()),
        prefix: call.prefix,
        session: call.session,
        role: None,
        tried: Vec::new(),
    };
    let explained = router.send(Explain(route)).await;
    explained.map_err(|_| Refusal::NoRouter)
}

/// How it would be split. `plan` is where it would go if it were served whole, by any worker.
async fn split(worker: &Worker, call: &Call, found: Option<&Found>) -> Value {
    match proxy::explain_split(worker, call, found).await {
        SplitPlan::Whole(path) => json!({"path": path.as_str()}),
        SplitPlan::Pair(pairing, names) => {
            let name = |plan: &Plan| names.get(plan.slot.0).map(|name| name.to_string());
            json!({
                "path": pairing.path.as_str(),
                "prefill": pairing.prefill.as_ref().map(name),
                "worker": name(&pairing.worker),
                "uncached_tokens": pairing.uncached,
                "missing_step": pairing.missing.map(Step::as_str),
            })
        }
        SplitPlan::Nobody(step) => {
            json!({"error": format!("no {} worker can take requests now", step.as_str())})
        }
        SplitPlan::Unknown => json!({"error": "the coordinator does not answer"}),
    }
}

fn told(call: &Call, found: &Result<Found, &'static str>, explained: &Explained) -> Value {
    let name = |slot: Slot| explained.names.get(slot.0).map_or("", |name| name);
    let said = &explained.explanation;
    let plan = match &said.plan {
        Ok(plan) => chosen(plan, name(plan.slot)),
        Err(why) => {
            let refusal = Refusal::NoBackend(*why, call.model.to_string());
            json!({"status": refusal.status().as_u16(), "error": refusal.body().error.message})
        }
    };
    let left_out = said.left_out.iter();
    let left_out = left_out.map(|(slot, why)| json!({"backend": name(*slot), "why": why.as_str()}));
    json!({
        "model": &*call.model,
        "prefix_key": call.prefix.map(|key| format!("{:016x}", key.0)),
        "lookup": lookup_result(found),
        "plan": plan,
        "candidates": said.candidates.iter().map(|of| terms(of, name(of.candidate.slot))).collect::<Vec<Value>>(),
        "left_out": left_out.collect::<Vec<Value>>(),
    })
}

fn lookup_result(found: &Result<Found, &'static str>) -> Value {
    let found = match found {
        Ok(found) => found,
        Err(why) => return json!({"result": why}),
    };
    let prompts = found.known.0.iter().map(|prompt| {
        json!({
            "by": basis(prompt.basis),
            "blocks": prompt.blocks,
            "block_size": prompt.block_size,
            "tokens": prompt.tokens,
        })
    });
    json!({"result": "found", "prompts": prompts.collect::<Vec<Value>>()})
}

fn basis(basis: Basis) -> &'static str {
    match basis {
        Basis::Tokens => "tokens",
        Basis::Text => "text",
    }
}

fn chosen(plan: &Plan, backend: &str) -> Value {
    let (route, why) = match plan.reason {
        Reason::Probe => (
            "strategy",
            "its circuit breaker is half open: this request tries it",
        ),
        Reason::KvIndex { .. } => ("kv_index", "best score of overlap, load and health"),
        Reason::Prefix { spilled: false } => ("prefix", "first on the ring for this prefix"),
        Reason::Prefix { spilled: true } => (
            "prefix",
            "the ring's first for this prefix has more than its share",
        ),
        Reason::Session => ("strategy", "the ring's backend for this session"),
        Reason::Strategy => ("strategy", "selection_strategy"),
    };
    json!({"backend": backend, "route": route, "why": why})
}

fn terms(of: &Terms, backend: &str) -> Value {
    let (load, reach) = (&of.candidate.load, &of.reach);
    json!({
        "backend": backend,
        "mode": load.mode.as_str(),
        "overlap": {
            "by": basis(reach.basis),
            "blocks": reach.overlap.blocks,
            "of_blocks": reach.of_blocks,
            "weighted": reach.overlap.weighted,
            "raw": reach.overlap.raw,
            "just_sent": reach.overlap.speculative,
            "rank": reach.memory.and_then(|memory| memory.rank),
        },
        "uncached_tokens": reach.uncached,
        "in_flight": load.in_flight,
        "queued_tokens": load.queued_tokens,
        "idle": of.idle,
        "health": of.health,
        "score": of.score,
        "overloaded": of.overloaded,
    })
}
