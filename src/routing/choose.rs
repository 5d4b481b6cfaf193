//! Filter, then pick: which backend serves this request, and why.
//!
//! Order: who may serve at all; a half-open backend's probe; the KV index; the prefix ring; the
//! strategy.

use crate::eligible::{LeftOut, left_out_of, spare_resting};
use crate::fair::Fair;
use crate::ids::{BackendId, PrefixKey, SessionKey, Slot};
use crate::ring::load_bound;
use crate::score::{Known, Reach, Weights, composite, load, reach};
use crate::strategy::{Candidate, Chance, Rotation, Strategy, pick};
use crate::view::{ClusterView, HandOffGroup, Live, Pool, Role};
use std::cmp::{Ordering, Reverse};

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
    pub known: Option<&'a Known>,
    /// Equal for requests that begin alike.
    pub prefix: Option<PrefixKey>,
    /// Equal for requests of one session.
    pub session: Option<SessionKey>,
    /// Only backends of this role; none: any.
    pub role: Option<Role>,
    /// Only backends of this hand-off group; none: any.
    pub group: Option<HandOffGroup>,
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
    let pool = pool_of(view, ask.model)?;
    let able = able(view, live, pool, ask);
    let probe = |slot| Plan {
        slot,
        reason: Reason::Probe,
    };
    if let Some(slot) = able.probe {
        return Ok(probe(slot));
    }
    let candidates = able.candidates;
    if candidates.is_empty() {
        return able.resting_probe.map(probe).ok_or(NoBackend::NoneServing);
    }
    if let Some(known) = ask.known
        && let Some((slot, blocks)) = by_overlap(view, &candidates, known, (rules, chance))
    {
        let reason = Reason::KvIndex { blocks };
        return Ok(Plan { slot, reason });
    }
    if let Some(key) = ask.prefix.filter(|_| rules.prefix_routing) {
        let placed = match ask.known {
            Some(known) => by_work(view, pool, &candidates, (key, known), rules),
            None => on_ring(view, pool, &candidates, key, rules),
        };
        if let Some((slot, spilled)) = placed {
            let reason = Reason::Prefix { spilled };
            return Ok(Plan { slot, reason });
        }
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

/// The backends of a model.
pub(crate) fn pool_of<'v>(view: &'v ClusterView, model: &str) -> Result<&'v Pool, NoBackend> {
    view.pools.get(model).ok_or(if view.all_models_known {
        NoBackend::UnknownModel
    } else {
        NoBackend::ModelsNotKnownYet
    })
}

/// Who may serve a request.
pub(crate) struct Able {
    /// Whoever has nothing against it; of these only those that do not rest, unless all do.
    pub(crate) candidates: Vec<Candidate>,
    /// A half-open one that waits to be tried. First come first served, or a strategy that shuns it would
    /// leave it out for good; never as a second attempt: that request has failed once already.
    pub(crate) probe: Option<Slot>,
    /// The same, which asked to be left alone for a moment.
    pub(crate) resting_probe: Option<Slot>,
}

impl Able {
    /// All of them.
    pub(crate) fn slots(&self) -> impl Iterator<Item = Slot> {
        let probes = self.probe.into_iter().chain(self.resting_probe);
        self.candidates
            .iter()
            .map(|candidate| candidate.slot)
            .chain(probes)
    }
}

pub(crate) fn able(view: &ClusterView, live: &impl Live, pool: &Pool, ask: &Ask<'_>) -> Able {
    let mut able = Able {
        candidates: Vec::with_capacity(pool.members.len()),
        probe: None,
        resting_probe: None,
    };
    for &slot in &pool.members {
        let backend = view.backend(slot);
        let other_group = ask.group.is_some_and(|group| group != backend.group);
        if other_group || ask.tried.contains(&backend.id) {
            continue;
        }
        match left_out_of(backend, ask.role) {
            None => able.candidates.push(Candidate {
                slot,
                load: live.load(slot),
            }),
            Some(LeftOut::BreakerHalfOpen) if live.probe_free(slot) && ask.tried.is_empty() => {
                let found = match live.load(slot).resting {
                    false => &mut able.probe,
                    true => &mut able.resting_probe,
                };
                found.get_or_insert(slot);
            }
            Some(_) => {}
        }
    }
    drop(spare_resting(&mut able.candidates));
    able
}

/// What a candidate is worth for a prompt, term by term.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Terms {
    /// The candidate.
    pub candidate: Candidate,
    /// What the prompt finds there.
    pub reach: Reach,
    /// 1 when idle, towards 0 with requests and queued tokens.
    pub idle: f64,
    /// Its average success.
    pub health: f64,
    /// All of it by the weights of the settings.
    pub score: f64,
    /// Whether it has so much queued that its overlap does not make up for it.
    pub overloaded: bool,
}

