//! Where a block is, and how surely; and sets of that.

/// Where a block is, and how surely. In the order in which they make room for others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// A request for it was sent there a moment ago.
    Speculative,
    /// External storage, as an eviction suggests.
    Assumed,
    /// External storage, as was said.
    Storage,
    /// The host's memory.
    Cpu,
    /// GPU memory.
    Gpu,
}

impl Tier {
    /// From the least to the most sure and near.
    pub const ALL: [Tier; 5] = [
        Tier::Speculative,
        Tier::Assumed,
        Tier::Storage,
        Tier::Cpu,
        Tier::Gpu,
    ];
}

/// The tiers in which one holder has one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tiers(u8);

impl Tiers {
    pub(super) const NONE: Tiers = Tiers(0);

    pub(super) fn from_bits(bits: u8) -> Self {
        Tiers(bits)
    }

    pub(super) fn bits(self) -> u8 {
        self.0
    }

    pub(super) fn with(self, tier: Tier) -> Self {
        Tiers(self.0 | 1 << tier as u8)
    }

    pub(super) fn without(self, tier: Tier) -> Self {
        Tiers(self.0 & !(1 << tier as u8))
    }

    pub(super) fn best(self) -> Option<Tier> {
        let highest = self.0.checked_ilog2()?;
        Tier::ALL.get(highest as usize).copied()
    }
}
