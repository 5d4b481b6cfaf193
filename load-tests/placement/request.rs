//! A prompt with all names of its blocks, made once and used by every policy: the engines', the router's by tokens, and
//! the router's by text.

use engine_sim::kv_cache::{BlockHash as EngineHash, chain_of, chain_seed};
use routing::block::{BlockHash, Realm, chain, text_chain};
use routing::ids::PrefixKey;
use routing::prefix_key::{PrefixParts, prefix_key};
use std::sync::Arc;

/// Tokens per block of the engines.
pub const BLOCK_SIZE: usize = 16;
/// The one model.
pub const MODEL: &str = "m";
/// What all its blocks have in common.
pub const REALM: Realm<'static> = Realm {
    model: MODEL,
    cache_salt: None,
    block_size: BLOCK_SIZE as u32,
};
/// `prefix_routing.max_prefix_length` by default.
const OPENING_BYTES_MAX: usize = 2048;

/// One request, without its time.
#[derive(Debug, Clone)]
pub struct Request {
    /// What is asked.
    pub prompt: Arc<[u32]>,
    /// What comes out.
    pub answer: Arc<[u32]>,
    /// The engines' names of the prompt's full blocks.
    pub names: Vec<EngineHash>,
    /// The router's names of them.
    pub by_tokens: Arc<[BlockHash]>,
    /// The router's names of the text's blocks.
    pub by_text: Arc<[BlockHash]>,
    /// What the ring goes by.
    pub key: Option<PrefixKey>,
}

impl Request {
    /// `system` and `opening` are the lengths in tokens of the prompt's first two parts: the system prompt, and the first
    /// thing that the user said. A token stands for four bytes of text.
    pub fn new(prompt: Vec<u32>, answer: Vec<u32>, (system, opening): (usize, usize)) -> Self {
        let text: Vec<u8> = prompt
            .iter()
            .flat_map(|token| token.to_le_bytes())
            .collect();
        let system_end = system.min(prompt.len()) * 4;
        let opening_end = (system + opening).min(prompt.len()) * 4;
        let parts = PrefixParts {
            model: MODEL,
            system: &text[..system_end],
            tools: b"",
            opening: &text[system_end..opening_end],
        };
        Request {
            names: chain_of(chain_seed(0, ""), &prompt, BLOCK_SIZE),
            by_tokens: chain(&REALM, &prompt).into(),
            by_text: text_chain(MODEL, &[], &text).into(),
            key: prefix_key(parts, OPENING_BYTES_MAX),
            prompt: prompt.into(),
            answer: answer.into(),
        }
    }

    /// Blocks that a cache can supply: engines always compute the last token themselves.
    pub fn reusable(&self) -> &[EngineHash] {
        let blocks = (self.prompt.len() - 1) / BLOCK_SIZE;
        &self.names[..blocks.min(self.names.len())]
    }
}
