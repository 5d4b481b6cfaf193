//! A circuit breaker as a state machine: events and a clock reading in, a passage out.
//!
//! `Closed` lets everything through and counts failures in a row; `Open` lets nothing through
//! for `recovery_timeout`; `HalfOpen` lets one request through at a time until one succeeds.

use crate::view::Passage;
use std::time::{Duration, Instant};

/// `circuit_breaker` of the settings.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BreakerRules {
    /// Failures in a row that open it.
    pub failure_threshold: u32,
    /// How long it stays open, and how long a half-open probe may take.
    pub recovery_timeout: Duration,
}

/// Counts the states a breaker has been in: outcomes of requests that began in an earlier one
/// say nothing about the present one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Era(pub u64);

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A request failed by the backend's fault. `successes` is the backend's count of all
    /// successes so far: when it has moved since the last failure, the row was broken.
    Failed {
        /// The era in which the request began.
        era: Era,
        /// All successes of this backend so far.
        successes: u64,
    },
    /// The half-open probe had a content byte, or a whole answer.
    ProbeSucceeded {
        /// The era in which the request began.
        era: Era,
    },
    /// Time has passed.
    Tick,
}

/// One backend's breaker.
#[derive(Debug)]
pub struct Breaker {
    rules: BreakerRules,
    passage: Passage,
    era: Era,
    failures_in_row: u32,
    successes_at_last_failure: u64,
    since: Instant,
    half_open_since: Era,
}

impl Breaker {
    /// A closed breaker that continues counting eras after `era`.
    pub fn new(rules: BreakerRules, era: Era, now: Instant) -> Self {
        Breaker {
            rules,
            passage: Passage::Closed,
            era,
            failures_in_row: 0,
            successes_at_last_failure: 0,
            since: now,
            half_open_since: era,
        }
    }

    /// What it lets through, and the era that requests sent now belong to.
    pub fn state(&self) -> (Passage, Era) {
        (self.passage, self.era)
    }

    /// When a [`Event::Tick`] will matter, if ever.
    pub fn next_tick(&self) -> Option<Instant> {
        match self.passage {
            Passage::Closed => None,
            Passage::Open | Passage::HalfOpen => Some(self.since + self.rules.recovery_timeout),
        }
    }

    /// Takes in an event; answers whether passage or era changed.
    pub fn on(&mut self, event: Event, now: Instant) -> bool {
        match (self.passage, event) {
            (Passage::Closed, Event::Failed { era, successes }) if era == self.era => {
                if successes != self.successes_at_last_failure {
                    self.failures_in_row = 0;
                }
                self.successes_at_last_failure = successes;
                self.failures_in_row += 1;
                if self.failures_in_row < self.rules.failure_threshold {
                    return false;
                }
                self.enter(Passage::Open, now)
            }
            (Passage::Open, Event::Tick) if self.elapsed(now) => self.enter(Passage::HalfOpen, now),
            // a probe that took longer than its turn still shows that the backend is back
            (Passage::HalfOpen, Event::ProbeSucceeded { era })
                if (self.half_open_since..=self.era).contains(&era) =>
            {
                self.enter(Passage::Closed, now)
            }
            (Passage::HalfOpen, Event::Failed { era, .. }) if era == self.era => {
                self.enter(Passage::Open, now)
            }
            // the probe never reported: a new era hands out a new one
            (Passage::HalfOpen, Event::Tick) if self.elapsed(now) => {
                self.enter(Passage::HalfOpen, now)
            }
            _ => false,
        }
    }

    fn elapsed(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.since) >= self.rules.recovery_timeout
    }

    fn enter(&mut self, passage: Passage, now: Instant) -> bool {
        self.era = Era(self.era.0 + 1);
        if self.passage != Passage::HalfOpen {
            self.half_open_since = self.era;
        }
        self.passage = passage;
        self.failures_in_row = 0;
        self.since = now;
        true
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)] // a test may read the clock once
mod tests {
    use super::*;
    use proptest::prelude::*;

    const RECOVERY: Duration = Duration::from_secs(30);

    fn breaker(now: Instant) -> Breaker {
        let rules = BreakerRules {
            failure_threshold: 3,
            recovery_timeout: RECOVERY,
        };
        Breaker::new(rules, Era(0), now)
    }

    fn fail(breaker: &mut Breaker, successes: u64, now: Instant) {
        let era = breaker.state().1;
        breaker.on(Event::Failed { era, successes }, now);
    }

