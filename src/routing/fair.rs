//! When a backend has so much to do that what it holds of a prompt does not make up for it. A
//! weighted sum alone never lets a queue outweigh a full overlap, so these are left out before
//! anything is weighed: for this request and this backend only.

use crate::strategy::Candidate;
use crate::view::{ClusterView, Load};

/// A backend may have so many more tokens queued than the least busy one, beyond what its extra
/// overlap saves, before it is left out.
pub const OVERLOAD_SLACK_TOKENS: u64 = 8192;
/// Requests in flight, as a multiple of the mean, and beyond that.
const IN_FLIGHT_FACTOR: f64 = 2.0;
const IN_FLIGHT_SLACK: f64 = 2.0;
/// Recent work, as a multiple of the mean.
const WORK_FACTOR: f64 = 1.1;
/// And beyond that, in prompts of the present size: where little was done lately, affinity counts
/// more than balance.
const WORK_SLACK_PROMPTS: u64 = 2;

/// A backend's fair share of what all candidates have to do.
pub(crate) struct Fair {
    /// The fewest queued tokens of one of them.
    queued: u64,
    /// Requests in flight and recent work, per unit of weight.
    in_flight: f64,
    work: f64,
}

impl Fair {
    pub(crate) fn of(view: &ClusterView, candidates: &[Candidate]) -> Self {
        let weights = candidates.iter().map(|c| view.backend(c.slot).weight);
        let all = f64::from(weights.sum::<u32>().max(1));
        let in_flight = candidates.iter().map(|c| f64::from(c.load.in_flight));
        let work = candidates.iter().map(|c| c.load.recent_work as f64);
        let queued = candidates.iter().map(|c| c.load.queued_tokens);
        Fair {
            queued: queued.min().unwrap_or(0),
            in_flight: in_flight.sum::<f64>() / all,
            work: work.sum::<f64>() / all,
        }
    }

    /// Whether a backend has too much to do for a prompt of so many tokens, of which it saves so
    /// many against the one with the fewest queued.
    pub(crate) fn is_exceeded_by(
        &self,
        load: &Load,
        weight: u32,
        (tokens, saved): (u64, u64),
    ) -> bool {
        let in_flight = self.in_flight * f64::from(weight) * IN_FLIGHT_FACTOR + IN_FLIGHT_SLACK;
        load.queued_tokens - self.queued > saved + OVERLOAD_SLACK_TOKENS
            || f64::from(load.in_flight) > in_flight
            || self.has_worked_enough(load, weight, (tokens, saved))
    }

    /// Whether a backend has more requests than the mean, and has done more than its share lately,
    /// beyond what it saves here and some prompts of this size. Where fewer wait than elsewhere,
    /// what was done before does not matter.
    pub(crate) fn has_worked_enough(
        &self,
        load: &Load,
        weight: u32,
        (tokens, saved): (u64, u64),
    ) -> bool {
        let weight = f64::from(weight);
        let slack = OVERLOAD_SLACK_TOKENS.min(WORK_SLACK_PROMPTS * tokens) + saved;
        f64::from(load.in_flight) > self.in_flight * weight
            && load.recent_work as f64 > self.work * weight * WORK_FACTOR + slack as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fair(in_flight: f64, work: f64) -> Fair {
        Fair {
            queued: 0,
            in_flight,
            work,
        }
    }

    fn load(in_flight: u32, recent_work: u64) -> Load {
        Load {
            in_flight,
            recent_work,
            ..Load::default()
        }
    }

    #[test]
    fn twice_the_mean_of_requests_is_too_much_and_more_weight_bears_more() {
        let fair = fair(3.0, 0.0);
        assert!(!fair.is_exceeded_by(&load(8, 0), 1, (1000, 0)));
        assert!(fair.is_exceeded_by(&load(9, 0), 1, (1000, 0)));
        assert!(!fair.is_exceeded_by(&load(14, 0), 2, (1000, 0)));
    }

    #[test]
    fn work_counts_only_where_requests_wait_and_beyond_what_the_overlap_saves() {
        let fair = fair(3.0, 100_000.0);
        let busy = load(4, 117_000);
        assert!(fair.is_exceeded_by(&busy, 1, (1000, 0)));
        assert!(!fair.is_exceeded_by(&load(3, 117_000), 1, (1000, 0)));
        assert!(
            !fair.is_exceeded_by(&busy, 1, (1000, 20_000)),
            "it saves more"
        );
        assert!(
            !fair.is_exceeded_by(&busy, 1, (8000, 0)),
            "within some prompts"
        );
    }

    #[test]
    fn a_single_session_on_an_idle_fleet_stays_where_it_is() {
        // one backend of two has done everything, and nothing waits there
        assert!(!fair(0.0, 50_000.0).is_exceeded_by(&load(0, 100_000), 1, (500, 400)));
    }
}
