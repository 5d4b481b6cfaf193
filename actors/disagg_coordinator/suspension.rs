//! Which hand-off groups are left alone, since their hand-offs fail in a row: a circuit breaker per group. What
//! fails there is what lies between the workers, which is nobody's own breaker's business; so it must fail at
//! more than one of them.

use super::{GroupSpec, Learned};
use routing::breaker::{Breaker, BreakerRules, Era, Event};
use routing::view::{HandOffGroup, Passage};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// Hand-offs of a group that fail in a row before it is left alone.
pub const HANDOFF_FAILURES: u32 = 5;
/// For how long, until one request tries it again.
pub const HANDOFF_RECOVERY: Duration = Duration::from_secs(10);

struct Group {
    breaker: Breaker,
    /// Hand-offs that went well, as the breaker counts them.
    successes: u64,
    /// Decode workers that have failed since the last one that went well.
    failing: BTreeSet<Arc<str>>,
    /// The hand-off that tries whether it works again.
    trial: Option<u64>,
}

impl Group {
    fn new() -> Self {
        let rules = BreakerRules {
            failure_threshold: HANDOFF_FAILURES,
            recovery_timeout: HANDOFF_RECOVERY,
        };
        Group {
            breaker: Breaker::new(rules, Era(0), super::now()),
            successes: 0,
            failing: BTreeSet::new(),
            trial: None,
        }
    }
}

pub(super) struct Suspensions {
    groups: Vec<Group>,
    specs: Arc<[GroupSpec]>,
}

impl Suspensions {
    pub(super) fn new(specs: Arc<[GroupSpec]>) -> Self {
        let groups = specs.iter().map(|_| Group::new());
        Suspensions {
            groups: groups.collect(),
            specs,
        }
    }

    /// The groups may be more from now on, or have other workers.
    pub(super) fn follow(&mut self, specs: &Arc<[GroupSpec]>) {
        if !Arc::ptr_eq(&self.specs, specs) {
            self.groups.resize_with(specs.len(), Group::new);
            self.specs = specs.clone();
        }
    }

    /// Those that take no hand-off now.
    pub(super) fn suspended(&mut self, now: Instant) -> Vec<HandOffGroup> {
        let mut suspended = Vec::new();
        for (at, group) in self.groups.iter_mut().enumerate() {
            if group.breaker.next_tick().is_some_and(|at| now >= at) {
                group.breaker.on(Event::Tick, now);
                group.trial = None;
            }
            let takes = match group.breaker.state().0 {
                Passage::Closed => true,
                Passage::Open => false,
                Passage::HalfOpen => group.trial.is_none(),
            };
            if !takes {
                suspended.push(HandOffGroup(at as u32));
            }
        }
        suspended
    }

    /// The state that hand-offs begun now belong to.
    pub(super) fn era(&self, group: HandOffGroup) -> Era {
        let group = self.groups.get(group.0 as usize);
        group.map_or(Era(0), |group| group.breaker.state().1)
    }

    /// A hand-off of this group begins.
    pub(super) fn tries(&mut self, group: HandOffGroup, lease: u64) {
        if let Some(group) = self.groups.get_mut(group.0 as usize)
            && group.breaker.state().0 == Passage::HalfOpen
        {
            group.trial = Some(lease);
        }
    }

    /// A request has ended: if it was to try a group and told nothing, another one may.
    pub(super) fn ended(&mut self, lease: u64) {
        for group in &mut self.groups {
            group.trial = group.trial.filter(|trial| *trial != lease);
        }
    }

