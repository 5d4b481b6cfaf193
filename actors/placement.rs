//! A choice that was acted on: the request counts at its backend from here on.

use crate::backend::InFlight;
use crate::directory::{LiveAt, Snapshot};
use routing::choose::{Plan, Reason};
use routing::knowledge::Mode;
use routing::score::{Known, Reach, Weights, reach};
use routing::view::Live;

/// Where a request goes, and why.
pub struct Placement {
    /// Counts the attempt until it is dropped.
    pub in_flight: InFlight,
    /// Why this backend.
    pub reason: Reason,
    /// What the prompt finds there; none when nothing is known of the prompt.
    pub reach: Option<Reach>,
    /// Where the knowledge of its KV cache came from.
    pub mode: Mode,
}

impl Placement {
    /// Counts the request in, with the work that it brings where that backend computes the prompt. None when the plan was to try a half-open
    /// backend, and another request was faster: then it is not free any more, and the next choice does not
    /// see it.
    pub(crate) fn take(
        snapshot: &Snapshot,
        live: &LiveAt<'_>,
        plan: &Plan,
        (known, weights): (Option<&Known>, &Weights),
        computes: bool,
    ) -> Option<Self> {
        let mut in_flight = snapshot.enter(plan.slot)?;
        let load = live.load(plan.slot);
        let backend = snapshot.view.backend(plan.slot);
        let reach = known.map(|known| reach(known, backend, &load, weights));
        if let (Some(reach), true) = (&reach, computes) {
            in_flight.will_compute(reach.uncached);
        }
        Some(Placement {
            in_flight,
            reason: plan.reason,
            reach,
            mode: load.mode,
        })
    }
}
