//! Who holds a block, and in which tier at best, as one number: blocks with the same holders share
//! one set. Consecutive blocks of a prompt mostly have the same holders, so a lookup compares these
//! numbers, and looks into a set only where one begins.

use super::holders::HolderNumber;
use super::slab::Place;
use super::table::{Table, spread};
use super::tier::Tier;

/// A set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SetId(pub(super) u32);

impl SetId {
    /// Nobody.
    pub(super) const EMPTY: SetId = SetId(0);
}

/// A holder in its best tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Member(u32);

const TIER_BITS: u32 = 3;

impl Member {
    fn new(holder: HolderNumber, tier: Tier) -> Self {
        Member(u32::from(holder.0) << TIER_BITS | tier as u32)
    }

    pub(super) fn holder(self) -> HolderNumber {
        HolderNumber((self.0 >> TIER_BITS) as u16)
    }

    pub(super) fn tier(self) -> Tier {
        Tier::ALL[(self.0 & ((1 << TIER_BITS) - 1)) as usize]
    }

    fn mark(self) -> u64 {
        spread(u64::from(self.0) + 1)
    }
}

#[derive(Debug, Default)]
struct Set {
    // of its members' marks: changes with a member, in any order
    sum: u64,
    // blocks that have it
    uses: u32,
    // by holder, each once
    members: Box<[Member]>,
}

/// One step from set to set, as often repeated for the next block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Step {
    from: SetId,
    holder: HolderNumber,
    tier: Option<Tier>,
    to: SetId,
}

/// Steps that are remembered: a store and some removals take turns.
const STEPS: usize = 8;

/// See the module.
#[derive(Debug)]
pub(super) struct HolderSets {
    sets: Vec<Set>,
    free: Vec<u32>,
    by_sum: Table,
    steps: [Option<Step>; STEPS],
}

impl Default for HolderSets {
    fn default() -> Self {
        HolderSets {
            sets: vec![Set::default()],
            free: Vec::new(),
            by_sum: Table::default(),
            steps: [None; STEPS],
        }
    }
}

impl HolderSets {
    pub(super) fn members(&self, set: SetId) -> &[Member] {
        &self.sets[set.0 as usize].members
    }

    /// The best tier in which a holder is in a set.
    pub(super) fn tier_of(&self, set: SetId, holder: HolderNumber) -> Option<Tier> {
        let members = self.members(set);
        let at = members.partition_point(|member| member.holder() < holder);
        let member = members.get(at)?;
        (member.holder() == holder).then(|| member.tier())
    }

    /// A block had `from`; now this holder has it in `tier` at best, or not at all. Answers the set
    /// that the block has from now on.
    pub(super) fn change(
        &mut self,
        from: SetId,
        holder: HolderNumber,
        tier: Option<Tier>,
    ) -> SetId {
        let at = (from.0 as usize * 3 + usize::from(tier.is_some())) % STEPS;
        let to = match self.steps[at] {
            Some(step) if (step.from, step.holder, step.tier) == (from, holder, tier) => step.to,
            _ => self.find_changed(from, holder, tier),
        };
        self.steps[at] = Some(Step {
            from,
            holder,
            tier,
            to,
        });
        self.sets[to.0 as usize].uses += 1;
        self.release(from);
        to
    }

    /// Sets, the empty one among them.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.sets.len() - self.free.len()
    }

    #[cold]
    fn find_changed(&mut self, from: SetId, holder: HolderNumber, tier: Option<Tier>) -> SetId {
        let old = &self.sets[from.0 as usize];
        let at = old
            .members
            .partition_point(|member| member.holder() < holder);
        let (before, rest) = old.members.split_at(at);
        let was = rest.first().filter(|member| member.holder() == holder);
        let after = &rest[usize::from(was.is_some())..];
        let is = tier.map(|tier| Member::new(holder, tier));
        let sum = old
            .sum
            .wrapping_sub(was.map_or(0, |member| member.mark()))
            .wrapping_add(is.map_or(0, |member| member.mark()));
        if before.is_empty() && is.is_none() && after.is_empty() {
            return SetId::EMPTY;
        }
        let parts = || before.iter().chain(&is).chain(after).copied();
        let same = |place: Place| {
            let other = &self.sets[place as usize];
            other.sum == sum && other.members.iter().copied().eq(parts())
        };
        if let Some(known) = self.by_sum.find(spread(sum), same) {
            return SetId(known);
        }
        let set = Set {
            sum,
            uses: 0,
            members: parts().collect(),
        };
        self.add(set)
    }

    fn add(&mut self, set: Set) -> SetId {
        let sum = set.sum;
        let place = match self.free.pop() {
            Some(place) => {
                self.sets[place as usize] = set;
                place
            }
            None => {
                self.sets.push(set);
                self.sets.len() as u32 - 1
            }
        };
        let sets = &self.sets;
        let sum_of = |place: Place| spread(sets[place as usize].sum);
        self.by_sum.insert(spread(sum), place, sum_of);
        SetId(place)
    }

    fn release(&mut self, set: SetId) {
        let old = &mut self.sets[set.0 as usize];
        old.uses = old.uses.saturating_sub(1);
        if old.uses == 0 && set != SetId::EMPTY {
            self.remove(set);
        }
    }

    #[cold]
    fn remove(&mut self, set: SetId) {
        let old = &self.sets[set.0 as usize];
        for step in &mut self.steps {
            step.take_if(|step| step.from == set || step.to == set);
        }
        let sum = spread(old.sum);
        let sets = &self.sets;
        self.by_sum
            .remove(sum, set.0, |place| spread(sets[place as usize].sum));
        self.sets[set.0 as usize] = Set::default();
        self.free.push(set.0);
    }
}
