//! The router's own choice, by its own code: strategies, the prefix ring, and the index by the composite score.

use super::{Policy, Sight};
use crate::request::MODEL;
use routing::choose::{Ask, ChoiceRules, choose};
use routing::ids::Slot;
use routing::knowledge::Mode;
use routing::strategy::{Chance, Rotation};

/// See the module.
pub struct Ours {
    mode: Mode,
    rules: ChoiceRules,
    rotation: Rotation,
}

impl Ours {
    /// By these rules, with an index from this, or none.
    pub fn boxed(mode: Mode, rules: ChoiceRules) -> Box<dyn Policy> {
        Box::new(Ours {
            mode,
            rules,
            rotation: Rotation::default(),
        })
    }
}

impl Policy for Ours {
    fn knowledge(&self) -> Mode {
        self.mode
    }

    fn place(&mut self, sight: &Sight<'_>, chance: &mut Chance) -> Option<Slot> {
        let ask = Ask {
            model: MODEL,
            known: sight.known,
            prefix: sight.request.key,
            session: None,
            role: None,
            group: None,
            tried: sight.tried,
        };
        let rotation = &mut self.rotation;
        let plan = choose(&self.rules, sight.view, sight.live, &ask, rotation, chance);
        plan.ok().map(|plan| plan.slot)
    }
}
