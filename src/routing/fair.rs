//! When a backend has so much to do that what it holds of a prompt does not make up for it. A
//! weighted sum alone never lets a queue outweigh a full overlap, so these are left out before
//! anything is weighed: for this request and this backend only.

use crate::choose::Terms;
use crate::score::OVERLOAD_SLACK_TOKENS;
use crate::view::{ClusterView, Load};

/// Requests in flight, as a multiple of the mean, and beyond that.
const IN_FLIGHT_FACTOR: f64 = 2.0;
const IN_FLIGHT_SLACK: f64 = 2.0;
/// Recent work, as a multiple of the mean.
const WORK_FACTOR: f64 = 1.15;
/// And beyond that, in prompts of the present size: where little was done lately, affinity counts
/// more than balance.
const WORK_SLACK_PROMPTS: u64 = 8;

/// What the candidates have to do, to compare one of them with.
pub(crate) struct Fair {
    /// Of the one with the fewest queued tokens: these, and what it has not cached.
    idlest: (u64, u64),
    /// Requests in flight and recent work, per unit of weight.
    in_flight: f64,
    work: f64,
}

impl Fair {
    pub(crate) fn of(view: &ClusterView, terms: &[Terms]) -> Self {
        let weight = |of: &Terms| f64::from(view.backend(of.candidate.slot).weight);
        let all: f64 = terms.iter().map(weight).sum();
        let in_flight = terms
            .iter()
            .map(|of| f64::from(of.candidate.load.in_flight));
        let work = terms.iter().map(|of| of.candidate.load.recent_work as f64);
        let idlest = terms
            .iter()
            .min_by_key(|of| of.candidate.load.queued_tokens);
        Fair {
            idlest: idlest.map_or((0, 0), |of| {
                (of.candidate.load.queued_tokens, of.reach.uncached)
            }),
            in_flight: in_flight.sum::<f64>() / all.max(1.0),
            work: work.sum::<f64>() / all.max(1.0),
        }
    }

    /// Whether this candidate has more to do than its overlap makes up for.
    pub(crate) fn is_exceeded_by(&self, of: &Terms, weight: u32) -> bool {
        let load = &of.candidate.load;
        let weight = f64::from(weight.max(1));
        let (queued, uncached) = self.idlest;
        // how much less it has to compute than the least busy one
        let saved = uncached.saturating_sub(of.reach.uncached);
        let in_flight = self.in_flight * weight * IN_FLIGHT_FACTOR + IN_FLIGHT_SLACK;
        load.queued_tokens.saturating_sub(queued) > saved + OVERLOAD_SLACK_TOKENS
            || f64::from(load.in_flight) > in_flight
            || work_beyond(load, self.work, weight, of.reach.tokens) > saved as f64
    }
}

/// Whether a backend has done more than its share lately, by more than some prompts of this size.
/// An idle one never has: nobody waits there.
pub(crate) fn has_worked_enough(load: &Load, mean: f64, weight: u32, tokens: u64) -> bool {
    work_beyond(load, mean, f64::from(weight.max(1)), tokens) > 0.0
}

/// Recent work beyond a backend's share, in tokens; of an idle one, nothing.
fn work_beyond(load: &Load, mean: f64, weight: f64, tokens: u64) -> f64 {
    if load.in_flight == 0 {
        return 0.0;
    }
    let slack = OVERLOAD_SLACK_TOKENS.min(WORK_SLACK_PROMPTS * tokens);
    load.recent_work as f64 - mean * weight * WORK_FACTOR - slack as f64
}
