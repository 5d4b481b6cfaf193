//! Which values a directory holds, how much room they take, and which was not used for longest. Pure: no files, no clock.

use crate::store::Holdings;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use std::time::SystemTime;

/// File systems give room in blocks; 4 KiB is the usual one. Also bounds how many values, and so how much memory, the index can
/// have for its bytes.
const BLOCK_BYTES: u64 = 4096;

/// What is known of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    /// Bytes of the file.
    pub(super) file_bytes: u64,
    /// Bytes of the value in it.
    pub(super) value_bytes: u64,
    /// When it was stored.
    pub(super) stored_at: SystemTime,
    /// When its use was last noted in the file itself.
    pub(super) noted_at: SystemTime,
}

/// A page: keys with their entries, and whether there are more.
pub(super) type Found = (Vec<(Arc<str>, Entry)>, bool);

/// The values of a directory, bounded in bytes; who was not used for longest makes room.
#[derive(Debug)]
pub(super) struct Index {
    entries: BTreeMap<Arc<str>, (Entry, Turn)>,
    by_use: BTreeMap<Turn, Arc<str>>,
    next_turn: Turn,
    bytes: u64,
    bytes_max: u64,
    crowded_out: u64,
}

/// Counts uses: the smallest one of an entry is the oldest.
type Turn = u64;

fn room(entry: &Entry) -> u64 {
    entry.file_bytes.div_ceil(BLOCK_BYTES) * BLOCK_BYTES
}

impl Index {
    pub(super) fn new(bytes_max: u64) -> Self {
        Index {
            entries: BTreeMap::new(),
            by_use: BTreeMap::new(),
            next_turn: 0,
            bytes: 0,
            bytes_max,
            crowded_out: 0,
        }
    }

    /// Notes a file as the one used last. Gives the keys whose files must go for it.
    pub(super) fn insert(&mut self, key: &str, entry: Entry) -> Vec<Arc<str>> {
        self.remove(key);
        let key: Arc<str> = key.into();
        self.bytes += room(&entry);
        self.by_use.insert(self.next_turn, key.clone());
        self.entries.insert(key, (entry, self.next_turn));
        self.next_turn += 1;
        let mut gone = Vec::new();
        while self.bytes > self.bytes_max {
            let Some((_, oldest)) = self.by_use.first_key_value() else {
                break;
            };
            let oldest = oldest.clone();
            self.remove(&oldest);
            self.crowded_out += 1;
            gone.push(oldest);
        }
        gone
    }

    /// Notes a use. Gives the entry, or none if there is none.
    pub(super) fn used(&mut self, key: &str) -> Option<&mut Entry> {
        let (entry, turn) = self.entries.get_mut(key)?;
        let key = self.by_use.remove(turn)?;
        *turn = self.next_turn;
        self.by_use.insert(self.next_turn, key);
        self.next_turn += 1;
        Some(entry)
    }

    pub(super) fn remove(&mut self, key: &str) -> Option<Entry> {
        let (entry, turn) = self.entries.remove(key)?;
        self.by_use.remove(&turn);
        self.bytes -= room(&entry);
        Some(entry)
    }

    /// Keys that begin with `prefix` and come behind `after`, in order.
    pub(super) fn page(&self, prefix: &str, after: Option<&str>, limit: usize) -> Found {
        let from = match after {
            Some(after) if after >= prefix => Bound::Excluded(after),
            _ => Bound::Included(prefix),
        };
        let mut found = self
            .entries
            .range::<str, _>((from, Bound::Unbounded))
            .take_while(|(key, _)| key.starts_with(prefix))
            .map(|(key, (entry, _))| (key.clone(), entry.clone()));
        let page = found.by_ref().take(limit).collect();
        (page, found.next().is_some())
    }

    /// Entries, bytes of all files in whole blocks, and how many have made room so far.
    pub(super) fn holdings(&self) -> Holdings {
        Holdings {
            entries: self.entries.len() as u64,
            bytes: self.bytes,
            crowded_out: self.crowded_out,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::UNIX_EPOCH;

    fn entry(file_bytes: u64) -> Entry {
        let (stored_at, noted_at) = (UNIX_EPOCH, UNIX_EPOCH);
        Entry {
            file_bytes,
            value_bytes: file_bytes,
            stored_at,
            noted_at,
        }
    }

    fn keys(index: &Index) -> Vec<String> {
        let (found, _) = index.page("", None, usize::MAX);
        found.iter().map(|(key, _)| key.to_string()).collect()
    }

    #[test]
    fn the_value_that_was_not_used_for_longest_makes_room() {
        let mut index = Index::new(3 * BLOCK_BYTES);
        for key in ["a", "b", "c"] {
            assert!(index.insert(key, entry(1)).is_empty());
        }
        assert!(index.used("a").is_some());
        assert_eq!(
            index.insert("d", entry(BLOCK_BYTES + 1)),
            [Arc::<str>::from("b"), "c".into()]
        );
        assert_eq!(keys(&index), ["a", "d"]);
        assert_eq!(index.holdings().bytes, 3 * BLOCK_BYTES);
    }

    #[test]
    fn pages_follow_each_other_and_keep_to_the_prefix() {
        let mut index = Index::new(u64::MAX);
        for key in ["a/1", "a/2", "a/3", "b/1"] {
            index.insert(key, entry(1));
        }
        let (page, more) = index.page("a/", None, 2);
        assert!(more && page.len() == 2);
        let (page, more) = index.page("a/", Some("a/2"), 2);
        assert!(!more && page.len() == 1 && &*page[0].0 == "a/3");
    }

    /// The slow way: a list in order of use.
    #[derive(Default)]
    struct Model(Vec<(String, u64)>);

    impl Model {
        fn apply(&mut self, op: u8, key: String, size: u64, max: u64) {
            let at = self.0.iter().position(|(known, _)| *known == key);
            let known = at.map(|at| self.0.remove(at));
            match op {
                0 => self.0.push((key, size)),
                1 => self.0.extend(known),
                _ => {}
            }
            while self
                .0
                .iter()
                .map(|(_, size)| size * BLOCK_BYTES)
                .sum::<u64>()
                > max
            {
                self.0.remove(0);
            }
        }
    }

    proptest! {
        #[test]
        fn it_holds_what_a_list_in_order_of_use_would_hold(
            ops in prop::collection::vec((0u8..3, 0u8..8, 1u64..4), 0..200),
        ) {
            let max = 8 * BLOCK_BYTES;
            let (mut index, mut model) = (Index::new(max), Model::default());
            for (op, key, blocks) in ops {
                let key = key.to_string();
                match op {
                    0 => drop(index.insert(&key, entry(blocks * BLOCK_BYTES))),
                    1 => drop(index.used(&key).is_some()),
                    _ => drop(index.remove(&key)),
                }
                model.apply(op, key, blocks, max);
                let mut expected: Vec<_> = model.0.iter().map(|(key, _)| key.clone()).collect();
                expected.sort();
                prop_assert_eq!(keys(&index), expected);
                let bytes: u64 = model.0.iter().map(|(_, blocks)| blocks * BLOCK_BYTES).sum();
                prop_assert_eq!(index.holdings().bytes, bytes);
            }
        }
    }
}
