//! Picks among backends that may serve when neither cache nor prefix says more.

use crate::ids::{BackendId, Slot};
use crate::view::{ClusterView, Load};
use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};
use std::str::FromStr;
use std::sync::Arc;

/// `selection_strategy` of the settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Strategy {
    /// One after the other, by name.
    RoundRobin,
    /// One after the other, in proportion to weight.
    WeightedRoundRobin,
    /// By chance, in proportion to weight.
    Random,
    /// Fewest requests in flight per unit of weight.
    #[default]
    LeastConnections,
    /// Lowest expected time to first token.
    LeastLatency,
    /// The same backend for the same session.
    ConsistentHash,
    /// The less busy of two drawn by chance.
    PowerOfTwo,
}

impl Strategy {
    /// All of them, as the settings spell them.
    pub const ALL: [(&'static str, Strategy); 7] = [
        ("RoundRobin", Strategy::RoundRobin),
        ("WeightedRoundRobin", Strategy::WeightedRoundRobin),
        ("Random", Strategy::Random),
        ("LeastConnections", Strategy::LeastConnections),
        ("LeastLatency", Strategy::LeastLatency),
        ("ConsistentHash", Strategy::ConsistentHash),
        ("PowerOfTwo", Strategy::PowerOfTwo),
    ];
}

impl FromStr for Strategy {
    type Err = ();
    fn from_str(text: &str) -> Result<Self, ()> {
        let found = Self::ALL.iter().find(|(name, _)| *name == text);
        found.map(|(_, strategy)| *strategy).ok_or(())
    }
}

/// A backend that may serve, with its numbers of this moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// Where it stands in the view.
    pub slot: Slot,
    /// Its live numbers.
    pub load: Load,
}

/// What a strategy remembers between requests. One per HTTP worker.
#[derive(Debug, Clone, Default)]
pub struct Rotation {
    // per model, so that two models asked in turn do not share one counter
    last_served: BTreeMap<Arc<str>, Arc<str>>,
    credit: HashMap<BackendId, i64>,
}

/// Where chance comes from: the caller seeds it, so that a test can repeat a choice.
/// Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators" (SplitMix64).
#[derive(Debug, Clone)]
pub struct Chance(pub u64);

impl Chance {
    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `n`, which must be at least 1.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(n)) >> 64) as u64
    }
}

/// Picks one of `candidates`, which must not be empty and be in the order of the pool's names.
/// `ConsistentHash` is resolved on the ring before this and falls back to load here.
pub fn pick(
    strategy: Strategy,
    (view, model): (&ClusterView, &str),
    candidates: &[Candidate],
    rotation: &mut Rotation,
    chance: &mut Chance,
) -> Slot {
    match strategy {
        Strategy::RoundRobin => rotation.next(view, model, candidates),
        Strategy::WeightedRoundRobin => rotation.next_weighted(view, candidates),
        Strategy::Random => weighted_random(view, candidates, chance),
        Strategy::LeastLatency => least_latency(view, candidates, chance),
        Strategy::PowerOfTwo => power_of_two(view, candidates, chance),
        Strategy::LeastConnections | Strategy::ConsistentHash => {
            lowest(candidates, chance, |c| per_weight(view, c))
        }
    }
}

impl Rotation {
    fn next(&mut self, view: &ClusterView, model: &str, candidates: &[Candidate]) -> Slot {
        let name = |c: &Candidate| &view.backend(c.slot).name;
        let last = self.last_served.get_mut(model);
        // the next name after the last served one, not the next index: candidates come and go
        let next = last
            .as_ref()
            .and_then(|last| candidates.iter().find(|c| name(c) > last))
            .unwrap_or(&candidates[0]);
        match last {
            Some(last) => *last = name(next).clone(),
            None => {
                self.last_served
                    .insert(Arc::from(model), name(next).clone());
            }
        }
        next.slot
    }

    /// Smooth weighted round robin: each gains its weight, the richest serves and pays the total.
    fn next_weighted(&mut self, view: &ClusterView, candidates: &[Candidate]) -> Slot {
        let mut total = 0;
        let mut best: Option<(i64, &Candidate)> = None;
        for candidate in candidates {
            let backend = view.backend(candidate.slot);
            total += i64::from(backend.weight);
            let credit = self.credit.entry(backend.id).or_default();
            *credit += i64::from(backend.weight);
            if best.is_none_or(|(most, _)| *credit > most) {
                best = Some((*credit, candidate));
            }
        }
        let (_, winner) = best.expect("candidates are not empty");
        if let Some(credit) = self.credit.get_mut(&view.backend(winner.slot).id) {
            *credit -= total;
        }
        self.forget_removed(view);
        winner.slot
    }

    fn forget_removed(&mut self, view: &ClusterView) {
        if self.credit.len() > 2 * view.backends.len() {
            self.credit
                .retain(|id, _| view.backends.iter().any(|b| b.id == *id));
        }
    }
}

fn weighted_random(view: &ClusterView, candidates: &[Candidate], chance: &mut Chance) -> Slot {
    let weight = |c: &Candidate| u64::from(view.backend(c.slot).weight);
    let mut ticket = chance.below(candidates.iter().map(weight).sum());
    for candidate in candidates {
        match ticket.checked_sub(weight(candidate)) {
            Some(rest) => ticket = rest,
            None => return candidate.slot,
        }
    }
    candidates[candidates.len() - 1].slot
}

fn per_weight(view: &ClusterView, candidate: &Candidate) -> f64 {
    f64::from(candidate.load.in_flight) / f64::from(view.backend(candidate.slot).weight)
}

/// Expected wait = average time to first token × (requests in flight + 1) / weight, as in peak-EWMA
/// balancing. An unsampled backend is explored first, but only by one request at a time.
fn least_latency(view: &ClusterView, candidates: &[Candidate], chance: &mut Chance) -> Slot {
    let typical = candidates.iter().filter_map(|c| c.load.ttft_us).min();
    lowest(candidates, chance, |c| {
        let queue = f64::from(c.load.in_flight + 1) / f64::from(view.backend(c.slot).weight);
        match (c.load.ttft_us, typical) {
            (Some(us), _) => us as f64 * queue,
            (None, _) if c.load.in_flight == 0 => -1.0,
            (None, typical) => typical.unwrap_or(1) as f64 * queue,
        }
    })
}

fn power_of_two(view: &ClusterView, candidates: &[Candidate], chance: &mut Chance) -> Slot {
    let n = candidates.len() as u64;
    if n == 1 {
        return candidates[0].slot;
    }
    let first = chance.below(n);
    let second = (first + 1 + chance.below(n - 1)) % n;
    let two = [candidates[first as usize], candidates[second as usize]];
    lowest(&two, chance, |c| per_weight(view, c))
}

/// The candidate of the lowest cost; equals share by chance.
fn lowest(candidates: &[Candidate], chance: &mut Chance, cost: impl Fn(&Candidate) -> f64) -> Slot {
    let mut best = (f64::INFINITY, candidates[0].slot);
    let mut equals = 0;
    for candidate in candidates {
        let cost = cost(candidate);
        match cost.partial_cmp(&best.0) {
            Some(Ordering::Less) => {
                best = (cost, candidate.slot);
                equals = 1;
            }
            Some(Ordering::Equal) => {
                equals += 1;
                if chance.below(equals) == 0 {
                    best.1 = candidate.slot;
                }
            }
            _ => {}
        }
    }
    best.1
}
