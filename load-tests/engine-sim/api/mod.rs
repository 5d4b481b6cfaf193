//! The HTTP face: vLLM's routes. One file per route; what they share is here.

pub mod chat;
pub mod chat_writer;
pub mod completions;
pub mod connection;
pub mod embeddings;
pub mod error;
pub mod generation;
pub mod kv_events;
pub mod messages;
pub mod metrics;
pub mod models;
pub mod sampling;
pub mod streaming;
pub mod tokenize;

use crate::config::SimConfig;
use crate::engine_client::EngineClient;
use crate::failure::{Fate, Faults};
use crate::kv_events::feed::Feed;
use crate::kv_transfer::{Kv, peer};
use crate::metrics::{Metrics, add};
use crate::tokenizer::Tokenizer;
use actix_web::body::MessageBody;
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::{StatusCode, header};
use actix_web::middleware::{Next, from_fn};
use actix_web::{Error, HttpRequest, HttpResponse, web};
use bytes::Bytes;
use error::ApiError;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{SystemTime, UNIX_EPOCH};

/// A prompt of a million tokens fits; nothing larger is meant.
const REQUEST_BODY_MAX: usize = 64 << 20;
/// Bodies up to this are parsed and tokenized at once (under about 2 ms); longer ones leave the HTTP thread.
const INLINE_BODY_MAX: usize = 4 << 10;

/// What every handler reads.
pub struct App {
    /// What this engine is.
    pub config: Arc<SimConfig>,
    /// The engine.
    pub engine: EngineClient,
    /// How it hands keys and values over; none when it shares nothing.
    pub kv: Option<Arc<Kv>>,
    /// What its cache holds, as it changes.
    pub feed: Arc<Feed>,
    /// Text to tokens.
    pub tokenizer: &'static Tokenizer,
    /// Failures on demand.
    pub faults: Arc<Faults>,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// Unix seconds.
    pub started: u64,
    /// Keeps the answers' ids of several engines apart.
    pub engine_id: u32,
    /// Numbers requests that bring no id.
    pub next_request: AtomicU64,
}

impl App {
    /// Counts a model request, then refuses or holds it if a fault says so.
    async fn admit(&self) -> Result<(), ApiError> {
        add(&self.metrics.requests, 1);
        match self.faults.fate() {
            Fate::Serve => Ok(()),
            Fate::Refuse(status) => Err(ApiError::injected(status)),
            Fate::Hang => std::future::pending().await,
        }
    }

    /// The model's name for the answer.
    fn check_model(&self, model: Option<&str>) -> Result<String, ApiError> {
        match model.filter(|model| !model.is_empty()) {
            Some(model) if self.config.models.iter().any(|served| served == model) => {
                Ok(model.to_owned())
            }
            Some(model) => Err(ApiError::unknown_model(model)),
            None => Ok(self.config.model().to_owned()),
        }
    }

    /// `chatcmpl-` and the client's request id, or a number.
    fn answer_id(&self, kind: &str, request: &HttpRequest) -> String {
        match request_id(request) {
            Some(id) => format!("{kind}-{id}"),
            None => format!(
                "{kind}-{:08x}{:024x}",
                self.engine_id,
                self.next_request.fetch_add(1, Relaxed)
            ),
        }
    }
}

/// What the client calls its request.
fn request_id(request: &HttpRequest) -> Option<&str> {
    let id = request.headers().get("x-request-id")?;
    id.to_str().ok()
}

/// Unix seconds.
pub fn unix_now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs()
}

