//! Workers with LRU caches of blocks: serves requests and records what an index would be told.

use crate::trace::Request;
use routing::block::{BlockHash, Realm, chain};
use std::collections::{BTreeMap, HashMap};

/// Tokens behind one id of a trace.
const TOKENS_PER_ID: u32 = 512;

/// What the index is asked or told, in order.
pub enum Op {
    /// A prompt is looked up.
    Look {
        /// Our hashes of its blocks.
        chain: Vec<BlockHash>,
    },
    /// A worker stored blocks.
    Store {
        /// Who.
        worker: u32,
        /// Its hashes.
        hashes: Vec<u64>,
        /// Its hash of the block before.
        parent: Option<u64>,
        /// Their tokens.
        tokens: Vec<u32>,
    },
    /// A worker evicted blocks.
    Remove {
        /// Who.
        worker: u32,
        /// Its hashes.
        hashes: Vec<u64>,
    },
}

/// See the module.
pub struct Fleet {
    workers: Vec<Cache>,
    block_size: u32,
    next: usize,
    ops: Vec<Op>,
}

struct Cache {
    room: usize,
    used: HashMap<u64, u64>,
    by_use: BTreeMap<u64, u64>,
    clock: u64,
}

impl Cache {
    /// Uses a chain from its end to its beginning, so that tails are the older; answers how much
    /// was there, and what made room.
    fn use_chain(&mut self, hashes: &[u64]) -> (usize, Vec<u64>) {
        let there = hashes
            .iter()
            .take_while(|hash| self.used.contains_key(hash))
            .count();
        for hash in hashes.iter().rev() {
            self.clock += 1;
            if let Some(before) = self.used.insert(*hash, self.clock) {
                self.by_use.remove(&before);
            }
            self.by_use.insert(self.clock, *hash);
        }
        let mut gone = Vec::new();
        while self.used.len() > self.room {
            let Some((_, hash)) = self.by_use.pop_first() else {
                break;
            };
            self.used.remove(&hash);
            gone.push(hash);
        }
        (there, gone)
    }
}

impl Fleet {
    /// Empty caches.
    pub fn new(workers: u32, room: usize, block_size: u32) -> Self {
        let cache = |_| Cache {
            room,
            used: HashMap::new(),
            by_use: BTreeMap::new(),
            clock: 0,
        };
        Fleet {
            workers: (0..workers).map(cache).collect(),
            block_size,
            next: 0,
            ops: Vec::new(),
        }
    }

    /// Serves a request on the next worker in turn.
    pub fn serve(&mut self, request: &Request) {
        let tokens: Vec<u32> = request
            .iter()
            .flat_map(|id| {
                (0..TOKENS_PER_ID)
                    .map(move |i| (*id as u32).wrapping_mul(2_654_435_761).wrapping_add(i))
            })
            .collect();
        let realm = Realm {
            model: "m",
            cache_salt: None,
            block_size: self.block_size,
        };
        let chain = chain(&realm, &tokens);
        let worker = self.next;
        self.next = (worker + 1) % self.workers.len();
        // the worker's own hashes: nothing that the index could guess
        let hashes: Vec<u64> = chain
            .iter()
            .map(|own| own.0.rotate_left(17) ^ (worker as u64 + 1))
            .collect();
        self.ops.push(Op::Look { chain });
        let (there, gone) = self.workers[worker].use_chain(&hashes);
        let worker = worker as u32;
        if there < hashes.len() {
            let size = self.block_size as usize;
            self.ops.push(Op::Store {
                worker,
                parent: there.checked_sub(1).map(|last| hashes[last]),
                tokens: tokens[there * size..hashes.len() * size].to_vec(),
                hashes: hashes[there..].to_vec(),
            });
        }
        if !gone.is_empty() {
            self.ops.push(Op::Remove {
                worker,
                hashes: gone,
            });
        }
    }

    /// All that was recorded.
    pub fn into_ops(self) -> Vec<Op> {
        self.ops
    }
}
