//! What engines say of their KV caches, in every encoding that has been seen: msgpack arrays of all
//! ages, maps, and the JSON of the HTTP stream. One reader serves them all.
//!
//! Nothing here trusts a length: lists grow as elements come, and the caller bounds the frame. A
//! single odd event is reported as [`KvEvent::Odd`] and costs no other.

mod field;
mod read;

use std::fmt;

/// One frame of an engine's event stream.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// Its sequence number, where the body carries one (the HTTP form; ZeroMQ has it in a frame of
    /// its own).
    pub seq: Option<u64>,
    /// Unix seconds; 0 when absent.
    pub ts: f64,
    /// The data-parallel rank, where it is said.
    pub rank: Option<u32>,
    /// In the order in which they happened.
    pub events: Vec<KvEvent>,
}

/// One change of a cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KvEvent {
    /// Blocks are there now.
    Stored(Stored),
    /// Blocks are gone from one medium.
    Removed {
        /// The engine's hashes.
        hashes: Vec<u64>,
        /// From where.
        medium: Medium,
    },
    /// Blocks have moved from the GPU to external storage.
    Offloaded {
        /// The engine's hashes.
        hashes: Vec<u64>,
    },
    /// Everything is gone from the engine's own memory.
    Cleared,
    /// Nothing that can be used; see why.
    Odd(Odd),
}

/// A run of consecutive full blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// The engine's own hashes, one per block. Not to be compared with anything but themselves.
    pub hashes: Vec<u64>,
    /// The engine's hash of the block before the first; none at the start of a prompt.
    pub parent: Option<u64>,
    /// `hashes.len() * block_size` token ids; empty when the engine does not say them.
    pub tokens: Vec<u32>,
    /// Tokens per block.
    pub block_size: u32,
    /// Where they are.
    pub medium: Medium,
    /// The adapter that the blocks were computed with: its name, else its number.
    pub lora: Option<String>,
    /// Separates otherwise equal prompts.
    pub cache_salt: Option<String>,
}

/// Where a block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Medium {
    /// GPU memory; also meant when nothing is said.
    #[default]
    Gpu,
    /// The host's memory.
    Cpu,
    /// A disk, or storage outside of the host.
    Storage,
}

impl Medium {
    /// vLLM's and SGLang's names.
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "GPU" => Some(Medium::Gpu),
            "CPU" | "CPU_PINNED" | "CPU_TIER1" | "CPU_TIER2" => Some(Medium::Cpu),
            "STORAGE" | "DISK" | "EXTERNAL" => Some(Medium::Storage),
            _ => None,
        }
    }
}

/// Why an event is of no use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Odd {
    /// A kind that is not known.
    Kind,
    /// A field that is needed is missing or of another type.
    Field,
    /// Token ids that do not fill the blocks.
    TokenCount,
    /// A medium that is not known.
    Medium,
    /// A cache group that does not cover the whole prefix, such as a sliding window.
    Group,
}

impl Odd {
    /// All of them, in order.
    pub const ALL: [Odd; 5] = [
        Odd::Kind,
        Odd::Field,
        Odd::TokenCount,
        Odd::Medium,
        Odd::Group,
    ];

    /// The word used in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Odd::Kind => "kind",
            Odd::Field => "field",
            Odd::TokenCount => "token_count",
            Odd::Medium => "medium",
            Odd::Group => "group",
        }
    }
}

/// A frame that cannot be read at all. To be treated as a gap: what it said is unknown.
#[derive(Debug)]
pub struct Undecodable(String);

impl Undecodable {
    /// A message of the HTTP form without its number.
    pub fn without_seq() -> Self {
        Undecodable("it has no seq".into())
    }
}

impl fmt::Display for Undecodable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "event frame cannot be read: {}", self.0)
    }
}

impl std::error::Error for Undecodable {}

/// Nesting beyond this is no event.
const DEPTH_MAX: usize = 32;

/// Reads a ZeroMQ payload.
///
/// # Errors
/// When it is not one msgpack batch.
pub fn from_msgpack(payload: &[u8]) -> Result<Batch, Undecodable> {
    let mut reader = rmp_serde::Deserializer::from_read_ref(payload);
    reader.set_max_depth(DEPTH_MAX);
    serde::Deserialize::deserialize(&mut reader).map_err(|e| Undecodable(e.to_string()))
}

/// Reads a message of the HTTP stream.
///
/// # Errors
/// When it is not one JSON batch.
pub fn from_json(text: &[u8]) -> Result<Batch, Undecodable> {
    serde_json::from_slice(text).map_err(|e| Undecodable(e.to_string()))
}

#[cfg(test)]
mod tests;
