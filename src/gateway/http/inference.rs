//! The forwarded paths: read the body, see what it asks for, hand it to the proxy.

use super::body::{ReadBody, read_all};
use super::error::Refusal;
use super::fallback;
use super::routes::ApiRoute;
use super::{request_id, worker};
use crate::access;
use crate::cache::serve;
use crate::cache::wish::{self, Wish};
use crate::gateway::{Phase, Worker};
use crate::proxy::{self, Call, headers};
use crate::quotas::{self, Asker, Grant, Quotas};
use crate::settings::Settings;
use crate::telemetry::report::{CacheNote, Report};
use actix_web::http::header::{HeaderName, HeaderValue};
use actix_web::web::Payload;
use actix_web::{HttpRequest, HttpResponse};
use bytes::Bytes;
use routing::access::{ApiKey, Scope};
use routing::cache_policy::Why;
use routing::ids::SessionKey;
use routing::prefix_key::{PrefixParts, prefix_key, session_key};
use std::rc::Rc;
use std::sync::Arc;
use wire::request::RequestView;
use wire::splice::{self, AnswerEdit, Change};

/// Serves one request of a forwarded path.
pub async fn handle(route: ApiRoute, request: HttpRequest, payload: Payload) -> HttpResponse {
    let worker = worker(&request);
    let id = request_id(&request);
    let mut report = Report::new(worker.clone(), route, id);
    report.follow(request.headers());
    if worker.gateway.phase.now() >= Phase::Draining {
        return refuse(Refusal::Draining, report);
    }
    // before the body is read: who may not ask need not be heard
    let key = match access::admit(&worker.gateway, request.headers(), Scope::Inference) {
        Ok(key) => key,
        Err(refusal) => return refuse(refusal, report),
    };
    report.key = key.as_ref().map(|key| key.name.clone());
    let settings = worker.gateway.settings.load();
    let asker = Asker::of(&request, key.as_ref(), &settings);
    let mut grant = match worker.gateway.quotas.knock(&settings, &asker) {
        Ok(grant) => grant,
        Err(refusal) => return refuse(refusal, report),
    };
    let body = match read_all(&request, payload, &worker.gateway).await {
        Ok(Some(body)) => body,
        Err(refusal) => return refuse(refusal, report),
        // the client is gone: nobody reads this, and the report says so
        Ok(None) => return HttpResponse::BadRequest().finish(),
    };
    let asked = (&request, key.as_deref(), &asker);
    let (mut call, wish) = match call(&worker, route, asked, body, &report.request_id) {
        Ok(asked) => asked,
        Err(refusal) => return refuse(refusal, report),
    };
    report.model(&call.model);
    call.belongs_to(report.trace());
    report.fallback_from.clone_from(&call.fallback_from);
    if let Err(refusal) = admit((&worker, &settings), &asker, &call, &mut grant).await {
        return refuse(refusal, report);
    }
    drop(settings); // there is no fast way to many that are held at a time
    report.grant = grant;
    match (wish, worker.gateway.cache.clone()) {
        // boxed, as is the split way: what few requests go through makes no room in the future of all
        (Some(Ok(wish)), Some(cache)) => {
            Box::pin(serve::serve((call, wish), worker, cache, report)).await
        }
        (Some(Err(why)), Some(cache)) => {
            cache.bypass(why);
            report.cache = Some(CacheNote::Bypass);
            proxy::serve(call, worker, report).await
        }
        _ => proxy::serve(call, worker, report).await,
    }
}

/// Waits until the request may run. One that still waits when the process must end is told so.
async fn admit(
    (worker, settings): (&Worker, &Settings),
    asker: &Asker,
    call: &Call,
    grant: &mut Grant,
) -> Result<(), Refusal> {
    let (gateway, cutting) = (&worker.gateway, worker.phase.cutting());
    let of = (&call.model, call.tokens_estimated);
    tokio::select! {
        biased;
        admitted = gateway.quotas.admit((gateway, settings), asker, of, grant) => admitted,
        () = cutting => Err(Refusal::Draining),
    }
}

/// Answers in place of a backend.
pub fn refuse(refusal: Refusal, mut report: Report) -> HttpResponse {
    let (by, kind) = refusal.blame();
    report.error(by, kind);
    report.status(refusal.status().as_u16());
    report.complete();
    let mut response = refusal.response(&report.request_id);
    let headers = response.headers_mut();
    report.tell_headers(|name, value| {
        // nothing was chosen, so nothing is said of it
        let chosen = report.backend.is_some() || !name.starts_with("x-tidegate-");
        if let (Ok(value), true) = (HeaderValue::from_str(value), chosen) {
            headers.insert(HeaderName::from_static(name), value);
        }
    });
    response
}

