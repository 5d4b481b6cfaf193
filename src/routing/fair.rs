//! When a backend has so much to do that what it holds of a prompt does not make up for it. A
//! weighted sum alone never lets a queue outweigh a full overlap, so these are left out before
//! anything is weighed: for this request and this backend only.

use crate::strategy::Candidate;
use crate::view::{ClusterView, Load};

/// Where all backends are busy, a prompt that moves away from its cached blocks makes others wait for their being
/// computed again, too: its queue may be longer by so many tokens beyond what its overlap saves.
const BUSY_SLACK_TOKENS: u64 = 8192;
/// Requests in flight, as a multiple of the mean, and beyond that.
const IN_FLIGHT_FACTOR: f64 = 2.0;
const IN_FLIGHT_SLACK: f64 = 2.0;
/// Recent work, as a multiple of the mean.
const WORK_FACTOR: f64 = 1.1;
/// And beyond that, in prompts of the present size: where little was done lately, affinity counts
/// more than balance. Long prompts do not make it more than so many tokens.
const WORK_SLACK_PROMPTS: u64 = 2;
const WORK_SLACK_TOKENS_MAX: u64 = 8192;

/// A backend's fair share of what all candidates have to do.
pub(crate) struct Fair {
    /// The fewest queued tokens of one of them.
    queued: u64,
    /// Whether one of them has nothing to do.
    has_idle: bool,
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
            has_idle: candidates.iter().any(|c| c.load.in_flight == 0),
            in_flight: in_flight.sum::<f64>() / all,
            work: work.sum::<f64>() / all,
        }
    }

    /// Whether a backend has too much to do for a prompt of so many tokens, of which it saves so
    /// many against the one with the fewest queued. A queue that is longer by more than that makes the
    /// prompt wait longer than computing it elsewhere would take. That has some slack where computing it again takes from
    /// others: not where it is not computed yet (`unsure`), or where an idle backend would do it.
    pub(crate) fn is_exceeded_by(
        &self,
        load: &Load,
        weight: u32,
        (tokens, saved, unsure): (u64, u64, bool),
    ) -> bool {
        let slack = match saved > 0 && !unsure && !self.has_idle {
            true => BUSY_SLACK_TOKENS,
            false => 0,
        };
        let in_flight = self.in_flight * f64::from(weight) * IN_FLIGHT_FACTOR + IN_FLIGHT_SLACK;
        load.queued_tokens - self.queued > saved + slack
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
        let slack = WORK_SLACK_TOKENS_MAX.min(WORK_SLACK_PROMPTS * tokens) + saved;
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
            has_idle: false,
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
        assert!(!fair.is_exceeded_by(&load(8, 0), 1, (1000, 0, false)));
        assert!(fair.is_exceeded_by(&load(9, 0), 1, (1000, 0, false)));
        assert!(!fair.is_exceeded_by(&load(14, 0), 2, (1000, 0, false)));
    }

    #[test]
    fn work_counts_only_where_requests_wait_and_beyond_what_the_overlap_saves() {
        let fair = fair(3.0, 100_000.0);
        let busy = load(4, 117_000);
        assert!(fair.is_exceeded_by(&busy, 1, (1000, 0, false)));
        assert!(!fair.is_exceeded_by(&load(3, 117_000), 1, (1000, 0, false)));
        assert!(
            !fair.is_exceeded_by(&busy, 1, (1000, 20_000, false)),
            "it saves more"
        );
        assert!(
            !fair.is_exceeded_by(&busy, 1, (8000, 0, false)),
            "within some prompts"
        );
    }

    #[test]
    fn a_queue_may_be_longer_where_all_are_busy_and_it_saves_computed_blocks() {
        let queued = |queued_tokens| Load {
            queued_tokens,
            ..load(1, 0)
        };
        let most = 400 + BUSY_SLACK_TOKENS;
        let busy = fair(1.0, 0.0);
        assert!(!busy.is_exceeded_by(&queued(most), 1, (1000, 400, false)));
        assert!(busy.is_exceeded_by(&queued(most + 1), 1, (1000, 400, false)));
        assert!(busy.is_exceeded_by(&queued(1), 1, (1000, 0, false)));
        assert!(!busy.is_exceeded_by(&queued(400), 1, (1000, 400, true)));
        assert!(busy.is_exceeded_by(&queued(401), 1, (1000, 400, true)));
        let has_idle = Fair {
            has_idle: true,
            ..busy
        };
        assert!(has_idle.is_exceeded_by(&queued(401), 1, (1000, 400, false)));
    }

    #[test]
    fn a_single_session_on_an_idle_fleet_stays_where_it_is() {
        // one backend of two has done everything, and nothing waits there
        assert!(!fair(0.0, 50_000.0).is_exceeded_by(&load(0, 100_000), 1, (500, 400, false)));
    }
}
