//! llm-d's scheduler with its weighted scorers: 3 × prefix + 2 × queue + 2 × free KV cache, the highest wins.
//!
//! Prefix: the share of the prompt that is cached. Queue: (most − own) / (most − fewest) sequences that wait, 1 when all have
//! equally many. KV cache: the share of its blocks that is free. Source: prefix-cache-scorer, queue-scorer and
//! kv-cache-utilization-scorer of llm-d's and the Gateway API Inference Extension's documentation, with the weights of their
//! sample configurations (prefix 3, queue 2, KV cache 2). Caches are known by events (the precise prefix scorer), queues and
//! KV caches as engines have them at this moment; it scrapes them, so that here it knows more than it would.

use super::{Policy, Sight, Worker, lowest};
use routing::ids::Slot;
use routing::knowledge::Mode;
use routing::strategy::Chance;

const PREFIX: f64 = 3.0;
const QUEUE: f64 = 2.0;
const KV_CACHE: f64 = 2.0;

/// See the module.
pub struct LlmD;

fn score(worker: &Worker, waiting: usize, (fewest, most): (usize, usize), used: f64) -> f64 {
    let tokens = (worker.cached + worker.uncached).max(1);
    let prefix = worker.cached as f64 / tokens as f64;
    let queue = match most - fewest {
        0 => 1.0,
        apart => (most - waiting) as f64 / apart as f64,
    };
    PREFIX * prefix + QUEUE * queue + KV_CACHE * (1.0 - used)
}

impl Policy for LlmD {
    fn knowledge(&self) -> Mode {
        Mode::Exact
    }

    fn place(&mut self, sight: &Sight<'_>, chance: &mut Chance) -> Option<Slot> {
        let workers = sight.workers();
        let waiting = |of: &Worker| sight.engines[of.slot].running_and_waiting().1;
        let (fewest, most) = (
            workers.iter().map(waiting).min().unwrap_or(0),
            workers.iter().map(waiting).max().unwrap_or(0),
        );
        lowest(&workers, chance, |of| {
            let used = sight.engines[of.slot].kv_usage();
            (-score(of, waiting(of), (fewest, most), used), 0.0)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policies::worker;

    #[test]
    fn prefix_queue_and_free_cache_are_weighted_three_two_two() {
        let half = worker(0, 1, 0, 500, 500);
        assert_eq!(score(&half, 4, (0, 4), 0.25), 1.5 + 0.0 + 1.5);
        assert_eq!(score(&half, 1, (0, 4), 1.0), 1.5 + 1.5 + 0.0);
        assert_eq!(score(&half, 2, (2, 2), 1.0), 1.5 + 2.0, "all wait alike");
    }
}
