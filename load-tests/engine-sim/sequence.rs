//! One prompt on its way to an answer, as the scheduler keeps it. Pure.

use crate::kv_cache::{BlockHash, BlockId, block_hash};
use std::ops::Range;
use std::sync::Arc;

/// Names a sequence within one engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u64);

/// A request as the scheduler sees it: its answer is known beforehand, as no model runs.
#[derive(Debug, Clone)]
pub struct NewSequence {
    /// Unique among live sequences.
    pub id: SequenceId,
    /// At least one token.
    pub prompt: Arc<[u32]>,
    /// The tokens to "sample", one per step; empty for embeddings, which end with their prefill.
    pub answer: Arc<[u32]>,
    /// Where the hash chain starts ([`crate::kv_cache::chain_seed`]).
    pub chain: BlockHash,
    /// The part of it that the request gave.
    pub salt: Option<Arc<str>>,
    /// Prompt tokens whose keys and values came from elsewhere; usable where the cache holds all before them.
    pub loaded: Range<usize>,
    /// Keep the prompt's blocks after the first token until [`crate::scheduler::State::unpin`].
    pub pin: bool,
}

/// A live sequence.
#[derive(Debug)]
pub struct Sequence {
    /// Its name.
    pub id: SequenceId,
    /// Prompt, then what was generated.
    pub tokens: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt_len: usize,
    /// What is to come out.
    pub answer: Arc<[u32]>,
    /// Where the hash chain starts.
    pub chain: BlockHash,
    /// The part of it that the request gave.
    pub salt: Option<Arc<str>>,
    /// Prompt tokens that came from elsewhere.
    pub loaded: Range<usize>,
    /// Keep the prompt's blocks after the first token.
    pub pin: bool,
    /// Names of the full blocks of `tokens`.
    pub hashes: Vec<BlockHash>,
    /// Its places in the pool, in order.
    pub blocks: Vec<BlockId>,
    /// Blocks that are findable by others: found there, or published.
    pub published: usize,
    /// Tokens with keys and values.
    pub computed: usize,
    /// Prompt tokens found in the cache; set once, at the first admission.
    pub cached: Option<usize>,
}

impl Sequence {
    /// A sequence of which nothing is computed.
    pub fn new(new: NewSequence, block_size: usize) -> Self {
        let mut sequence = Self {
            id: new.id,
            tokens: new.prompt.to_vec(),
            prompt_len: new.prompt.len(),
            answer: new.answer,
            chain: new.chain,
            salt: new.salt,
            loaded: new.loaded,
            pin: new.pin,
            hashes: Vec::new(),
            blocks: Vec::new(),
            published: 0,
            computed: 0,
            cached: None,
        };
        sequence.hash_full_blocks(block_size);
        sequence
    }

    /// After its blocks were given back: everything is to be computed again, the tokens so far included.
    pub fn start_over(&mut self) {
        self.blocks.clear();
        self.published = 0;
        self.computed = 0;
        self.loaded = 0..0;
    }

    /// Answer tokens so far.
    pub fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// How many of its tokens need no computing when the cache holds the first `hit`. The last token is always computed: its
    /// logits give the first answer token.
    pub fn supplied(&self, hit: usize) -> usize {
        match self.loaded.start <= hit {
            true => hit.max(self.loaded.end.min(self.tokens.len() - 1)),
            false => hit,
        }
    }

    /// Names the blocks that have become full.
    pub fn hash_full_blocks(&mut self, block_size: usize) {
        while (self.hashes.len() + 1) * block_size <= self.tokens.len() {
            let start = self.hashes.len() * block_size;
            let parent = self.hashes.last().copied().unwrap_or(self.chain);
            self.hashes
                .push(block_hash(parent, &self.tokens[start..start + block_size]));
        }
    }
}
