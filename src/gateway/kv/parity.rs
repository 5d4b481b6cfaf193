//! Finds out at the start whether an engine's tokens and blocks are what is expected here: one short
//! probe prompt, once for every time that its event stream is learned anew. A tokenizer, a template
//! or a block size that differs would make every lookup miss, and nobody would notice.

use super::remote_tokens::ask;
use super::wiring::BASE_REALM;
use crate::gateway::Gateway;
use crate::upstream::{Client, Outgoing, bearer};
use actors::backend::Backend;
use actors::index_shard::FindOverlap;
use actors::kv_index::KvIndexHandle;
use bytes::Bytes;
use hyper::Method;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue};
use routing::block::{BlockHash, Realm, chain};
use routing::knowledge::Parity;
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tracing::{info, warn};

/// Words of the probe prompt: more than one block of any engine.
const PROBE_WORDS: usize = 1000;
/// How often streams are looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);
/// What one engine may take for the probe.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// How long its blocks are waited for after that, and how often they are looked for.
const EVENTS_TIMEOUT: Duration = Duration::from_secs(3);
const EVENTS_INTERVAL: Duration = Duration::from_millis(20);
/// An answer to the probe.
const ANSWER_BYTES_MAX: usize = 1 << 20;

/// Compares every backend that has events, again whenever they were learned anew; runs for ever.
pub async fn watch(gateway: Arc<Gateway>, client: Client) {
    let client = Rc::new(client);
    let mut compared: HashMap<Arc<str>, u64> = HashMap::new();
    let Some(kv) = &gateway.kv else { return };
    loop {
        for (backend, model) in able(&gateway) {
            let own = kv.sources.iter().filter(|s| s.backend == backend.spec.name);
            let states: Vec<_> = own.map(|source| source.state.load()).collect();
            let learned: u64 = states.iter().map(|state| state.resyncs).sum();
            let open = !states.is_empty() && states.iter().all(|state| state.connected);
            let name = backend.spec.name.clone();
            if open && compared.insert(name, learned) != Some(learned) {
                let probe = Probe {
                    gateway: gateway.clone(),
                    client: client.clone(),
                    backend,
                    model,
                };
                actix_rt::spawn(async move { probe.run().await });
            }
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

/// Backends that take requests, with a model of theirs.
fn able(gateway: &Gateway) -> Vec<(Arc<Backend>, Arc<str>)> {
    let snapshot = gateway.directory.load();
    let all = snapshot.view.backends.iter().zip(&snapshot.entries);
    let able = all.filter(|(view, _)| view.can_serve());
    able.filter_map(|(view, entry)| {
        let model = view.models.as_ref()?.first()?;
        Some((entry.backend.clone(), model.clone()))
    })
    .collect()
}

struct Probe {
    gateway: Arc<Gateway>,
    client: Rc<Client>,
    backend: Arc<Backend>,
    model: Arc<str>,
}

/// Why a comparison says nothing.
type Unclear = &'static str;

impl Probe {
    async fn run(self) {
        let name = &self.backend.spec.name;
        let parity = match tokio::time::timeout(ANSWER_TIMEOUT, self.compare()).await {
            Ok(Ok(parity)) => parity,
            Ok(Err(why)) => {
                info!(backend = %name, why, "probe prompt could not be compared");
                Parity::Unknown
            }
            Err(_) => {
                info!(backend = %name, why = "no answer in time", "probe prompt could not be compared");
                Parity::Unknown
            }
        };
        self.backend.spec.kv.standing.set_parity(parity);
        match parity {
            Parity::Unknown => {}
            Parity::Holds => {
                info!(backend = %name, "probe prompt has the expected tokens and blocks")
            }
            Parity::TokensDiffer => {
                warn!(backend = %name, model = %self.model, "the engine makes other tokens of the probe prompt than the tokenizer that is configured for its model: its events are not used")
            }
            Parity::BlocksDiffer => {
                warn!(backend = %name, model = %self.model, "the engine's events do not have the blocks of the probe prompt that it computed: its events are not used")
            }
        }
    }

    async fn compare(&self) -> Result<Parity, Unclear> {
        let nonce = fastrand::u64(..);
        let words = (0..PROBE_WORDS).map(|n| format!(" probe {}", (nonce >> (n % 48)) % 1000));
        let text = format!("{nonce:016x}:{}", words.collect::<String>());
        let theirs = self.tokens(json!({"prompt": text})).await;
        let ours = self.encoded(&text);
        if let (Some(theirs), Some(ours)) = (&theirs, &ours)
            && theirs[..] != ours[..]
        {
            return Ok(Parity::TokensDiffer);
        }
        if !self.templates_agree(&text).await {
            return Ok(Parity::TokensDiffer);
        }
        let tokens = theirs.or_else(|| ours.map(Into::into));
        let tokens = tokens.ok_or("its /tokenize does not answer")?;
        let before = self.last_seq();
        self.complete(&tokens).await?;
        self.announced(&tokens, before).await
    }

    fn encoded(&self, text: &str) -> Option<Vec<u32>> {
        let encoder = self.gateway.encoders.get(&self.model)?;
        encoder.text(text, true).ok()
    }

    /// Whether a chat has the same tokens here and there, as far as both say.
    async fn templates_agree(&self, text: &str) -> bool {
        let Some(encoder) = self.gateway.encoders.get(&self.model) else {
            return true;
        };
        let messages = json!([{"role": "user", "content": text}]);
        let body: Map<String, Value> = [("messages".to_owned(), messages.clone())]
            .into_iter()
            .collect();
        let ours = encoder.chat(&body).ok().flatten();
        let theirs = self
            .tokens(json!({"messages": messages, "add_generation_prompt": true}))
            .await;
        match (ours, theirs) {
            (Some(ours), Some(theirs)) => ours[..] == theirs[..],
            _ => true,
        }
    }

    async fn tokens(&self, mut question: Value) -> Option<Arc<[u32]>> {
        question["model"] = (*self.model).into();
        ask(&self.client, &self.backend, question.to_string()).await
    }

    /// Has the engine compute the prompt.
    async fn complete(&self, tokens: &[u32]) -> Result<(), Unclear> {
        let spec = &self.backend.spec;
        let body =
            json!({"model": &*self.model, "prompt": tokens, "max_tokens": 1, "temperature": 0});
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(key) = bearer(spec) {
            headers.insert(AUTHORIZATION, key);
        }
        let outgoing = Outgoing {
            method: Method::POST,
            path: spec.url.path("/v1/completions"),
            headers,
            body: Bytes::from(body.to_string()),
        };
        let counts = &self.backend.live.counters.connections;
        let sent = self.client.send(&spec.url, &outgoing, counts).await;
        let mut reply = sent.map_err(|_| "it cannot be reached")?;
        let whole = reply.body.whole(ANSWER_BYTES_MAX).await;
        if whole.is_err() || !reply.status.is_success() {
            return Err("it does not complete token ids");
        }
        Ok(())
    }

    /// Whether its events bring the blocks of the prompt, all but the last one: what ends exactly
    /// with a block may be computed anew.
    async fn announced(&self, tokens: &[u32], before: Option<u64>) -> Result<Parity, Unclear> {
        let kv = self.gateway.kv.as_ref().ok_or("the index is off")?;
        let until = tokio::time::Instant::now() + EVENTS_TIMEOUT;
        loop {
            let block_size = self.backend.spec.kv.standing.block_size();
            if let Some(block_size) = block_size
                && self.holds(kv, tokens, block_size).await
            {
                return Ok(Parity::Holds);
            }
            if tokio::time::Instant::now() >= until {
                return match block_size {
                    Some(_) if self.last_seq() > before => Ok(Parity::BlocksDiffer),
                    _ => Err("it announced nothing"),
                };
            }
            tokio::time::sleep(EVENTS_INTERVAL).await;
        }
    }

    fn last_seq(&self) -> Option<u64> {
        let sources = &self.gateway.kv.as_ref()?.sources;
        let own = sources
            .iter()
            .filter(|s| s.backend == self.backend.spec.name);
        own.filter_map(|source| source.state.load().last_seq).max()
    }

    async fn holds(&self, kv: &KvIndexHandle, tokens: &[u32], block_size: u32) -> bool {
        let realm = Realm {
            model: BASE_REALM,
            cache_salt: None,
            block_size,
        };
        let chain: Arc<[BlockHash]> = chain(&realm, tokens).into();
        let expected = chain.len().saturating_sub(1);
        let shard = kv.shard.load();
        let Some(shard) = shard.as_ref().clone() else {
            return false;
        };
        let found = shard
            .send(FindOverlap {
                chains: vec![chain],
            })
            .await;
        let memories = &self.backend.spec.kv.memories;
        let mut runs = found.into_iter().flatten().flatten();
        runs.any(|run| {
            let own = memories.iter().any(|memory| memory.holder == run.holder);
            own && run.from == 0 && run.to as usize >= expected.max(1)
        })
    }
}