/// What a request wants of the cache, or why it passes it by; none when there is no cache.
pub type Wished = Option<Result<Wish, Why>>;

/// What is to be asked of a backend, unless the cache has it.
pub(super) fn call(
    worker: &Worker,
    route: ApiRoute,
    (request, key, asker): (&HttpRequest, Option<&ApiKey>, &Asker),
    body: ReadBody,
    request_id: &Arc<str>,
) -> Result<(Call, Wished), Refusal> {
    let settings = worker.gateway.settings.load();
    let view = RequestView::parse(&body.bytes).map_err(Refusal::Body)?;
    let asked = view.model().map_err(Refusal::Body)?;
    let alias = settings.model_aliases.get(&*asked);
    let wanted: Arc<str> = alias.cloned().unwrap_or_else(|| Arc::from(&*asked));
    if key.is_some_and(|key| !key.allows([&asked, &wanted])) {
        return Err(Refusal::ModelNotAllowed(asked.into_owned()));
    }
    let wish_for = |model: &Arc<str>| {
        worker.gateway.cache.as_ref().map(|cache| {
            let tenant = access::tenant(key, request.headers());
            let of = (&*body.bytes, &view);
            wish::wish(&cache.rules, route, request.headers(), of, (model, tenant))
        })
    };
    let is_at_hand = |wish: Wished| match (wish, &worker.gateway.cache) {
        (Some(Ok(wish)), Some(cache)) => cache.has_in_memory(&wish),
        _ => false,
    };
    let other = fallback::instead_of(&wanted, &worker.gateway, &settings, key)
        .filter(|_| !is_at_hand(wish_for(&wanted)));
    let fallback_from = other.is_some().then(|| wanted.clone());
    let model = other.unwrap_or(wanted);
    let opening = view.opening(route.prompt_field());
    let parts = PrefixParts {
        model: &model,
        system: opening.system,
        tools: opening.tools,
        opening: opening.first,
    };
    let prefix = settings
        .prefix_routing
        .enabled
        .then(|| prefix_key(parts, settings.prefix_routing.max_prefix_length))
        .flatten();
    let wants_stream = view.wants_stream();
    let may_ask_usage = wants_stream && route.is_openai_stream() && !view.wants_usage();
    let ask_usage = may_ask_usage
        && (settings.upstream.request_stream_usage
            || Quotas::counts_tokens(&settings, asker, &model));
    let edit = AnswerEdit {
        // what another model made carries that model's name
        model: alias
            .filter(|_| fallback_from.is_none())
            .map(|_| serde_json::Value::from(&*asked).to_string()),
        strip_usage_chunk: ask_usage,
        cached: None,
    };
    let renamed = (*model != *asked).then_some(&*model);
    let rewritten = rewrite(&body.bytes, &view, renamed, ask_usage);
    let session = session(request, &settings.session_header, &view);
    let wish = wish_for(&model);
    let asks_usage = ask_usage || view.wants_usage();
    let call = Call {
        trace: None,
        may_split: route.is_openai_stream() && view.can_be_split(),
        request_id: request_id.clone(),
        route,
        asks_usage,
        wants_stream,
        headers: Rc::new(headers::to_backend(
            request.headers(),
            request_id,
            key.is_some(),
        )),
        body: rewritten.unwrap_or(body.bytes.clone()),
        tokens_estimated: quotas::estimate(route, &view, body.bytes.len()),
        _held: body.held,
        model,
        fallback_from,
        prefix,
        session,
        edit,
    };
    Ok((call, wish))
}

fn session(request: &HttpRequest, header: &str, view: &RequestView<'_>) -> Option<SessionKey> {
    let header = request.headers().get(header).map(|value| value.as_bytes());
    match header.filter(|value| !value.is_empty()) {
        Some(value) => session_key(value),
        None => session_key(view.user().as_bytes()),
    }
}

/// The body for the backend, when it differs from the client's.
fn rewrite(
    body: &Bytes,
    view: &RequestView<'_>,
    model: Option<&str>,
    ask_usage: bool,
) -> Option<Bytes> {
    let mut changed: Option<Bytes> = None;
    if let (Some(model), Some(raw)) = (model, view.raw_model()) {
        let name = serde_json::Value::from(model).to_string();
        changed = Some(splice::replace(body, raw.as_bytes(), name.as_bytes()));
    }
    if ask_usage {
        let present = changed.as_ref().unwrap_or(body);
        changed = Some(splice::ask_for_usage(present));
    }
    // engine-internal; a client could make an engine read another's blocks
    let gone: Vec<(&str, Change<'_>)> = view
        .hand_off_members()
        .map(|name| (name, Change::Remove))
        .collect();
    if !gone.is_empty() {
        let present = changed.as_ref().unwrap_or(body);
        changed = Some(splice::change_members(present, &gone));
    }
    changed
}
