//! Who may be chosen at all, and why the others may not: said once, for the choice and for its
//! explanation.

use crate::health::HealthState;
use crate::ids::Slot;
use crate::strategy::Candidate;
use crate::view::{BackendView, Passage, Role};

/// Why a backend is not a candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LeftOut {
    /// Probes say that it is not healthy, or it was not probed yet.
    NotHealthy,
    /// Its breaker is open.
    BreakerOpen,
    /// Its breaker is half open: it takes single requests only.
    BreakerHalfOpen,
    /// It is being drained.
    Draining,
    /// Its role does not fit.
    Role,
    /// It asked to be left alone for a moment, and others need not.
    Resting,
}

impl LeftOut {
    /// For people.
    pub fn as_str(self) -> &'static str {
        match self {
            LeftOut::NotHealthy => "not healthy",
            LeftOut::BreakerOpen => "circuit breaker open",
            LeftOut::BreakerHalfOpen => "circuit breaker half open",
            LeftOut::Draining => "draining",
            LeftOut::Role => "role does not fit",
            LeftOut::Resting => "resting after 429 or 503",
        }
    }
}

/// Why a backend is no candidate for a request of this role; none when it is one. That it rests is not
/// said here: whether that counts depends on the others.
pub(crate) fn left_out_of(backend: &BackendView, role: Option<Role>) -> Option<LeftOut> {
    if backend.health != HealthState::Healthy {
        Some(LeftOut::NotHealthy)
    } else if backend.passage == Passage::Open {
        Some(LeftOut::BreakerOpen)
    } else if backend.draining {
        Some(LeftOut::Draining)
    } else if role.is_some_and(|role| role != backend.role) {
        Some(LeftOut::Role)
    } else {
        (backend.passage == Passage::HalfOpen).then_some(LeftOut::BreakerHalfOpen)
    }
}

/// Leaves out those that rest, unless all do: resting is a wish, not a wall, and with everybody
/// resting, asking is the only way to learn. Answers who was left out.
pub(crate) fn spare_resting(candidates: &mut Vec<Candidate>) -> impl Iterator<Item = Slot> + use<> {
    let awake = candidates.iter().any(|c| !c.load.resting);
    let spared = candidates.extract_if(.., |c| awake && c.load.resting);
    let spared: Vec<Slot> = spared.map(|c| c.slot).collect();
    spared.into_iter()
}
