//! Workers with LRU caches of blocks: serves requests and records what an index would be told.

use crate::trace::Request;
use routing::block::{BlockHash, Realm, chain};
use std::collections::{BTreeMap, HashMap};

/// Tokens behind one id of a trace.
const TOKENS_PER_ID: u32 = 512;

/// What the index is asked or told, in order.
#[derive(Clone)]
pub enum Op {
    /// A prompt is looked up.
    Look {
        /// Our hashes of its blocks.
        chain: Vec<BlockHash>,
        /// Their tokens.
        tokens: Vec<u32>,
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

impl Op {
    /// Blocks that it stores or removes.
    pub fn blocks(&self) -> usize {
        match self {
            Op::Look { .. } => 0,
            Op::Store { hashes, .. } | Op::Remove { hashes, .. } => hashes.len(),
        }
    }
}

/// How a fleet is made.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Workers.
    pub workers: u32,
    /// Blocks that a worker's cache holds.
    pub room: usize,
    /// Tokens per block.
    pub block_size: u32,
    /// One token stands for a block: then hashing tokens costs next to nothing.
    pub token_per_block: bool,
    /// All workers name a block alike, as engines with one seed do.
    pub names_alike: bool,
}

impl Shape {
    /// Tokens per block, as recorded.
    pub fn recorded_block_size(&self) -> u32 {
        if self.token_per_block {
            1
        } else {
            self.block_size
        }
    }
}

/// What all blocks of a fleet have in common.
pub fn realm(block_size: u32) -> Realm<'static> {
    Realm {
        model: "m",
        cache_salt: None,
        block_size,
    }
}

/// See the module.
pub struct Fleet {
    workers: Vec<Cache>,
    shape: Shape,
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
    pub fn new(shape: Shape) -> Self {
        let cache = |_| Cache {
            room: shape.room,
            used: HashMap::new(),
            by_use: BTreeMap::new(),
            clock: 0,
        };
        Fleet {
            workers: (0..shape.workers).map(cache).collect(),
            shape,
            next: 0,
            ops: Vec::new(),
        }
    }

    /// Serves a request on the next worker in turn.
    pub fn serve(&mut self, request: &Request) {
        let tokens = self.tokens(request);
        let size = self.shape.recorded_block_size();
        let chain = chain(&realm(size), &tokens);
        let worker = self.next;
        self.next = (worker + 1) % self.workers.len();
        // nothing that the index could guess
        let salt = if self.shape.names_alike {
            1
        } else {
            worker as u64 + 1
        };
        let hashes: Vec<u64> = chain
            .iter()
            .map(|own| own.0.rotate_left(17) ^ salt)
            .collect();
        self.ops.push(Op::Look {
            chain,
            tokens: tokens.clone(),
        });
        let (there, gone) = self.workers[worker].use_chain(&hashes);
        let worker = worker as u32;
        if there < hashes.len() {
            let size = size as usize;
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

    fn tokens(&self, request: &Request) -> Vec<u32> {
        let step = if self.shape.token_per_block {
            self.shape.block_size
        } else {
            1
        };
        let of_id = |id: &u64| {
            let first = (*id as u32).wrapping_mul(2_654_435_761);
            let within = (0..TOKENS_PER_ID).step_by(step as usize);
            within.map(move |i| first.wrapping_add(i))
        };
        request.iter().flat_map(of_id).collect()
    }

    /// All that was recorded.
    pub fn into_ops(self) -> Vec<Op> {
        self.ops
    }
}
