//! A batch as the payload of a ZeroMQ message, in the encodings of three eras of vLLM.
//!
//! The batch itself is an array in each era: `[ts, events, rank]`, in the oldest without the rank.

use super::{DP_RANK, EventEncoding, HashForm, KvEventQuirks};
use crate::event_log::{CacheEvent, EventBatch};
use crate::kv_cache::{BlockHash, block_hash};
use bytes::Bytes;
use rmp::encode as put;
use std::io;

/// The simulated model has one cache group, of this kind.
const GROUP: u64 = 0;
const GROUP_KIND: &str = "full_attention";
/// Bytes of a hash in its long form: SHA-256.
const DIGEST_BYTES: usize = 32;

type Written = Result<(), put::ValueWriteError<io::Error>>;

/// Which form to write.
#[derive(Debug, Clone, Copy)]
pub struct Encoder {
    encoding: EventEncoding,
    hashes: HashForm,
}

/// What one event of the wire says; a [`CacheEvent`] makes one or two.
enum Wire<'a> {
    Stored(Stored<'a>),
    Removed { hashes: &'a [BlockHash] },
    Cleared,
}

struct Stored<'a> {
    hashes: &'a [BlockHash],
    parent: Option<BlockHash>,
    tokens: &'a [u32],
    block_size: usize,
    medium: &'static str,
    salt: Option<&'a str>,
}

impl Encoder {
    /// In the form that the settings want.
    pub fn new(quirks: &KvEventQuirks) -> Self {
        Self {
            encoding: quirks.encoding,
            hashes: quirks.hashes,
        }
    }

    /// The payload.
    pub fn encode(&self, batch: &EventBatch) -> Bytes {
        let mut out = Vec::new();
        self.batch(&mut out, batch)
            .expect("memory takes every write");
        out.into()
    }

    fn batch(&self, out: &mut Vec<u8>, batch: &EventBatch) -> Written {
        let oldest = self.encoding == EventEncoding::Oldest;
        let events: Vec<Wire<'_>> = batch
            .events
            .iter()
            .flat_map(|event| self.wire_events(event))
            .collect();
        array(out, if oldest { 2 } else { 3 })?;
        put::write_f64(out, batch.ts)?;
        array(out, events.len())?;
        for event in &events {
            match self.encoding {
                EventEncoding::Oldest | EventEncoding::Array => self.as_array(out, event)?,
                EventEncoding::Map => self.as_map(out, event)?,
            }
        }
        if !oldest {
            put::write_uint(out, DP_RANK)?;
        }
        Ok(())
    }

