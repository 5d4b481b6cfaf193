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
use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use wire::request::PromptField;

/// A request waits no longer than this for its tokens; they are cached when they come later.
const TOKENIZE_BUDGET: Duration = Duration::from_millis(20);
/// An engine that takes longer is not waited for in the background either.
const TOKENIZE_TIMEOUT: Duration = Duration::from_secs(2);
/// A shorter prompt is computed sooner than it is tokenised.
const TEXT_LENGTH_MIN: usize = 1024;
/// Tokens that one worker thread keeps of texts that engines tokenised.
const CACHED_TOKENS_MAX: usize = 4 << 20;
/// Longer texts are not sent to be tokenised.
const QUESTION_BYTES_MAX: usize = 1 << 20;
/// Questions that one worker thread asks at one time.
const ASKS_MAX: usize = 16;
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
    #[serde(borrow, default)]
    input: Option<&'a RawValue>,
    #[serde(borrow, default)]
    system: Option<&'a RawValue>,
    #[serde(borrow, default)]
    instructions: Option<&'a RawValue>,
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

    /// The prompt as it is written, up to where the next turn of a conversation goes on, and what
    /// stands before it: the beginnings of prompts are compared by these.
    pub(super) fn text(&self, route: ApiRoute) -> Option<(Vec<&[u8]>, &[u8])> {
        let main = match route.prompt_field() {
            PromptField::Messages => self.messages,
            PromptField::Prompt => self.prompt,
            PromptField::Input => self.input,
            PromptField::None => None,
        };
        let main = main?.get().as_bytes();
        let main = match main {
            [inner @ .., b']' | b'"'] => inner,
            other => other,
        };
        let raw = |part: Option<&'a RawValue>| part.map_or(&b""[..], |raw| raw.get().as_bytes());
        let salt = self.cache_salt.as_deref().unwrap_or_default().as_bytes();
        let head = vec![
            raw(self.tools),
            raw(self.system),
            raw(self.instructions),
            salt,
        ];
        Some((head, main))
    }

    /// What to ask an engine's `/tokenize`; none for what is short, or has no one prompt.
    fn question(&self, model: &str, route: ApiRoute) -> Option<String> {
        let model = serde_json::Value::from(model);
        match route {
            ApiRoute::Chat => {
                let messages = self
                    .messages
                    .filter(|raw| raw.get().len() >= TEXT_LENGTH_MIN)?;
                if messages.get().contains("_url\"") || messages.get().contains("input_audio") {
                    return None; // the engine would fetch or decode media a second time
                }
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

/// Tokens of texts that engines tokenised. One per worker thread.
#[derive(Clone, Default)]
pub struct TokenCache(Rc<RefCell<Cached>>);

/// Stands for a question: two hashes with random keys of this process.
type Digest = (u64, u64);

#[derive(Default)]
struct Cached {
    keys: (RandomState, RandomState),
    by_question: HashMap<Digest, Arc<[u32]>>,
    in_order: VecDeque<Digest>,
    tokens: usize,
    asking: HashSet<Digest>,
}

/// What an entry takes beside its tokens, in tokens.
const ENTRY_TOKENS: usize = 32;

impl TokenCache {
    fn digest(&self, question: &str) -> Digest {
        let cached = self.0.borrow();
        (
            cached.keys.0.hash_one(question),
            cached.keys.1.hash_one(question),
        )
    }

    fn get(&self, question: Digest) -> Option<Arc<[u32]>> {
        self.0.borrow().by_question.get(&question).cloned()
    }

    fn put(&self, question: Digest, tokens: Arc<[u32]>) {
        let mut cached = self.0.borrow_mut();
        if tokens.len() > CACHED_TOKENS_MAX / 2 || cached.by_question.contains_key(&question) {
            return;
        }
        cached.tokens += tokens.len() + ENTRY_TOKENS;
        cached.in_order.push_back(question);
        cached.by_question.insert(question, tokens);
        while cached.tokens > CACHED_TOKENS_MAX {
            let Some(oldest) = cached.in_order.pop_front() else {
                break;
            };
            let gone = cached.by_question.remove(&oldest);
            cached.tokens -= gone.map_or(0, |tokens| tokens.len() + ENTRY_TOKENS);
        }
    }

    /// Leave to ask an engine: one at a time for the same question, and not too many in all.
    fn start_asking(&self, question: Digest) -> Option<Asking> {
        let mut cached = self.0.borrow_mut();
        let free = cached.asking.len() < ASKS_MAX && cached.asking.insert(question);
        free.then(|| Asking(self.clone(), question))
    }
}

/// A question that is being asked.
struct Asking(TokenCache, Digest);

impl Drop for Asking {
    fn drop(&mut self) {
        self.0.0.borrow_mut().asking.remove(&self.1);
    }
}

/// The tokens of a request, as far as they can be had in time.
pub(super) async fn of(
    call: &Call,
    view: &TokenView<'_>,
    worker: &Worker,
    engine: &Arc<Backend>,
) -> Option<Arc<[u32]>> {
    if call.route == ApiRoute::Completions
        && let Some(ids) = view.given()
    {
        return Some(ids.into());
    }
    let question = view.question(&call.model, call.route)?;
    if question.len() > QUESTION_BYTES_MAX {
        return None;
    }
    let digest = worker.tokens.digest(&question);
    if let Some(tokens) = worker.tokens.get(digest) {
        return Some(tokens);
    }
    let asking = worker.tokens.start_asking(digest)?;
    let (client, engine) = (worker.client.clone(), engine.clone());
    // goes on when it is too late for this request: the next turn will need the same
    let answer = actix_rt::spawn(async move {
        let asked = ask(&client, &engine, question);
        let tokens = tokio::time::timeout(TOKENIZE_TIMEOUT, asked).await.ok()??;
        asking.0.put(digest, tokens.clone());
        Some(tokens)
    });
    tokio::time::timeout(TOKENIZE_BUDGET, answer)
        .await
        .ok()?
        .ok()?
}

async fn ask(client: &Client, engine: &Backend, question: String) -> Option<Arc<[u32]>> {
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
        body: Bytes::from(question),
    };
    let counts = &engine.live.counters.connections;
    let mut reply = client
        .send(&engine.spec.url, &outgoing, counts)
        .await
        .ok()?;
    if !reply.status.is_success() {
        return None;
    }
    let body = reply.body.whole(ANSWER_BYTES_MAX).await.ok()?;
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
    fn the_cache_is_bounded_in_tokens_and_entries() {
        let cache = TokenCache::default();
        let many: Arc<[u32]> = vec![0; CACHED_TOKENS_MAX / 4 - ENTRY_TOKENS].into();
        for n in 0..10 {
            cache.put((n, 0), many.clone());
            assert!(cache.0.borrow().tokens <= CACHED_TOKENS_MAX);
        }
        assert!(cache.get((0, 0)).is_none() && cache.get((9, 0)).is_some());
        assert_eq!(cache.0.borrow().in_order.len(), 4);
        for n in 0..1_000_000 {
            cache.put((n, 1), Arc::from([]));
        }
        assert!(cache.0.borrow().in_order.len() <= CACHED_TOKENS_MAX / ENTRY_TOKENS);
    }

    #[test]
    fn a_question_is_asked_once_at_a_time_and_few_at_all() {
        let cache = TokenCache::default();
        let first = cache.start_asking((0, 0));
        assert!(first.is_some() && cache.start_asking((0, 0)).is_none());
        let others: Vec<_> = (1..100)
            .filter_map(|n| cache.start_asking((n, 0)))
            .collect();
        assert_eq!(others.len(), ASKS_MAX - 1);
        drop((first, others));
        assert!(cache.start_asking((0, 0)).is_some());
    }

    #[test]
    fn media_are_not_sent_to_be_tokenised() {
        let long = "x".repeat(TEXT_LENGTH_MIN);
        let body = format!(
            r#"{{"messages":[{{"role":"user","content":[{{"type":"image_url","image_url":{{"url":"http://i"}}}},{{"type":"text","text":"{long}"}}]}}]}}"#
        );
        assert!(view(&body).question("m", ApiRoute::Chat).is_none());
    }
}
