//! From a hash to a place of a slab, in about six bytes an entry. The hash itself stands in the slab
//! only: a slot has the place, and as many bits of the hash as there is room for, so that hardly any
//! other record is looked at on the way.
//!
//! Slots lie in rows as long as a cache line, and an entry is in the row where its hash belongs
//! unless that was full; so nearly every search reads one line, without a branch from slot to slot.

use super::slab::Place;

const ROW_SLOTS: usize = 15;
/// Bits of a slot for the place, at most; the rest are bits of the hash, the highest one always set.
const PLACE_BITS_MAX: u32 = 27;
/// Places from here on find no room in a slot.
pub(super) const PLACES_MAX: usize = 1 << PLACE_BITS_MAX;
/// Full up to this share of the slots: beyond, many rows overflow.
const LOAD_MAX: (usize, usize) = (4, 5);

// The first slots that are taken, then 0; and last a word of how many are taken, and how many
// entries belong here or before and stand in a later row (a count that stays at its maximum).
#[derive(Debug, Default, Clone, Copy)]
#[repr(align(64))]
struct Row([u32; ROW_SLOTS + 1]);

const PASSED_ONE: u32 = 1 << 8;
const PASSED_MAX: u32 = u32::MAX / PASSED_ONE;

impl Row {
    fn taken(&self) -> usize {
        (self.0[ROW_SLOTS] % PASSED_ONE) as usize
    }

    fn passed(&self) -> u32 {
        self.0[ROW_SLOTS] / PASSED_ONE
    }

    fn pass(&mut self) {
        if self.passed() != PASSED_MAX {
            self.0[ROW_SLOTS] += PASSED_ONE;
        }
    }

    fn unpass(&mut self) {
        if self.passed() != PASSED_MAX {
            self.0[ROW_SLOTS] -= PASSED_ONE;
        }
    }

    fn push(&mut self, slot: u32) {
        self.0[self.taken()] = slot;
        self.0[ROW_SLOTS] += 1;
    }

    fn swap_remove(&mut self, slot: usize) {
        self.0[ROW_SLOTS] -= 1;
        let last = self.taken();
        self.0[slot] = self.0[last];
        self.0[last] = 0;
    }

    /// Which slots show this mark above the place: a bit for each. Looks at all sixteen words, so
    /// that it becomes a few instructions on vectors.
    #[inline]
    fn alike(&self, mark: u32, place_bits: u32) -> u32 {
        let mut alike = 0;
        for (slot, word) in self.0.iter().enumerate() {
            alike |= if word >> place_bits == mark {
                1 << slot
            } else {
                0
            };
        }
        alike & ((1 << ROW_SLOTS) - 1)
    }
}

/// Where an entry stands. Of use until the table changes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Position {
    row: usize,
    slot: usize,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Table {
    rows: Vec<Row>,
    len: usize,
    place_bits: u32,
}

/// Hashes that may be small numbers become evenly spread ones.
pub(super) fn spread(hash: u64) -> u64 {
    let wide = u128::from(hash ^ 0x2545_F491_4F6C_DD1D) * 0x9E37_79B9_7F4A_7C15;
    (wide >> 64) as u64 ^ wide as u64
}

impl Table {
    /// Memory that it takes.
    pub(super) fn bytes(&self) -> usize {
        self.rows.capacity() * size_of::<Row>()
    }

    /// Entries.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Brings the rows of these hashes nearer.
    pub(super) fn warm(&self, hashes: impl Iterator<Item = u64>) {
        if !self.rows.is_empty() {
            let rows = hashes.map(|hash| self.rows[self.home(hash)].0[ROW_SLOTS]);
            std::hint::black_box(rows.fold(0, |all, one| all ^ one));
        }
    }

    /// The place for which `is_it` says so, of those with this hash.
    #[inline]
    pub(super) fn find(&self, hash: u64, is_it: impl Fn(Place) -> bool) -> Option<Place> {
        self.position(hash, is_it).map(|at| self.at(at))
    }

    /// The place that stands at a position.
    pub(super) fn at(&self, at: Position) -> Place {
        self.place(self.rows[at.row].0[at.slot])
    }

