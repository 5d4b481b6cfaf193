//! Places for small records, numbered from 0. A record can be put right behind another: chains are
//! stored and removed block by block, and what lies side by side is walked without a search. A bit
//! says of each place whether it is free, so that freed neighbours are one stretch again.

use std::ops::{Index, IndexMut};

/// The number of a place.
pub(super) type Place = u32;
/// No place. Leaves the highest bit to those who pack more into the word.
pub(super) const NOWHERE: Place = u32::MAX >> 1;
/// Room is taken by this share of what is there: little is held that is not used, and a large
/// vector moves rarely (the allocator moves its pages, not its bytes).
const GROWTH_SHARE: usize = 32;
const GROWTH_MIN: usize = 64;

/// Up to this share of all places is free before short stretches of free ones are used.
const FREE_SHARE: usize = 64;
/// Words with free places that are searched for a long stretch of these: short ones make chains of
/// many pieces, and most of the time a long one is near.
const WORDS_SEARCHED: usize = 8;

/// Where 32 bits in a row are set, if so.
fn long_stretch(word: u64) -> Option<u32> {
    let mut starts = word;
    for shift in [1, 2, 4, 8, 16] {
        starts &= starts >> shift;
    }
    (starts != 0).then(|| starts.trailing_zeros())
}

/// See the module.
#[derive(Debug)]
pub(super) struct Slab<T> {
    places: Vec<T>,
    // a bit per place, set if it is free; and a bit per word of these, set if it is not 0
    free: Vec<u64>,
    free_words: Vec<u64>,
    live: usize,
    // where the search for a free place begins: the last one that became free
    hand: Place,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Slab {
            places: Vec::new(),
            free: Vec::new(),
            free_words: Vec::new(),
            live: 0,
            hand: 0,
        }
    }
}

impl<T> Index<Place> for Slab<T> {
    type Output = T;
    fn index(&self, place: Place) -> &T {
        &self.places[place as usize]
    }
}

impl<T> IndexMut<Place> for Slab<T> {
    fn index_mut(&mut self, place: Place) -> &mut T {
        &mut self.places[place as usize]
    }
}

impl<T: Copy> Slab<T> {
    /// Places, free ones among them.
    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// Records.
    pub(super) fn live(&self) -> usize {
        self.live
    }

    /// Memory that it takes.
    pub(super) fn bytes(&self) -> usize {
        let bits = self.free.capacity() + self.free_words.capacity();
        self.places.capacity() * size_of::<T>() + bits * size_of::<u64>()
    }

    /// All places in order, whatever a free one still shows.
    pub(super) fn as_slice(&self) -> &[T] {
        &self.places
    }

    /// The record at a place, if there is one.
    pub(super) fn get(&self, place: Place) -> Option<&T> {
        let record = self.places.get(place as usize)?;
        (!self.is_free(place)).then_some(record)
    }

    /// Puts a record behind another if that place is free, else anywhere.
    pub(super) fn put(&mut self, behind: Option<Place>, record: T) -> Place {
        let next = behind.map(|place| place + 1);
        let place = match next {
            Some(next) if self.is_free(next) => next,
            Some(next) if next as usize == self.places.len() && self.may_grow() => next,
            _ => self.find_free(),
        };
        self.live += 1;
        if place as usize == self.places.len() {
            self.push(record);
        } else {
            self.set_used(place);
            self.places[place as usize] = record;
        }
        place
    }

    /// Frees a place. What it shows from now on is `blank`.
    pub(super) fn take(&mut self, place: Place, blank: T) {
        self.live -= 1;
        self.places[place as usize] = blank;
        let word = place as usize / 64;
        self.free[word] |= 1 << (place % 64);
        self.free_words[word / 64] |= 1 << (word % 64);
        self.hand = place;
    }

    /// Whether a place at the end may be taken while others are free: few of them may be.
    fn may_grow(&self) -> bool {
        (self.places.len() - self.live) * FREE_SHARE <= self.places.len()
    }

    fn is_free(&self, place: Place) -> bool {
        let word = self.free.get(place as usize / 64);
        word.is_some_and(|word| word >> (place % 64) & 1 == 1)
    }

    fn set_used(&mut self, place: Place) {
        let word = place as usize / 64;
        self.free[word] &= !(1 << (place % 64));
        if self.free[word] == 0 {
            self.free_words[word / 64] &= !(1 << (word % 64));
        }
    }

    fn push(&mut self, record: T) {
        if self.places.len() == self.places.capacity() {
            let more = self.places.len() / GROWTH_SHARE + GROWTH_MIN;
            self.places.reserve_exact(more);
        }
        let words = self.places.len() / 64 + 1;
        if self.free.len() < words {
            self.free.push(0);
        }
        if self.free_words.len() < words.div_ceil(64) {
            self.free_words.push(0);
        }
        self.places.push(record);
    }

    /// A free place near the hand, best one with others behind it: a chain begins here. A new one if
    /// none is free.
    fn find_free(&self) -> Place {
        if self.live == self.places.len() {
            return self.places.len() as Place;
        }
        let hand = self.hand as usize / 64;
        let mut word = hand;
        for _ in 0..WORDS_SEARCHED {
            let found = self.free_word_from(word);
            let found = found.or_else(|| self.free_word_from(0));
            word = found.expect("fewer records than places, so a place is free");
            if let Some(stretch) = long_stretch(self.free[word]) {
                return (word * 64) as Place + stretch;
            }
            word += 1;
        }
        if self.may_grow() {
            return self.places.len() as Place;
        }
        let word = self.free_word_from(hand);
        let word = word.or_else(|| self.free_word_from(0));
        let word = word.expect("fewer records than places, so a place is free");
        (word * 64) as Place + self.free[word].trailing_zeros()
    }

    fn free_word_from(&self, from: usize) -> Option<usize> {
        let first = from / 64;
        let here = self.free_words.get(first)? & (u64::MAX << (from % 64));
        if here != 0 {
            return Some(first * 64 + here.trailing_zeros() as usize);
        }
        let rest = self.free_words.iter().enumerate().skip(first + 1);
        let (group, bits) = rest.into_iter().find(|(_, bits)| **bits != 0)?;
        Some(group * 64 + bits.trailing_zeros() as usize)
    }
}
