//! `/admin/…`: what the router knows, for its operators. Open to this machine alone, or to those
//! who have the token.

mod backends;
mod cache;
mod explain;
mod kv_index;
mod settings;
mod split;
pub(super) mod status;

use super::error::Refusal;
use super::{only, read, request_id, worker};
use crate::access;
use crate::gateway::Gateway;
use actix_web::web::{self, Payload, ServiceConfig};
use actix_web::{HttpRequest, HttpResponse};
use actors::backend::Secret;
use routing::access::Scope;
use std::net::IpAddr;

/// What proxies add to requests that they pass on.
const PROXIED: [&str; 5] = [
    "forwarded",
    "via",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-real-ip",
];

/// Registers the paths.
pub fn configure(config: &mut ServiceConfig) {
    config.service(read("/admin/kv-index", kv_index_path));
    config.service(read("/admin/split", split_path));
    config.service(read("/admin/decisions", decisions_path));
    config.service(read("/admin/info", info_path));
    // holds no data, so whoever may not ask sees as much of it as whoever may
    for path in ["/admin", "/admin/"] {
        config.service(read(path, status::page));
    }
    config.service(read("/admin/backends", backends_path));
    config.service(read("/admin/config", config_path));
    config.service(only("/admin/reload").route(web::post().to(reload_path)));
    for (word, draining) in [("drain", true), ("undrain", false)] {
        let path = format!("/admin/backends/{{name}}/{word}");
        let set = move |request| drain_path(request, draining);
        config.service(only(&path).route(web::post().to(set)));
    }
    config.service(read("/admin/cache", cache_path).route(web::delete().to(clear_path)));
    config.service(
        only("/admin/cache/key")
            .route(web::get().to(cache_key_path))
            .route(web::post().to(cache_key_path)),
    );
    config.service(only("/admin/explain").route(web::post().to(explain_path)));
}

/// Answers whoever may ask, and tells others why not.
async fn guarded(
    request: HttpRequest,
    answer: impl AsyncFnOnce(&HttpRequest) -> Result<HttpResponse, Refusal>,
) -> HttpResponse {
    let answered = match admit(&request) {
        Ok(()) => answer(&request).await,
        Err(refusal) => Err(refusal),
    };
    answered.unwrap_or_else(|refusal| refusal.response(&request_id(&request)))
}

/// The same of what a look at the gateway answers.
async fn looked_up(request: HttpRequest, show: fn(&Gateway) -> HttpResponse) -> HttpResponse {
    guarded(request, async |of| Ok(show(&worker(of).gateway))).await
}

async fn kv_index_path(request: HttpRequest) -> HttpResponse {
    looked_up(request, kv_index::show).await
}

async fn backends_path(request: HttpRequest) -> HttpResponse {
    looked_up(request, backends::show).await
}

async fn decisions_path(request: HttpRequest) -> HttpResponse {
    looked_up(request, status::decisions).await
}

async fn info_path(request: HttpRequest) -> HttpResponse {
    looked_up(request, status::info).await
}

async fn config_path(request: HttpRequest) -> HttpResponse {
    looked_up(request, settings::show).await
}

async fn cache_path(request: HttpRequest) -> HttpResponse {
    looked_up(request, cache::show).await
}

async fn split_path(request: HttpRequest) -> HttpResponse {
    guarded(request, async |of| {
        Ok(split::show(&worker(of).gateway).await)
    })
    .await
}

async fn reload_path(request: HttpRequest) -> HttpResponse {
    guarded(request, async |of| {
        settings::reload(&worker(of).gateway).await
    })
    .await
}

async fn drain_path(request: HttpRequest, draining: bool) -> HttpResponse {
    guarded(request, async |of| {
        let name = of.match_info().get("name").unwrap_or_default();
        backends::drain(&worker(of).gateway, name, draining).await
    })
    .await
}

