//! Asks the index about a request, and tells it where the request went.

use super::tokens::{self, TokenView};
use super::wiring::base_model;
use crate::gateway::Worker;
use crate::proxy::Call;
use crate::telemetry::names;
use actix::Addr;
use actix_web::rt::time::timeout;
use actors::backend::Backend;
use actors::index_shard::{DispatchEnded, Dispatched, Fate, FindOverlap, IndexShard};
use actors::kv_index::{KvIndexHandle, SourceHandle};
use metrics::counter;
use routing::block::{BlockHash, Realm, chain};
use routing::prefix_index::HolderId;
use routing::score::PromptOverlap;
use std::sync::Arc;
use std::time::Duration;

/// A lookup that takes longer is given up, and the request goes by the next best rule.
const INDEX_DEADLINE: Duration = Duration::from_millis(10);
/// For how long a dispatch counts as held: twice the backend's time to first token, within these.
const HOLD_MIN: Duration = Duration::from_secs(2);
const HOLD_MAX: Duration = Duration::from_secs(30);

/// What is known of a request's blocks.
#[derive(Clone)]
pub struct Found {
    /// Who has which of them.
    pub overlap: Arc<PromptOverlap>,
    /// The blocks.
    pub chain: Arc<[BlockHash]>,
    shard: Addr<IndexShard>,
}

/// Looks a request up; none when nothing can be known of it, which is counted with the reason.
pub async fn find(call: &Call, worker: &Worker) -> Option<Found> {
    let kv = worker.gateway.kv.as_ref()?;
    let found = look(call, worker, kv).await;
    let result = found.as_ref().map_or_else(|reason| *reason, |_| "found");
    counter!(names::KV_LOOKUPS, "result" => result).increment(1);
    found.ok()
}

async fn look(call: &Call, worker: &Worker, kv: &KvIndexHandle) -> Result<Found, &'static str> {
    let (block_size, engine) = live_source(call, worker, kv).ok_or("no_events")?;
    let view = TokenView::parse(&call.body).ok_or("no_tokens")?;
    let tokens = tokens::of(call, &view, worker, Some(&engine))
        .await
        .ok_or("no_tokens")?;
    // an adapter's blocks are announced under its name, which is also the request's model
    let is_adapter = |source: &SourceHandle| source.state.load().adapters.contains(&call.model);
    let model = if kv.sources.iter().any(is_adapter) {
        call.model.clone()
    } else {
        base_model(&engine.spec)
    };
    let realm = Realm {
        model: &model,
        cache_salt: view.cache_salt.as_deref(),
        block_size,
    };
    let chain: Arc<[BlockHash]> = chain(&realm, &tokens).into();
    if chain.is_empty() {
        return Err("too_short");
    }
    let shard = kv.shard.load();
    let shard = shard.as_ref().clone().ok_or("no_index")?;
    let asked = shard.send(FindOverlap {
        chain: chain.clone(),
    });
    let runs = timeout(INDEX_DEADLINE, asked).await.map_err(|_| "late")?;
    let overlap = PromptOverlap {
        runs: runs.map_err(|_| "no_index")?,
        blocks: chain.len() as u32,
        tokens: tokens.len() as u32,
        block_size,
    };
    Ok(Found {
        overlap: Arc::new(overlap),
        chain,
        shard,
    })
}

/// The block size of the model's engines, and the least busy of those whose events come.
fn live_source(call: &Call, worker: &Worker, kv: &KvIndexHandle) -> Option<(u32, Arc<Backend>)> {
    let snapshot = worker.gateway.directory.load();
    let pool = snapshot.view.pools.get(&call.model)?;
    let live = pool
        .members
        .iter()
        .filter(|slot| snapshot.view.backend(**slot).can_serve());
    let fed = live.filter_map(|slot| {
        let backend = &snapshot.entries[slot.0].backend;
        let source = kv
            .sources
            .iter()
            .find(|source| source.backend == backend.spec.name)?;
        let state = source.state.load();
        let size = state.block_size.filter(|_| state.connected)?;
        Some((size, backend.clone()))
    });
    fed.min_by_key(|(_, backend)| backend.live.in_flight())
}

/// A prompt that was sent to a backend: counts as held there, until it is told how it went.
pub struct Dispatch {
    shard: Addr<IndexShard>,
    holder: HolderId,
    chain: Arc<[BlockHash]>,
    fate: Fate,
}

impl Dispatch {
    /// Tells the index that a request goes to this backend.
    pub fn new(found: &Found, backend: &Backend) -> Option<Self> {
        let holder = *backend.spec.holders.first()?;
        let ttft = backend
            .live
            .load(tokio::time::Instant::now().into_std())
            .ttft_us;
        let hold = Duration::from_micros(2 * ttft.unwrap_or(0)).clamp(HOLD_MIN, HOLD_MAX);
        // bounded by the requests in flight
        found.shard.do_send(Dispatched {
            holder,
            chain: found.chain.clone(),
            hold,
        });
        Some(Dispatch {
            shard: found.shard.clone(),
            holder,
            chain: found.chain.clone(),
            fate: Fate::Withdrawn,
        })
    }

    /// The first byte came: the backend has computed the prompt.
    pub fn served(&mut self) {
        self.fate = Fate::Served;
    }
}

impl Drop for Dispatch {
    fn drop(&mut self) {
        self.shard.do_send(DispatchEnded {
            holder: self.holder,
            chain: self.chain.clone(),
            fate: self.fate,
        });
    }
}
