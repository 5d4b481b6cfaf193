//! The tokens of a request: as it gives them, or as an engine of its model says they are.

use crate::gateway::Worker;
use crate::http::routes::ApiRoute;
use crate::proxy::Call;
use crate::upstream::{Client, Outgoing};
use actors::backend::Backend;
use bytes::Bytes;
use hyper::Method;
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use serde::Deserialize;
use serde_json::value::RawValue;
use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// A request waits no longer than this for its tokens; they are cached when they come later.
const TOKENIZE_BUDGET: Duration = Duration::from_millis(20);
/// An engine that takes longer is not waited for in the background either.
const TOKENIZE_TIMEOUT: Duration = Duration::from_secs(2);
/// A shorter prompt is computed sooner than it is tokenised.
const TEXT_LENGTH_MIN: usize = 1024;
/// Tokens that one worker thread keeps of texts that engines tokenised.
const CACHED_TOKENS_MAX: usize = 4 << 20;
/// The largest answer of `/tokenize` that is read.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// What of a body its tokens depend on.
#[derive(Deserialize)]
pub(super) struct TokenView<'a> {
    #[serde(borrow, default)]
    prompt: Option<&'a RawValue>,
    #[serde(borrow, default)]
    messages: Option<&'a RawValue>,
    #[serde(borrow, default)]
    tools: Option<&'a RawValue>,
    #[serde(borrow, default)]
    chat_template_kwargs: Option<&'a RawValue>,
    #[serde(borrow, default)]
    add_generation_prompt: Option<&'a RawValue>,
    #[serde(default)]
    pub(super) cache_salt: Option<String>,
}

impl<'a> TokenView<'a> {
    pub(super) fn parse(body: &'a [u8]) -> Option<Self> {
        serde_json::from_slice(body).ok()
    }

    /// Token ids that the client gave; of a list of prompts, the only one.
    fn given(&self) -> Option<Vec<u32>> {
        let raw = self.prompt?.get();
        if let Ok(ids) = serde_json::from_str::<Vec<u32>>(raw) {
            return Some(ids);
        }
        let mut prompts = serde_json::from_str::<Vec<Vec<u32>>>(raw).ok()?;
        (prompts.len() == 1).then(|| prompts.remove(0))
    }

