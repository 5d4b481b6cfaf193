//! Finds out at the start whether an engine's tokens and blocks are what is expected here: one short
//! probe prompt, once for every time that its event stream is learned anew. A tokenizer, a template
//! or a block size that differs would make every lookup miss, and nobody would notice.

use super::remote_tokens::ask;
use super::wiring::BASE_REALM;
use crate::gateway::Gateway;
use crate::upstream::{self, Client, Unanswered};
use actors::backend::{Backend, Standing};
use actors::index_shard::FindOverlap;
use actors::kv_index::KvIndexHandle;
use actors::support::mailbox::Mailbox;
use routing::block::{BlockHash, Realm, chain};
use routing::knowledge::Parity;
use serde_json::{Map, Value, json};
use std::cell::Cell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::time::Instant;
use tracing::{info, warn};

/// Words of the probe prompt, of two to five tokens each: more than one block of any engine.
const PROBE_WORDS: usize = 400;
/// How often streams are looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);
/// Before another probe of the same engine, doubled with each bad one in a row up to the second.
const REPEAT_AFTER: Duration = Duration::from_secs(30);
const REPEAT_MAX: Duration = Duration::from_secs(600);
/// What one engine may take for the probe.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// How long its blocks are waited for after that, and how often they are looked for.
const EVENTS_TIMEOUT: Duration = Duration::from_secs(3);
const EVENTS_INTERVAL: Duration = Duration::from_millis(20);
/// An answer to the probe.
const ANSWER_BYTES_MAX: usize = 1 << 20;

/// Compares every backend that has events, again whenever they were learned anew; runs for ever. One
/// probe at a time for each, and not before the pause that the last one asked for.
pub async fn watch(gateway: Arc<Gateway>, client: Client) {
    let client = Rc::new(client);
    let mut compared: HashMap<Arc<str>, Rc<Compared>> = HashMap::new();
    loop {
        compared.retain(|_, last| last.of.strong_count() > 0); // backends that are gone
        for (backend, model) in able(&gateway) {
            let last = compared.entry(backend.spec.name.clone()).or_default();
            if !last.is_of(&backend) {
                *last = Rc::new(Compared::new(&backend));
            }
            let Some(learned) = learned(&gateway, &backend.spec.name) else {
                continue;
            };
            if !last.is_due(learned) {
                continue;
            }
            last.running.set(true);
            let last = last.clone();
            let probe = Probe {
                gateway: gateway.clone(),
                client: client.clone(),
                backend,
                model,
            };
            actix_rt::spawn(async move {
                let parity = probe.run().await;
                let name = &probe.backend.spec.name;
                // of what was learned anew meanwhile it says nothing
                if self::learned(&probe.gateway, name) == Some(learned) {
                    probe.backend.spec.kv.standing.set_parity(parity);
                }
                last.ended(learned, parity);
            });
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

/// How often a backend's events were learned anew; none while they are not all taken in as they come:
/// behind a replay, the probe's own blocks would wait.
fn learned(gateway: &Gateway, backend: &str) -> Option<u64> {
    let sources = gateway.kv.as_ref()?.sources.load();
    let own = sources.iter().filter(|source| *source.backend == *backend);
    let states: Vec<_> = own.map(|source| source.state.load()).collect();
    let live = !states.is_empty() && states.iter().all(|s| s.connected && s.live);
    live.then(|| states.iter().map(|state| state.resyncs).sum())
}

/// What came of the last probe of a backend.
#[derive(Default)]
struct Compared {
    /// What is held of that backend. One that left the settings and returned begins anew, and so do its counts.
    of: Weak<Standing>,
    running: Cell<bool>,
    /// What had been learned by then.
    learned: Cell<Option<u64>>,
    /// When the next one may be sent.
    next: Cell<Option<Instant>>,
    /// Bad ones in a row.
    bad: Cell<u32>,
}

impl Compared {
    fn new(backend: &Backend) -> Self {
        Compared {
            of: Arc::downgrade(&backend.spec.kv.standing),
            ..Compared::default()
        }
    }

    fn is_of(&self, backend: &Backend) -> bool {
        std::ptr::eq(self.of.as_ptr(), Arc::as_ptr(&backend.spec.kv.standing))
    }

    fn is_due(&self, learned: u64) -> bool {
        let rested = self.next.get().is_none_or(|next| Instant::now() >= next);
        let news = self.bad.get() > 0 || self.learned.get() != Some(learned);
        !self.running.get() && rested && news
    }

    /// A bad one is repeated later: what was wrong may be put right.
    fn ended(&self, learned: u64, parity: Parity) {
        let is_bad = matches!(parity, Parity::TokensDiffer | Parity::BlocksDiffer);
        let bad = if is_bad { self.bad.get() + 1 } else { 0 };
        let pause = REPEAT_AFTER
            .saturating_mul(1 << bad.min(10))
            .min(REPEAT_MAX);
        self.bad.set(bad);
        self.learned.set(Some(learned));
        self.next.set(Some(Instant::now() + pause));
        self.running.set(false);
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
    async fn run(&self) -> Parity {
        let mut parity = self.try_once().await;
        if parity == Parity::BlocksDiffer {
            parity = self.try_once().await; // events may have been late
        }
        let (backend, model) = (&self.backend.spec.name, &self.model);
        match parity {
            Parity::Unknown => {}
            Parity::Holds => {
                info!(%backend, "probe prompt has the expected tokens and blocks");
            }
            Parity::TokensDiffer => {
                warn!(%backend, %model, "the engine makes other tokens of the probe prompt than the tokenizer that is configured for its model: its events are not used");
            }
            Parity::BlocksDiffer => {
                warn!(%backend, %model, "the engine's events do not have the blocks of the probe prompt that it computed: its events are not used");
            }
        }
        parity
    }

    async fn try_once(&self) -> Parity {
        let compared = tokio::time::timeout(ANSWER_TIMEOUT, self.compare()).await;
        compared
            .unwrap_or(Err("no answer in time"))
            .unwrap_or_else(|why| {
                info!(backend = %self.backend.spec.name, why, "probe prompt could not be compared");
                Parity::Unknown
            })
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
        let body =
            json!({"model": &*self.model, "prompt": tokens, "max_tokens": 1, "temperature": 0});
        let question = ("/v1/completions", body.to_string());
        let asked = upstream::ask(&self.client, &self.backend, question, ANSWER_BYTES_MAX);
        match asked.await {
            Ok(_) => Ok(()),
            Err(Unanswered::Unreachable) => Err("it cannot be reached"),
            Err(Unanswered::Refused) => Err("it does not complete token ids"),
        }
    }

    /// Whether its events bring the blocks of the prompt, all but the last one: what ends exactly
    /// with a block may be computed anew.
    async fn announced(&self, tokens: &[u32], before: Option<u64>) -> Result<Parity, Unclear> {
        let kv = self.gateway.kv.as_ref().ok_or("the index is off")?;
        let until = Instant::now() + EVENTS_TIMEOUT;
        loop {
            let block_size = self.backend.spec.kv.standing.block_size();
            if let Some(block_size) = block_size
                && self.holds(kv, tokens, block_size).await
            {
                return Ok(Parity::Holds);
            }
            if Instant::now() >= until {
                return match block_size {
                    Some(_) if self.last_seq() > before => Ok(Parity::BlocksDiffer),
                    _ => Err("it announced nothing"),
                };
            }
            tokio::time::sleep(EVENTS_INTERVAL).await;
        }
    }

    fn last_seq(&self) -> Option<u64> {
        let sources = self.gateway.kv.as_ref()?.sources.load();
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
                queued: Mailbox::IndexShard.enter(),
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
