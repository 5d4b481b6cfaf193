//! The blocks that somebody has or has a name for, found by their hashes. A block stands right
//! behind its parent where that place was free: then it is found from there, and nothing else leads
//! to it. All other blocks are heads, and stand in a table.

use super::holder_sets::SetId;
use super::slab::{NOWHERE, Place, Slab};
use super::table::Table;
use crate::block::BlockHash;

#[derive(Debug, Clone, Copy)]
pub(super) struct Block {
    pub(super) own: BlockHash,
    /// Who has it.
    pub(super) holders: SetId,
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
            let next = parent + 1;
            if self.slab.get(next).is_some_and(|block| block.own == own) {
                return Some(next);
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
        // its child is found from here no longer
        if self.slab.get(place + 1).is_some_and(|next| !next.is_head()) {
            self.make_head(place + 1);
        }
    }

    /// The child of a block that stands right behind it.
    pub(super) fn child_behind(&self, place: Place) -> Option<Place> {
        let next = self.slab.get(place + 1)?;
        (!next.is_head()).then_some(place + 1)
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
        let slab = &self.slab;
        let own = slab[place].own.0;
        self.heads.insert(own, place, |place| slab[place].own.0);
    }

    #[cfg(test)]
    pub(super) fn assert_consistent(&self) {
        for place in 0..self.slab.len() as Place {
            let Some(block) = self.slab.get(place) else {
                assert_eq!(self.slab[place].holders, SetId::EMPTY);
                continue;
            };
            assert!(block.first().is_some(), "a block that nobody has");
            let listed = self.heads.find(block.own.0, |other| other == place);
            assert_eq!(listed.is_some(), block.is_head());
            if !block.is_head() {
                assert!(self.is_live(place - 1), "found from a block that is gone");
            }
        }
        assert!(self.heads.len() <= self.slab.live());
    }
}
