//! `/v1/models`: what the fleet serves, from what is known already. Asks no backend, so that a
//! dead one costs nothing.

use super::error::Refusal;
use super::{request_id, worker};
use crate::access;
use actix_web::{HttpRequest, HttpResponse};
use routing::access::Scope;
use std::collections::BTreeSet;
use wire::openai::{ModelCard, ModelList};

pub async fn handle(request: HttpRequest) -> HttpResponse {
    let worker = worker(&request);
    let gateway = &worker.gateway;
    let id = request_id(&request);
    let key = match access::admit(gateway, request.headers(), Scope::Models) {
        Ok(key) => key,
        Err(refusal) => return refusal.response(&id),
    };
    let snapshot = gateway.directory.load();
    let served = |model: &str| snapshot.view.pools.contains_key(model);
    let models = snapshot.view.pools.keys().map(|name| name.to_string());
    let settings = gateway.settings();
    let aliases = settings.model_aliases.iter();
    let aliases = aliases
        .filter(|(_, target)| served(target))
        .map(|(alias, _)| alias.to_string());
    let behind = |name: &str| {
        settings
            .model_aliases
            .get(name)
            .map_or_else(|| name.to_owned(), |target| target.to_string())
    };
    let allowed = |name: &String| {
        key.as_ref()
            .is_none_or(|key| key.allows([name, &behind(name)]))
    };
    let names: BTreeSet<String> = models.chain(aliases).filter(allowed).collect();
    let mut response = HttpResponse::Ok();
    response.insert_header(("x-request-id", &*id));
    // the server decodes a path but for its slashes, which names of models have
    let named = request.match_info().get("id");
    let named = named.map(|name| name.replace("%2F", "/").replace("%2f", "/"));
    match named {
        Some(name) if names.contains(&name) => response.json(card(name)),
        Some(name) => Refusal::NoSuchModel(name).response(&id),
        None => response.json(ModelList {
            object: "list".into(),
            data: names.into_iter().map(card).collect(),
        }),
    }
}

fn card(id: String) -> ModelCard {
    ModelCard {
        id,
        object: "model".into(),
        created: 0,
        owned_by: "tidegate".into(),
        max_model_len: None,
    }
}
