//! A pair at work. Its lease is held by whoever serves the request, moves into the answer's body, and is given
//! back when it is dropped, on every ending.

use super::SplitState;
use actix::{Message, Recipient};
use routing::breaker::Era;
use routing::disagg::Path;
use routing::view::HandOffGroup;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Counts leases from 1, over restarts of the actor.
static LEASES: AtomicU64 = AtomicU64::new(0);

/// Where a leased pair stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeasedStep {
    /// The prompt is being computed.
    Prefill,
    /// The answer is being made.
    Decode,
}

/// Requests in each step. Counted by the leases themselves, so that they are right over restarts of the actor.
#[derive(Debug, Default)]
pub struct StepsIn {
    /// In their prefill step.
    pub prefill: AtomicU64,
    /// In their decode step.
    pub decode: AtomicU64,
}

impl StepsIn {
    fn of(&self, step: LeasedStep) -> &AtomicU64 {
        match step {
            LeasedStep::Prefill => &self.prefill,
            LeasedStep::Decode => &self.decode,
        }
    }
}

/// A lease has ended: this one.
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "()")]
pub struct Release(pub u64);

/// What was learned of the way between two workers.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct Learned {
    /// Whose hand-off it was.
    pub group: HandOffGroup,
    /// In which state of the group it began.
    pub era: Era,
    /// Who was to get the KV.
    pub worker: Arc<str>,
    /// Whether it did.
    pub well: bool,
}

/// Whom leases tell: of what was learned, and of their end.
pub(super) type Told = (Recipient<Learned>, Recipient<Release>);

/// See the module.
pub struct Lease {
    lease: u64,
    group: HandOffGroup,
    era: Era,
    worker: Arc<str>,
    step: LeasedStep,
    state: Arc<SplitState>,
    told: Told,
}

impl Lease {
    /// Its number.
    pub fn id(&self) -> u64 {
        self.lease
    }

    /// The decode leg is being sent.
    pub fn decodes(&mut self) {
        self.turn_to(LeasedStep::Decode);
    }

    /// Whether KV went from one worker to the other: told at once, since an answer may last long after that.
    pub fn handed_over(&self, well: bool) {
        // bounded by the requests in flight
        self.told.0.do_send(Learned {
            group: self.group,
            era: self.era,
            worker: self.worker.clone(),
            well,
        });
    }

    fn turn_to(&mut self, step: LeasedStep) {
        self.state.steps.of(self.step).fetch_sub(1, Relaxed);
        self.step = step;
        self.state.steps.of(step).fetch_add(1, Relaxed);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.state.steps.of(self.step).fetch_sub(1, Relaxed);
        // bounded by the requests in flight
        self.told.1.do_send(Release(self.lease));
    }
}

/// A leased pair, for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseInfo {
    /// How the request is served.
    pub path: Path,
    /// Who computes the prompt.
    pub prefill: Option<Arc<str>>,
    /// Who answers.
    pub worker: Arc<str>,
    /// For how long.
    pub age: Duration,
}

struct Granted {
    path: Path,
    prefill: Option<Arc<str>>,
    worker: Arc<str>,
    since: Instant,
}

/// The leases of one coordinator.
pub(super) struct Leases {
    granted: HashMap<u64, Granted>,
    state: Arc<SplitState>,
}

impl Leases {
    pub(super) fn new(state: Arc<SplitState>) -> Self {
        Leases {
            granted: HashMap::new(),
            state,
        }
    }

    pub(super) fn grant(
        &mut self,
        (path, group, era): (Path, HandOffGroup, Era),
        (prefill, worker): (Option<Arc<str>>, Arc<str>),
        told: Told,
    ) -> Lease {
        let lease = LEASES.fetch_add(1, Relaxed) + 1;
        let step = match prefill {
            Some(_) => LeasedStep::Prefill,
            None => LeasedStep::Decode,
        };
        self.state.steps.of(step).fetch_add(1, Relaxed);
        let granted = Granted {
            path,
            prefill,
            worker: worker.clone(),
            since: super::now(),
        };
        self.granted.insert(lease, granted);
        Lease {
            lease,
            group,
            era,
            worker,
            step,
            state: self.state.clone(),
            told,
        }
    }

    /// Leases of an actor that died are not known here.
    pub(super) fn end(&mut self, lease: u64) {
        self.granted.remove(&lease);
    }

    /// The oldest first.
    pub(super) fn list(&self, most: usize) -> Vec<LeaseInfo> {
        let now = super::now();
        let mut all: Vec<(&u64, &Granted)> = self.granted.iter().collect();
        all.sort_unstable_by_key(|(lease, _)| **lease);
        let told = all.into_iter().take(most).map(|(_, of)| LeaseInfo {
            path: of.path,
            prefill: of.prefill.clone(),
            worker: of.worker.clone(),
            age: now.saturating_duration_since(of.since),
        });
        told.collect()
    }
}
