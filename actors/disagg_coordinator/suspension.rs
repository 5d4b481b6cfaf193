//! Which hand-off groups are left alone, since their hand-offs fail in a row: a circuit breaker per group. What
//! fails there is mostly what lies between the workers, which is nobody's own breaker's business.

use super::Release;
use routing::breaker::{Breaker, BreakerRules, Era, Event};
use routing::view::{HandOffGroup, Passage};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// Hand-offs of a group that fail in a row before it is left alone.
pub const HANDOFF_FAILURES: u32 = 5;
/// For how long, until one request tries it again.
pub const HANDOFF_RECOVERY: Duration = Duration::from_secs(10);

struct Group {
    breaker: Breaker,
    successes: u64,
    /// The hand-off that tries whether it works again.
    trial: Option<u64>,
}

pub(super) struct Suspensions {
    groups: Vec<Group>,
    names: Arc<[String]>,
}

impl Suspensions {
    pub(super) fn new(names: Arc<[String]>) -> Self {
        let rules = BreakerRules {
            failure_threshold: HANDOFF_FAILURES,
            recovery_timeout: HANDOFF_RECOVERY,
        };
        let groups = names.iter().map(|_| Group {
            breaker: Breaker::new(rules, Era(0), super::now()),
            successes: 0,
            trial: None,
        });
        Suspensions {
            groups: groups.collect(),
            names,
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

    /// A hand-off of this group begins.
    pub(super) fn tries(&mut self, group: HandOffGroup, lease: u64) {
        if let Some(group) = self.groups.get_mut(group.0 as usize)
            && group.breaker.state().0 == Passage::HalfOpen
        {
            group.trial = Some(lease);
        }
    }

    /// A hand-off has ended.
    pub(super) fn ended(&mut self, at: HandOffGroup, release: &Release, now: Instant) {
        let Some(group) = self.groups.get_mut(at.0 as usize) else {
            return;
        };
        let (passage, era) = group.breaker.state();
        let is_trial = group.trial == Some(release.lease);
        if is_trial {
            group.trial = None;
        }
        match release.handed_over {
            None => return,
            // of those that began before, the failures are known already
            Some(_) if passage == Passage::HalfOpen && !is_trial => return,
            Some(true) => {
                group.successes += 1;
                group.breaker.on(Event::ProbeSucceeded { era }, now);
            }
            Some(false) => {
                let successes = group.successes;
                group.breaker.on(Event::Failed { era, successes }, now);
            }
        }
        let name = self.names.get(at.0 as usize).map_or("", |name| name);
        match (passage, group.breaker.state().0) {
            (Passage::Closed, Passage::Open) => warn!(
                group = name,
                failures = HANDOFF_FAILURES,
                again_in_s = HANDOFF_RECOVERY.as_secs(),
                "hand-offs fail in a row, nobody is split here for now"
            ),
            (Passage::HalfOpen, Passage::Closed) => info!(group = name, "hand-offs work again"),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUP: HandOffGroup = HandOffGroup(0);

    fn release(lease: u64, handed_over: Option<bool>) -> Release {
        Release {
            lease,
            group: GROUP,
            handed_over,
        }
    }

    #[test]
    fn a_group_whose_hand_offs_fail_in_a_row_is_left_alone_and_tried_by_one() {
        let mut all = Suspensions::new(Arc::from(["g".to_owned()]));
        let start = super::super::now();
        for lease in 1..=4 {
            all.ended(GROUP, &release(lease, Some(false)), start);
        }
        all.ended(GROUP, &release(5, Some(true)), start);
        for lease in 6..=10 {
            assert!(all.suspended(start).is_empty(), "the row was broken");
            all.ended(GROUP, &release(lease, None), start);
            all.ended(GROUP, &release(lease, Some(false)), start);
        }
        assert_eq!(all.suspended(start), [GROUP]);
        let later = start + HANDOFF_RECOVERY;
        assert!(all.suspended(later).is_empty());
        all.tries(GROUP, 11);
        assert_eq!(all.suspended(later), [GROUP], "one at a time");
        all.ended(GROUP, &release(9, Some(false)), later);
        all.ended(GROUP, &release(11, None), later);
        assert!(all.suspended(later).is_empty(), "it told nothing");
        all.tries(GROUP, 12);
        all.ended(GROUP, &release(12, Some(false)), later);
        assert_eq!(all.suspended(later), [GROUP]);
        let latest = later + HANDOFF_RECOVERY;
        assert!(all.suspended(latest).is_empty());
        all.tries(GROUP, 13);
        all.ended(GROUP, &release(13, Some(true)), latest);
        for _ in 0..3 {
            assert!(all.suspended(latest).is_empty());
            all.tries(GROUP, 14);
        }
    }
}
