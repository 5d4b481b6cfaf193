//! Asks the index about a request: by its tokens where backends announce what they hold, by its
//! text where that is only guessed.

use super::prompt::PromptView;
use super::tokens;
use super::wiring::BASE_REALM;
use crate::gateway::Worker;
use crate::proxy::Call;
use crate::settings::Tokenizer;
use actix::Addr;
use actix_web::rt::time::timeout;
use actors::backend::Backend;
use actors::index_shard::{FindOverlap, IndexShard};
use actors::kv_index::KvIndexHandle;
use actors::support::mailbox::Mailbox;
use routing::block::{BlockHash, Realm, TEXT_BLOCK_BYTES, TEXT_BLOCK_TOKENS, chain, text_chain};
use routing::ids::Slot;
use routing::knowledge::Mode;
use routing::prefix_index::Run;
use routing::score::{Basis, Known, PromptOverlap, Reach};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A lookup that takes longer is given up, and the request goes by the next best rule.
const INDEX_DEADLINE: Duration = Duration::from_millis(10);
/// Blocks of one prompt; a longer one fits no engine, and would push others out of the index.
const CHAIN_BLOCKS_MAX: usize = 65_536;
/// Larger bodies are not looked up: reading and hashing them would hold up others on this thread. About a
/// million tokens of text.
const BODY_BYTES_MAX: usize = 4 << 20;
/// What a token of text is taken to be long.
const BYTES_PER_TOKEN: usize = TEXT_BLOCK_BYTES / TEXT_BLOCK_TOKENS as usize;
/// Different block sizes of one model's engines that a prompt is cut by.
const BLOCK_SIZES_MAX: usize = 4;

/// What is known of a request's blocks.
#[derive(Clone)]
pub struct Found {
    /// Who has which of them.
    pub known: Arc<Known>,
    pub(super) chains: Vec<Cut>,
    pub(super) shard: Addr<IndexShard>,
}

/// A prompt, cut into blocks in one way.
#[derive(Clone)]
pub(super) struct Cut {
    pub(super) basis: Basis,
    block_size: u32,
    tokens: u32,
    pub(super) chain: Arc<[BlockHash]>,
}

impl Found {
    /// The blocks that stand for the prompt at a backend: by what is known there, and by its text
    /// as well, for a next turn whose tokens may come too late.
    pub(super) fn cuts_at(&self, backend: &Backend, reach: &Reach) -> impl Iterator<Item = &Cut> {
        let size = backend.spec.kv.standing.block_size();
        let known = reach.of_blocks > 0;
        let by_tokens = reach.basis == Basis::Tokens;
        self.chains.iter().filter(move |cut| match cut.basis {
            Basis::Tokens => known && by_tokens && size.is_none_or(|s| s == cut.block_size),
            Basis::Text => known,
        })
    }
}

/// Looks a request up; none when nothing can be known of it, which is counted with the reason.
pub async fn find(call: &Call, worker: &Worker) -> Option<Found> {
    let kv = worker.gateway.kv.as_ref()?;
    let found = look(call, worker, kv).await;
    let result = found.as_ref().map_or_else(|reason| *reason, |_| "found");
    worker.handles.lookup(result);
    found.ok()
}

/// Looks a request up; answers why nothing can be known of it, where that is so.
pub async fn look(call: &Call, worker: &Worker, kv: &KvIndexHandle) -> Result<Found, &'static str> {
    let pool = Pool::of(call, worker)?;
    if call.body.len() > BODY_BYTES_MAX {
        return Err("too_long");
    }
    let view = PromptView::parse(&call.body).ok_or("no_tokens")?;
    let chains = cut(call, &view, worker, &pool).await?;
    let shard = kv.shard.load();
    let shard = shard.as_ref().clone().ok_or("no_index")?;
    let asked = shard.send(FindOverlap {
        chains: chains.iter().map(|cut| cut.chain.clone()).collect(),
        queued: Mailbox::IndexShard.enter(),
    });
    let start = Instant::now();
    let runs = timeout(INDEX_DEADLINE, asked).await.map_err(|_| "late")?;
    let seconds = start.elapsed().as_secs_f64();
    worker.handles.asked_index(seconds);
    worker.handles.asked(Mailbox::IndexShard.as_str(), seconds);
    let runs = runs.map_err(|_| "no_index")?;
    let known: Vec<PromptOverlap> = chains.iter().zip(runs).map(overlap).collect();
    let mut by_tokens = known.iter().filter(|p| p.basis == Basis::Tokens).peekable();
    if by_tokens.peek().is_some() {
        kv.looked_up(by_tokens.any(|prompt| !prompt.runs.is_empty()));
    }
    Ok(Found {
        known: Arc::new(Known(known)),
        chains,
        shard,
    })
}

/// Tokens of a prompt that was not looked up: as given, or by the length of its text.
pub fn tokens_by_text(call: &Call) -> u64 {
    if call.body.len() > BODY_BYTES_MAX {
        return (call.body.len() / BYTES_PER_TOKEN) as u64;
    }
    let Some(view) = PromptView::parse(&call.body) else {
        return 0;
    };
    let given = view.given().map(|tokens| tokens.len());
    let by_text = || {
        view.text(call.route)
            .map_or(0, |(_, text)| text.len() / BYTES_PER_TOKEN)
    };
    given.unwrap_or_else(by_text) as u64
}

