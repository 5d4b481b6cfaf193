//! All that a decision may read: who is there (a snapshot) and how busy they are (live numbers).

use crate::health::HealthState;
use crate::ids::{BackendId, Slot};
use crate::knowledge::Mode;
use crate::prefix_index::HolderId;
use crate::ring::Ring;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

/// What a backend does when serving is split.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Computes the prompt's KV cache.
    Prefill,
    /// Generates from a KV cache that is already there.
    Decode,
    /// Both.
    Unified,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Unified => "unified",
        })
    }
}

/// What the circuit breaker lets through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Passage {
    /// Everything.
    #[default]
    Closed,
    /// Nothing.
    Open,
    /// One request at a time, to see whether the backend is back.
    HalfOpen,
}

impl Passage {
    /// The word used in metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Passage::Closed => "closed",
            Passage::Open => "open",
            Passage::HalfOpen => "half_open",
        }
    }
}

/// One backend as the last snapshot saw it.
#[derive(Debug, Clone)]
pub struct BackendView {
    /// Stable for the life of the process.
    pub id: BackendId,
    /// The configured name; unique.
    pub name: Arc<str>,
    /// Its part in split serving.
    pub role: Role,
    /// Its share relative to others, at least 1.
    pub weight: u32,
    /// The models it serves; none while they are not known yet.
    pub models: Option<Arc<[Arc<str>]>>,
    /// What probes say.
    pub health: HealthState,
    /// What the breaker says.
    pub passage: Passage,
    /// Whether it takes no new requests.
    pub draining: bool,
    /// Its own memory in the KV index: of unknown rank first, then one per data-parallel rank.
    pub memories: Arc<[Memory]>,
    /// The storage namespaces that it reads.
    pub reads: Arc<[HolderId]>,
    /// Whom it can hand KV to, or get it from.
    pub group: HandOffGroup,
}

/// Prefill and decode workers of one group can hand over to each other: they have the same connector,
/// and share storage where it needs some.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct HandOffGroup(pub u32);

/// The KV cache of an engine, or of one of its data-parallel ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Which rank; none when the engine does not say, or has one only.
    pub rank: Option<u32>,
    /// Its name in the index.
    pub holder: HolderId,
}

impl BackendView {
    /// Whether it takes requests now: a half-open one takes one at a time.
    pub fn can_serve(&self) -> bool {
        self.health == HealthState::Healthy && self.passage != Passage::Open && !self.draining
    }
}

/// Live numbers of one backend, read at the moment of the decision.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Load {
    /// Requests that were sent and have not ended, streams included.
    pub in_flight: u32,
    /// Moving average of the time to first token in microseconds; none when unsampled or stale.
    pub ttft_us: Option<u64>,
    /// Prompt tokens that were sent and wait to be computed, as far as is known.
    pub queued_tokens: u64,
    /// Tokens whose KV running requests hold there, as far as is known: of prompts that were handed to it.
    pub held_tokens: u64,
    /// Tokens that it has computed lately, or has been sent to compute: of prompts those that were
    /// not cached, and of answers all. What is older counts less.
    pub recent_work: u64,
    /// Moving average of success, from 0 to 1; none when nothing has ended yet.
    pub success: Option<f64>,
    /// Whether it asked to be left alone for a moment (429, or a 503 that says so).
    pub resting: bool,
    /// Where the knowledge of its KV cache comes from.
    pub mode: Mode,
    /// Tokens per block, as its events say; none while they have not.
    pub block_size: Option<u32>,
}

/// Where live numbers come from: atomics in the gateway, plain vectors in tests.
pub trait Live {
    /// The numbers of one backend.
    fn load(&self, slot: Slot) -> Load;
    /// Whether a half-open backend's one probe can still be taken.
    fn probe_free(&self, slot: Slot) -> bool;
}

/// The backends of one model, with their ring.
#[derive(Debug, Clone)]
pub struct Pool {
    /// In the order of their names, so that the order of registration never matters.
    pub members: Vec<Slot>,
    /// The prefix ring over all members, able to serve or not: health must not move keys.
    pub ring: Arc<Ring>,
}

/// A snapshot of the cluster.
#[derive(Debug, Clone, Default)]
pub struct ClusterView {
    /// All backends; a [`Slot`] indexes this.
    pub backends: Vec<BackendView>,
    /// Per model.
    pub pools: BTreeMap<Arc<str>, Pool>,
    /// Whether the models of every backend are known, so that an unknown name is surely wrong.
    pub all_models_known: bool,
}

impl ClusterView {
    /// Groups `backends` into pools. Rings of `previous` whose members and weights are the same
    /// are kept: a change of health costs no sorting.
    pub fn new(backends: Vec<BackendView>, virtual_nodes: u32, previous: &ClusterView) -> Self {
        let mut slots: BTreeMap<Arc<str>, BTreeSet<(Arc<str>, usize)>> = BTreeMap::new();
        for (i, backend) in backends.iter().enumerate() {
            for model in backend.models.iter().flat_map(|m| m.iter()) {
                slots
                    .entry(model.clone())
                    .or_default()
                    .insert((backend.name.clone(), i));
            }
        }
        let pools = slots
            .into_iter()
            .map(|(model, members)| {
                let members: Vec<Slot> = members.into_iter().map(|(_, i)| Slot(i)).collect();
                let weighted: Vec<(Arc<str>, u32)> = members
                    .iter()
                    .map(|s| (backends[s.0].name.clone(), backends[s.0].weight))
                    .collect();
                let ring = previous
                    .pools
                    .get(&model)
                    .filter(|pool| pool.ring.is_for(&weighted, virtual_nodes))
                    .map(|pool| pool.ring.clone())
                    .unwrap_or_else(|| Arc::new(Ring::new(weighted, virtual_nodes)));
                (model, Pool { members, ring })
            })
            .collect();
        let all_models_known = backends.iter().all(|b| b.models.is_some());
        ClusterView {
            backends,
            pools,
            all_models_known,
        }
    }

    /// Whether somebody can serve this model at this moment; with split serving, prefill workers alone cannot.
    pub fn has_server(&self, model: &str, is_split: bool) -> bool {
        let members = self.pools.get(model).map(|pool| &pool.members);
        let mut members = members.into_iter().flatten();
        members.any(|slot| {
            let backend = self.backend(*slot);
            backend.can_serve() && !(is_split && backend.role == Role::Prefill)
        })
    }

    /// The backend at a slot of this view.
    pub fn backend(&self, slot: Slot) -> &BackendView {
        &self.backends[slot.0]
    }
}
