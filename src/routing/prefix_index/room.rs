//! What goes by itself: expired records, and, when there are too many, those that are missed least.
//! A hand goes round over all records for both.

use super::Seconds;
use super::holding::Holding;
use super::ledger::Ledger;
use super::slab::Place;
use super::tier::{Tier, Tiers};

/// Records that the search for room looks at.
const VICTIMS_SAMPLED: usize = 16;
/// How far it goes on from one of these towards the tail of its chain.
const TAIL_STEPS_MAX: usize = 64;

/// The least goes first: expired, least sure and near, longest unused.
type Rank = (bool, Option<Tier>, Seconds);

impl Ledger {
    /// Moves the hand by `budget` records and drops what has expired; answers how many. Engines'
    /// names stay.
    pub(super) fn sweep(&mut self, now: Seconds, ttl: Seconds, budget: usize) -> u64 {
        let mut expired = 0;
        for _ in 0..budget.min(self.holdings.len()) {
            let Some((place, holding)) = self.next_place() else {
                continue;
            };
            if now.saturating_sub(holding.touched) >= ttl {
                self.take_all(place);
                expired += 1;
            }
        }
        expired
    }

    /// Who makes room: the least of some records under the hand, and of its chain, as far as that
    /// ranks alike, the tail: a chain without its head is of no use.
    pub(super) fn victim(&mut self, now: Seconds, ttl: Seconds) -> Option<Place> {
        let rank = |holding: &Holding| -> Rank {
            let fresh = now.saturating_sub(holding.touched) < ttl;
            (fresh, holding.tiers().best(), holding.touched)
        };
        let mut worst: Option<(Rank, Place)> = None;
        let mut seen = 0;
        for _ in 0..self.holdings.len() {
            let Some((place, holding)) = self.next_place() else {
                continue;
            };
            seen += 1;
            let rank = rank(&holding);
            // of equal ones the last: chains lie in order
            if worst.is_none_or(|(least, _)| rank <= least) {
                worst = Some((rank, place));
            }
            if seen == VICTIMS_SAMPLED {
                break;
            }
        }
        let (least, mut place) = worst?;
        for _ in 0..TAIL_STEPS_MAX {
            match self.same_holders_next(place) {
                Some(next) if rank(&self.holdings[next]) == least => place = next,
                _ => break,
            }
        }
        Some(place)
    }

    /// The record under the hand, if a block is held by it, and moves on.
    fn next_place(&mut self) -> Option<(Place, Holding)> {
        let place = self.hand;
        let next = place + 1;
        self.hand = if next as usize >= self.holdings.len() {
            0
        } else {
            next
        };
        let holding = *self.holdings.as_slice().get(place as usize)?;
        (holding.tiers() != Tiers::NONE).then_some((place, holding))
    }

    /// The same holder's record of the block that stands behind this one's.
    fn same_holders_next(&self, place: Place) -> Option<Place> {
        let holding = &self.holdings[place];
        let child = self.blocks.child_behind(holding.block)?;
        self.held(holding.holder(), child, Some(place + 1))
    }
}
