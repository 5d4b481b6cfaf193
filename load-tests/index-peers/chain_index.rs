//! `kv-index`: ChainIndex.

use index_bench::fleet::{Op, Shape};
use index_bench::replay::{Measured, Subject, replay};
use kv_index::chain_index::ChainIndex;
use kv_index::{ChainBlockMap, ContentHash, SequenceHash, StoredBlock, compute_content_hash};

struct Peer {
    index: ChainIndex,
    ids: Vec<u32>,
    maps: Vec<ChainBlockMap>,
    block_size: usize,
    hashing_inside: bool,
    scratch: Vec<StoredBlock>,
}

enum Ready {
    Look(Vec<ContentHash>),
    Tokens {
        worker: u32,
        hashes: Vec<u64>,
        parent: Option<SequenceHash>,
        tokens: Vec<u32>,
    },
    Blocks {
        worker: u32,
        blocks: Vec<StoredBlock>,
        parent: Option<SequenceHash>,
    },
    Remove {
        worker: u32,
        hashes: Vec<SequenceHash>,
    },
}

fn block((hash, tokens): (&u64, &[u32])) -> StoredBlock {
    StoredBlock {
        seq_hash: SequenceHash(*hash),
        content_hash: compute_content_hash(tokens),
    }
}

impl Peer {
    fn store(&mut self, worker: u32, blocks: &[StoredBlock], parent: Option<SequenceHash>) {
        let at = worker as usize;
        let map = &mut self.maps[at];
        if let Err(error) = self.index.apply_stored(self.ids[at], blocks, parent, map) {
            panic!("a store that the index refuses: {error:?}");
        }
    }
}

impl Subject for Peer {
    type Ready = Ready;
    const NAME: &'static str = "kv-index ChainIndex";

    fn ready(&self, op: &Op) -> Ready {
        match op {
            Op::Look { tokens, .. } => {
                let blocks = tokens.chunks_exact(self.block_size);
                Ready::Look(blocks.map(compute_content_hash).collect())
            }
            Op::Remove { worker, hashes } => Ready::Remove {
                worker: *worker,
                hashes: hashes.iter().map(|hash| SequenceHash(*hash)).collect(),
            },
            Op::Store {
                worker,
                hashes,
                parent,
                tokens,
            } => {
                let (worker, parent) = (*worker, parent.map(SequenceHash));
                if self.hashing_inside {
                    return Ready::Tokens {
                        worker,
                        hashes: hashes.clone(),
                        parent,
                        tokens: tokens.clone(),
                    };
                }
                let blocks = hashes.iter().zip(tokens.chunks_exact(self.block_size));
                Ready::Blocks {
                    worker,
                    blocks: blocks.map(block).collect(),
                    parent,
                }
            }
        }
    }

    fn apply(&mut self, event: &Ready) {
        match event {
            Ready::Look(_) => {}
            Ready::Tokens {
                worker,
                hashes,
                parent,
                tokens,
            } => {
                let mut blocks = std::mem::take(&mut self.scratch);
                blocks.clear();
                let pairs = hashes.iter().zip(tokens.chunks_exact(self.block_size));
                blocks.extend(pairs.map(block));
                self.store(*worker, &blocks, *parent);
                self.scratch = blocks;
            }
            Ready::Blocks {
                worker,
                blocks,
                parent,
            } => self.store(*worker, blocks, *parent),
            Ready::Remove { worker, hashes } => {
                let at = *worker as usize;
                self.index
                    .apply_removed(self.ids[at], hashes, &mut self.maps[at]);
            }
        }
    }

    fn look(&self, prompt: &Ready) -> u32 {
        let Ready::Look(contents) = prompt else {
            return 0;
        };
        let mut best = 0;
        let report = |_, blocks| best = best.max(blocks);
        self.index
            .score_into(contents, |content| content.0, false, report);
        best
    }
}

/// Measures it.
pub fn measure(shape: Shape, ops: &[Op]) -> Measured {
    let new = || {
        let index = ChainIndex::new();
        let name = |worker: u32| format!("worker {worker}");
        let ids = (0..shape.workers).map(|worker| index.intern_worker(&name(worker)));
        let ids = ids.collect::<Result<_, _>>().expect("room for each worker");
        Peer {
            index,
            ids,
            maps: (0..shape.workers).map(|_| ChainBlockMap::new()).collect(),
            block_size: shape.recorded_block_size() as usize,
            hashing_inside: !shape.token_per_block,
            scratch: Vec::new(),
        }
    };
    replay(ops, new).0
}
