//! Policies of placement, one file each: the router's own, by its own code, and others, by their published formulas.

mod active_blocks;
mod cache_aware;
mod composite;
mod cost;
mod dynamo;
mod llm_d;
mod lmetric;
mod oracle;

use crate::engine::Engine;
use crate::numbers::At;
use crate::request::Request;
use crate::router::WEIGHTS;
use routing::choose::ChoiceRules;
use routing::health::HealthState;
use routing::ids::{BackendId, Slot};
use routing::knowledge::Mode;
use routing::score::{Known, reach};
use routing::strategy::{Chance, Strategy};
use routing::view::{ClusterView, Live, Load};
use std::time::Duration;

/// Chooses workers.
pub trait Policy {
    /// What the router keeps an index from for it; blind: it keeps none.
    fn knowledge(&self) -> Mode;
    /// Chooses; none when nobody can serve.
    fn place(&mut self, sight: &Sight<'_>, chance: &mut Chance) -> Option<Slot>;
    /// A request went to a worker.
    fn sent(&mut self, _worker: usize, _request: &Request) {}
    /// Its first token came so long after; so many tokens were believed to wait there, its own included.
    fn first_token(&mut self, _worker: usize, _request: &Request, _pair: (u64, Duration)) {}
    /// It ended, before its first token or after.
    fn ended(&mut self, _worker: usize, _request: &Request, _begun: bool) {}
}

/// All that a policy may read.
pub struct Sight<'a> {
    /// What is placed.
    pub request: &'a Request,
    /// Workers that already failed it.
    pub tried: &'a [BackendId],
    /// Who is there.
    pub view: &'a ClusterView,
    /// How busy they are.
    pub live: &'a At<'a>,
    /// What is known of the prompt's blocks.
    pub known: Option<&'a Known>,
    /// What engines say of themselves; routers that ask get it without delay.
    pub engines: &'a [Engine],
}

/// A worker that may serve, with what the router counts and believes of it.
#[derive(Debug, Clone, Copy)]
pub struct Worker {
    /// Which.
    pub slot: usize,
    /// Its numbers.
    pub load: Load,
    /// Tokens of the prompt that are believed to be cached there.
    pub cached: u64,
    /// The other ones.
    pub uncached: u64,
}

impl Sight<'_> {
    /// Those that may serve.
    pub fn workers(&self) -> Vec<Worker> {
        let all = self.view.backends.iter().enumerate();
        let able = all.filter(|(_, backend)| {
            backend.health == HealthState::Healthy && !self.tried.contains(&backend.id)
        });
        let workers = able.map(|(slot, backend)| {
            let load = self.live.load(Slot(slot));
            let found = self
                .known
                .map(|known| reach(known, backend, &load, &WEIGHTS));
            let tokens = self.request.prompt.len() as u64;
            let uncached = found.map_or(tokens, |found| found.uncached);
            Worker {
                slot,
                load,
                cached: tokens - uncached,
                uncached,
            }
        });
        workers.collect()
    }
}

/// The worker of the lowest cost; of equals the one of the lowest second cost, else by chance.
pub fn lowest(
    workers: &[Worker],
    chance: &mut Chance,
    cost: impl Fn(&Worker) -> (f64, f64),
) -> Option<Slot> {
    let mut best: Option<((f64, f64), usize)> = None;
    let mut equals = 0;
    for worker in workers {
        let cost = cost(worker);
        if best.is_none_or(|(least, _)| cost < least) {
            best = Some((cost, worker.slot));
            equals = 1;
        } else if best.is_some_and(|(least, _)| cost == least) {
            equals += 1;
            if chance.below(equals) == 0 {
                best = Some((cost, worker.slot));
            }
        }
    }
    best.map(|(_, slot)| Slot(slot))
}

/// How a policy is made anew for each run.
type Make = fn() -> Box<dyn Policy>;

/// The settings' defaults, but for the strategy.
const fn rules(strategy: Strategy, prefix_routing: bool) -> ChoiceRules {
    ChoiceRules {
        strategy,
        prefix_routing,
        load_factor_epsilon: 0.2,
        weights: WEIGHTS,
    }
}

/// What all others are compared with.
pub const BASE: &str = "round robin";
/// What knows more than a router can.
pub const ORACLE: &str = "oracle";
/// The router's defaults: with events, and without.
pub const OURS: [&str; 2] = ["exact", "approximate"];

/// All of them, in the order of the tables.
pub const ALL: [(&str, Make); 13] = [
    (BASE, || {
        composite::Ours::boxed(Mode::Blind, rules(Strategy::RoundRobin, false))
    }),
    ("power of two", || {
        composite::Ours::boxed(Mode::Blind, rules(Strategy::PowerOfTwo, false))
    }),
    ("prefix ring", || {
        composite::Ours::boxed(Mode::Blind, rules(Strategy::LeastConnections, true))
    }),
    (OURS[1], || {
        composite::Ours::boxed(Mode::Approximate, rules(Strategy::LeastConnections, true))
    }),
    (OURS[0], || {
        composite::Ours::boxed(Mode::Exact, rules(Strategy::LeastConnections, true))
    }),
    ("sglang", || {
        cache_aware::CacheAware::boxed(cache_aware::SGLANG)
    }),
    ("smg", || cache_aware::CacheAware::boxed(cache_aware::SMG)),
    ("dynamo", || Box::new(dynamo::Dynamo::default())),
    ("llm-d", || Box::new(llm_d::LlmD)),
    ("lmetric", || Box::new(lmetric::LMetric)),
    ("cost, approx.", || cost::Cost::boxed(Mode::Approximate)),
    ("cost, exact", || cost::Cost::boxed(Mode::Exact)),
    (ORACLE, || Box::new(oracle::Oracle::default())),
];

/// Makes a policy by its name.
pub fn make(name: &str) -> Option<Box<dyn Policy>> {
    let found = ALL.iter().find(|(of, _)| *of == name);
    found.map(|(_, make)| make())
}

#[cfg(test)]
pub fn worker(
    slot: usize,
    in_flight: u32,
    queued_tokens: u64,
    cached: u64,
    uncached: u64,
) -> Worker {
    Worker {
        slot,
        load: Load {
            in_flight,
            queued_tokens,
            ..Load::default()
        },
        cached,
        uncached,
    }
}
