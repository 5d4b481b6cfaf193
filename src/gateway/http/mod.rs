//! What clients meet: paths, errors, reading bodies.

mod admin;
mod body;
mod cors;
pub mod error;
mod fallback;
mod inference;
mod models;
mod probes;
pub mod routes;

use crate::gateway::Worker;
use crate::settings::CorsSettings;
use actix_web::web::{self, ServiceConfig};
use actix_web::{FromRequest, Handler, HttpRequest, HttpResponse, Resource};
use error::Refusal;
pub use inference::refuse;
use routes::ApiRoute;
use std::rc::Rc;

/// Registers every path of the API on one worker thread, with `/admin` unless that has a listener of its own. Nothing else
/// is answered or forwarded.
pub fn configure(config: &mut ServiceConfig, worker: &Rc<Worker>) {
    api(config, &worker.gateway.settings().server.cors);
    if worker.gateway.settings().admin.listen.is_none() {
        admin::configure(config);
    }
    everywhere(config, worker);
}

/// Registers every path of the listener of `/admin`.
pub fn configure_admin(config: &mut ServiceConfig, worker: &Rc<Worker>) {
    admin::configure(config);
    config.service(read("/", admin::status::page));
    everywhere(config, worker);
}

fn everywhere(config: &mut ServiceConfig, worker: &Rc<Worker>) {
    config.app_data(worker.clone());
    config.service(read("/health", probes::health));
    config.service(read("/ready", probes::ready));
    config.service(read("/metrics", probes::metrics));
    config.default_service(web::to(unknown_path));
}

fn api(config: &mut ServiceConfig, cors: &CorsSettings) {
    let mut register = |resource: Resource| {
        match cors::policy(cors) {
            Some(cors) => config.service(resource.wrap(cors)),
            None => config.service(resource),
        };
    };
    for route in ApiRoute::ALL {
        let handler = move |request, payload| inference::handle(route, request, payload);
        register(only(route.path()).route(web::post().to(handler)));
    }
    for path in ["/v1/models", "/v1/models/{id:.*}"] {
        register(read(path, models::handle));
    }
}

fn only(path: &str) -> Resource {
    web::resource(path.to_owned()).default_service(web::to(wrong_method))
}

/// Answers GET, and HEAD, which some load balancers probe with.
fn read<F, Args>(path: &str, handler: F) -> Resource
where
    F: Handler<Args, Output = HttpResponse> + Copy,
    Args: FromRequest + 'static,
{
    only(path)
        .route(web::get().to(handler))
        .route(web::head().to(handler))
}

async fn unknown_path(request: HttpRequest) -> HttpResponse {
    Refusal::UnknownPath(request.path().to_owned()).response(&request_id(&request))
}

async fn wrong_method(request: HttpRequest) -> HttpResponse {
    Refusal::WrongMethod(request.method().to_string()).response(&request_id(&request))
}

fn worker(request: &HttpRequest) -> Rc<Worker> {
    let worker = request.app_data::<Rc<Worker>>();
    worker.expect("configure() put it there").clone()
}

/// Longer ids are the client's, but not useful to anybody.
const REQUEST_ID_LENGTH_MAX: usize = 128;

/// What engines with P2P NCCL read addresses behind in a request id: no client's to say.
const ADDRESSES: [&str; 2] = ["___prefill_addr_", "___decode_addr_"];

/// The client's `x-request-id` when it is short visible ASCII and names no engine, else a fresh one.
fn request_id(request: &HttpRequest) -> std::sync::Arc<str> {
    let given = request.headers().get("x-request-id");
    let given = given.and_then(|value| value.to_str().ok()).filter(|id| {
        (1..=REQUEST_ID_LENGTH_MAX).contains(&id.len())
            && id.bytes().all(|b| b.is_ascii_graphic())
            && !ADDRESSES.iter().any(|mark| id.contains(mark))
    });
    match given {
        Some(id) => id.into(),
        None => format!("req-{:032x}", fastrand::u128(..)).into(),
    }
}
