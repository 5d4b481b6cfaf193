//! Our index under measurement.

use crate::fleet::{Op, realm};
use crate::replay::Subject;
use routing::block::BlockHash;
use routing::prefix_index::{Afterwards, HolderId, Limits, PrefixIndex, StoredRun, Tier};

/// Limits that nothing here comes near to.
pub const LIMITS: Limits = Limits {
    max_entries: 50_000_000,
    ttl: u32::MAX,
};

/// See the module.
pub struct Ours {
    /// The index.
    pub index: PrefixIndex,
    /// Tokens per block, as stored.
    pub block_size: u32,
}

impl Ours {
    /// An empty index.
    pub fn new(block_size: u32) -> Self {
        Ours {
            index: PrefixIndex::new(LIMITS),
            block_size,
        }
    }

    /// A worker stored blocks: for those who have no recorded operation.
    pub fn store(&mut self, worker: u32, hashes: &[u64], parent: Option<u64>, tokens: &[u32]) {
        let run = StoredRun {
            realm: realm(self.block_size),
            hashes,
            parent,
            tokens,
            tier: Tier::Gpu,
        };
        self.index.store(HolderId(worker), &run, 0);
    }

    /// A worker removed blocks.
    pub fn remove(&mut self, worker: u32, hashes: &[u64]) {
        let gone = (Afterwards::Gone, 0);
        self.index.remove(HolderId(worker), hashes, Tier::Gpu, gone);
    }
}

impl Subject for Ours {
    type Ready = Op;
    const NAME: &'static str = "tidegate PrefixIndex";

    fn ready(&self, op: &Op) -> Op {
        op.clone()
    }

    fn apply(&mut self, event: &Op) {
        match event {
            Op::Look { .. } => {}
            Op::Store {
                worker,
                hashes,
                parent,
                tokens,
            } => self.store(*worker, hashes, *parent, tokens),
            Op::Remove { worker, hashes } => self.remove(*worker, hashes),
        }
    }

    fn look(&self, prompt: &Op) -> u32 {
        let Op::Look { chain, .. } = prompt else {
            return 0;
        };
        best(&self.index, chain)
    }
}

fn best(index: &PrefixIndex, chain: &[BlockHash]) -> u32 {
    let runs = index.find_overlap(chain);
    let from_start = runs.iter().filter(|run| run.from == 0);
    from_start.map(|run| run.to).max().unwrap_or(0)
}
