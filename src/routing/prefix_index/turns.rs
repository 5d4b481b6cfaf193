//! A bit per block: whether a walk along a chain has to look at it. It need not where a block stands
//! behind its parent and has the same holders. So a lookup jumps over a stretch of such blocks, and
//! one comparison at its end holds for all of it: a block's hash stands for everything before it.

use super::slab::Place;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Turns(Vec<u64>);

impl Turns {
    /// Makes bits for so many places. They say yes.
    pub(super) fn cover(&mut self, places: usize) {
        let words = places.div_ceil(64);
        if self.0.len() < words {
            if self.0.len() == self.0.capacity() {
                self.0.reserve_exact(self.0.len() / 16 + 8);
            }
            self.0.push(u64::MAX);
        }
    }

    pub(super) fn set(&mut self, place: Place, turns: bool) {
        let word = &mut self.0[place as usize / 64];
        let bit = 1 << (place % 64);
        *word = *word & !bit | if turns { bit } else { 0 };
    }

    /// How many places from `from` on say no, at most `limit`.
    pub(super) fn clear_from(&self, from: usize, limit: usize) -> usize {
        let mut word = from / 64;
        let Some(first) = self.0.get(word) else {
            return 0;
        };
        let here = first & (u64::MAX << (from % 64));
        let mut end = word * 64 + here.trailing_zeros() as usize;
        while end == (word + 1) * 64 && end - from < limit {
            word += 1;
            end += self.0.get(word).map_or(0, |bits| bits.trailing_zeros()) as usize;
        }
        (end - from).min(limit)
    }
}
