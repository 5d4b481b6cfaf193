//! Which web pages may call the API from a browser, and what they may read of its answers. Never `/admin`.

use crate::settings::{ANY_ORIGIN, CorsSettings};
use actix_cors::Cors;
use std::time::Duration;

/// How long a browser may go by what a preflight said; browsers cap it by themselves.
const PREFLIGHT_HOLDS: Duration = Duration::from_secs(600);

/// What scripts may read of an answer, beside what browsers show them anyway.
const EXPOSED: [&str; 15] = [
    "age",
    "retry-after",
    "x-cache",
    "x-cache-tier",
    "x-ratelimit-limit-concurrency",
    "x-ratelimit-limit-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-concurrency",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-concurrency",
    "x-ratelimit-reset-requests",
    "x-ratelimit-reset-tokens",
    "x-request-id",
    "www-authenticate",
];
/// Those of our own.
const EXPOSED_OWN: [&str; 7] = [
    "x-tidegate-backend",
    "x-tidegate-fallback-from",
    "x-tidegate-model",
    "x-tidegate-overlap",
    "x-tidegate-path",
    "x-tidegate-prefill-backend",
    "x-tidegate-route",
];

/// For one resource; none while no page may call.
///
/// Any request header is allowed: OpenAI's own client sends a dozen that name its platform, and none of them gives a page more
/// than its credentials do, which a browser never adds by itself.
pub fn policy(settings: &CorsSettings) -> Option<Cors> {
    let origins = &settings.allowed_origins;
    if origins.is_empty() {
        return None;
    }
    let mut cors = Cors::default()
        .allowed_methods(["GET", "HEAD", "POST"])
        .allow_any_header()
        .expose_headers(EXPOSED.into_iter().chain(EXPOSED_OWN))
        .max_age(PREFLIGHT_HOLDS.as_secs() as usize);
    if origins.iter().any(|origin| &**origin == ANY_ORIGIN) {
        return Some(cors.allow_any_origin().send_wildcard());
    }
    for origin in origins {
        cors = cors.allowed_origin(origin);
    }
    Some(cors)
}
