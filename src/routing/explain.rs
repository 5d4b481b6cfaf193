//! Why a request would go where it would: every backend of its model, with what speaks for it or
//! why it is left out. Changes nothing: no rotation turns, no half-open probe is taken.

use crate::choose::{Ask, ChoiceRules, NoBackend, Plan, Terms, choose, may_serve, weigh};
use crate::health::HealthState;
use crate::ids::Slot;
use crate::score::Known;
use crate::strategy::{Candidate, Chance, Rotation};
use crate::view::{ClusterView, Live, Passage};

/// What speaks for and against everybody.
#[derive(Debug, Clone, PartialEq)]
pub struct Explanation {
    /// Where the request would go now. Ties and chance may fall otherwise the next time.
    pub plan: Result<Plan, NoBackend>,
    /// Who could serve it, by the names of the backends.
    pub candidates: Vec<Terms>,
    /// Who could not, and why.
    pub left_out: Vec<(Slot, LeftOut)>,
}

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

/// Explains what [`choose`] does with the same arguments.
pub fn explain(
    rules: &ChoiceRules,
    view: &ClusterView,
    live: &impl Live,
    ask: &Ask<'_>,
    rotation: &Rotation,
    chance: &Chance,
) -> Explanation {
    let (mut rotation, mut chance) = (rotation.clone(), chance.clone());
    let plan = choose(rules, view, live, ask, &mut rotation, &mut chance);
    let members = view.pools.get(ask.model).map(|pool| &pool.members[..]);
    let (mut candidates, mut left_out) = (Vec::new(), Vec::new());
    for &slot in members.unwrap_or_default() {
        let backend = view.backend(slot);
        let why = if may_serve(backend, ask.role) {
            (backend.passage == Passage::HalfOpen).then_some(LeftOut::BreakerHalfOpen)
        } else if backend.health != HealthState::Healthy {
            Some(LeftOut::NotHealthy)
        } else if backend.passage == Passage::Open {
            Some(LeftOut::BreakerOpen)
        } else if backend.draining {
            Some(LeftOut::Draining)
        } else {
            Some(LeftOut::Role)
        };
        match why {
            Some(why) => left_out.push((slot, why)),
            None => candidates.push(Candidate {
                slot,
                load: live.load(slot),
            }),
        }
    }
    if candidates.iter().any(|c| !c.load.resting) {
        let resting = candidates.iter().filter(|c| c.load.resting);
        left_out.extend(resting.map(|c| (c.slot, LeftOut::Resting)));
        candidates.retain(|c| !c.load.resting);
    }
    let nothing = Known::default();
    Explanation {
        plan,
        candidates: weigh(rules, view, &candidates, ask.known.unwrap_or(&nothing)),
        left_out,
    }
}