async fn clear_path(request: HttpRequest) -> HttpResponse {
    guarded(request, async |of| cache::clear(of).await).await
}

async fn cache_key_path(request: HttpRequest, payload: Payload) -> HttpResponse {
    guarded(request, async |of| cache::key(of, payload).await).await
}

async fn explain_path(request: HttpRequest, payload: Payload) -> HttpResponse {
    guarded(request, async |of| explain::explain(of, payload).await).await
}

fn admit(request: &HttpRequest) -> Result<(), Refusal> {
    let header = |name: &str| request.headers().get(name).map(|value| value.as_bytes());
    let bearer = header("authorization").and_then(|value| value.strip_prefix(b"Bearer "));
    let peer = request.peer_addr().map(|peer| peer.ip());
    // passed on by a proxy on this machine: whoever sent it may be anywhere
    let passed_on = PROXIED
        .iter()
        .any(|name| request.headers().contains_key(*name));
    let peer = peer.filter(|_| !passed_on && !is_of_another_page(request));
    let worker = worker(request);
    let has_key = worker.gateway.keys.load().is_some()
        && matches!(
            access::admit(&worker.gateway, request.headers(), Scope::Admin),
            Ok(Some(_))
        );
    if has_key {
        return Ok(());
    }
    let settings = worker.gateway.settings();
    let token = settings.admin.token.as_ref();
    may_ask(token, bearer.or_else(|| header("x-api-key")), peer)
}

/// Sent by a browser on behalf of a page that is not ours: the browser is on this machine, who made the page may be anywhere.
fn is_of_another_page(request: &HttpRequest) -> bool {
    let header = |name: &str| request.headers().get(name).map(|value| value.as_bytes());
    let Some(origin) = header("origin") else {
        return false;
    };
    let host = header("host").unwrap_or_default();
    !["http://", "https://"]
        .iter()
        .any(|scheme| origin.strip_prefix(scheme.as_bytes()) == Some(host))
}

/// With a token: whoever has it. Without: whoever is on this machine.
fn may_ask(
    token: Option<&Secret>,
    given: Option<&[u8]>,
    peer: Option<IpAddr>,
) -> Result<(), Refusal> {
    match (token, given) {
        (Some(token), Some(given)) if equal_in_constant_time(given, token.0.as_bytes()) => Ok(()),
        (Some(_), _) => Err(Refusal::NoAdminToken),
        (None, _) if peer.is_some_and(|peer| peer.to_canonical().is_loopback()) => Ok(()),
        (None, _) => Err(Refusal::AdminFromAfar),
    }
}

/// Takes as long for any two texts of these lengths.
fn equal_in_constant_time(a: &[u8], b: &[u8]) -> bool {
    let differences = a.iter().zip(b).fold(0u8, |all, (a, b)| all | (a ^ b));
    a.len() == b.len() && std::hint::black_box(differences) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_token_only_this_machine_may_ask_and_with_one_only_who_has_it() {
        let peer = |text: &str| Some(text.parse().unwrap());
        for (address, allowed) in [
            ("127.0.0.1", true),
            ("127.8.9.1", true),
            ("::1", true),
            ("::ffff:127.0.0.1", true),
            ("10.0.0.7", false),
            ("::ffff:10.0.0.7", false),
        ] {
            assert_eq!(
                may_ask(None, None, peer(address)).is_ok(),
                allowed,
                "{address}"
            );
        }
        assert!(may_ask(None, Some(b"x"), None).is_err());
        let token = Secret("secret".into());
        for (given, allowed) in [
            (None, false),
            (Some(&b"secret"[..]), true),
            (Some(b"secreT"), false),
            (Some(b"secret1"), false),
            (Some(b"secre"), false),
            (Some(b""), false),
        ] {
            let found = may_ask(Some(&token), given, peer("127.0.0.1"));
            assert_eq!(found.is_ok(), allowed, "{given:?}");
        }
    }
}