    /// A hand-off went well, or did not.
    pub(super) fn learned(&mut self, of: &Learned, now: Instant) {
        let at = of.group.0 as usize;
        let (Some(group), Some(spec)) = (self.groups.get_mut(at), self.specs.get(at)) else {
            return;
        };
        let before = group.breaker.state().0;
        if of.well {
            group.successes += 1;
            group.failing.clear();
            group.breaker.on(Event::ProbeSucceeded { era: of.era }, now);
        } else {
            group.failing.insert(of.worker.clone());
            // one worker alone is at fault itself
            let several = group.failing.len() >= spec.decoders.min(2);
            if before == Passage::Closed && !several {
                return;
            }
            let (era, successes) = (of.era, group.successes);
            group.breaker.on(Event::Failed { era, successes }, now);
        }
        match (before, group.breaker.state().0) {
            (Passage::Closed, Passage::Open) => warn!(
                group = spec.name,
                failures = HANDOFF_FAILURES,
                again_in_s = HANDOFF_RECOVERY.as_secs(),
                "hand-offs fail in a row, nobody is split here for now"
            ),
            (Passage::HalfOpen, Passage::Closed) => {
                info!(group = spec.name, "hand-offs work again")
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUP: HandOffGroup = HandOffGroup(0);

    fn all(decoders: usize) -> Suspensions {
        Suspensions::new(Arc::from([GroupSpec {
            name: "g".into(),
            pairs_only: false,
            decoders,
        }]))
    }

    fn learn(all: &mut Suspensions, worker: &str, well: bool, now: Instant) {
        let of = Learned {
            group: GROUP,
            era: all.era(GROUP),
            worker: worker.into(),
            well,
        };
        all.learned(&of, now);
    }

    fn suspend(all: &mut Suspensions, now: Instant) {
        for _ in 0..HANDOFF_FAILURES {
            learn(all, "d", false, now);
        }
        assert_eq!(all.suspended(now), [GROUP]);
    }

    #[test]
    fn a_group_whose_hand_offs_fail_in_a_row_is_left_alone_and_tried_by_one() {
        let mut all = all(1);
        let start = super::super::now();
        for _ in 0..4 {
            learn(&mut all, "d", false, start);
        }
        learn(&mut all, "d", true, start);
        assert!(all.suspended(start).is_empty(), "the row was broken");
        suspend(&mut all, start);
        let later = start + HANDOFF_RECOVERY;
        assert!(all.suspended(later).is_empty());
        all.tries(GROUP, 11);
        assert_eq!(all.suspended(later), [GROUP], "one at a time");
        all.ended(11);
        assert!(all.suspended(later).is_empty(), "it told nothing");
        all.tries(GROUP, 12);
        learn(&mut all, "d", false, later);
        all.ended(12);
        assert_eq!(all.suspended(later), [GROUP]);
        let latest = later + HANDOFF_RECOVERY;
        assert!(all.suspended(latest).is_empty());
        all.tries(GROUP, 13);
        learn(&mut all, "d", true, latest);
        for _ in 0..3 {
            assert!(all.suspended(latest).is_empty());
            all.tries(GROUP, 14);
        }
    }

    #[test]
    fn a_trial_that_takes_longer_than_its_turn_still_shows_that_it_works() {
        let mut all = all(1);
        let start = super::super::now();
        suspend(&mut all, start);
        let first = start + HANDOFF_RECOVERY;
        assert!(all.suspended(first).is_empty());
        let slow = Learned {
            group: GROUP,
            era: all.era(GROUP),
            worker: "d".into(),
            well: true,
        };
        all.tries(GROUP, 1);
        let second = first + HANDOFF_RECOVERY;
        assert!(all.suspended(second).is_empty(), "another one may try");
        all.tries(GROUP, 2);
        all.learned(&slow, second);
        assert!(all.suspended(second).is_empty());
        all.tries(GROUP, 3);
        assert!(all.suspended(second).is_empty(), "it is closed");
    }

    #[test]
    fn what_began_before_says_nothing_about_the_present() {
        let mut all = all(1);
        let start = super::super::now();
        let old = |well| Learned {
            group: GROUP,
            era: Era(0),
            worker: "d".into(),
            well,
        };
        suspend(&mut all, start);
        let later = start + HANDOFF_RECOVERY;
        assert!(all.suspended(later).is_empty());
        all.learned(&old(true), later);
        all.learned(&old(false), later);
        all.tries(GROUP, 1);
        assert_eq!(all.suspended(later), [GROUP], "it is still being tried");
    }

    #[test]
    fn one_worker_alone_does_not_suspend_its_group() {
        let mut all = all(3);
        let now = super::super::now();
        for _ in 0..50 {
            learn(&mut all, "d1", false, now);
        }
        assert!(all.suspended(now).is_empty());
        for _ in 0..HANDOFF_FAILURES {
            learn(&mut all, "d2", false, now);
        }
        assert_eq!(all.suspended(now), [GROUP]);
    }
}
