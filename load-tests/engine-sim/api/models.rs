//! `/v1/models` and `/version`.

use super::App;
use actix_web::{HttpResponse, web};
use serde_json::json;
use wire::openai::{ModelCard, ModelList};

/// The names that this engine answers to.
pub async fn serve(app: web::Data<App>) -> HttpResponse {
    let card = |model: &String| ModelCard {
        id: model.clone(),
        object: "model".into(),
        created: app.started,
        owned_by: "vllm".into(),
        max_model_len: Some(app.config.max_model_len as u64),
    };
    HttpResponse::Ok().json(ModelList {
        object: "list".into(),
        data: app.config.models.iter().map(card).collect(),
    })
}

/// The simulator's own version, so that nobody takes it for an engine.
pub async fn version() -> HttpResponse {
    HttpResponse::Ok().json(json!({"version": concat!("engine-sim ", env!("CARGO_PKG_VERSION"))}))
}
