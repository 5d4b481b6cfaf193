//! The engine's paged KV cache: a fixed pool of blocks, found again by the hash of everything up to their end.
//! Pure: no clock, no I/O. The hash chain is the simulator's own on purpose; a router must never need to know it.

use crate::event_log::CacheEvent;
use std::collections::HashMap;
use std::sync::Arc;

/// Names a full block by its tokens and everything before them. A type of its own, so that it cannot be taken for a place in the pool.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
pub struct BlockHash(pub u64);

/// A place in the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockId(u32);

impl BlockId {
    /// Its number in the pool.
    pub fn number(self) -> u32 {
        self.0
    }

    fn index(self) -> usize {
        self.0 as usize
    }
}

/// Full blocks of one sequence that became findable together.
#[derive(Debug)]
pub struct Run<'a> {
    /// Where they lie.
    pub ids: &'a [BlockId],
    /// Their names, as many as `ids`.
    pub hashes: &'a [BlockHash],
    /// The block before the first; none at the start of a prompt.
    pub parent: Option<BlockHash>,
    /// Their tokens: `ids.len() × block_size`.
    pub tokens: &'a [u32],
    /// What keeps them apart from equal tokens of others.
    pub salt: Option<Arc<str>>,
}

/// The end of the intrusive list of free blocks.
const NONE: u32 = u32::MAX;

#[derive(Debug, Clone)]
struct Block {
    users: u32,
    hash: Option<BlockHash>,
    /// Neighbours in the free list; meaningful only while `users` is 0.
    previous: u32,
    next: u32,
}

/// The pool. A block is free when no sequence uses it; a free block keeps its content, findable, until it is taken again.
#[derive(Debug)]
pub struct KvCache {
    block_size: usize,
    caching: bool,
    blocks: Vec<Block>,
    /// Physical copies by hash: two sequences that computed the same block at the same time leave two.
    copies: HashMap<BlockHash, Vec<BlockId>>,
    /// The free list, least recently used first.
    head: u32,
    tail: u32,
    free: usize,
    events: Vec<CacheEvent>,
}

impl KvCache {
    /// A pool of `count` empty blocks of `block_size` tokens; `caching` false forgets every block at its release.
    pub fn new(count: usize, block_size: usize, caching: bool) -> Self {
        assert!(count < NONE as usize, "block ids are 32 bits");
        let mut cache = Self {
            block_size,
            caching,
            blocks: vec![
                Block {
                    users: 0,
                    hash: None,
                    previous: NONE,
                    next: NONE
                };
                count
            ],
            copies: HashMap::new(),
            head: NONE,
            tail: NONE,
            free: 0,
            events: Vec::new(),
        };
        for index in 0..count as u32 {
            cache.append_free(index);
        }
        cache
    }

