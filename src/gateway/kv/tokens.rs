//! The tokens of a request: as it gives them, as the model's own encoder makes them here, or as an
//! engine of its model says they are.

use super::prompt::PromptView;
use super::remote_tokens;
use crate::gateway::Worker;
use crate::http::routes::ApiRoute;
use crate::proxy::Call;
use crate::settings::Tokenizer;
use crate::tokenize::{EncodeError, Encoder};
use actors::backend::Backend;
use serde_json::{Map, Value};
use std::sync::Arc;
use std::time::Duration;
use tracing::debug;

/// A request waits no longer than this for its tokens; they are cached when they come later.
const TOKENIZE_BUDGET: Duration = Duration::from_millis(20);

/// Larger bodies are not encoded here: they would hold an encoding thread too long.
const TEXT_BYTES_MAX: usize = 2 << 20;

/// The tokens of a request, as far as they can be had in time; else why not, as a label.
pub(super) async fn of(
    call: &Call,
    view: &PromptView<'_>,
    worker: &Worker,
    engine: &Arc<Backend>,
) -> Result<Arc<[u32]>, &'static str> {
    if call.route == ApiRoute::Completions
        && let Some(ids) = view.given()
    {
        return Ok(ids.into());
    }
    if !view.is_long(call.route) {
        return Err("no_tokens");
    }
    let settings = worker.gateway.settings();
    let settings = &settings.kv_cache_index;
    match settings.tokenizers.get(&call.model) {
        Some(Tokenizer::None) => Err("no_tokens"),
        Some(Tokenizer::Local(_)) => local(call, worker).await,
        Some(Tokenizer::Backend) | None => {
            let question = view.question(&call.model, call.route).ok_or("no_tokens")?;
            remote_tokens::tokens(question, worker, engine, TOKENIZE_BUDGET).await
        }
    }
}

/// Encodes on a thread that serves no requests: a long prompt takes a good part of a second. What
/// comes too late for this request is kept for the next turn.
async fn local(call: &Call, worker: &Worker) -> Result<Arc<[u32]>, &'static str> {
    let encoder = worker.gateway.encoders.get(&call.model);
    let encoder = encoder.cloned().ok_or("no_tokens")?;
    if call.body.len() > TEXT_BYTES_MAX {
        return Err("no_tokens");
    }
    let (body, route) = (call.body.clone(), call.route);
    let threads = worker.gateway.encoding.clone();
    // a task of its own: what has begun is kept for the next turn, also when nobody waits any more
    let encoding = threads.run(move || encode(&encoder, &body, route));
    let encoded = tokio::time::timeout(TOKENIZE_BUDGET, encoding).await;
    match encoded.map_err(|_| "late_tokens")? {
        Some(Ok(Some(tokens))) => Ok(tokens.into()),
        Some(Ok(None)) => Err("no_tokens"),
        Some(Err(error)) => {
            debug!(model = %call.model, %error, "a prompt has no tokens here");
            Err("encode_failed")
        }
        None => Err("encode_failed"),
    }
}

fn encode(
    encoder: &Encoder,
    body: &[u8],
    route: ApiRoute,
) -> Result<Option<Vec<u32>>, EncodeError> {
    let Ok(body) = serde_json::from_slice::<Map<String, Value>>(body) else {
        return Ok(None);
    };
    match (route, body.get("prompt")) {
        (ApiRoute::Chat, _) => encoder.chat(&body),
        (ApiRoute::Completions, Some(Value::String(text))) => {
            let special = body.get("add_special_tokens").and_then(Value::as_bool);
            encoder.text(text, special.unwrap_or(true)).map(Some)
        }
        _ => Ok(None),
    }
}
