//! The HTTP form of a batch, as the design's "KV event stream" defines it. Hashes are integers whatever ZeroMQ is told to carry.

use super::DP_RANK;
use crate::event_log::{CacheEvent, EventBatch};
use crate::kv_cache::BlockHash;
use serde::Serialize;

#[derive(Serialize)]
struct Batch<'a> {
    seq: u64,
    ts: f64,
    dp_rank: u64,
    events: Vec<Event<'a>>,
}

#[derive(Serialize)]
#[serde(tag = "type")]
enum Event<'a> {
    #[serde(rename = "cache_created")]
    Created {
        block_hashes: &'a [BlockHash],
        parent_block_hash: Option<BlockHash>,
        token_ids: &'a [u32],
        block_size: usize,
        medium: &'static str,
        lora_name: Option<&'a str>,
        cache_salt: Option<&'a str>,
    },
    #[serde(rename = "cache_offloaded")]
    Offloaded {
        block_hashes: &'a [BlockHash],
        medium: &'static str,
    },
    #[serde(rename = "cache_evicted")]
    Evicted {
        block_hashes: &'a [BlockHash],
        medium: &'static str,
    },
    #[serde(rename = "cache_cleared")]
    Cleared,
}

impl<'a> From<&'a CacheEvent> for Event<'a> {
    fn from(event: &'a CacheEvent) -> Self {
        match event {
            CacheEvent::Stored {
                hashes,
                parent,
                tokens,
                block_size,
                cache_salt,
            } => Self::Created {
                block_hashes: hashes,
                parent_block_hash: *parent,
                token_ids: tokens,
                block_size: *block_size,
                medium: "GPU",
                lora_name: None,
                cache_salt: cache_salt.as_deref(),
            },
            CacheEvent::Removed { hashes } => Self::Evicted {
                block_hashes: hashes,
                medium: "GPU",
            },
            CacheEvent::Offloaded { hashes, .. } => Self::Offloaded {
                block_hashes: hashes,
                medium: "STORAGE",
            },
            CacheEvent::Copied { hashes, block_size } => Self::Created {
                block_hashes: hashes,
                parent_block_hash: None,
                token_ids: &[],
                block_size: *block_size,
                medium: "STORAGE",
                lora_name: None,
                cache_salt: None,
            },
            CacheEvent::Cleared => Self::Cleared,
        }
    }
}

/// One line of JSON.
pub fn encode(batch: &EventBatch) -> String {
    let body = Batch {
        seq: batch.seq,
        ts: batch.ts,
        dp_rank: DP_RANK,
        events: batch.events.iter().map(Event::from).collect(),
    };
    serde_json::to_string(&body).expect("numbers, strings and lists are JSON")
}