/// Reads a body and turns it into `T`, on a thread for long work when it is long.
async fn prepare<T: Send + 'static>(
    app: &web::Data<App>,
    payload: web::Payload,
    work: fn(&App, &[u8]) -> Result<T, ApiError>,
) -> Result<T, ApiError> {
    let body: Bytes = match payload.to_bytes_limited(REQUEST_BODY_MAX).await {
        Ok(Ok(body)) => body,
        Ok(Err(fault)) => {
            return Err(ApiError::bad_request(format!(
                "the request body could not be read: {fault}"
            )));
        }
        Err(_) => return Err(ApiError::plain(StatusCode::PAYLOAD_TOO_LARGE)),
    };
    if body.len() <= INLINE_BODY_MAX {
        return work(app, &body);
    }
    let app = app.clone();
    web::block(move || work(&app, &body))
        .await
        .map_err(|_| ApiError::internal("the thread pool is gone"))?
}

/// Parses a request body.
fn parse<'a, T: serde::Deserialize<'a>>(body: &'a [u8]) -> Result<T, ApiError> {
    serde_json::from_slice(body)
        .map_err(|fault| ApiError::bad_request(format!("invalid request body: {fault}")))
}

/// All routes.
pub fn routes(services: &mut web::ServiceConfig) {
    let v1 = web::scope("/v1")
        .wrap(from_fn(check_key))
        .service(only("/chat/completions", web::post().to(chat::serve)))
        .service(only("/completions", web::post().to(completions::serve)))
        .service(only("/embeddings", web::post().to(embeddings::serve)))
        .service(only("/kv_events", web::get().to(kv_events::serve)))
        .service(only("/models", web::get().to(models::serve)))
        .default_service(web::to(not_found));
    services
        .service(v1)
        .service(only("/tokenize", web::post().to(tokenize::tokenize)))
        .service(only("/detokenize", web::post().to(tokenize::detokenize)))
        .service(only("/health", web::get().to(health)))
        .service(only("/ping", web::route().to(health)))
        .service(only("/version", web::get().to(models::version)))
        .service(only("/load", web::get().to(metrics::load)))
        .service(only("/metrics", web::get().to(metrics::serve)))
        .service(only("/query", web::get().to(peer::query)))
        .service(only(peer::TAKE, web::post().to(peer::take)))
        .service(only(peer::GIVE, web::post().to(peer::give)))
        .service(only(
            "/reset_prefix_cache",
            web::post().to(reset_prefix_cache),
        ))
        .default_service(web::to(not_found));
}

/// A path with one method; others are refused in the envelope.
fn only(path: &str, route: actix_web::Route) -> actix_web::Resource {
    web::resource(path)
        .route(route)
        .default_service(web::to(wrong_method))
}

async fn wrong_method() -> Result<HttpResponse, ApiError> {
    Err(ApiError::plain(StatusCode::METHOD_NOT_ALLOWED))
}

async fn health(app: web::Data<App>) -> HttpResponse {
    HttpResponse::build(
        StatusCode::from_u16(app.faults.health()).unwrap_or(StatusCode::SERVICE_UNAVAILABLE),
    )
    .finish()
}

async fn reset_prefix_cache(app: web::Data<App>) -> HttpResponse {
    match app.engine.clear_cache().await {
        true => HttpResponse::Ok().finish(),
        false => HttpResponse::InternalServerError().finish(),
    }
}

async fn not_found() -> Result<HttpResponse, ApiError> {
    Err(ApiError::plain(StatusCode::NOT_FOUND))
}

/// Lets requests under `/v1` in that carry one of the keys; all of them when there are none.
async fn check_key(
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<impl MessageBody>, Error> {
    let keys = request
        .app_data::<web::Data<App>>()
        .map(|app| app.config.clone());
    let given = request
        .headers()
        .get(header::AUTHORIZATION)
        .and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
    let allowed = keys.is_none_or(|config| {
        config.api_keys.is_empty()
            || given.is_some_and(|given| config.api_keys.iter().any(|key| key == given))
    });
    match allowed {
        true => next
            .call(request)
            .await
            .map(ServiceResponse::map_into_left_body),
        false => Ok(request
            .into_response(error::unauthorized())
            .map_into_right_body()),
    }
}
