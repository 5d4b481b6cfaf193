//! One holder's record of one block: in which tiers it is there, what the engine calls it and how
//! many copies it announced, and when it was last used.

use super::Seconds;
use super::holders::{HOLDER_BITS, HolderNumber};
use super::slab::{NOWHERE, Place};
use super::tier::{Tier, Tiers};

/// Copies beyond this are not counted: some engines announce a block again whenever it is used.
const COPIES_MAX: u32 = 8;
/// Tiers whose copies are counted: those that engines announce.
const COUNTED: [Tier; 3] = [Tier::Gpu, Tier::Cpu, Tier::Storage];

// the word of small facts, from its lowest bit
const NAMED: u32 = 1 << HOLDER_BITS;
const TIERS_SHIFT: u32 = HOLDER_BITS + 1;
const TIERS_MASK: u32 = 0b1_1111;
const COPIES_SHIFT: u32 = TIERS_SHIFT + 5;
const COPIES_BITS: u32 = 4;
const COPIES_MASK: u32 = (1 << COPIES_BITS) - 1;

/// See the module.
#[derive(Debug, Clone, Copy)]
pub(super) struct Holding {
    /// The engine's hash; of meaning while it is named.
    pub(super) name: u64,
    /// Which block.
    pub(super) block: Place,
    next: Place,
    /// The last use.
    pub(super) touched: Seconds,
    facts: u32,
}

impl Holding {
    /// What a free place shows.
    pub(super) const BLANK: Holding = Holding {
        name: 0,
        block: NOWHERE,
        next: NOWHERE,
        touched: 0,
        facts: 0,
    };

    pub(super) fn new(holder: HolderNumber, block: Place, next: Option<Place>) -> Self {
        Holding {
            block,
            next: next.unwrap_or(NOWHERE),
            facts: u32::from(holder.0),
            ..Holding::BLANK
        }
    }

    pub(super) fn holder(&self) -> HolderNumber {
        HolderNumber((self.facts & (NAMED - 1)) as u16)
    }

    /// The next record of the same block.
    pub(super) fn next(&self) -> Option<Place> {
        (self.next != NOWHERE).then_some(self.next)
    }

    pub(super) fn set_next(&mut self, next: Option<Place>) {
        self.next = next.unwrap_or(NOWHERE);
    }

    /// Where the block is now; empty if the record only keeps the engine's name for it.
    pub(super) fn tiers(&self) -> Tiers {
        Tiers::from_bits((self.facts >> TIERS_SHIFT & TIERS_MASK) as u8)
    }

    pub(super) fn set_tiers(&mut self, tiers: Tiers) {
        self.facts &= !(TIERS_MASK << TIERS_SHIFT);
        self.facts |= u32::from(tiers.bits()) << TIERS_SHIFT;
    }

    /// Whether an engine's hash leads here.
    pub(super) fn is_named(&self) -> bool {
        self.facts & NAMED != 0
    }

    pub(super) fn set_name(&mut self, name: u64) {
        self.name = name;
        self.facts |= NAMED;
    }

    pub(super) fn clear_name(&mut self) {
        self.facts &= !(NAMED | u32::MAX << COPIES_SHIFT);
    }

    /// Whether copies in any tier are counted.
    pub(super) fn has_copies(&self) -> bool {
        self.facts >> COPIES_SHIFT != 0
    }

    /// The copies in a tier that the engine announced.
    pub(super) fn copies(&self, tier: Tier) -> u32 {
        copies_shift(tier).map_or(0, |shift| self.facts >> shift & COPIES_MASK)
    }

    /// The engine announced a copy.
    pub(super) fn add_copy(&mut self, tier: Tier) {
        if let Some(shift) = copies_shift(tier)
            && self.facts >> shift & COPIES_MASK < COPIES_MAX
        {
            self.facts += 1 << shift;
        }
    }

    /// The engine removed a copy; answers how many are left in that tier.
    pub(super) fn take_copy(&mut self, tier: Tier) -> Option<u32> {
        let shift = copies_shift(tier)?;
        if self.facts >> shift & COPIES_MASK > 0 {
            self.facts -= 1 << shift;
        }
        Some(self.facts >> shift & COPIES_MASK)
    }
}

fn copies_shift(tier: Tier) -> Option<u32> {
    let at = COUNTED.iter().position(|counted| *counted == tier)?;
    Some(COPIES_SHIFT + at as u32 * COPIES_BITS)
}
