//! Which blocks a namespace store has: names only, as nobody needs the keys and values of a simulated model. Bounded; the block
//! that was used least recently leaves first. Pure.

use crate::kv_cache::BlockHash;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

type Name = (Arc<str>, BlockHash);

/// Blocks by namespace.
#[derive(Debug)]
pub struct Shelf {
    blocks_max: usize,
    /// When each block was last used, counted in uses.
    used: HashMap<Name, u64>,
    by_use: BTreeMap<u64, Name>,
    uses: u64,
    evicted: u64,
}

impl Shelf {
    /// An empty one for at most `blocks_max` blocks.
    pub fn new(blocks_max: usize) -> Self {
        Self {
            blocks_max,
            used: HashMap::new(),
            by_use: BTreeMap::new(),
            uses: 0,
            evicted: 0,
        }
    }

    /// How many of the leading `hashes` are here.
    pub fn leading(&self, namespace: &Arc<str>, hashes: &[BlockHash]) -> usize {
        let is_here = |hash: &&BlockHash| self.used.contains_key(&(namespace.clone(), **hash));
        hashes.iter().take_while(is_here).count()
    }

    /// Those of `hashes` that are not here.
    pub fn missing(&self, namespace: &Arc<str>, hashes: &[BlockHash]) -> usize {
        let is_missing = |hash: &&BlockHash| !self.used.contains_key(&(namespace.clone(), **hash));
        hashes.iter().filter(is_missing).count()
    }

    /// Adds blocks, or notes that they were used. Given in a prompt's order: its end leaves before its beginning.
    pub fn put(&mut self, namespace: &Arc<str>, hashes: &[BlockHash]) {
        for hash in hashes.iter().rev() {
            let name = (namespace.clone(), *hash);
            self.uses += 1;
            if let Some(before) = self.used.insert(name.clone(), self.uses) {
                self.by_use.remove(&before);
            }
            self.by_use.insert(self.uses, name);
        }
        while self.used.len() > self.blocks_max {
            let Some((_, name)) = self.by_use.pop_first() else {
                return;
            };
            self.used.remove(&name);
            self.evicted += 1;
        }
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.used.clear();
        self.by_use.clear();
    }

    /// Blocks here.
    pub fn len(&self) -> usize {
        self.used.len()
    }

    /// Blocks that left for want of room, since the start.
    pub fn evicted(&self) -> u64 {
        self.evicted
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn names(numbers: &[u64]) -> Vec<BlockHash> {
        numbers.iter().copied().map(BlockHash).collect()
    }

    #[test]
    fn namespaces_are_apart_and_only_leading_blocks_count() {
        let mut shelf = Shelf::new(10);
        let (one, other) = (Arc::from("one"), Arc::from("other"));
        shelf.put(&one, &names(&[1, 2, 4]));
        assert_eq!(shelf.leading(&one, &names(&[1, 2, 3, 4])), 2);
        assert_eq!(shelf.missing(&one, &names(&[1, 2, 3, 4])), 1);
        assert_eq!(shelf.leading(&other, &names(&[1])), 0);
    }

    #[test]
    fn the_end_of_the_least_recently_used_prompt_leaves_first() {
        let mut shelf = Shelf::new(4);
        let namespace = Arc::from("one");
        shelf.put(&namespace, &names(&[1, 2]));
        shelf.put(&namespace, &names(&[3, 4]));
        shelf.put(&namespace, &names(&[1, 2]));
        shelf.put(&namespace, &names(&[5]));
        assert_eq!(shelf.leading(&namespace, &names(&[1, 2])), 2);
        assert_eq!(shelf.leading(&namespace, &names(&[3, 4])), 1);
        assert_eq!((shelf.len(), shelf.evicted()), (4, 1));
    }
}
