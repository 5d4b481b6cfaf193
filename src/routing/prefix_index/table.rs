//! From a hash to a place of a slab, in four bytes a slot. The hash itself stands in the slab only:
//! a slot has the place, how far it is from where its hash belongs, and as many bits of the hash as
//! there is room for, so that hardly any other record is looked at on the way.
//!
//! Entries stand in the order of where they belong (Robin Hood hashing): a search ends at the first
//! one that is nearer to its own, and a removal moves those behind it back. No slot is ever a
//! tombstone.

use super::slab::Place;

/// How far an entry may be from where it belongs, plus one: what five bits can say.
const DISTANCE_MAX: u32 = 31;
const DISTANCE_SHIFT: u32 = 27;
const ONE_FARTHER: u32 = 1 << DISTANCE_SHIFT;
/// Places from here on find no room in a slot.
pub(super) const PLACES_MAX: usize = 1 << DISTANCE_SHIFT;
const CAPACITY_MIN: usize = 8;
/// Full up to this share: beyond, entries drift far from where they belong.
const LOAD_MAX: (usize, usize) = (4, 5);

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Table {
    // empty (0), or: distance + 1, bits of the hash, place; behind the last home there is room for
    // entries that drift
    slots: Vec<u32>,
    len: usize,
    capacity: usize,
    place_bits: u32,
}

/// Hashes that may be small numbers become evenly spread ones.
pub(super) fn spread(hash: u64) -> u64 {
    let wide = u128::from(hash ^ 0x2545_F491_4F6C_DD1D) * 0x9E37_79B9_7F4A_7C15;
    (wide >> 64) as u64 ^ wide as u64
}

impl Table {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The place for which `is_it` says so, of those with this hash.
    pub(super) fn find(&self, hash: u64, is_it: impl Fn(Place) -> bool) -> Option<Place> {
        self.position(hash, is_it)
            .map(|at| self.place(self.slots[at]))
    }

    /// Adds an entry that is not there. `hash_of` is asked when the table grows.
    pub(super) fn insert(&mut self, hash: u64, place: Place, hash_of: impl Fn(Place) -> u64) {
        let full = (self.len + 1) * LOAD_MAX.1 > self.capacity * LOAD_MAX.0;
        if full || u64::from(place) >> self.place_bits != 0 {
            let wanted = if full {
                self.len + self.len / 2 + CAPACITY_MIN
            } else {
                self.capacity
            };
            self.rebuild(wanted, place, &hash_of);
        }
        self.len += 1;
        let (mut place, mut hash) = (place, hash);
        while let Err(left_over) = self.settle(hash, place) {
            self.rebuild(self.capacity + self.capacity / 4 + 1, left_over, &hash_of);
            place = left_over;
            hash = hash_of(left_over);
        }
    }

    /// Removes the entry of this hash and place.
    pub(super) fn remove(&mut self, hash: u64, place: Place, hash_of: impl Fn(Place) -> u64) {
        let Some(mut at) = self.position(hash, |other| other == place) else {
            return;
        };
        while self.slots[at + 1] >= 2 * ONE_FARTHER {
            self.slots[at] = self.slots[at + 1] - ONE_FARTHER;
            at += 1;
        }
        self.slots[at] = 0;
        self.len -= 1;
        if self.len * 8 < self.capacity && self.capacity > 64 {
            self.rebuild(self.len * 2, 0, &hash_of);
        }
    }

    /// All places, in no order.
    pub(super) fn places(&self) -> impl Iterator<Item = Place> {
        let taken = self.slots.iter().filter(|slot| **slot != 0);
        taken.map(|slot| self.place(*slot))
    }

    fn place(&self, slot: u32) -> Place {
        slot & ((1 << self.place_bits) - 1)
    }

    fn home(&self, hash: u64) -> usize {
        ((u128::from(hash) * self.capacity as u128) >> 64) as usize
    }

    /// What a slot at distance 0 shows of a hash: the low bits, as the high ones say where it belongs.
    fn marked(&self, hash: u64) -> u32 {
        let bits = DISTANCE_SHIFT - self.place_bits;
        let of_hash = (hash as u32 & ((1 << bits) - 1)) << self.place_bits;
        ONE_FARTHER | of_hash
    }

    fn position(&self, hash: u64, is_it: impl Fn(Place) -> bool) -> Option<usize> {
        if self.len == 0 {
            return None;
        }
        let mut at = self.home(hash);
        let mut wanted = self.marked(hash);
        loop {
            let slot = self.slots[at];
            if slot >> self.place_bits == wanted >> self.place_bits && is_it(self.place(slot)) {
                return Some(at);
            }
            if slot >> DISTANCE_SHIFT < wanted >> DISTANCE_SHIFT
                || wanted >> DISTANCE_SHIFT == DISTANCE_MAX
            {
                return None;
            }
            at += 1;
            wanted += ONE_FARTHER;
        }
    }

    /// Puts an entry in, moving nearer ones on; answers the one that would drift too far.
    fn settle(&mut self, hash: u64, place: Place) -> Result<(), Place> {
        let mut at = self.home(hash);
        let mut slot = self.marked(hash) | place;
        loop {
            let other = self.slots[at];
            if other == 0 {
                self.slots[at] = slot;
                return Ok(());
            }
            if other >> DISTANCE_SHIFT < slot >> DISTANCE_SHIFT {
                self.slots[at] = slot;
                slot = other;
            }
            if slot >> DISTANCE_SHIFT == DISTANCE_MAX {
                return Err(self.place(slot));
            }
            at += 1;
            slot += ONE_FARTHER;
        }
    }

    /// A table for so many entries, in which `largest` and each place so far has room.
    fn rebuild(&mut self, wanted: usize, largest: Place, hash_of: &impl Fn(Place) -> u64) {
        let places: Vec<Place> = self.places().collect();
        let largest = places.iter().copied().max().unwrap_or(0).max(largest);
        self.place_bits = bits_for(largest);
        self.capacity = (wanted * LOAD_MAX.1).div_ceil(LOAD_MAX.0).max(CAPACITY_MIN);
        'larger: loop {
            self.slots = vec![0; self.capacity + DISTANCE_MAX as usize + 1];
            for place in &places {
                if self.settle(hash_of(*place), *place).is_err() {
                    self.capacity += self.capacity / 4 + 1;
                    continue 'larger;
                }
            }
            return;
        }
    }
}

/// Room for four times as many places as there are, so that tables are rebuilt rarely for it.
fn bits_for(largest: Place) -> u32 {
    (34 - (largest | 63).leading_zeros()).min(DISTANCE_SHIFT)
}
