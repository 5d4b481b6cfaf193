//! The blocks that somebody has or has a name for, found by their hashes. A block stands right
//! behind its parent where that place was free: then it is found from there, and nothing else leads
//! to it. All other blocks are heads, and stand in a table.

use super::holder_sets::SetId;
use super::slab::{NOWHERE, Place, Slab};
use super::table::Table;
use super::turns::Turns;
use crate::block::BlockHash;
use std::collections::HashMap;

#[derive(Debug, Clone, Copy)]
pub(super) struct Block {
    pub(super) own: BlockHash,
    holders: SetId,
    // the first record of a holder, or nowhere; the highest bit says whether it is a head
    first: u32,
}

const HEAD: u32 = NOWHERE + 1;

impl Block {
    /// What a free place shows.
    const BLANK: Block = Block {
        own: BlockHash(0),
        holders: SetId::EMPTY,
        first: NOWHERE,
    };

    /// Who has it.
    pub(super) fn holders(&self) -> SetId {
        self.holders
    }

    pub(super) fn first(&self) -> Option<Place> {
        let first = self.first & NOWHERE;
        (first != NOWHERE).then_some(first)
    }

    pub(super) fn set_first(&mut self, first: Option<Place>) {
        self.first = self.first & HEAD | first.unwrap_or(NOWHERE);
    }

    fn is_head(&self) -> bool {
        self.first & HEAD != 0
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    slab: Slab<Block>,
    heads: Table,
    turns: Turns,
}

impl std::ops::Index<Place> for Blocks {
    type Output = Block;
    fn index(&self, place: Place) -> &Block {
        &self.slab[place]
    }
}

impl std::ops::IndexMut<Place> for Blocks {
    fn index_mut(&mut self, place: Place) -> &mut Block {
        &mut self.slab[place]
    }
}

impl Blocks {
    /// Where a block is; `parent` is the block before it in its chain, if that is there.
    pub(super) fn find(&self, parent: Option<Place>, own: BlockHash) -> Option<Place> {
        if let Some(parent) = parent {
            let next = self.slab.as_slice().get(parent as usize + 1);
            // a free place shows no record
            if next.is_some_and(|next| next.own == own && next.first().is_some()) {
                return Some(parent + 1);
            }
        }
        self.heads.find(own.0, |place| self.slab[place].own == own)
    }

    /// Adds a block that is not there; somebody must have it at once.
    pub(super) fn add(&mut self, parent: Option<Place>, own: BlockHash) -> Place {
        let fresh = Block {
            own,
            ..Block::BLANK
        };
        let place = self.slab.put(parent, fresh);
        self.turns.cover(self.slab.len() + 1);
        if parent.is_none_or(|parent| parent + 1 != place) {
            self.make_head(place);
        }
        place
    }

    /// Nobody has a block any more, under no name.
    pub(super) fn remove(&mut self, place: Place) {
        let block = self.slab[place];
        if block.is_head() {
            let slab = &self.slab;
            self.heads
                .remove(block.own.0, place, |place| slab[place].own.0);
        }
        self.slab.take(place, Block::BLANK);
        self.turns.set(place, true);
        // its child is found from here no longer
        if self.slab.get(place + 1).is_some_and(|next| !next.is_head()) {
            self.make_head(place + 1);
        }
    }

    /// From now on these have a block.
    pub(super) fn set_holders(&mut self, place: Place, holders: SetId) {
        self.slab[place].holders = holders;
        let before = place.checked_sub(1).map(|before| &self.slab[before]);
        let turns =
            |block: &Block, before: &Block| block.is_head() || block.holders != before.holders;
        let here = before.is_none_or(|before| turns(&self.slab[place], before));
        self.turns.set(place, here);
        if let Some(next) = self.slab.as_slice().get(place as usize + 1) {
            let there = next.first().is_none() || turns(next, &self.slab[place]);
            self.turns.set(place + 1, there);
        }
    }

    /// How many blocks behind this one, at most `limit`, continue its chain with the same holders.
    pub(super) fn continued(&self, place: Place, limit: usize) -> usize {
        self.turns.clear_from(place as usize + 1, limit)
    }

    /// The child of a block that stands right behind it.
    pub(super) fn child_behind(&self, place: Place) -> Option<Place> {
        let next = self.slab.get(place + 1)?;
        (!next.is_head()).then_some(place + 1)
    }

    /// Memory that they take.
    pub(super) fn bytes(&self) -> usize {
        self.slab.bytes() + self.heads.bytes()
    }

    /// Every block by its hash. Takes as long as there are blocks.
    pub(super) fn by_hash(&self) -> HashMap<BlockHash, Place> {
        let places = 0..self.slab.len() as Place;
        let live = places.filter(|place| self.is_live(*place));
        live.map(|place| (self.slab[place].own, place)).collect()
    }

    /// Somebody's record of the parent of a block that is found from there.
    pub(super) fn record_before(&self, place: Place) -> Option<Place> {
        let found_from_parent = !self.slab[place].is_head();
        let parent = place.checked_sub(1).filter(|_| found_from_parent)?;
        self.slab[parent].first()
    }

    /// Whether a block is still there.
    pub(super) fn is_live(&self, place: Place) -> bool {
        self.slab.get(place).is_some()
    }

    /// All places in order; free ones have no holders.
    pub(super) fn as_slice(&self) -> &[Block] {
        self.slab.as_slice()
    }

    fn make_head(&mut self, place: Place) {
        self.slab[place].first |= HEAD;
        self.turns.set(place, true);
        let slab = &self.slab;
        let own = slab[place].own.0;
        self.heads.insert(own, place, |place| slab[place].own.0);
    }

    #[cfg(test)]
    pub(super) fn assert_consistent(&self) {
        for place in 0..self.slab.len() as Place {
            let Some(block) = self.slab.get(place) else {
                assert_eq!(self.slab[place].holders, SetId::EMPTY);
                assert_eq!(self.continued(place.max(1) - 1, 1), 0);
                continue;
            };
            assert!(block.first().is_some(), "a block that nobody has");
            let listed = self.heads.find(block.own.0, |other| other == place);
            assert_eq!(listed.is_some(), block.is_head());
            let before = self.slab.as_slice().get((place as usize).wrapping_sub(1));
            let alike = before.is_some_and(|before| before.holders == block.holders);
            let continued = place > 0 && self.continued(place - 1, 1) == 1;
            assert_eq!(continued, alike && !block.is_head());
            if !block.is_head() {
                assert!(self.is_live(place - 1), "found from a block that is gone");
            }
        }
        assert!(self.heads.len() <= self.slab.live());
    }
}