    /// A block that moves to storage is stored there, without saying its tokens again, and then gone from the GPU. The oldest
    /// encoding has no word for where a block is, so that it only says the second.
    fn wire_events<'a>(&self, event: &'a CacheEvent) -> Vec<Wire<'a>> {
        match event {
            CacheEvent::Stored {
                hashes,
                parent,
                tokens,
                block_size,
                cache_salt,
            } => vec![Wire::Stored(Stored {
                hashes,
                parent: *parent,
                tokens,
                block_size: *block_size,
                medium: "GPU",
                salt: cache_salt.as_deref(),
            })],
            CacheEvent::Copied { hashes, block_size } => match self.encoding {
                EventEncoding::Oldest => Vec::new(),
                EventEncoding::Array | EventEncoding::Map => {
                    vec![in_storage(hashes, *block_size)]
                }
            },
            CacheEvent::Offloaded { hashes, block_size } => {
                let stored = in_storage(hashes, *block_size);
                let removed = Wire::Removed { hashes };
                match self.encoding {
                    EventEncoding::Oldest => vec![removed],
                    EventEncoding::Array | EventEncoding::Map => vec![stored, removed],
                }
            }
            CacheEvent::Removed { hashes } => vec![Wire::Removed { hashes }],
            CacheEvent::Cleared => vec![Wire::Cleared],
        }
    }

    fn as_array(&self, out: &mut Vec<u8>, event: &Wire<'_>) -> Written {
        let full = self.encoding == EventEncoding::Array;
        match event {
            Wire::Stored(stored) => {
                array(out, if full { 12 } else { 6 })?;
                put::write_str(out, "BlockStored")?;
                self.hash_list(out, stored.hashes)?;
                self.optional_hash(out, stored.parent)?;
                token_list(out, stored.tokens)?;
                put::write_uint(out, stored.block_size as u64)?;
                nil(out)?; // lora_id
                if full {
                    put::write_str(out, stored.medium)?;
                    nil(out)?; // lora_name
                    extra_keys(out, stored)?;
                    put::write_uint(out, GROUP)?;
                    put::write_str(out, GROUP_KIND)?;
                    nil(out)?; // kv_cache_spec_sliding_window
                }
            }
            Wire::Removed { hashes } => {
                array(out, if full { 4 } else { 2 })?;
                put::write_str(out, "BlockRemoved")?;
                self.hash_list(out, hashes)?;
                if full {
                    put::write_str(out, "GPU")?;
                    put::write_uint(out, GROUP)?;
                }
            }
            Wire::Cleared => {
                array(out, 1)?;
                put::write_str(out, "AllBlocksCleared")?;
            }
        }
        Ok(())
    }

    /// Fields that are nil by default are left out, as vLLM does.
    fn as_map(&self, out: &mut Vec<u8>, event: &Wire<'_>) -> Written {
        match event {
            Wire::Stored(stored) => {
                let salted = stored.salt.is_some() && stored.parent.is_none();
                map(out, if salted { 10 } else { 9 })?;
                text(out, "type", "BlockStored")?;
                put::write_str(out, "block_hashes")?;
                self.hash_list(out, stored.hashes)?;
                put::write_str(out, "parent_block_hash")?;
                self.optional_hash(out, stored.parent)?;
                put::write_str(out, "token_ids")?;
                token_list(out, stored.tokens)?;
                number(out, "block_size", stored.block_size as u64)?;
                text(out, "medium", stored.medium)?;
                if salted {
                    put::write_str(out, "extra_keys")?;
                    extra_keys(out, stored)?;
                }
                number(out, "group_idx", GROUP)?;
                text(out, "kv_cache_spec_kind", GROUP_KIND)?;
                text(out, "locality", locality(stored.medium))?;
            }
            Wire::Removed { hashes } => {
                map(out, 5)?;
                text(out, "type", "BlockRemoved")?;
                put::write_str(out, "block_hashes")?;
                self.hash_list(out, hashes)?;
                text(out, "medium", "GPU")?;
                number(out, "group_idx", GROUP)?;
                text(out, "locality", locality("GPU"))?;
            }
            Wire::Cleared => {
                map(out, 1)?;
                text(out, "type", "AllBlocksCleared")?;
            }
        }
        Ok(())
    }

    fn hash_list(&self, out: &mut Vec<u8>, hashes: &[BlockHash]) -> Written {
        array(out, hashes.len())?;
        hashes.iter().try_for_each(|hash| self.hash(out, *hash))
    }

    fn optional_hash(&self, out: &mut Vec<u8>, hash: Option<BlockHash>) -> Written {
        match hash {
            Some(hash) => self.hash(out, hash),
            None => nil(out),
        }
    }

    fn hash(&self, out: &mut Vec<u8>, hash: BlockHash) -> Written {
        match self.hashes {
            HashForm::Int => put::write_uint(out, hash.0).map(drop),
            HashForm::Bytes => put::write_bin(out, &digest(hash)),
        }
    }
}

/// The long form of a hash: its own eight bytes at the end, other ones before them.
fn digest(hash: BlockHash) -> [u8; DIGEST_BYTES] {
    let mut digest = [0; DIGEST_BYTES];
    let (front, own) = digest.split_at_mut(DIGEST_BYTES - 8);
    own.copy_from_slice(&hash.0.to_be_bytes());
    for (at, part) in front.chunks_exact_mut(8).enumerate() {
        part.copy_from_slice(&block_hash(hash, &[at as u32]).0.to_be_bytes());
    }
    digest
}

/// One entry per block; a salt belongs to the first block of a prompt.
fn extra_keys(out: &mut Vec<u8>, stored: &Stored<'_>) -> Written {
    match stored.salt {
        Some(salt) if stored.parent.is_none() => {
            array(out, stored.hashes.len())?;
            array(out, 1)?;
            put::write_str(out, salt)?;
            (1..stored.hashes.len()).try_for_each(|_| nil(out))
        }
        _ => nil(out),
    }
}

/// Seen from the engine.
fn locality(medium: &str) -> &'static str {
    match medium {
        "GPU" => "LOCAL",
        _ => "REMOTE",
    }
}

fn token_list(out: &mut Vec<u8>, tokens: &[u32]) -> Written {
    array(out, tokens.len())?;
    tokens
        .iter()
        .try_for_each(|token| put::write_uint(out, u64::from(*token)).map(drop))
}

fn text(out: &mut Vec<u8>, name: &str, value: &str) -> Written {
    put::write_str(out, name)?;
    put::write_str(out, value)
}

fn number(out: &mut Vec<u8>, name: &str, value: u64) -> Written {
    put::write_str(out, name)?;
    put::write_uint(out, value).map(drop)
}

fn array(out: &mut Vec<u8>, len: usize) -> Written {
    put::write_array_len(out, len as u32).map(drop)
}

fn map(out: &mut Vec<u8>, len: u32) -> Written {
    put::write_map_len(out, len).map(drop)
}

fn nil(out: &mut Vec<u8>) -> Written {
    put::write_nil(out).map_err(put::ValueWriteError::InvalidMarkerWrite)
}

/// Blocks that were announced before, now in storage.
fn in_storage(hashes: &[BlockHash], block_size: usize) -> Wire<'_> {
    Wire::Stored(Stored {
        hashes,
        parent: None,
        tokens: &[],
        block_size,
        medium: "STORAGE",
        salt: None,
    })
}
