//! Keeps blocks, their holders' records and the sets of holders in step. What an event or a request
//! means is said in `mod.rs`; here is what must change together.

use super::blocks::Blocks;
use super::holder_sets::{HolderSets, SetId};
use super::holders::{HolderNumber, Holders};
use super::holding::Holding;
use super::slab::{Place, Slab};
use super::table::{PLACES_MAX, Position, spread};
use super::tier::{Tier, Tiers};
use super::{HolderId, Seconds};
use crate::block::BlockHash;

/// Records in all, whatever the limits say: some places are free, and all must find room in a table.
pub(super) const RECORDS_MAX: usize = PLACES_MAX / 8 * 7;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    pub(super) blocks: Blocks,
    pub(super) holdings: Slab<Holding>,
    pub(super) sets: HolderSets,
    pub(super) holders: Holders,
    // records with tiers, and blocks that have such a record
    entries: usize,
    held_blocks: usize,
    // where sweeps and the search for room go on
    pub(super) hand: Place,
}

impl Ledger {
    pub(super) fn entries(&self) -> usize {
        self.entries
    }

    pub(super) fn held_blocks(&self) -> usize {
        self.held_blocks
    }

    /// Memory that it takes, sets of holders left out: they are few.
    pub(super) fn bytes(&self) -> usize {
        self.blocks.bytes() + self.holdings.bytes() + self.holders.bytes()
    }

    /// Whether another record finds room, whatever the limits say.
    pub(super) fn is_full(&self) -> bool {
        self.holdings.live() >= RECORDS_MAX
    }

    /// The record that an engine's hash leads to.
    pub(super) fn named(&self, holder: HolderNumber, name: u64) -> Option<Place> {
        let names = &self.holders[holder].names;
        names.find(spread(name), |place| self.holdings[place].name == name)
    }

    /// Looks at where hashes stand of which each will be needed in a moment. A search waits for
    /// memory, and many that do not wait for each other do so at the same time.
    pub(super) fn warm(&self, holder: HolderNumber, names: &[u64]) {
        let names_of = &self.holders[holder].names;
        names_of.warm(names.iter().map(|name| spread(*name)));
    }

    /// Finds the record that an engine's hash leads to, and where that stands.
    pub(super) fn named_at(&self, holder: HolderNumber, name: u64) -> Option<(Place, Position)> {
        let names = &self.holders[holder].names;
        let at = names.position(spread(name), |place| self.holdings[place].name == name)?;
        Some((names.at(at), at))
    }

    /// A holder's record of a block that it has now. `guess` is looked at first.
    pub(super) fn held(
        &self,
        holder: HolderNumber,
        block: Place,
        guess: Option<Place>,
    ) -> Option<Place> {
        let is_it = |place: &Place| {
            let holding = self.holdings.as_slice().get(*place as usize);
            holding.is_some_and(|holding| {
                holding.block == block
                    && holding.holder() == holder
                    && holding.tiers() != Tiers::NONE
            })
        };
        if let Some(right) = guess.filter(is_it) {
            return Some(right);
        }
        let block = &self.blocks[block];
        if block.holders() == SetId::EMPTY {
            return None;
        }
        self.sets.tier_of(block.holders(), holder)?;
        let first = block.first();
        std::iter::successors(first, |place| self.holdings[*place].next()).find(is_it)
    }

    /// A new record, best behind the holder's record of the block before.
    pub(super) fn add(
        &mut self,
        holder: HolderNumber,
        block: Place,
        behind: Option<Place>,
    ) -> Place {
        let first = self.blocks[block].first();
        let place = self
            .holdings
            .put(behind, Holding::new(holder, block, first));
        self.blocks[block].set_first(Some(place));
        self.holders[holder].holdings += 1;
        place
    }

    /// An engine's hash leads to this record from now on.
    pub(super) fn give_name(&mut self, place: Place, name: u64) {
        let holding = &mut self.holdings[place];
        holding.set_name(name);
        let holder = holding.holder();
        let holdings = &self.holdings;
        let names = &mut self.holders[holder].names;
        names.insert(spread(name), place, |place| spread(holdings[place].name));
    }

    /// An engine's hash leads here no longer. The record stays while it has tiers.
    pub(super) fn take_name(&mut self, place: Place) {
        let holding = &self.holdings[place];
        if let Some((named, at)) = self.named_at(holding.holder(), holding.name) {
            self.take_name_at(named, at);
        }
    }

    /// The same, where the hash has been found at `at`.
    pub(super) fn take_name_at(&mut self, place: Place, at: Position) {
        let holding = &mut self.holdings[place];
        let (holder, name) = (holding.holder(), holding.name);
        holding.clear_name();
        let holdings = &self.holdings;
        let names = &mut self.holders[holder].names;
        names.remove_at(spread(name), at, |place| spread(holdings[place].name));
    }

