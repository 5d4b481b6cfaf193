//! The fewest seconds until the first token, at the speed that each worker has shown.

use super::{Policy, Sight, lowest};
use crate::rates::{Rates, seconds};
use crate::request::Request;
use routing::ids::Slot;
use routing::knowledge::Mode;
use routing::strategy::Chance;
use std::collections::BTreeMap;
use std::time::Duration;

/// See the module.
pub struct Cost {
    mode: Mode,
    rates: BTreeMap<usize, Rates>,
}

impl Cost {
    /// With an index from this.
    pub fn boxed(mode: Mode) -> Box<dyn Policy> {
        Box::new(Cost {
            mode,
            rates: BTreeMap::new(),
        })
    }
}

impl Policy for Cost {
    fn knowledge(&self) -> Mode {
        self.mode
    }

    fn place(&mut self, sight: &Sight<'_>, chance: &mut Chance) -> Option<Slot> {
        lowest(&sight.workers(), chance, |worker| {
            let rates = self.rates.get(&worker.slot).copied().unwrap_or_default();
            let tokens = (worker.load.queued_tokens, worker.uncached);
            (seconds(&rates, tokens, worker.load.in_flight), 0.0)
        })
    }

    fn first_token(&mut self, worker: usize, _: &Request, (computed, ttft): (u64, Duration)) {
        self.rates.entry(worker).or_default().learn(computed, ttft);
    }
}