    /// What to ask an engine's `/tokenize`; none for what is short, or has no one prompt.
    fn question(&self, model: &str, route: ApiRoute) -> Option<String> {
        let model = serde_json::Value::from(model);
        match route {
            ApiRoute::Chat => {
                let messages = self
                    .messages
                    .filter(|raw| raw.get().len() >= TEXT_LENGTH_MIN)?;
                let mut out = format!(r#"{{"model":{model},"messages":{}"#, messages.get());
                let add = self.add_generation_prompt.map_or("true", RawValue::get);
                out += &format!(r#","add_generation_prompt":{add}"#);
                for (key, value) in [
                    ("tools", self.tools),
                    ("chat_template_kwargs", self.chat_template_kwargs),
                ] {
                    if let Some(value) = value {
                        out += &format!(r#","{key}":{}"#, value.get());
                    }
                }
                Some(out + "}")
            }
            ApiRoute::Completions => {
                let prompt = self.prompt.filter(|raw| raw.get().starts_with('"'))?;
                let prompt = Some(prompt.get()).filter(|raw| raw.len() >= TEXT_LENGTH_MIN)?;
                Some(format!(r#"{{"model":{model},"prompt":{prompt}}}"#))
            }
            _ => None,
        }
    }
}

/// Tokens of texts that engines tokenised, by the whole question. One per worker thread.
#[derive(Clone, Default)]
pub struct TokenCache(Rc<RefCell<Cached>>);

#[derive(Default)]
struct Cached {
    by_question: HashMap<String, Arc<[u32]>>,
    in_order: VecDeque<String>,
    tokens: usize,
}

impl TokenCache {
    fn get(&self, question: &str) -> Option<Arc<[u32]>> {
        self.0.borrow().by_question.get(question).cloned()
    }

    fn put(&self, question: String, tokens: Arc<[u32]>) {
        let mut cached = self.0.borrow_mut();
        if tokens.len() > CACHED_TOKENS_MAX || cached.by_question.contains_key(&question) {
            return;
        }
        cached.tokens += tokens.len();
        cached.in_order.push_back(question.clone());
        cached.by_question.insert(question, tokens);
        while cached.tokens > CACHED_TOKENS_MAX {
            let Some(oldest) = cached.in_order.pop_front() else {
                break;
            };
            let gone = cached.by_question.remove(&oldest);
            cached.tokens -= gone.map_or(0, |tokens| tokens.len());
        }
    }
}

/// The tokens of a request, as far as they can be had in time.
pub(super) async fn of(
    call: &Call,
    view: &TokenView<'_>,
    worker: &Worker,
    engine: Option<&Arc<Backend>>,
) -> Option<Arc<[u32]>> {
    if let Some(ids) = view.given() {
        return Some(ids.into());
    }
    let question = view.question(&call.model, call.route)?;
    if let Some(tokens) = worker.tokens.get(&question) {
        return Some(tokens);
    }
    let engine = engine?.clone();
    let (cache, client) = (worker.tokens.clone(), worker.client.clone());
    // goes on when it is too late for this request: the next turn will need the same
    let asking = actix_rt::spawn(async move {
        let asked = ask(&client, &engine, &question);
        let tokens = tokio::time::timeout(TOKENIZE_TIMEOUT, asked).await.ok()??;
        cache.put(question, tokens.clone());
        Some(tokens)
    });
    let answer = tokio::time::timeout(TOKENIZE_BUDGET, asking).await;
    answer.ok()?.ok()?
}

async fn ask(client: &Client, engine: &Backend, question: &str) -> Option<Arc<[u32]>> {
    #[derive(Deserialize)]
    struct Answer {
        tokens: Vec<u32>,
    }
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let Some(key) = crate::upstream::bearer(&engine.spec) {
        headers.insert(hyper::header::AUTHORIZATION, key);
    }
    let outgoing = Outgoing {
        method: Method::POST,
        path: engine.spec.url.path("/tokenize"),
        headers,
        body: Bytes::copy_from_slice(question.as_bytes()),
    };
    let counts = &engine.live.counters.connections;
    let mut reply = client
        .send(&engine.spec.url, &outgoing, counts)
        .await
        .ok()?;
    if !reply.status.is_success() {
        return None;
    }
    let mut body = Vec::new();
    while let Some(chunk) = reply.body.chunk().await {
        body.extend_from_slice(&chunk.ok()?);
        if body.len() > ANSWER_BYTES_MAX {
            return None;
        }
    }
    let answer: Answer = serde_json::from_slice(&body).ok()?;
    Some(answer.tokens.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(body: &str) -> TokenView<'_> {
        TokenView::parse(body.as_bytes()).unwrap()
    }

    #[test]
    fn token_ids_are_taken_as_given_and_several_prompts_have_no_one_chain() {
        assert_eq!(view(r#"{"prompt":[1,2,3]}"#).given(), Some(vec![1, 2, 3]));
        assert_eq!(view(r#"{"prompt":[[1,2]]}"#).given(), Some(vec![1, 2]));
        for prompt in ["[[1],[2]]", "\"text\"", "[\"a\"]", "[1,\"a\"]", "[-1]"] {
            assert_eq!(
                view(&format!(r#"{{"prompt":{prompt}}}"#)).given(),
                None,
                "{prompt}"
            );
        }
    }

    #[test]
    fn the_question_holds_what_the_tokens_depend_on_and_short_texts_ask_nothing() {
        let long = "x".repeat(TEXT_LENGTH_MIN);
        let body = format!(
            r#"{{"messages":[{{"role":"user","content":"{long}"}}],"tools":[1],"chat_template_kwargs":{{"a":1}},"temperature":0}}"#
        );
        let question = view(&body).question("m", ApiRoute::Chat).unwrap();
        let json: serde_json::Value = serde_json::from_str(&question).unwrap();
        assert_eq!(json["add_generation_prompt"], true);
        assert_eq!(
            (&json["tools"][0], &json["chat_template_kwargs"]["a"]),
            (&1.into(), &1.into())
        );
        assert!(json.get("temperature").is_none());
        assert!(
            view(r#"{"prompt":"short"}"#)
                .question("m", ApiRoute::Completions)
                .is_none()
        );
        assert!(
            view(&format!(r#"{{"prompt":["{long}"]}}"#))
                .question("m", ApiRoute::Completions)
                .is_none()
        );
    }

    #[test]
    fn the_cache_is_bounded_in_tokens() {
        let cache = TokenCache::default();
        let many: Arc<[u32]> = vec![0; CACHED_TOKENS_MAX / 4].into();
        for n in 0..10 {
            cache.put(n.to_string(), many.clone());
            assert!(cache.0.borrow().tokens <= CACHED_TOKENS_MAX);
        }
        assert!(cache.get("0").is_none() && cache.get("9").is_some());
        assert_eq!(cache.0.borrow().in_order.len(), 4);
    }
}