/// Weighs all candidates for a prompt.
pub fn weigh(
    rules: &ChoiceRules,
    view: &ClusterView,
    candidates: &[Candidate],
    known: &Known,
) -> Vec<Terms> {
    let terms = candidates.iter().map(|&candidate| {
        let backend = view.backend(candidate.slot);
        let at = candidate.load;
        let reach = reach(known, backend, &at, &rules.weights);
        let load = load(at.in_flight, at.queued_tokens, backend.weight);
        let health = at.success.unwrap_or(1.0);
        let score = composite(&rules.weights, reach.overlap.weighted, load, health);
        Terms {
            candidate,
            reach,
            idle: 1.0 - load,
            health,
            score,
            overloaded: false,
        }
    });
    let mut terms: Vec<Terms> = terms.collect();
    let fair = Fair::of(view, candidates);
    // of equals the one that has least of it: the others save something against that
    let queued = |of: &&Terms| (of.candidate.load.queued_tokens, Reverse(of.reach.uncached));
    let idlest = terms.iter().min_by_key(queued);
    let idlest = idlest.map_or(0, |of| of.reach.uncached);
    for of in &mut terms {
        let weight = view.backend(of.candidate.slot).weight;
        let saved = idlest.saturating_sub(of.reach.uncached);
        let prompt = (of.reach.tokens, saved, of.reach.overlap.speculative);
        of.overloaded = fair.is_exceeded_by(&of.candidate.load, weight, prompt);
    }
    terms
}

/// The candidate of the best score, when some candidate has enough of the prompt to matter.
fn by_overlap(
    view: &ClusterView,
    candidates: &[Candidate],
    known: &Known,
    (rules, chance): (&ChoiceRules, &mut Chance),
) -> Option<(Slot, u32)> {
    let terms = weigh(rules, view, candidates, known);
    let most = terms.iter().map(|of| of.reach.overlap.raw);
    let most = most.fold(0.0, f64::max);
    if most <= 0.0 || most < rules.weights.min_overlap {
        return None;
    }
    let mut best: Option<&Terms> = None;
    let mut equals = 0;
    for of in terms.iter().filter(|of| !of.overloaded) {
        match best.map(|best| of.score.total_cmp(&best.score)) {
            None | Some(Ordering::Greater) => {
                best = Some(of);
                equals = 1;
            }
            Some(Ordering::Equal) => {
                equals += 1;
                if chance.below(equals) == 0 {
                    best = Some(of);
                }
            }
            Some(Ordering::Less) => {}
        }
    }
    best.map(|best| (best.candidate.slot, best.reach.overlap.blocks))
}

/// Candidates clockwise from the key.
fn clockwise<'a>(
    pool: &'a Pool,
    candidates: &'a [Candidate],
    key: PrefixKey,
) -> impl Iterator<Item = &'a Candidate> {
    let slots = pool.ring.walk(key.0).map(|index| pool.members[index]);
    slots.filter_map(|slot| candidates.iter().find(|candidate| candidate.slot == slot))
}

/// Where a prompt of which nobody holds enough would be computed first: the candidate with the fewest tokens to
/// compute until then, its own included; of equals the one with the fewest requests, and of these the first clockwise
/// from the key, so that several gateways agree about an idle fleet.
fn by_work(
    view: &ClusterView,
    pool: &Pool,
    candidates: &[Candidate],
    (key, known): (PrefixKey, &Known),
    rules: &ChoiceRules,
) -> Option<(Slot, bool)> {
    let cost = |candidate: &Candidate| {
        let backend = view.backend(candidate.slot);
        let reach = reach(known, backend, &candidate.load, &rules.weights);
        let weight = f64::from(backend.weight);
        let tokens = candidate.load.queued_tokens.saturating_add(reach.uncached);
        let per_weight = (tokens as f64, f64::from(candidate.load.in_flight));
        (per_weight.0 / weight, per_weight.1 / weight)
    };
    let mut least = (f64::INFINITY, f64::INFINITY);
    let mut equals: Vec<Slot> = Vec::new();
    for candidate in candidates {
        let cost = cost(candidate);
        if cost < least {
            least = cost;
            equals.clear();
        }
        if cost == least {
            equals.push(candidate.slot);
        }
    }
    let mut around = clockwise(pool, candidates, key).map(|candidate| candidate.slot);
    let home = around.next()?;
    let slot = match equals[..] {
        [only] => only,
        _ if equals.contains(&home) => home,
        _ => around.find(|slot| equals.contains(slot))?,
    };
    Some((slot, slot != home))
}

/// The first candidate clockwise from the key that has not more than its share of requests in flight.
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
    for candidate in clockwise(pool, candidates, key) {
        let slot = candidate.slot;
        let bound = load_bound(total, weight(slot), total_weight, rules.load_factor_epsilon);
        if u64::from(candidate.load.in_flight) < bound {
            return Some((slot, spilled));
        }
        spilled = true;
    }
    None
}
