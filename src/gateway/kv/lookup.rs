//! Asks the index about a request, and tells it where the request went.

use super::tokens::{self, TokenView};
use super::wiring::BASE_REALM;
use crate::gateway::Worker;
use crate::proxy::Call;
use crate::telemetry::names;
use actix::Addr;
use actix_web::rt::time::timeout;
use actors::backend::Backend;
use actors::index_shard::{DispatchEnded, Dispatched, Fate, FindOverlap, IndexShard};
use actors::kv_index::KvIndexHandle;
use metrics::counter;
use routing::block::{BlockHash, Realm, chain};
use routing::prefix_index::HolderId;
use routing::score::PromptOverlap;
use std::sync::Arc;
use std::time::Duration;

/// A lookup that takes longer is given up, and the request goes by the next best rule.
const INDEX_DEADLINE: Duration = Duration::from_millis(10);
/// Blocks of one prompt; a longer one fits no engine, and would push others out of the index.
const CHAIN_BLOCKS_MAX: usize = 65_536;
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
    let live = live_source(call, worker, kv)?;
    let view = TokenView::parse(&call.body).ok_or("no_tokens")?;
    let tokens = tokens::of(call, &view, worker, &live.engine)
        .await
        .ok_or("no_tokens")?;
    let realm = Realm {
        model: if live.is_base {
            BASE_REALM
        } else {
            &call.model
        },
        cache_salt: view.cache_salt.as_deref(),
        block_size: live.block_size,
    };
    let chain: Arc<[BlockHash]> = chain(&realm, &tokens).into();
    if chain.is_empty() {
        return Err("too_short");
    }
    if chain.len() > CHAIN_BLOCKS_MAX {
        return Err("too_long");
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
        block_size: live.block_size,
    };
    Ok(Found {
        overlap: Arc::new(overlap),
        chain,
        shard,
    })
}

/// What a lookup needs of the engines whose events come.
struct Live {
    block_size: u32,
    /// The least busy of them, to ask for tokens.
    engine: Arc<Backend>,
    /// Whether the request is for their own model: a name that may be an adapter's is not taken
    /// for it, since a miss costs less than a false hit.
    is_base: bool,
}

fn live_source(call: &Call, worker: &Worker, kv: &KvIndexHandle) -> Result<Live, &'static str> {
    let snapshot = worker.gateway.directory.load();
    let pool = snapshot.view.pools.get(&call.model).ok_or("no_events")?;
    if pool.members.len() < 2 {
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
    let fed = members
        .filter(|(view, _)| view.can_serve())
        .filter_map(|(_, backend)| {
            let own = backend.spec.holders.first()?;
            let source = kv.sources.iter().find(|source| source.holder == *own)?;
            let state = source.state.load();
            let size = state.block_size.filter(|_| state.connected)?;
            Some((size, backend.clone()))
        });
    let (block_size, engine) = fed
        .min_by_key(|(_, backend)| backend.live.in_flight())
        .ok_or("no_events")?;
    Ok(Live {
        block_size,
        engine,
        is_base,
    })
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
