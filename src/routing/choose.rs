//! Filter, then pick: which backend serves this request, and why.
//!
//! Order: who may serve at all; a half-open backend's probe; the KV index; the prefix ring; the
//! strategy.

use crate::ids::{BackendId, PrefixKey, SessionKey, Slot};
use crate::ring::load_bound;
use crate::score::{
    OVERLOAD_SLACK_TOKENS, Overlap, PromptOverlap, Weights, composite, load, overlap,
};
use crate::strategy::{Candidate, Chance, Rotation, Strategy, pick};
use crate::view::{BackendView, ClusterView, Live, Load, Passage, Pool, Role};
use std::cmp::Ordering;

/// The settings that a choice depends on.
#[derive(Debug, Clone, Copy)]
pub struct ChoiceRules {
    /// What decides when nothing better is known.
    pub strategy: Strategy,
    /// Whether requests with a prefix key go by the ring.
    pub prefix_routing: bool,
    /// How far above its share a backend may go before its keys move on (0.2 = 20 %).
    pub load_factor_epsilon: f64,
    /// How a backend's overlap, load and health weigh.
    pub weights: Weights,
}

/// What is known of a request when it is placed.
#[derive(Debug, Clone, Copy)]
pub struct Ask<'a> {
    /// The model, as backends name it.
    pub model: &'a str,
    /// What is known of the prompt's blocks, if anything.
    pub overlap: Option<&'a PromptOverlap>,
    /// Equal for requests that begin alike.
    pub prefix: Option<PrefixKey>,
    /// Equal for requests of one session.
    pub session: Option<SessionKey>,
    /// Only backends of this role; none: any.
    pub role: Option<Role>,
    /// Backends that already failed this request.
    pub tried: &'a [BackendId],
}

/// Where a request goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// The backend.
    pub slot: Slot,
    /// Why this one.
    pub reason: Reason,
}

/// Why a backend was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// Its breaker is half open and this request tries it.
    Probe,
    /// The KV index.
    KvIndex {
        /// Blocks of the prompt that the backend can reach.
        blocks: u32,
    },
    /// The prefix ring.
    Prefix {
        /// Whether the key's home had more than its share, so that a neighbour took it.
        spilled: bool,
    },
    /// `selection_strategy`.
    Strategy,
    /// `selection_strategy: ConsistentHash` with a session key.
    Session,
}

/// Why nobody serves the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoBackend {
    /// No backend serves that model, and every backend's models are known.
    UnknownModel,
    /// No known backend serves it, but some have not said what they serve yet.
    ModelsNotKnownYet,
    /// It is served, but nobody may take a request now.
    NoneServing,
}

/// Chooses. The half-open probe it may name is not taken yet: the caller takes it, and asks
/// again when another was faster.
pub fn choose(
    rules: &ChoiceRules,
    view: &ClusterView,
    live: &impl Live,
    ask: &Ask<'_>,
    rotation: &mut Rotation,
    chance: &mut Chance,
) -> Result<Plan, NoBackend> {
    let Some(pool) = view.pools.get(ask.model) else {
        return Err(if view.all_models_known {
            NoBackend::UnknownModel
        } else {
            NoBackend::ModelsNotKnownYet
        });
    };
    let mut candidates = Vec::with_capacity(pool.members.len());
    let mut resting_probe = None;
    for &slot in &pool.members {
        let backend = view.backend(slot);
        if ask.tried.contains(&backend.id) || !may_serve(backend, ask.role) {
            continue;
        }
        if backend.passage == Passage::HalfOpen {
            // first come first served, or a strategy that shuns it would leave it out for good;
            // never a second attempt: that one has failed once already
            if live.probe_free(slot) && ask.tried.is_empty() {
                let reason = Reason::Probe;
                let probe = Plan { slot, reason };
                if !live.load(slot).resting {
                    return Ok(probe);
                }
                resting_probe = Some(probe);
            }
            continue;
        }
        candidates.push(Candidate {
            slot,
            load: live.load(slot),
        });
    }
    // resting is a wish, not a wall: with everybody resting, asking is the only way to learn
    if candidates.iter().any(|c| !c.load.resting) {
        candidates.retain(|c| !c.load.resting);
    }
    if candidates.is_empty() {
        return resting_probe.ok_or(NoBackend::NoneServing);
    }
    if let Some(prompt) = ask.overlap
        && let Some((slot, blocks)) = by_overlap(view, &candidates, prompt, (rules, chance))
    {
        let reason = Reason::KvIndex { blocks };
        return Ok(Plan { slot, reason });
    }
    if let Some(key) = ask.prefix.filter(|_| rules.prefix_routing)
        && let Some((slot, spilled)) = on_ring(view, pool, &candidates, key, rules)
    {
        let reason = Reason::Prefix { spilled };
        return Ok(Plan { slot, reason });
    }
    if let (Strategy::ConsistentHash, Some(key)) = (rules.strategy, ask.session) {
        let mut members = pool.ring.walk(key.0).map(|i| pool.members[i]);
        if let Some(slot) = members.find(|s| candidates.iter().any(|c| c.slot == *s)) {
            let reason = Reason::Session;
            return Ok(Plan { slot, reason });
        }
    }
    let slot = pick(
        rules.strategy,
        (view, ask.model),
        &candidates,
        rotation,
        chance,
    );
    Ok(Plan {
        slot,
        reason: Reason::Strategy,
    })
}

