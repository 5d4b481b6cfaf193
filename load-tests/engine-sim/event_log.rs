//! The last KV cache events with their sequence numbers: what the engine announces, kept so that a late listener can catch up.
//! Pure, and bounded: the oldest batch leaves when a new one does not fit.

use crate::kv_cache::BlockHash;
use std::collections::VecDeque;
use std::sync::Arc;

/// Tokens that all kept batches may hold together, beside the limit on batches: 64 MiB, whatever the prompts' lengths.
const TOKENS_MAX: usize = 16 << 20;

/// One change of the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CacheEvent {
    /// A run of consecutive full blocks became findable; `tokens.len() = hashes.len() × block_size`.
    Stored {
        /// The engine's own names of the blocks, first to last.
        hashes: Vec<BlockHash>,
        /// The block before the first.
        parent: Option<BlockHash>,
        /// What the blocks hold.
        tokens: Vec<u32>,
        /// Tokens per block.
        block_size: usize,
        /// What the request gave to keep its blocks apart.
        cache_salt: Option<Arc<str>>,
    },
    /// One physical copy of each block is gone.
    Removed {
        /// The engine's own names of the blocks.
        hashes: Vec<BlockHash>,
    },
    /// One physical copy of each block has moved to shared storage. Comes instead of `Removed` when the engine offloads.
    Offloaded {
        /// The engine's own names of the blocks.
        hashes: Vec<BlockHash>,
        /// Tokens per block.
        block_size: usize,
    },
    /// A copy of each block lies in shared storage now; the one on the GPU stays.
    Copied {
        /// The engine's own names of the blocks.
        hashes: Vec<BlockHash>,
        /// Tokens per block.
        block_size: usize,
    },
    /// All blocks are gone.
    Cleared,
}

/// The events of one scheduling step.
#[derive(Debug, Clone, PartialEq)]
pub struct EventBatch {
    /// Counts from 0 without gaps in each engine process.
    pub seq: u64,
    /// Unix time in seconds.
    pub ts: f64,
    /// In order.
    pub events: Vec<CacheEvent>,
}

/// A ring of batches.
#[derive(Debug)]
pub struct EventLog {
    batches: VecDeque<Arc<EventBatch>>,
    batches_max: usize,
    tokens: usize,
    next_seq: u64,
}

impl EventLog {
    /// Keeps at most `batches_max` batches (vLLM's `buffer_steps`).
    pub fn new(batches_max: usize) -> Self {
        Self {
            batches: VecDeque::new(),
            batches_max,
            tokens: 0,
            next_seq: 0,
        }
    }

    /// Appends one step's events.
    pub fn append(&mut self, ts: f64, events: Vec<CacheEvent>) -> Arc<EventBatch> {
        self.tokens += tokens_in(&events);
        let batch = Arc::new(EventBatch {
            seq: self.next_seq,
            ts,
            events,
        });
        self.batches.push_back(batch.clone());
        self.next_seq += 1;
        while self.batches.len() > self.batches_max || self.tokens > TOKENS_MAX {
            let Some(oldest) = self.batches.pop_front() else {
                break;
            };
            self.tokens -= tokens_in(&oldest.events);
        }
        batch
    }

    /// The number of the batch that comes next.
    pub fn next_seq(&self) -> u64 {
        self.next_seq
    }

    /// Counts a batch that is lost.
    pub fn skip(&mut self) {
        self.next_seq += 1;
    }

    /// Forgets everything and counts from 0 again.
    pub fn restart(&mut self) {
        *self = Self::new(self.batches_max);
    }

    /// The batches still kept, from `seq` on. A first one later than `seq` means that history was lost.
    pub fn since(&self, seq: u64) -> Vec<Arc<EventBatch>> {
        self.batches
            .iter()
            .filter(|batch| batch.seq >= seq)
            .cloned()
            .collect()
    }
}

fn tokens_in(events: &[CacheEvent]) -> usize {
    events
        .iter()
        .map(|event| match event {
            CacheEvent::Stored { tokens, .. } => tokens.len(),
            _ => 0,
        })
        .sum()
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn sequence_numbers_have_no_gap_and_the_oldest_batch_leaves() {
        let mut log = EventLog::new(2);
        for _ in 0..3 {
            log.append(0.0, vec![CacheEvent::Cleared]);
        }
        let kept: Vec<u64> = log.since(0).iter().map(|batch| batch.seq).collect();
        assert_eq!(kept, [1, 2]);
        assert_eq!(log.since(2).len(), 1);
    }
}