    /// A block is in these tiers for the holder of a record; with none and without a name the
    /// record goes, and with the last record the block.
    pub(super) fn set_tiers(&mut self, place: Place, tiers: Tiers) {
        let holding = &mut self.holdings[place];
        let before = holding.tiers().best();
        let (holder, block, after) = (holding.holder(), holding.block, tiers.best());
        holding.set_tiers(tiers);
        if before == after {
            return;
        }
        let from = self.blocks[block].holders();
        let to = self.sets.change(from, holder, after);
        self.blocks.set_holders(block, to);
        let (was, is) = (from != SetId::EMPTY, to != SetId::EMPTY);
        self.held_blocks = self.held_blocks + usize::from(is) - usize::from(was);
        self.entries = self.entries + usize::from(after.is_some()) - usize::from(before.is_some());
    }

    /// Removes a record that has neither tiers nor a name.
    pub(super) fn drop_if_void(&mut self, place: Place) {
        let holding = self.holdings[place];
        if holding.is_named() || holding.tiers() != Tiers::NONE {
            return;
        }
        self.holders[holding.holder()].holdings -= 1;
        self.unlink(place, &holding);
        self.holdings.take(place, Holding::BLANK);
        if self.blocks[holding.block].first().is_none() {
            self.blocks.remove(holding.block);
        }
    }

    fn unlink(&mut self, place: Place, holding: &Holding) {
        let block = &mut self.blocks[holding.block];
        if block.first() == Some(place) {
            block.set_first(holding.next());
            return;
        }
        let mut before = block.first();
        while let Some(at) = before {
            before = self.holdings[at].next();
            if before == Some(place) {
                self.holdings[at].set_next(holding.next());
                return;
            }
        }
    }

    /// A holder has a block in a tier. Answers its record.
    pub(super) fn put(
        &mut self,
        (holder, tier): (HolderNumber, Tier),
        block: Place,
        (guess, behind): (Option<Place>, Option<Place>),
        now: Seconds,
    ) -> Place {
        let held = self.held(holder, block, guess);
        // a record that so far keeps the engine's name only
        let own = |place: &Place| {
            let holding = self.holdings.get(*place);
            holding.is_some_and(|holding| holding.block == block && holding.holder() == holder)
        };
        let place = held
            .or_else(|| guess.filter(own))
            .unwrap_or_else(|| self.add(holder, block, behind));
        let tiers = self.holdings[place].tiers().with(tier);
        self.holdings[place].touched = now;
        self.set_tiers(place, tiers);
        place
    }

    /// A holder no longer has a block in a tier.
    pub(super) fn take(
        &mut self,
        (holder, tier): (HolderNumber, Tier),
        block: Place,
        guess: Option<Place>,
    ) -> Option<Place> {
        let place = self.held(holder, block, guess)?;
        let tiers = self.holdings[place].tiers().without(tier);
        self.set_tiers(place, tiers);
        Some(place)
    }

    /// A holder no longer has a block in any tier.
    pub(super) fn take_all(&mut self, place: Place) {
        self.set_tiers(place, Tiers::NONE);
        self.drop_if_void(place);
    }

    /// Whose record this is, and of which block.
    pub(super) fn key(&self, place: Place) -> (HolderId, BlockHash) {
        let holding = &self.holdings[place];
        let own = self.blocks[holding.block].own;
        (self.holders.id(holding.holder()), own)
    }
}

#[cfg(test)]
impl Ledger {
    pub(super) fn assert_consistent(&self) {
        use std::collections::BTreeMap;
        self.blocks.assert_consistent();
        let (mut entries, mut held, mut records) = (0, 0, 0);
        for (block, place) in self.blocks.as_slice().iter().zip(0..) {
            if !self.blocks.is_live(place) {
                continue;
            }
            let mut members = BTreeMap::new();
            let first = block.first();
            for at in std::iter::successors(first, |at| self.holdings[*at].next()) {
                let holding = self.holdings.get(at).expect("a record that was freed");
                assert_eq!(holding.block, place);
                assert!(holding.is_named() || holding.tiers() != Tiers::NONE);
                let named = self.named(holding.holder(), holding.name) == Some(at);
                assert_eq!(named, holding.is_named());
                records += 1;
                if let Some(tier) = holding.tiers().best() {
                    let twice = members.insert(holding.holder(), tier);
                    assert!(twice.is_none(), "two records say that it is there");
                }
            }
            let set = self.sets.members(block.holders()).iter();
            let set: Vec<_> = set.map(|member| (member.holder(), member.tier())).collect();
            assert_eq!(
                set,
                members.iter().map(|(h, t)| (*h, *t)).collect::<Vec<_>>()
            );
            entries += members.len();
            held += usize::from(!members.is_empty());
        }
        assert_eq!((entries, held), (self.entries, self.held_blocks));
        assert_eq!(records, self.holdings.live());
        assert!(self.sets.len() <= held + 1, "sets that no block has");
    }
}
