//! What a request wants of the cache, and the key of its answer.

use super::Rules;
use crate::http::routes::ApiRoute;
use actix_web::http::header::HeaderMap;
use routing::cache_key::{CacheKey, KeyParts, digest_of, path};
use routing::cache_policy::{Control, Kind, Request, Use, Why, of_request};
use std::sync::Arc;
use wire::answer::{Dialect, Form};
use wire::cache_entry::Entry;
use wire::canonical::canonical;
use wire::media::refers_elsewhere;
use wire::request::RequestView;

/// `force`: the client wants its answer cached though another call might give another.
const FORCE_HEADER: &str = "x-tidegate-cache";
/// What shapes the transport only, what stands in the key apart, and what no engine gets to see.
const NOT_IN_KEY: [&str; 4] = ["stream", "stream_options", "model", "kv_transfer_params"];
/// Whose answers are shared who do not say who they are.
const NOBODY: &str = "anonymous";

/// A request that the cache may serve.
#[derive(Debug, Clone)]
pub struct Wish {
    /// The key of its answer.
    pub key: CacheKey,
    model: Arc<str>,
    tenant: String,
    /// Whether a kept answer will do.
    pub may_read: bool,
    /// The form that the client wants.
    pub form: Form,
    /// Whether the client wants token counts.
    pub wants_usage: bool,
    /// How many choices it asks for.
    pub choices: usize,
    /// Whose words are used.
    pub dialect: Dialect,
}

impl Wish {
    /// Where its answer is kept, as folders: `v1/MODEL/TENANT/DIGEST`.
    pub fn path(&self) -> Arc<str> {
        path(&self.model, &self.tenant, &self.key).into()
    }

    /// Whether an entry has what the client wants: token counts, where it will look for them.
    pub fn is_served_by(&self, entry: &Entry) -> bool {
        entry.tokens.is_some()
            || !self.wants_usage
            || entry.form == self.form && self.form == Form::Json
    }
}

/// Whose words a path answers in, if its answers can be kept.
pub fn dialect(route: ApiRoute) -> Option<Dialect> {
    match route {
        ApiRoute::Chat => Some(Dialect::Chat),
        ApiRoute::Completions => Some(Dialect::Completions),
        ApiRoute::Embeddings => Some(Dialect::Embeddings),
        ApiRoute::Responses => Some(Dialect::Responses),
        ApiRoute::Messages => Some(Dialect::Messages),
        ApiRoute::Rerank | ApiRoute::Tokenize | ApiRoute::Detokenize => None,
    }
}

/// The tenant of a request: without keys of our own, whoever has the same credentials.
pub fn tenant(headers: &HeaderMap) -> String {
    let said = ["authorization", "x-api-key"].into_iter().flat_map(|name| {
        let values = headers.get_all(name).map(|value| value.as_bytes());
        values.flat_map(move |value| [name.as_bytes(), value])
    });
    let said: Vec<&[u8]> = said.collect();
    if said.is_empty() {
        return NOBODY.into();
    }
    digest_of(&said) // the credentials themselves go no further
}

/// What a request wants of the cache, or why it passes it by.
///
/// # Errors
/// Why its answer is neither looked up nor kept.
pub fn wish(
    rules: &Rules,
    route: ApiRoute,
    headers: &HeaderMap,
    (body, view): (&[u8], &RequestView<'_>),
    (model, tenant): (&Arc<str>, String),
) -> Result<Wish, Why> {
    let dialect = dialect(route).ok_or(Why::Path)?;
    let wants_stream = view.wants_stream();
    // embeddings come whole, whatever is asked for
    let form = match wants_stream && dialect != Dialect::Embeddings {
        true => Form::Events,
        false => Form::Json,
    };
    if !view.says_stream_plainly() {
        return Err(Why::Body);
    }
    let kind = match dialect {
        Dialect::Embeddings => Kind::Embedding,
        Dialect::Responses => Kind::Response,
        Dialect::Chat | Dialect::Completions | Dialect::Messages => Kind::Generation,
    };
    let said = |name: &str| {
        headers
            .get_all(name)
            .filter_map(|value| value.to_str().ok())
    };
    let mut request = Request {
        kind,
        temperature: view.temperature(),
        control: Control::of_all(said("cache-control")),
        forced: said(FORCE_HEADER).any(|value| value.eq_ignore_ascii_case("force")),
        may_force: rules.allow_force,
        remote_media: false,
        // of `/v1/responses`, tools may be the server's own, which look elsewhere
        remembered: view.is_remembered(kind == Kind::Response)
            || kind == Kind::Response && view.has_tools(),
        shapes_stream: wants_stream && view.shapes_stream(),
    };
    if let Use::Bypass(why) = of_request(&request) {
        return Err(why); // most requests: nothing more is read of them
    }
    request.remote_media = refers_elsewhere(body);
    let may_read = match of_request(&request) {
        Use::Bypass(why) => return Err(why),
        Use::ReadAndKeep => true,
        Use::KeepOnly => false,
    };
    let body = canonical(body, &NOT_IN_KEY).ok_or(Why::Body)?;
    let parts = KeyParts {
        route: route_name(route, dialect, form),
        model,
        key_version: rules.key_version,
        tenant: &tenant,
        body: &body,
    };
    Ok(Wish {
        key: parts.key(),
        model: model.clone(),
        tenant,
        may_read,
        form,
        wants_usage: !wants_stream || view.wants_usage(),
        choices: match dialect {
            Dialect::Chat | Dialect::Completions => view.choices(),
            Dialect::Messages => 1,
            Dialect::Embeddings | Dialect::Responses => 0,
        },
        dialect,
    })
}

/// Where one form cannot be made of the other, each has entries of its own.
fn route_name(route: ApiRoute, dialect: Dialect, form: Form) -> &'static str {
    match (dialect, form) {
        (Dialect::Responses, Form::Events) => "responses-stream",
        (Dialect::Messages, Form::Events) => "messages-stream",
        _ => route.as_str(),
    }
}