    /// Adds an entry that is not there. `hash_of` is asked when the table grows.
    #[inline]
    pub(super) fn insert(&mut self, hash: u64, place: Place, hash_of: impl Fn(Place) -> u64) {
        let full = (self.len + 1) * LOAD_MAX.1 > self.rows.len() * ROW_SLOTS * LOAD_MAX.0;
        if full || place >> self.place_bits != 0 {
            // a quarter more at a time: half of a table is never empty
            let entries = self.len + if full { self.len / 4 + 4 } else { 0 };
            self.rebuild(entries, place, hash_of);
        }
        self.len += 1;
        self.settle(hash, place);
    }

    /// Removes the entry of this hash and place.
    pub(super) fn remove(&mut self, hash: u64, place: Place, hash_of: impl Fn(Place) -> u64) {
        if let Some(at) = self.position(hash, |other| other == place) {
            self.remove_at(hash, at, hash_of);
        }
    }

    /// Removes the entry of this hash at a position.
    #[inline]
    pub(super) fn remove_at(&mut self, hash: u64, at: Position, hash_of: impl Fn(Place) -> u64) {
        let mut passed = self.home(hash);
        while passed != at.row {
            self.rows[passed].unpass();
            passed = self.behind(passed);
        }
        self.rows[at.row].swap_remove(at.slot);
        self.len -= 1;
        if self.len * 8 < self.rows.len() * ROW_SLOTS && self.rows.len() > 4 {
            self.rebuild(self.len * 2, 0, hash_of);
        }
    }

    /// All places, in no order.
    pub(super) fn places(&self) -> impl Iterator<Item = Place> {
        let taken = self.rows.iter().flat_map(|row| &row.0[..ROW_SLOTS]);
        let taken = taken.filter(|slot| **slot != 0);
        taken.map(|slot| self.place(*slot))
    }

    fn place(&self, slot: u32) -> Place {
        slot & ((1 << self.place_bits) - 1)
    }

    fn home(&self, hash: u64) -> usize {
        ((u128::from(hash) * self.rows.len() as u128) >> 64) as usize
    }

    fn behind(&self, row: usize) -> usize {
        if row + 1 == self.rows.len() {
            0
        } else {
            row + 1
        }
    }

    /// What a slot shows of a hash: the low bits, as the high ones say where it belongs.
    fn mark(&self, hash: u64) -> u32 {
        (hash as u32 | 1 << 31 >> self.place_bits) & (u32::MAX >> self.place_bits)
    }

    /// Where the entry stands for which `is_it` says so, of those with this hash.
    #[inline]
    pub(super) fn position(&self, hash: u64, is_it: impl Fn(Place) -> bool) -> Option<Position> {
        if self.rows.is_empty() {
            return None;
        }
        let mark = self.mark(hash);
        let first = self.home(hash);
        let mut at = first;
        loop {
            let row = &self.rows[at];
            let mut alike = row.alike(mark, self.place_bits);
            while alike != 0 {
                let slot = alike.trailing_zeros() as usize;
                if is_it(self.place(row.0[slot])) {
                    return Some(Position { row: at, slot });
                }
                alike &= alike - 1;
            }
            if row.passed() == 0 {
                return None;
            }
            at = self.behind(at);
            if at == first {
                return None;
            }
        }
    }

    /// Puts an entry into the first row with room, from its home on.
    fn settle(&mut self, hash: u64, place: Place) {
        let slot = self.mark(hash) << self.place_bits | place;
        let mut at = self.home(hash);
        while self.rows[at].taken() == ROW_SLOTS {
            self.rows[at].pass();
            at = self.behind(at);
        }
        self.rows[at].push(slot);
    }

    /// A table for so many entries, in which `largest` and each place so far has room.
    #[cold]
    fn rebuild(&mut self, entries: usize, largest: Place, hash_of: impl Fn(Place) -> u64) {
        let all: Vec<(u64, Place)> = self.places().map(|place| (hash_of(place), place)).collect();
        let largest = all.iter().map(|(_, place)| *place).max().max(Some(largest));
        self.place_bits = bits_for(largest.unwrap_or(0));
        let slots = (entries * LOAD_MAX.1).div_ceil(LOAD_MAX.0);
        self.rows = vec![Row::default(); slots.div_ceil(ROW_SLOTS).max(1)];
        for (hash, place) in all {
            self.settle(hash, place);
        }
    }
}

/// Room for twice to four times as many places as there are, so that tables are rebuilt rarely for
/// it.
fn bits_for(largest: Place) -> u32 {
    (33 - (largest | 63).leading_zeros()).min(PLACE_BITS_MAX)
}
