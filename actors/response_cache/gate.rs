//! Whether a tier is worth asking: a circuit breaker, and one log line for each change.

use routing::breaker::{Breaker, BreakerRules, Era, Event};
use routing::view::Passage;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// Failures in a row after which a tier is left alone: so many requests pay its budget, no more.
pub const FAILURES_MAX: u32 = 5;
/// Until a tier that is left alone is tried again.
pub const REST: Duration = Duration::from_secs(2);

const RULES: BreakerRules = BreakerRules {
    failure_threshold: FAILURES_MAX,
    recovery_timeout: REST,
};

/// The breaker of one kind of call to one tier.
#[derive(Debug)]
pub struct Gate {
    tier: &'static str,
    calls: &'static str,
    place: Arc<str>,
    breaker: Breaker,
    successes: u64,
    /// The era whose one trial call was let through.
    tried: Option<Era>,
}

impl Gate {
    /// An open way. `calls` is what they do, for the log: `reads`, `writes`; `place` is where.
    pub fn new(tier: &'static str, calls: &'static str, place: Arc<str>, now: Instant) -> Self {
        Gate {
            tier,
            calls,
            place,
            breaker: Breaker::new(RULES, Era::default(), now),
            successes: 0,
            tried: None,
        }
    }

    /// Whether calls are let through.
    pub fn is_up(&self) -> bool {
        self.breaker.state().0 == Passage::Closed
    }

    /// Lets a call through, or not; while the tier is tried again, one at a time, and only one that
    /// may `try_it`.
    pub fn admit(&mut self, try_it: bool, now: Instant) -> Option<Era> {
        if self.breaker.next_tick().is_some_and(|at| at <= now) {
            self.breaker.on(Event::Tick, now);
        }
        let (passage, era) = self.breaker.state();
        match passage {
            Passage::Closed => Some(era),
            Passage::HalfOpen if try_it && self.tried != Some(era) => {
                self.tried = Some(era);
                Some(era)
            }
            _ => None,
        }
    }

    /// How a call ended that was let through; answers whether the way opened or closed.
    pub fn ended(&mut self, era: Era, failure: Option<&str>, now: Instant) -> bool {
        let was_up = self.is_up();
        let successes = self.successes;
        match failure {
            Some(_) => self.breaker.on(Event::Failed { era, successes }, now),
            None => {
                self.successes += 1;
                !was_up && self.breaker.on(Event::ProbeSucceeded { era }, now)
            }
        };
        match (was_up, self.is_up()) {
            (true, false) => warn!(
                tier = self.tier,
                calls = self.calls,
                place = &*self.place,
                reason = failure.unwrap_or_default(),
                retry_s = REST.as_secs(),
                "cache tier fails, going on without it"
            ),
            (false, true) => info!(tier = self.tier, calls = self.calls, "cache tier is back"),
            _ => return false,
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tier_that_fails_is_left_alone_and_tried_by_one_call_at_a_time() {
        let start = Instant::now();
        let mut gate = Gate::new("redis", "reads", "here".into(), start);
        for _ in 0..FAILURES_MAX {
            let era = gate.admit(false, start).expect("still up");
            gate.ended(era, Some("away"), start);
        }
        assert!(!gate.is_up() && gate.admit(true, start).is_none());
        let later = start + REST;
        assert!(gate.admit(false, later).is_none(), "requests do not try it");
        let era = gate.admit(true, later).expect("the trial");
        assert!(gate.admit(true, later).is_none(), "one at a time");
        assert!(!gate.ended(era, Some("away"), later));
        assert!(gate.admit(true, later).is_none(), "it rests again");
        let era = gate.admit(true, later + REST).expect("the next trial");
        assert!(gate.ended(era, None, later + REST) && gate.is_up());
    }

    #[test]
    fn successes_between_failures_keep_a_tier() {
        let now = Instant::now();
        let mut gate = Gate::new("s3", "reads", "here".into(), now);
        for _ in 0..4 * FAILURES_MAX {
            let era = gate.admit(false, now).expect("up");
            gate.ended(era, Some("slow"), now);
            gate.ended(era, None, now);
        }
        assert!(gate.is_up());
    }

    #[test]
    fn failures_of_calls_that_began_before_the_change_count_for_nothing() {
        let now = Instant::now();
        let mut gate = Gate::new("s3", "reads", "here".into(), now);
        let old = gate.admit(false, now).expect("up");
        for _ in 0..FAILURES_MAX {
            gate.ended(old, Some("slow"), now);
        }
        let era = gate.admit(true, now + REST).expect("the trial");
        gate.ended(era, None, now + REST);
        for _ in 0..FAILURES_MAX {
            gate.ended(old, Some("slow"), now + REST);
        }
        assert!(gate.is_up());
    }
}