fn overlap((cut, runs): (&Cut, Vec<Run>)) -> PromptOverlap {
    PromptOverlap {
        basis: cut.basis,
        runs,
        blocks: cut.chain.len() as u32,
        tokens: cut.tokens,
        block_size: cut.block_size,
    }
}

/// Cuts a prompt in every way that some backend needs.
async fn cut(
    call: &Call,
    view: &PromptView<'_>,
    worker: &Worker,
    pool: &Pool,
) -> Result<Vec<Cut>, &'static str> {
    let mut cuts = Vec::new();
    let mut missing = "no_events";
    if let Some(engine) = &pool.engine {
        let tokens = tokens::of(call, view, worker, engine).await;
        missing = tokens.as_ref().err().unwrap_or(&"too_short");
        for &block_size in pool.block_sizes.iter().filter(|_| tokens.is_ok()) {
            let tokens = tokens.as_deref().unwrap_or_default();
            let realm = Realm {
                model: if pool.is_base {
                    BASE_REALM
                } else {
                    &call.model
                },
                cache_salt: view.cache_salt.as_deref(),
                block_size,
            };
            cuts.push(Cut {
                basis: Basis::Tokens,
                block_size,
                tokens: tokens.len() as u32,
                chain: chain(&realm, tokens).into(),
            });
        }
    }
    let may_be_late = !matches!(
        worker
            .gateway
            .settings
            .load()
            .kv_cache_index
            .tokenizers
            .get(&call.model),
        Some(Tokenizer::Local(_))
    );
    if pool.guesses && (pool.some_guessed || cuts.is_empty() || may_be_late) {
        let cut = by_text(call, view);
        if cut.is_some() && pool.engine.is_none() {
            missing = "too_short";
        }
        cuts.extend(cut);
    }
    cuts.retain(|cut| !cut.chain.is_empty());
    let all = cuts.len();
    cuts.retain(|cut| cut.chain.len() <= CHAIN_BLOCKS_MAX);
    match cuts.len() {
        0 if all > 0 => Err("too_long"),
        0 => Err(missing),
        _ => Ok(cuts),
    }
}

fn by_text(call: &Call, view: &PromptView<'_>) -> Option<Cut> {
    let (head, text) = view.text(call.route)?;
    Some(Cut {
        basis: Basis::Text,
        block_size: TEXT_BLOCK_TOKENS,
        tokens: (text.len() / BYTES_PER_TOKEN) as u32,
        chain: text_chain(&call.model, &head, text).into(),
    })
}

/// What a lookup needs of the backends that can serve the request.
struct Pool {
    /// Of the engines that announce what they hold.
    block_sizes: Vec<u32>,
    /// The least busy of these, to ask for tokens.
    engine: Option<Arc<Backend>>,
    /// Whether the request is for their own model: a name that may be an adapter's is not taken
    /// for it, since a miss costs less than a false hit.
    is_base: bool,
    /// Whether some backend's cache is guessed, and whether that is allowed at all.
    some_guessed: bool,
    guesses: bool,
}

impl Pool {
    fn of(call: &Call, worker: &Worker) -> Result<Self, &'static str> {
        let snapshot = worker.gateway.directory.load();
        let pool = snapshot.view.pools.get(&call.model).ok_or("no_events")?;
        let ranks = |slot: &Slot| snapshot.view.backend(*slot).memories.len();
        if pool.members.len() < 2 && pool.members.iter().all(|slot| ranks(slot) < 2) {
            return Err("no_choice");
        }
        let members = pool.members.iter().map(|slot| {
            (
                snapshot.view.backend(*slot),
                &snapshot.entries[slot.0].backend,
            )
        });
        let is_base = members
            .clone()
            .any(|(view, backend)| match backend.spec.models.first() {
                Some(first) => *first == call.model,
                None => view.models.iter().any(|models| models.len() == 1),
            });
        let mut found = Pool {
            block_sizes: Vec::new(),
            engine: None,
            is_base,
            some_guessed: false,
            guesses: worker.gateway.settings.load().kv_cache_index.approximate,
        };
        for (_, backend) in members.filter(|(view, _)| view.can_serve()) {
            found.add(backend);
        }
        Ok(found)
    }

    fn add(&mut self, backend: &Arc<Backend>) {
        let standing = &backend.spec.kv.standing;
        match standing.mode().0 {
            Mode::Approximate => self.some_guessed = true,
            Mode::Blind => {}
            Mode::Exact => {
                let size = standing.block_size().unwrap_or(0);
                if !self.block_sizes.contains(&size) && self.block_sizes.len() < BLOCK_SIZES_MAX {
                    self.block_sizes.push(size);
                }
                let busy = |backend: &Arc<Backend>| backend.live.in_flight();
                if self.engine.as_ref().is_none_or(|e| busy(backend) < busy(e)) {
                    self.engine = Some(backend.clone());
                }
            }
        }
    }
}
