//! NVIDIA Dynamo's KV router: cost = overlap weight × prefill blocks + decode blocks, the lowest wins (temperature 0).
//!
//! Prefill blocks: prompt tokens that wait at the worker until their first token, and the uncached ones of the request, by the
//! block size. Decode blocks: blocks of the worker's active sequences, and of the request. Source: "Routing Concepts" and
//! "Configuration and Tuning" of Dynamo's documentation, with the weight's default of 1. Caches are known by events.

use super::active_blocks::ActiveBlocks;
use super::{Policy, Sight, Worker, lowest};
use crate::request::{BLOCK_SIZE, Request};
use routing::ids::Slot;
use routing::knowledge::Mode;
use routing::strategy::Chance;

const OVERLAP_WEIGHT: f64 = 1.0;

/// See the module.
#[derive(Debug, Default)]
pub struct Dynamo(ActiveBlocks);

fn cost(worker: &Worker, decode_blocks: usize) -> f64 {
    let prefill = (worker.load.queued_tokens + worker.uncached) as f64;
    OVERLAP_WEIGHT * prefill / BLOCK_SIZE as f64 + decode_blocks as f64
}

impl Policy for Dynamo {
    fn knowledge(&self) -> Mode {
        Mode::Exact
    }

    fn place(&mut self, sight: &Sight<'_>, chance: &mut Chance) -> Option<Slot> {
        lowest(&sight.workers(), chance, |worker| {
            (cost(worker, self.0.with(worker.slot, sight.request)), 0.0)
        })
    }

    fn sent(&mut self, worker: usize, request: &Request) {
        self.0.enter(worker, request);
    }

    fn ended(&mut self, worker: usize, request: &Request, _: bool) {
        self.0.leave(worker, request);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policies::worker;

    #[test]
    fn prefill_and_decode_blocks_add_up_as_in_the_documentations_example() {
        // prefill 8, 5 and 2 blocks, decode 10, 5 and 9: costs of 18, 10 and 11 at weight 1
        let of = |prefill: u64, decode| cost(&worker(0, 1, 0, 0, prefill * 16), decode);
        assert_eq!([of(8, 10), of(5, 5), of(2, 9)], [18.0, 10.0, 11.0]);
        assert_eq!(
            cost(&worker(0, 1, 160, 0, 32), 3),
            15.0,
            "what waits counts"
        );
    }
}
