//! Why a request would go where it would: every backend of its model, with what speaks for it or
//! why it is left out. Changes nothing: no rotation turns, no half-open probe is taken.

use crate::choose::{Ask, ChoiceRules, NoBackend, Plan, Terms, choose, weigh};
use crate::eligible::{LeftOut, left_out_of, spare_resting};
use crate::ids::Slot;
use crate::score::Known;
use crate::strategy::{Candidate, Chance, Rotation};
use crate::view::{ClusterView, Live};

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
        match left_out_of(backend, ask.role) {
            Some(why) => left_out.push((slot, why)),
            None => candidates.push(Candidate {
                slot,
                load: live.load(slot),
            }),
        }
    }
    let resting = spare_resting(&mut candidates);
    left_out.extend(resting.map(|slot| (slot, LeftOut::Resting)));
    let nothing = Known::default();
    Explanation {
        plan,
        candidates: weigh(rules, view, &candidates, ask.known.unwrap_or(&nothing)),
        left_out,
    }
}