    /// Tokens per block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Blocks in the pool.
    pub fn capacity(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks that no sequence uses.
    pub fn free(&self) -> usize {
        self.free
    }

    /// Blocks in use by sequences.
    pub fn used(&self) -> usize {
        self.blocks.len() - self.free
    }

    /// The longest leading part of `hashes` that is in the pool. Takes nothing: see [`KvCache::share`].
    pub fn find(&self, hashes: &[BlockHash]) -> Vec<BlockId> {
        if !self.caching {
            return Vec::new();
        }
        hashes
            .iter()
            .map_while(|hash| self.copies.get(hash)?.first().copied())
            .collect()
    }

    /// How many of `ids` are free, so that sharing them takes them out of the free list.
    pub fn free_among(&self, ids: &[BlockId]) -> usize {
        ids.iter()
            .filter(|id| self.blocks[id.index()].users == 0)
            .count()
    }

    /// Adds one user to each block that [`KvCache::find`] returned.
    pub fn share(&mut self, ids: &[BlockId]) {
        for id in ids {
            if self.blocks[id.index()].users == 0 {
                self.unlink_free(id.0);
            }
            self.blocks[id.index()].users += 1;
        }
    }

    /// Takes `count` blocks for one sequence, forgetting the least recently used contents; none when too few are free.
    pub fn allocate(&mut self, count: usize) -> Option<Vec<BlockId>> {
        if count > self.free {
            return None;
        }
        let mut taken = Vec::with_capacity(count);
        for _ in 0..count {
            let index = self.head;
            self.unlink_free(index);
            self.forget(BlockId(index));
            self.blocks[index as usize].users = 1;
            taken.push(BlockId(index));
        }
        Some(taken)
    }

    /// Makes a run of full blocks findable and announces it.
    pub fn publish(&mut self, run: Run<'_>) {
        debug_assert_eq!(run.ids.len(), run.hashes.len());
        debug_assert_eq!(run.tokens.len(), run.ids.len() * self.block_size);
        if !self.caching || run.ids.is_empty() {
            return;
        }
        for (id, hash) in run.ids.iter().zip(run.hashes) {
            self.blocks[id.index()].hash = Some(*hash);
            self.copies.entry(*hash).or_default().push(*id);
        }
        self.events.push(CacheEvent::Stored {
            hashes: run.hashes.to_vec(),
            parent: run.parent,
            tokens: run.tokens.to_vec(),
            block_size: self.block_size,
            cache_salt: run.salt,
        });
    }

    /// Gives a sequence's blocks back, given in the sequence's order: the tail of a chain is reused before its head,
    /// because a head serves more prompts.
    pub fn release(&mut self, ids: &[BlockId]) {
        for id in ids.iter().rev() {
            let block = &mut self.blocks[id.index()];
            debug_assert!(block.users > 0, "released more often than taken");
            block.users -= 1;
            if block.users == 0 {
                self.append_free(id.0);
            }
        }
    }

    /// Forgets every content. Refused (false) while a sequence uses a block.
    pub fn clear(&mut self) -> bool {
        if self.used() > 0 {
            return false;
        }
        self.forget_all();
        self.events.push(CacheEvent::Cleared);
        true
    }

    /// Forgets every content without a word, also of blocks in use: what a new process knows.
    pub fn forget_all(&mut self) {
        for block in &mut self.blocks {
            block.hash = None;
        }
        self.copies.clear();
        self.events.clear();
    }

    /// Announces a change that did not happen in this pool.
    pub fn announce(&mut self, event: CacheEvent) {
        self.events.push(event);
    }

    /// What changed since the last call, in order.
    pub fn take_events(&mut self) -> Vec<CacheEvent> {
        std::mem::take(&mut self.events)
    }

    /// Removes one physical copy's content; each copy that was announced is taken back by a Removed of its own.
    fn forget(&mut self, id: BlockId) {
        let Some(hash) = self.blocks[id.index()].hash.take() else {
            return;
        };
        if let Some(copies) = self.copies.get_mut(&hash) {
            copies.retain(|copy| *copy != id);
            if copies.is_empty() {
                self.copies.remove(&hash);
            }
        }
        match self.events.last_mut() {
            Some(CacheEvent::Removed { hashes }) => hashes.push(hash),
            _ => self.events.push(CacheEvent::Removed { hashes: vec![hash] }),
        }
    }

    fn append_free(&mut self, index: u32) {
        let previous = self.tail;
        let block = &mut self.blocks[index as usize];
        block.previous = previous;
        block.next = NONE;
        match previous {
            NONE => self.head = index,
            _ => self.blocks[previous as usize].next = index,
        }
        self.tail = index;
        self.free += 1;
    }

    fn unlink_free(&mut self, index: u32) {
        let (previous, next) = {
            let block = &self.blocks[index as usize];
            (block.previous, block.next)
        };
        match previous {
            NONE => self.head = next,
            _ => self.blocks[previous as usize].next = next,
        }
        match next {
            NONE => self.tail = previous,
            _ => self.blocks[next as usize].previous = previous,
        }
        self.free -= 1;
    }
}

/// The name of a block: the chain up to its parent, then its tokens, folded by wide multiplication. `parent` of the first
/// block is [`chain_seed`].
pub fn block_hash(parent: BlockHash, tokens: &[u32]) -> BlockHash {
    BlockHash(
        tokens
            .iter()
            .fold(fold(parent.0, tokens.len() as u64), |chain, token| {
                fold(chain, u64::from(*token))
            }),
    )
}

/// The names of the full blocks of a prompt.
pub fn chain_of(start: BlockHash, tokens: &[u32], block_size: usize) -> Vec<BlockHash> {
    let mut parent = start;
    let blocks = tokens.chunks_exact(block_size);
    let names = blocks.map(|block| {
        parent = block_hash(parent, block);
        parent
    });
    names.collect()
}

/// Where a chain starts: apart for each engine seed, LoRA adapter or cache salt, so that equal tokens do not meet.
pub fn chain_seed(seed: u64, salt: &str) -> BlockHash {
    BlockHash(salt.bytes().fold(fold(seed, 0x7465_6e74), |chain, byte| {
        fold(chain, u64::from(byte))
    }))
}

/// Mixes one word into a chain: the halves of a 128-bit product of odd-weighted inputs.
fn fold(chain: u64, word: u64) -> u64 {
    const LEFT: u64 = 0xd6e8_feb8_6659_fd93;
    const RIGHT: u64 = 0xa076_1d64_78bd_642f;
    let product = u128::from(chain ^ LEFT)
        * u128::from(word.wrapping_mul(RIGHT).wrapping_add(chain.rotate_left(23)) | 1);
    (product as u64) ^ ((product >> 64) as u64).rotate_left(32) ^ word
}

#[cfg(test)]
mod test {
    use super::*;