fn may_serve(backend: &BackendView, role: Option<Role>) -> bool {
    role.is_none_or(|r| r == backend.role) && backend.can_serve()
}

/// The candidate of the best score, when some candidate has enough of the prompt to matter.
fn by_overlap(
    view: &ClusterView,
    candidates: &[Candidate],
    prompt: &PromptOverlap,
    (rules, chance): (&ChoiceRules, &mut Chance),
) -> Option<(Slot, u32)> {
    let weights = &rules.weights;
    let scored: Vec<(&Candidate, Overlap)> = candidates
        .iter()
        .map(|c| (c, overlap(prompt, &view.backend(c.slot).holders, weights)))
        .collect();
    let most = scored.iter().map(|(_, o)| o.raw).fold(0.0, f64::max);
    if most <= 0.0 || most < weights.min_overlap {
        return None;
    }
    let idlest = scored.iter().min_by_key(|(c, _)| c.load.queued_tokens)?;
    let mut best: Option<(f64, Slot, u32)> = None;
    let mut equals = 0;
    for (candidate, own) in &scored {
        // how much less it has to compute than the least busy one
        let saved = prompt
            .uncached(&idlest.1)
            .saturating_sub(prompt.uncached(own));
        let waits = candidate.load.queued_tokens - idlest.0.load.queued_tokens;
        if waits > saved + OVERLOAD_SLACK_TOKENS {
            continue;
        }
        let Load {
            in_flight,
            queued_tokens,
            success,
            ..
        } = candidate.load;
        let load = load(
            in_flight,
            queued_tokens,
            view.backend(candidate.slot).weight,
        );
        let score = composite(weights, own.weighted, load, success.unwrap_or(1.0));
        match best.map(|(most, ..)| score.total_cmp(&most)) {
            None | Some(Ordering::Greater) => {
                best = Some((score, candidate.slot, own.blocks));
                equals = 1;
            }
            Some(Ordering::Equal) => {
                equals += 1;
                if chance.below(equals) == 0 {
                    best = Some((score, candidate.slot, own.blocks));
                }
            }
            Some(Ordering::Less) => {}
        }
    }
    best.map(|(_, slot, blocks)| (slot, blocks))
}

/// The first candidate clockwise from the key that has not more than its share.
fn on_ring(
    view: &ClusterView,
    pool: &Pool,
    candidates: &[Candidate],
    key: PrefixKey,
    rules: &ChoiceRules,
) -> Option<(Slot, bool)> {
    let weight = |slot: Slot| view.backend(slot).weight;
    let total: u64 = candidates.iter().map(|c| u64::from(c.load.in_flight)).sum();
    let total_weight = candidates.iter().map(|c| u64::from(weight(c.slot))).sum();
    let mut spilled = false;
    for index in pool.ring.walk(key.0) {
        let slot = pool.members[index];
        let Some(candidate) = candidates.iter().find(|c| c.slot == slot) else {
            continue;
        };
        let bound = load_bound(total, weight(slot), total_weight, rules.load_factor_epsilon);
        if u64::from(candidate.load.in_flight) < bound {
            return Some((slot, spilled));
        }
        spilled = true;
    }
    None
}
