//! The changes that events and requests make, block by block, on the ledger.

use super::holders::HolderNumber;
use super::ledger::Ledger;
use super::slab::Place;
use super::tier::{Tier, Tiers};
use super::{HolderId, Seconds};
use crate::block::BlockHash;

impl Ledger {
    /// Engines' hashes of a holder. An engine that never removes any must not fill our memory.
    pub(super) fn names_of(&self, holder: HolderNumber) -> usize {
        self.holders[holder].names.len()
    }

    /// An engine stored a block, perhaps once more, behind the block of the record `parent`.
    /// `known` is where its hash leads so far. Answers the record; none if there is no room at all.
    pub(super) fn stored(
        &mut self,
        (holder, tier): (HolderNumber, Tier),
        (parent, own): (Option<Place>, BlockHash),
        (name, mut known): (u64, Option<Place>),
        now: Seconds,
    ) -> Option<Place> {
        let mut before = parent.map(|parent| self.holdings[parent].block);
        let found = self.blocks.find(before, own);
        if let Some(other) = known
            && Some(self.holdings[other].block) != found
        {
            // the hash was reused for other tokens
            self.take_name(other);
            self.drop_if_void(other);
            before = before.filter(|before| self.blocks.is_live(*before));
            known = None;
        }
        if known.is_none() && self.is_full() {
            return None;
        }
        let block = found.unwrap_or_else(|| self.blocks.add(before, own));
        if let Some(place) = known {
            self.holdings[place].add_copy(tier);
            self.put((holder, tier), block, (Some(place), parent), now);
            return Some(place);
        }
        let held = self.held(holder, block, parent.map(|parent| parent + 1));
        let unnamed = held.filter(|held| !self.holdings[*held].is_named());
        let place = unnamed.unwrap_or_else(|| self.add(holder, block, parent));
        self.give_name(place, name);
        self.holdings[place].add_copy(tier);
        // under a second name the block is there already
        let at = held.unwrap_or(place);
        self.holdings[at].touched = now;
        self.set_tiers(at, self.holdings[at].tiers().with(tier));
        Some(place)
    }

    /// An engine copied a block that it stored before.
    pub(super) fn copied(&mut self, place: Place, tier: Tier, now: Seconds) {
        let holding = &mut self.holdings[place];
        holding.add_copy(tier);
        let (holder, block) = (holding.holder(), holding.block);
        self.put((holder, tier), block, (Some(place), None), now);
    }

    /// An engine removed a copy. If it was the last one in that tier, `afterwards` comes before the
    /// block can go. Answers how many are left; none if the hash is not known.
    pub(super) fn removed(
        &mut self,
        (holder, tier): (HolderNumber, Tier),
        name: u64,
        afterwards: impl FnOnce(&mut Self, Place),
    ) -> Option<u32> {
        let (place, at) = self.named_at(holder, name)?;
        let left = self.holdings[place].take_copy(tier)?;
        if !self.holdings[place].has_copies() {
            self.take_name_at(place, at);
        }
        if left == 0 {
            let block = self.holdings[place].block;
            let held = self.take((holder, tier), block, Some(place));
            afterwards(self, block);
            if let Some(other) = held.filter(|held| *held != place) {
                self.drop_if_void(other);
            }
        }
        self.drop_if_void(place);
        Some(left)
    }

    /// All that this engine announced is void.
    pub(super) fn forget(&mut self, holder: HolderNumber) {
        let mut places = self.holders.forget_names(holder);
        places.sort_unstable(); // tails first: blocks stand behind their parents
        for place in places.into_iter().rev() {
            let holding = &mut self.holdings[place];
            holding.clear_name();
            let block = holding.block;
            let held = self.held(holder, block, Some(place));
            if let Some(held) = held {
                self.set_tiers(held, Tiers::NONE);
            }
            if let Some(other) = held.filter(|held| *held != place) {
                self.drop_if_void(other);
            }
            self.drop_if_void(place);
        }
    }

    /// What is only assumed to be there is void. Nothing leads to it but a walk.
    pub(super) fn forget_assumed(&mut self, holder: HolderNumber) {
        if self.holders[holder].holdings == self.holders[holder].names.len() {
            return;
        }
        for place in (0..self.holdings.len() as Place).rev() {
            self.take_assumed(holder, place);
        }
    }

    /// A holder has a block; `before` is its record of the block before in the chain, if any.
    pub(super) fn put_behind(
        &mut self,
        what: (HolderNumber, Tier),
        block: Place,
        before: Option<Place>,
        now: Seconds,
    ) -> Place {
        let guess = before.map(|before| before + 1);
        self.put(what, block, (guess, before), now)
    }

    /// A holder has the blocks of a chain from `from` on; `has` is told its record of each.
    pub(super) fn put_chain(
        &mut self,
        what: (HolderNumber, Tier),
        (chain, from): (&[BlockHash], usize),
        now: Seconds,
        mut has: impl FnMut(Place),
    ) {
        let (mut block, mut holding) = (None, None);
        for (at, own) in chain.iter().enumerate() {
            let found = self.blocks.find(block, *own);
            if at < from {
                block = found;
                continue;
            }
            if self.is_full() {
                return;
            }
            let this = found.unwrap_or_else(|| self.blocks.add(block, *own));
            let record = self.put_behind(what, this, holding, now);
            has(record);
            holding = Some(record);
            block = Some(this);
        }
    }

    /// A namespace no longer has a block.
    pub(super) fn take_stored(&mut self, namespace: HolderNumber, block: Place) {
        if let Some(place) = self.held(namespace, block, None) {
            let tiers = self.holdings[place].tiers();
            self.set_tiers(place, tiers.without(Tier::Storage).without(Tier::Assumed));
            self.drop_if_void(place);
        }
    }

    /// A holder is no longer believed to have the block of a record. False if that is not its own any more, or no guess.
    pub(super) fn take_assumed(&mut self, holder: HolderNumber, record: Place) -> bool {
        let Some(holding) = self.holdings.get(record) else {
            return false;
        };
        let tiers = holding.tiers();
        let is_guess = holding.holder() == holder && tiers.without(Tier::Assumed) != tiers;
        if is_guess {
            self.set_tiers(record, tiers.without(Tier::Assumed));
            self.drop_if_void(record);
        }
        is_guess
    }

    /// A request has used a chain at a holder, or did not: notes the time, and ends the speculation
    /// on each block of which `is_over` says so. It is asked for every block, held or not.
    pub(super) fn used(
        &mut self,
        holder: HolderId,
        chain: &[BlockHash],
        touched: Option<Seconds>,
        mut is_over: impl FnMut(BlockHash) -> bool,
    ) {
        let holder = self.holders.find(holder);
        let (mut block, mut guess) = (None, None);
        for own in chain {
            let over = is_over(*own);
            block = self.blocks.find(block, *own);
            let (Some(holder), Some(block)) = (holder, block) else {
                continue;
            };
            let Some(place) = self.held(holder, block, guess) else {
                continue;
            };
            guess = Some(place + 1);
            if let Some(now) = touched {
                self.holdings[place].touched = now;
            }
            if over {
                let tiers = self.holdings[place].tiers().without(Tier::Speculative);
                self.set_tiers(place, tiers);
                self.drop_if_void(place);
            }
        }
    }
}
