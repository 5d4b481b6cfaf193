//! Knows all caches as they are at this moment, and what each worker still has to compute: the most hits, less what waits
//! there. No router can; greedy, as the best placement over all future requests cannot be computed.

use super::active_blocks::ActiveBlocks;
use super::{Policy, Sight, lowest};
use crate::request::{BLOCK_SIZE, Request};
use routing::ids::Slot;
use routing::knowledge::Mode;
use routing::strategy::Chance;
use std::collections::HashMap;

/// See the module.
#[derive(Debug, Default)]
pub struct Oracle {
    /// Prompts on their way to a cache, so that equal ones stay together.
    active: ActiveBlocks,
    /// Per worker, tokens of each prompt that wait to be computed; of equal prompts in order.
    waiting: HashMap<usize, HashMap<usize, Vec<u64>>>,
    queued: HashMap<usize, u64>,
    chosen: u64,
}

/// A prompt's identity: policies are handed the same one each time.
fn identity(request: &Request) -> usize {
    request.prompt.as_ptr() as usize
}

impl Oracle {
    fn taken(&mut self, worker: usize, request: &Request) {
        let waiting = self.waiting.entry(worker).or_default();
        if let Some(mut tokens) = waiting.remove(&identity(request)) {
            let done = tokens.pop().unwrap_or(0);
            *self.queued.entry(worker).or_default() -= done;
            if !tokens.is_empty() {
                waiting.insert(identity(request), tokens);
            }
        }
    }
}

impl Policy for Oracle {
    fn knowledge(&self) -> Mode {
        Mode::Blind
    }

    fn place(&mut self, sight: &Sight<'_>, chance: &mut Chance) -> Option<Slot> {
        let workers = sight.workers();
        let all = sight.request.prompt.len() as u64;
        let uncached: HashMap<usize, u64> = workers
            .iter()
            .map(|of| {
                let there = sight.engines[of.slot].cached_tokens(sight.request);
                let coming = self.active.shared(of.slot, sight.request) * BLOCK_SIZE;
                (of.slot, all - there.max(coming as u64).min(all - 1))
            })
            .collect();
        let slot = lowest(&workers, chance, |of| {
            let queued = self.queued.get(&of.slot).copied().unwrap_or(0);
            let tokens = (queued + uncached[&of.slot]) as f64;
            (tokens, f64::from(of.load.in_flight))
        })?;
        self.chosen = uncached[&slot.0];
        Some(slot)
    }

    fn sent(&mut self, worker: usize, request: &Request) {
        self.active.enter(worker, request);
        let waiting = self.waiting.entry(worker).or_default();
        waiting
            .entry(identity(request))
            .or_default()
            .push(self.chosen);
        *self.queued.entry(worker).or_default() += self.chosen;
    }

    fn first_token(&mut self, worker: usize, request: &Request, _: (u64, std::time::Duration)) {
        self.taken(worker, request);
    }

    fn ended(&mut self, worker: usize, request: &Request, begun: bool) {
        self.active.leave(worker, request);
        if !begun {
            self.taken(worker, request);
        }
    }
}