    fn opened(now: Instant) -> Breaker {
        let mut breaker = breaker(now);
        for _ in 0..3 {
            fail(&mut breaker, 0, now);
        }
        assert_eq!(breaker.state().0, Passage::Open);
        breaker
    }

    #[test]
    fn failures_open_it_only_in_a_row() {
        let now = Instant::now();
        let mut breaker = breaker(now);
        for successes in 0..20 {
            fail(&mut breaker, successes, now);
        }
        assert_eq!(
            breaker.state().0,
            Passage::Closed,
            "each failure followed a success"
        );
        fail(&mut breaker, 19, now);
        assert_eq!(breaker.state().0, Passage::Closed);
        fail(&mut breaker, 19, now);
        assert_eq!(breaker.state().0, Passage::Open);
    }

    #[test]
    fn it_half_opens_after_the_recovery_timeout_and_closes_on_success() {
        let now = Instant::now();
        let mut breaker = opened(now);
        breaker.on(Event::Tick, now + RECOVERY / 2);
        assert_eq!(breaker.state().0, Passage::Open);
        breaker.on(Event::Tick, now + RECOVERY);
        assert_eq!(breaker.state().0, Passage::HalfOpen);
        let era = breaker.state().1;
        breaker.on(Event::ProbeSucceeded { era }, now + RECOVERY);
        assert_eq!(breaker.state().0, Passage::Closed);
    }

    #[test]
    fn a_failed_probe_opens_it_for_another_full_timeout() {
        let now = Instant::now();
        let mut breaker = opened(now);
        breaker.on(Event::Tick, now + RECOVERY);
        fail(&mut breaker, 0, now + RECOVERY);
        assert_eq!(breaker.state().0, Passage::Open);
        assert_eq!(breaker.next_tick(), Some(now + RECOVERY * 2));
    }

    #[test]
    fn a_probe_that_never_reports_lapses_into_a_new_one() {
        let now = Instant::now();
        let mut breaker = opened(now);
        breaker.on(Event::Tick, now + RECOVERY);
        let first = breaker.state().1;
        assert!(breaker.on(Event::Tick, now + RECOVERY * 2));
        assert_eq!(breaker.state().0, Passage::HalfOpen);
        assert_ne!(breaker.state().1, first);
        let late = Event::Failed {
            era: first,
            successes: 0,
        };
        assert!(
            !breaker.on(late, now + RECOVERY * 2),
            "a late failure is ignored"
        );
        // an answer that takes longer than the timeout must be able to close it, or nothing can
        assert!(breaker.on(Event::ProbeSucceeded { era: first }, now + RECOVERY * 2));
        assert_eq!(breaker.state().0, Passage::Closed);
    }

    #[test]
    fn outcomes_of_an_earlier_era_are_ignored() {
        let now = Instant::now();
        let mut breaker = opened(now);
        breaker.on(Event::Tick, now + RECOVERY);
        let stale = Event::Failed {
            era: Era(0),
            successes: 0,
        };
        assert!(
            !breaker.on(stale, now + RECOVERY),
            "a request from before it opened"
        );
        let old = Event::ProbeSucceeded { era: Era(0) };
        assert!(!breaker.on(old, now + RECOVERY));
        assert_eq!(breaker.state().0, Passage::HalfOpen);
    }

    proptest! {
        #[test]
        fn it_is_never_stuck(events in proptest::collection::vec(0u8..4, 0..60)) {
            let mut now = Instant::now();
            let mut breaker = breaker(now);
            for event in events {
                let era = breaker.state().1;
                match event {
                    0 => { breaker.on(Event::Failed { era, successes: 0 }, now); }
                    1 => { breaker.on(Event::ProbeSucceeded { era }, now); }
                    2 => { breaker.on(Event::Failed { era: Era(u64::MAX), successes: 1 }, now); }
                    _ => { now += RECOVERY / 2; breaker.on(Event::Tick, now); }
                }
                prop_assert_eq!(breaker.next_tick().is_none(), breaker.state().0 == Passage::Closed);
            }
            // whatever came before: time and one good probe close it
            while let Some(at) = breaker.next_tick() {
                now = now.max(at);
                breaker.on(Event::Tick, now);
                let era = breaker.state().1;
                breaker.on(Event::ProbeSucceeded { era }, now);
            }
            prop_assert_eq!(breaker.state().0, Passage::Closed);
        }
    }
}
