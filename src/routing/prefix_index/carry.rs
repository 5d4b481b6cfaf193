//! What one index tells another of an engine's memory, so that the other need not have heard the
//! engine from its beginning.

use super::holders::HolderNumber;
use super::slab::Place;
use super::tier::{Tier, Tiers};
use super::{HolderId, PrefixIndex, Seconds};
use crate::block::BlockHash;

/// A block that an engine has a name for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Carried {
    /// The engine's hash.
    pub name: u64,
    /// Ours.
    pub own: BlockHash,
    /// Copies on the GPU, in the host's memory, in storage.
    pub copies: [u8; 3],
    /// Whether it counts as there; else it has expired, and only the name is kept.
    pub held: bool,
    /// Whether the block before it in the list is its parent.
    pub follows: bool,
}

/// The tiers of [`Carried::copies`].
const COUNTED: [Tier; 3] = [Tier::Gpu, Tier::Cpu, Tier::Storage];

impl PrefixIndex {
    /// All that an engine announced and has not taken back.
    pub fn carry(&self, holder: HolderId) -> Vec<Carried> {
        let Some(number) = self.ledger.holders.find(holder) else {
            return Vec::new();
        };
        let mut places: Vec<Place> = self.ledger.holders[number].names.places().collect();
        places.sort_unstable(); // blocks mostly stand behind their parents
        let mut before: Option<Place> = None;
        let carried = places.into_iter().map(|place| {
            let holding = &self.ledger.holdings[place];
            let block = holding.block;
            let parent = before.replace(block);
            Carried {
                name: holding.name,
                own: self.ledger.blocks[block].own,
                copies: COUNTED.map(|tier| holding.copies(tier) as u8),
                held: self.ledger.held(number, block, Some(place)).is_some(),
                follows: parent.and_then(|p| self.ledger.blocks.child_behind(p)) == Some(block),
            }
        });
        carried.collect()
    }

    /// Takes in what another index has carried, in its order. Goes through the whole index once.
    pub fn take_over(&mut self, holder: HolderId, blocks: &[Carried], now: Seconds) {
        let Some(number) = self.ledger.holders.number(holder) else {
            return;
        };
        // the parents of those that follow nothing in the list are not known, and many blocks are
        // found from their parents only
        let mut everywhere = self.ledger.blocks.by_hash();
        let mut before: Option<Place> = None;
        for block in blocks {
            if self.ledger.names_of(number) >= self.limits.max_entries {
                break;
            }
            let here = everywhere.get(&block.own);
            let parent = match before.filter(|_| block.follows) {
                None => here.and_then(|here| self.ledger.blocks.record_before(*here)),
                follows => follows,
            };
            before = self.take_over_block(number, block, (parent, now));
            if let Some(place) = before {
                everywhere.insert(block.own, self.ledger.holdings[place].block);
            }
        }
        self.make_room(now);
    }

    fn take_over_block(
        &mut self,
        holder: HolderNumber,
        block: &Carried,
        (parent, now): (Option<Place>, Seconds),
    ) -> Option<Place> {
        let mut record = None;
        for (tier, copies) in COUNTED.into_iter().zip(block.copies) {
            for _ in 0..copies {
                let named = (block.name, self.ledger.named(holder, block.name));
                let what = (parent, block.own);
                record = self.ledger.stored((holder, tier), what, named, now);
            }
        }
        if let Some(place) = record.filter(|_| !block.held) {
            self.ledger.set_tiers(place, Tiers::NONE);
        }
        record
    }
}
