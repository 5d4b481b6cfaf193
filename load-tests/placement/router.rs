//! The router's side of a run: the view of the fleet, what is counted of each worker, what is believed of their caches;
//! and the policy that chooses by these.

use crate::beliefs::{Beliefs, holder};
use crate::engine::Engine;
use crate::numbers::{At, Numbers};
use crate::policies::{Policy, Sight};
use crate::request::{MODEL, Request};
use engine_sim::CacheEvent;
use routing::health::HealthState;
use routing::ids::BackendId;
use routing::knowledge::{Mode, is_found};
use routing::score::{Reach, Weights, reach};
use routing::strategy::Chance;
use routing::view::{BackendView, ClusterView, HandOffGroup, Live, Memory, Passage, Role};
use std::sync::Arc;
use std::time::Duration;

/// `kv_cache_index.scoring` by default.
pub const WEIGHTS: Weights = Weights {
    overlap: 0.6,
    load: 0.3,
    health: 0.1,
    min_overlap: 0.3,
    gpu: 1.0,
    cpu: 0.8,
    storage: 0.6,
};
/// `prefix_routing.virtual_nodes` by default.
const VIRTUAL_NODES: u32 = 200;

/// An attempt at one worker, as the router counts it.
#[derive(Debug, Clone, Copy)]
pub struct Attempt {
    /// Where.
    pub worker: usize,
    /// What the prompt was believed to find there; none when nothing was known.
    pub reach: Option<Reach>,
    /// When it was sent.
    pub sent: Duration,
    /// Tokens that were believed to wait there, its own included.
    ahead: u64,
    /// Whether its first byte came.
    begun: bool,
}

/// See the module.
pub struct Router {
    view: ClusterView,
    numbers: Vec<Numbers>,
    beliefs: Beliefs,
    mode: Mode,
    policy: Box<dyn Policy>,
    chance: Chance,
}

fn backend(worker: usize) -> BackendView {
    BackendView {
        id: BackendId(worker as u32),
        name: format!("worker-{worker}").into(),
        role: Role::Unified,
        weight: 1,
        models: Some(Arc::from([Arc::from(MODEL)])),
        health: HealthState::Healthy,
        passage: Passage::Closed,
        draining: false,
        memories: Arc::from([Memory {
            rank: None,
            holder: holder(worker),
        }]),
        reads: Arc::from([]),
        group: HandOffGroup::default(),
    }
}

impl Router {
    /// For so many workers.
    pub fn new(workers: usize, policy: Box<dyn Policy>, seed: u64) -> Self {
        let backends = (0..workers).map(backend).collect();
        let mode = policy.knowledge();
        Router {
            view: ClusterView::new(backends, VIRTUAL_NODES, &ClusterView::default()),
            numbers: vec![Numbers::default(); workers],
            beliefs: Beliefs::new(mode),
            mode,
            policy,
            chance: Chance(seed),
        }
    }

    /// Chooses a worker and counts the request in; none when nobody can serve it.
    pub fn place(
        &mut self,
        request: &Request,
        tried: &[BackendId],
        (engines, now): (&[Engine], Duration),
    ) -> Option<Attempt> {
        self.beliefs.sweep(now);
        let known = self.beliefs.look(request);
        let live = At {
            numbers: &self.numbers,
            now,
            mode: self.mode,
            block_size: self.beliefs.block_size(),
        };
        let sight = Sight {
            request,
            tried,
            view: &self.view,
            live: &live,
            known: known.as_ref(),
            engines,
        };
        let slot = self.policy.place(&sight, &mut self.chance)?;
        let load = live.load(slot);
        let found = known.map(|known| reach(&known, self.view.backend(slot), &load, &WEIGHTS));
        let uncached = found.map(|found| found.uncached);
        self.numbers[slot.0].enter(uncached, now);
        // nothing that is known of it by this mode stands in the index
        if found.is_some_and(|found| found.of_blocks > 0) {
            self.beliefs.sent(slot.0, request, (load.ttft_us, now));
        }
        self.policy.sent(slot.0, request);
        Some(Attempt {
            worker: slot.0,
            reach: found,
            sent: now,
            ahead: load.queued_tokens + uncached.unwrap_or(0),
            begun: false,
        })
    }

    /// The first token of an attempt came.
    pub fn first_token(&mut self, attempt: &mut Attempt, request: &Request, now: Duration) {
        let ttft = now - attempt.sent;
        attempt.begun = true;
        self.numbers[attempt.worker].first_byte(attempt.queued(), ttft, now);
        // where nothing is announced, it is believed from here on
        if self.mode == Mode::Approximate && attempt.reach.is_some_and(|found| found.of_blocks > 0)
        {
            self.beliefs.ended(attempt.worker, request, (true, now));
        }
        self.policy
            .first_token(attempt.worker, request, (attempt.ahead, ttft));
    }

    /// An attempt has its whole answer; the engine says how much of the prompt was cached.
    pub fn served(&mut self, attempt: &Attempt, request: &Request, (cached, now): (u64, Duration)) {
        let numbers = &mut self.numbers[attempt.worker];
        numbers.leave(0, true);
        let prompt = request.prompt.len() as u64;
        if let Some(found) = attempt.reach {
            let computed = prompt - cached + request.answer.len() as u64;
            numbers.add_work(computed as i64 - found.uncached as i64, now);
            if found.of_blocks > 0 && !found.overlap.speculative {
                let predicted = found.tokens - found.uncached;
                numbers.judge(predicted, cached, prompt);
                if predicted > 0 {
                    let was_found = is_found(predicted, cached);
                    self.beliefs.checked(attempt.worker, (was_found, now));
                }
            }
        }
        self.end(attempt, request, (true, now));
    }

    /// An attempt failed by its worker's fault.
    pub fn failed(&mut self, attempt: &Attempt, request: &Request, now: Duration) {
        let queued = if attempt.begun { 0 } else { attempt.queued() };
        self.numbers[attempt.worker].leave(queued, false);
        self.end(attempt, request, (attempt.begun, now));
    }

    fn end(&mut self, attempt: &Attempt, request: &Request, how: (bool, Duration)) {
        let is_told = self.mode == Mode::Approximate && attempt.begun;
        if attempt.reach.is_some_and(|found| found.of_blocks > 0) && !is_told {
            self.beliefs.ended(attempt.worker, request, how);
        }
        self.policy.ended(attempt.worker, request, attempt.begun);
    }

    /// An engine announced these.
    pub fn heard(&mut self, worker: usize, events: &[CacheEvent], now: Duration) {
        for event in events {
            self.beliefs.heard(worker, event, now);
        }
    }

    /// A worker is gone or back, and that is noticed at once: probes and breakers are measured elsewhere.
    pub fn set_alive(&mut self, worker: usize, alive: bool) {
        self.view.backends[worker].health = match alive {
            true => HealthState::Healthy,
            false => HealthState::Unhealthy,
        };
        if !alive {
            self.beliefs.lost(worker);
        }
    }

    /// Workers whose predictions were given up.
    pub fn distrusted(&self) -> usize {
        let given_up = self.numbers.iter().filter(|of| of.is_distrusted());
        given_up.count()
    }
}

impl Attempt {
    fn queued(&self) -> u64 {
        self.reach.map_or(0, |found| found.uncached)
    }
}
