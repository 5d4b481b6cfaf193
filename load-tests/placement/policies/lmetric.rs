//! LMetric: (prompt tokens that wait at the worker + uncached ones of the request) × its batch size, the lowest wins.
//!
//! Source: Zhang et al., "LMetric: Simple is Better - Multiplication May Be All You Need for LLM Request Scheduling",
//! arXiv 2603.15202. Caches are known by events; of equals (an idle worker has 0) the one with fewer tokens.

use super::{Policy, Sight, Worker, lowest};
use routing::ids::Slot;
use routing::knowledge::Mode;
use routing::strategy::Chance;

/// See the module.
pub struct LMetric;

fn score(worker: &Worker) -> (f64, f64) {
    let tokens = (worker.load.queued_tokens + worker.uncached) as f64;
    (tokens * f64::from(worker.load.in_flight), tokens)
}

impl Policy for LMetric {
    fn knowledge(&self) -> Mode {
        Mode::Exact
    }

    fn place(&mut self, sight: &Sight<'_>, chance: &mut Chance) -> Option<Slot> {
        lowest(&sight.workers(), chance, score)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policies::worker;

    #[test]
    fn tokens_and_batch_size_multiply() {
        assert_eq!(score(&worker(0, 4, 500, 0, 300)), (3200.0, 800.0));
        let fleet = [
            worker(0, 4, 500, 700, 300),
            worker(1, 2, 0, 0, 1000),
            worker(2, 3, 0, 0, 1000),
        ];
        assert_eq!(lowest(&fleet, &mut Chance(1), score), Some(Slot(1)));
    }
}