    fn chain(tokens: &[u32], block_size: usize) -> Vec<BlockHash> {
        let mut parent = chain_seed(0, "");
        tokens
            .chunks_exact(block_size)
            .map(|block| {
                parent = block_hash(parent, block);
                parent
            })
            .collect()
    }

    fn fill(cache: &mut KvCache, tokens: &[u32]) -> Vec<BlockId> {
        let hashes = chain(tokens, cache.block_size());
        let ids = cache.allocate(hashes.len()).unwrap();
        cache.publish(Run {
            ids: &ids,
            hashes: &hashes,
            parent: None,
            tokens,
            salt: None,
        });
        ids
    }

    #[test]
    fn eviction_takes_the_tail_of_a_chain_before_its_head() {
        let mut cache = KvCache::new(4, 2, true);
        let tokens: Vec<u32> = (0..8).collect();
        let ids = fill(&mut cache, &tokens);
        cache.release(&ids);
        cache.allocate(2).unwrap();
        assert_eq!(cache.find(&chain(&tokens, 2)), ids[..2]);
    }

    #[test]
    fn the_least_recently_released_chain_goes_first() {
        let mut cache = KvCache::new(4, 2, true);
        let (old, new) = ([1, 2, 3, 4], [5, 6, 7, 8]);
        let old_ids = fill(&mut cache, &old);
        let new_ids = fill(&mut cache, &new);
        cache.release(&new_ids);
        cache.release(&old_ids);
        cache.allocate(2).unwrap();
        assert!(cache.find(&chain(&new, 2)).is_empty());
        assert_eq!(cache.find(&chain(&old, 2)).len(), 2);
    }

    #[test]
    fn a_shared_block_is_free_only_after_its_last_user() {
        let mut cache = KvCache::new(4, 2, true);
        let ids = fill(&mut cache, &[1, 2, 3, 4]);
        cache.share(&ids);
        cache.release(&ids);
        assert_eq!(cache.used(), 2);
        cache.release(&ids);
        assert_eq!((cache.used(), cache.free()), (0, 4));
    }

    #[test]
    fn each_physical_copy_is_announced_and_taken_back_once() {
        let mut cache = KvCache::new(2, 2, true);
        let first = fill(&mut cache, &[1, 2]);
        let second = fill(&mut cache, &[1, 2]);
        cache.release(&first);
        cache.release(&second);
        cache.allocate(1).unwrap();
        assert_eq!(
            cache.find(&chain(&[1, 2], 2)).len(),
            1,
            "the other copy still serves"
        );
        cache.allocate(1).unwrap();
        let hash = chain(&[1, 2], 2)[0];
        let removed: Vec<_> = cache
            .take_events()
            .into_iter()
            .filter_map(|event| match event {
                CacheEvent::Removed { hashes } => Some(hashes),
                _ => None,
            })
            .flatten()
            .collect();
        assert_eq!(removed, [hash, hash]);
    }

    #[test]
    fn clearing_waits_for_idle_blocks_and_is_announced() {
        let mut cache = KvCache::new(2, 2, true);
        let ids = fill(&mut cache, &[1, 2]);
        assert!(!cache.clear());
        cache.release(&ids);
        assert!(cache.clear());
        assert!(cache.find(&chain(&[1, 2], 2)).is_empty());
        assert!(matches!(
            cache.take_events().last(),
            Some(CacheEvent::Cleared)
        ));
    }

    #[test]
    fn without_caching_nothing_is_found_or_announced() {
        let mut cache = KvCache::new(2, 2, false);
        fill(&mut cache, &[1, 2]);
        assert!(cache.find(&chain(&[1, 2], 2)).is_empty());
        assert!(cache.take_events().is_empty());
    }

    #[test]
    fn too_large_a_demand_takes_nothing() {
        let mut cache = KvCache::new(2, 2, true);
        assert!(cache.allocate(3).is_none());
        assert_eq!(cache.free(), 2);
    }

    #[test]
    fn hashes_depend_on_order_parent_and_salt() {
        let start = chain_seed(0, "");
        assert_ne!(block_hash(start, &[1, 2]), block_hash(start, &[2, 1]));
        assert_ne!(block_hash(start, &[0, 0]), block_hash(start, &[0]));
        assert_ne!(
            block_hash(start, &[1, 2]),
            block_hash(chain_seed(0, "tenant"), &[1, 2])
        );
        assert_ne!(
            block_hash(start, &[1, 2]),
            block_hash(chain_seed(1, ""), &[1, 2])
        );
        assert_eq!(
            block_hash(start, &[1, 2]),
            block_hash(chain_seed(0, ""), &[1, 2])
        );
    }
}
