//! Who has blocks, numbered densely; and of each what its engine calls them.

use super::HolderId;
use super::slab::Place;
use super::table::Table;
use std::collections::HashMap;

/// A holder's number here: small enough to stand in every record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct HolderNumber(pub(super) u16);

/// Bits of a holder's number.
pub(super) const HOLDER_BITS: u32 = 14;
/// Holders that have something at the same time. Beyond, what others announce is unknown.
pub(super) const HOLDERS_MAX: usize = 1 << HOLDER_BITS;

#[derive(Debug)]
pub(super) struct Holder {
    /// Records of it, in use or only a name.
    pub(super) holdings: usize,
    /// From the engine's hashes to these records.
    pub(super) names: Table,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Holders {
    numbers: HashMap<HolderId, HolderNumber>,
    holders: Vec<Holder>,
    // apart from the rest: lookups read these, and many in a row
    ids: Vec<HolderId>,
}

impl std::ops::Index<HolderNumber> for Holders {
    type Output = Holder;
    fn index(&self, number: HolderNumber) -> &Holder {
        &self.holders[usize::from(number.0)]
    }
}

impl std::ops::IndexMut<HolderNumber> for Holders {
    fn index_mut(&mut self, number: HolderNumber) -> &mut Holder {
        &mut self.holders[usize::from(number.0)]
    }
}

impl Holders {
    /// Whose number it is.
    pub(super) fn id(&self, number: HolderNumber) -> HolderId {
        self.ids[usize::from(number.0)]
    }

    /// The number of a holder, if it has one.
    pub(super) fn find(&self, id: HolderId) -> Option<HolderNumber> {
        self.numbers.get(&id).copied()
    }

    /// The number of a holder; a new one if need be.
    pub(super) fn number(&mut self, id: HolderId) -> Option<HolderNumber> {
        if let Some(number) = self.find(id) {
            return Some(number);
        }
        let fresh = Holder {
            holdings: 0,
            names: Table::default(),
        };
        let number = if self.holders.len() < HOLDERS_MAX {
            self.holders.push(fresh);
            self.ids.push(id);
            HolderNumber(self.holders.len() as u16 - 1)
        } else {
            let unused = self
                .holders
                .iter()
                .position(|holder| holder.holdings == 0)?;
            self.numbers.remove(&self.ids[unused]);
            self.holders[unused] = fresh;
            self.ids[unused] = id;
            HolderNumber(unused as u16)
        };
        self.numbers.insert(id, number);
        Some(number)
    }

    /// Memory that the way from engines' hashes takes.
    pub(super) fn bytes(&self) -> usize {
        self.holders.iter().map(|holder| holder.names.bytes()).sum()
    }

    /// Forgets what an engine calls its blocks; answers the records that had names.
    pub(super) fn forget_names(&mut self, number: HolderNumber) -> Vec<Place> {
        let names = std::mem::take(&mut self[number].names);
        names.places().collect()
    }
}
