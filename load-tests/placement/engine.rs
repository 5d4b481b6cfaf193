//! One engine in virtual time: the simulator's scheduler and cache, and how long its steps take. As the simulator's own
//! loop, but nothing waits: the caller says when a step's time has passed.

use crate::request::{BLOCK_SIZE, Request};
use engine_sim::CacheEvent;
use engine_sim::Speed;
use engine_sim::kv_cache::{KvCache, chain_seed};
use engine_sim::scheduler::{Limits, Output, State, step};
use engine_sim::sequence::{NewSequence, SequenceId};
use std::collections::VecDeque;
use std::time::Duration;

/// vLLM's defaults on a large GPU.
const LIMITS: Limits = Limits {
    batched_tokens_max: 8192,
    sequences_max: 256,
};

/// What a step led to, known when its time has passed.
#[derive(Debug, Default)]
pub struct Stepped {
    /// Tokens, first and last.
    pub outputs: Vec<Output>,
    /// What the cache announces.
    pub events: Vec<CacheEvent>,
}

/// See the module.
pub struct Engine {
    state: State,
    speed: Speed,
    blocks: usize,
    /// Whether its process runs.
    pub alive: bool,
    /// Counts its processes: what was meant for an earlier one is void.
    pub life: u32,
    /// Requests in its front end, on their way to the scheduler.
    arriving: usize,
    /// Since when sequences wait for the scheduler, first come first.
    waiting_since: VecDeque<Duration>,
    step: Option<Stepped>,
}

fn empty(blocks: usize) -> State {
    State::new(LIMITS, KvCache::new(blocks, BLOCK_SIZE, true))
}

impl Engine {
    /// An idle engine with an empty cache of so many blocks.
    pub fn new(blocks: usize, speed: Speed) -> Self {
        Engine {
            state: empty(blocks),
            speed,
            blocks,
            alive: true,
            life: 0,
            arriving: 0,
            waiting_since: VecDeque::new(),
            step: None,
        }
    }

    /// A request came; answers when it will be ready for the scheduler.
    pub fn arrive(&mut self, now: Duration) -> Duration {
        self.arriving += 1;
        now + self.speed.overhead()
    }

    /// A request's way through the front end is over.
    pub fn ready(&mut self, id: u64, request: &Request, now: Duration) {
        self.arriving -= 1;
        self.waiting_since.push_back(now);
        self.state.add(NewSequence {
            id: SequenceId(id),
            prompt: request.prompt.clone(),
            answer: request.answer.clone(),
            chain: chain_seed(0, ""),
            salt: None,
            loaded: 0..0,
            pin: false,
        });
    }

    /// Begins a step if there is something to do and none runs; answers how long it takes.
    pub fn begin_step(&mut self) -> Option<Duration> {
        if self.step.is_some() || self.state.is_idle() {
            return None;
        }
        let report = step(&mut self.state);
        // preempted ones go on as if they had just come
        while self.waiting_since.len() > self.state.waiting() {
            self.waiting_since.pop_front();
        }
        let takes = self.speed.step(&report);
        self.step = Some(Stepped {
            outputs: report.outputs,
            events: self.state.cache_mut().take_events(),
        });
        Some(takes)
    }

    /// The running step's time has passed.
    pub fn end_step(&mut self) -> Stepped {
        self.step.take().unwrap_or_default()
    }

    /// Its process ends, with all that it had.
    pub fn kill(&mut self) {
        *self = Engine {
            alive: false,
            life: self.life + 1,
            ..Engine::new(self.blocks, self.speed)
        };
    }

    /// A new process takes its place.
    pub fn come_back(&mut self) {
        self.alive = true;
    }

    /// Whether it could begin with a request at once.
    pub fn is_idle(&self) -> bool {
        self.alive && self.arriving == 0 && self.step.is_none() && self.state.is_idle()
    }

    /// Since when its longest waiting sequence waits.
    pub fn waits_since(&self) -> Option<Duration> {
        self.waiting_since.front().copied()
    }

    /// What it tells of itself: sequences that are in the batch, and that are not.
    pub fn running_and_waiting(&self) -> (usize, usize) {
        (self.state.running(), self.state.waiting() + self.arriving)
    }

    /// What it tells of itself: the share of its blocks that sequences use.
    pub fn kv_usage(&self) -> f64 {
        self.state.cache().used() as f64 / self.blocks as f64
    }

    /// Tokens of a prompt that its cache has at this moment.
    pub fn cached_tokens(&self, request: &Request) -> u64 {
        (self.state.cache().find(request.reusable()).len() * BLOCK_SIZE) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine_sim::speed::figures_for;

    fn request(first: u32, prompt: u32) -> Request {
        Request::new((first..first + prompt).collect(), vec![1, 2], (0, 0))
    }

    #[test]
    fn a_prompt_takes_its_prefill_and_the_next_like_it_does_not() {
        let mut engine = Engine::new(1000, figures_for("small").speed);
        let now = engine.arrive(Duration::ZERO);
        assert_eq!(now, Duration::from_millis(40));
        engine.ready(0, &request(0, 1001), now);
        assert_eq!(engine.begin_step(), Some(Duration::from_secs_f64(0.15015)));
        assert_eq!(engine.begin_step(), None, "a step runs");
        assert_eq!(engine.end_step().outputs[0].cached, 0);
        let again = engine.arrive(now);
        engine.ready(1, &request(0, 1001), again);
        engine.begin_step();
        let outputs = engine.end_step().outputs;
        assert_eq!(outputs[1].cached, 992);
        assert_eq!(engine.cached_tokens(&request(0, 1001)), 992);
    }

    #[test]
    fn a_killed_engine_comes_back_with_nothing() {
        let mut engine = Engine::new(1000, figures_for("small").speed);
        engine.arrive(Duration::ZERO);
        engine.ready(0, &request(0, 100), Duration::ZERO);
        engine.begin_step();
        engine.kill();
        assert!(!engine.is_idle(), "it takes nothing");
        engine.come_back();
        assert!(engine.is_idle() && engine.life == 1);
        assert_eq!(engine.cached_tokens(&request(0, 100)), 0);
    }
}
