//! One request as a connector sees it: its prompt, and what body and headers say about keys and values. Pure.

use crate::kv_cache::{BlockHash, block_hash, chain_of, chain_seed};
use serde::Deserialize;
use serde_json::Value;
use std::sync::Arc;

/// What a request's body says. Loosely typed: an engine that shares nothing ignores all of it.
#[derive(Debug, Default, Clone, Deserialize)]
pub struct KvWish {
    /// vLLM's parameters, opaque to whoever carries them.
    #[serde(default)]
    pub kv_transfer_params: Option<Value>,
    /// SGLang: host of the prefill engine.
    #[serde(default)]
    pub bootstrap_host: Option<Value>,
    /// SGLang: its bootstrap port.
    #[serde(default)]
    pub bootstrap_port: Option<Value>,
    /// SGLang: the room where both legs meet.
    #[serde(default)]
    pub bootstrap_room: Option<Value>,
}

impl KvWish {
    /// A member of the transfer parameters.
    pub fn param(&self, name: &str) -> Option<&Value> {
        self.kv_transfer_params
            .as_ref()?
            .get(name)
            .filter(|value| !value.is_null())
    }

    /// Whether a member of the transfer parameters is `true`.
    pub fn says(&self, name: &str) -> bool {
        self.param(name) == Some(&Value::Bool(true))
    }

    /// A text among the transfer parameters; a number is taken as one.
    pub fn text(&self, name: &str) -> Option<String> {
        match self.param(name)? {
            Value::String(text) => Some(text.clone()),
            Value::Number(number) => Some(number.to_string()),
            _ => None,
        }
    }
}

/// One leg of a request that two engines may share.
#[derive(Debug)]
pub struct Leg {
    /// At least one token.
    pub prompt: Arc<[u32]>,
    /// Keeps equal prompts apart.
    pub salt: String,
    /// `X-Request-Id`, or nothing.
    pub request_id: String,
    /// What the body says.
    pub wish: KvWish,
}

impl Leg {
    /// The names of the prompt's full blocks in an engine's cache, without one that only the last token completes: that token is
    /// computed anyway.
    pub fn reusable(&self, engine_seed: u64, block_size: usize) -> Vec<BlockHash> {
        let tokens = &self.prompt[..self.prompt.len() - 1];
        chain_of(chain_seed(engine_seed, &self.salt), tokens, block_size)
    }

    /// The names of all of the prompt's full blocks.
    pub fn full_blocks(&self, engine_seed: u64, block_size: usize) -> Vec<BlockHash> {
        let start = chain_seed(engine_seed, &self.salt);
        chain_of(start, &self.prompt, block_size)
    }

    /// Tells this prompt from others, the same on all engines.
    pub fn content(&self) -> u64 {
        block_hash(chain_seed(0, &self.salt), &self.prompt).0
    }
}
