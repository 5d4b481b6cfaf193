//! Cache-aware routing of sglang-router and of SMG, which came of it: by a radix tree of what was sent.
//!
//! While the fleet is out of balance (most requests in flight − fewest > `abs`, and most > `rel` × fewest) the shortest queue;
//! else the worker that was sent the longest beginning of the prompt, if that is more than `threshold` of it, else the one
//! whose tree is the smallest. Source: `docs/router/router.md` of sgl-project/sglang and `docs/concepts/routing/cache-aware.md`
//! of lightseekorg/smg, with their defaults. Here a tree has blocks of 16 tokens instead of characters, and nothing is
//! evicted from it: runs are shorter than the eviction's interval.

use super::{Policy, Sight, Worker, lowest};
use crate::request::Request;
use routing::block::BlockHash;
use routing::ids::Slot;
use routing::knowledge::Mode;
use routing::strategy::Chance;
use std::collections::{BTreeMap, HashSet};

/// Its settings.
#[derive(Debug, Clone, Copy)]
pub struct Thresholds {
    threshold: f64,
    abs: u32,
    rel: f64,
}

/// Defaults of sglang-router.
pub const SGLANG: Thresholds = Thresholds {
    threshold: 0.5,
    abs: 32,
    rel: 1.1,
};
/// Defaults of SMG.
pub const SMG: Thresholds = Thresholds {
    threshold: 0.3,
    abs: 64,
    rel: 1.5,
};

/// See the module.
pub struct CacheAware {
    thresholds: Thresholds,
    trees: BTreeMap<usize, HashSet<BlockHash>>,
}

impl CacheAware {
    /// With these settings.
    pub fn boxed(thresholds: Thresholds) -> Box<dyn Policy> {
        Box::new(CacheAware {
            thresholds,
            trees: BTreeMap::new(),
        })
    }

    /// Leading blocks of a prompt that a worker was sent, and all that it was sent.
    fn tree(&self, worker: usize, request: &Request) -> (usize, usize) {
        let Some(tree) = self.trees.get(&worker) else {
            return (0, 0);
        };
        let matched = request
            .by_tokens
            .iter()
            .take_while(|own| tree.contains(own));
        (matched.count(), tree.len())
    }
}

/// Whether the fleet is out of balance.
fn is_imbalanced(thresholds: &Thresholds, workers: &[Worker]) -> bool {
    let loads = || workers.iter().map(|worker| worker.load.in_flight);
    let (most, fewest) = (loads().max().unwrap_or(0), loads().min().unwrap_or(0));
    most - fewest > thresholds.abs && f64::from(most) > thresholds.rel * f64::from(fewest)
}

impl Policy for CacheAware {
    fn knowledge(&self) -> Mode {
        Mode::Blind
    }

    fn place(&mut self, sight: &Sight<'_>, chance: &mut Chance) -> Option<Slot> {
        let workers = sight.workers();
        if is_imbalanced(&self.thresholds, &workers) {
            return lowest(&workers, chance, |of| (f64::from(of.load.in_flight), 0.0));
        }
        let trees: Vec<(usize, usize)> = (0..sight.engines.len())
            .map(|worker| self.tree(worker, sight.request))
            .collect();
        let matched = workers.iter().map(|of| trees[of.slot].0).max().unwrap_or(0);
        let blocks = sight.request.by_tokens.len().max(1);
        if matched as f64 / blocks as f64 > self.thresholds.threshold {
            return lowest(&workers, chance, |of| (-(trees[of.slot].0 as f64), 0.0));
        }
        lowest(&workers, chance, |of| (trees[of.slot].1 as f64, 0.0))
    }

    fn sent(&mut self, worker: usize, request: &Request) {
        let tree = self.trees.entry(worker).or_default();
        tree.extend(request.by_tokens.iter().copied());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policies::worker;

    #[test]
    fn balance_is_lost_by_both_thresholds_only() {
        let fleet = |most, fewest| [worker(0, most, 0, 0, 0), worker(1, fewest, 0, 0, 0)];
        assert!(
            !is_imbalanced(&SGLANG, &fleet(32, 0)),
            "not more than 32 apart"
        );
        assert!(is_imbalanced(&SGLANG, &fleet(33, 0)));
        assert!(!is_imbalanced(&SGLANG, &fleet(440, 400)), "1.1 times");
        assert!(is_imbalanced(&SGLANG, &fleet(441, 400)));
        assert!(!is_imbalanced(&SMG, &fleet(33, 0)));
    }

    #[test]
    fn a_tree_matches_from_the_beginning_on() {
        let mut policy = CacheAware {
            thresholds: SMG,
            trees: BTreeMap::new(),
        };
        let request = |from, to| Request::new((from..to).collect(), vec![1], (0, 0));
        policy.sent(1, &request(0, 160));
        assert_eq!(policy.tree(1, &request(0, 320)), (10, 10));
        assert_eq!(policy.tree(1, &request(16, 320)), (0, 10));
        assert_eq!(policy.tree(0, &request(0, 320)), (0, 0));
    }
}
