//! What one gateway leaves for another of an engine's KV cache: the blocks as they were after a frame
//! of its event stream, so that who comes later goes on behind that frame. Little-endian numbers
//! behind a head; the version changes with the meaning of any of them.

use std::fmt;

/// "TideGate Kv", and the version.
const MAGIC: &[u8; 4] = b"TGK1";
const HEAD_BYTES: usize = 4 + 8 + 4 + 4 + 8;
const BLOCK_BYTES: usize = 8 + 8 + 2;
/// Copies of a block in one tier fit four bits.
const COPIES_BITS: u16 = 4;
const COPIES_MASK: u16 = (1 << COPIES_BITS) - 1;
const HELD: u16 = 1 << 12;
const FOLLOWS: u16 = 1 << 13;

/// An engine's memory after a frame.
#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    /// The frame.
    pub seq: u64,
    /// When the engine made its last event so far, in Unix seconds: what comes later with a smaller
    /// number is of another process.
    pub ts: f64,
    /// Tokens per block.
    pub block_size: u32,
    /// In an order in which most blocks stand behind their parents.
    pub blocks: Vec<SnapshotBlock>,
}

/// One block of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SnapshotBlock {
    /// The engine's hash.
    pub name: u64,
    /// The router's own.
    pub own: u64,
    /// Copies on the GPU, in the host's memory, in storage; at most 15 of each.
    pub copies: [u8; 3],
    /// Whether it counts as there; else only its name is kept.
    pub held: bool,
    /// Whether the block before it in the list is its parent.
    pub follows: bool,
}

/// Bytes that are no snapshot of this version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoSnapshot;

impl fmt::Display for NoSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not a snapshot of this version")
    }
}

impl std::error::Error for NoSnapshot {}

impl Snapshot {
    /// As it is stored.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEAD_BYTES + self.blocks.len() * BLOCK_BYTES);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&self.seq.to_le_bytes());
        out.extend_from_slice(&self.block_size.to_le_bytes());
        out.extend_from_slice(&(self.blocks.len() as u32).to_le_bytes());
        out.extend_from_slice(&self.ts.to_bits().to_le_bytes());
        for block in &self.blocks {
            out.extend_from_slice(&block.name.to_le_bytes());
            out.extend_from_slice(&block.own.to_le_bytes());
            out.extend_from_slice(&block.facts().to_le_bytes());
        }
        out
    }

    /// Reads it again.
    ///
    /// # Errors
    /// When the bytes are of another version, or not whole.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, NoSnapshot> {
        let (head, body) = bytes.split_at_checked(HEAD_BYTES).ok_or(NoSnapshot)?;
        let number = |from: usize, len: usize| -> u64 {
            let mut bytes = [0; 8];
            bytes[..len].copy_from_slice(&head[from..from + len]);
            u64::from_le_bytes(bytes)
        };
        let count = number(16, 4) as usize;
        if head[..4] != MAGIC[..] || body.len() != count.saturating_mul(BLOCK_BYTES) {
            return Err(NoSnapshot);
        }
        Ok(Snapshot {
            seq: number(4, 8),
            ts: f64::from_bits(number(20, 8)),
            block_size: number(12, 4) as u32,
            blocks: body
                .chunks_exact(BLOCK_BYTES)
                .map(SnapshotBlock::read)
                .collect(),
        })
    }
}

impl SnapshotBlock {
    fn facts(&self) -> u16 {
        let mut facts = 0;
        for (tier, copies) in self.copies.into_iter().enumerate() {
            facts |= u16::from(copies).min(COPIES_MASK) << (tier as u16 * COPIES_BITS);
        }
        facts |= if self.held { HELD } else { 0 };
        facts | if self.follows { FOLLOWS } else { 0 }
    }

    fn read(bytes: &[u8]) -> Self {
        let number = |from: usize| -> u64 {
            let eight = bytes[from..from + 8].try_into();
            u64::from_le_bytes(eight.expect("eight bytes"))
        };
        let facts = u16::from_le_bytes([bytes[16], bytes[17]]);
        let copies = |tier: u16| (facts >> (tier * COPIES_BITS) & COPIES_MASK) as u8;
        SnapshotBlock {
            name: number(0),
            own: number(8),
            copies: [copies(0), copies(1), copies(2)],
            held: facts & HELD != 0,
            follows: facts & FOLLOWS != 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn block() -> impl Strategy<Value = SnapshotBlock> {
        (
            any::<u64>(),
            any::<u64>(),
            [0u8..16, 0u8..16, 0u8..16],
            any::<[bool; 2]>(),
        )
            .prop_map(|(name, own, copies, [held, follows])| SnapshotBlock {
                name,
                own,
                copies,
                held,
                follows,
            })
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_and_nothing_else(
            seq: u64, block_size: u32, blocks in proptest::collection::vec(block(), 0..20), cut in 0usize..400,
        ) {
            let snapshot = Snapshot { seq, ts: 1.5, block_size, blocks };
            let bytes = snapshot.to_bytes();
            prop_assert_eq!(Snapshot::from_bytes(&bytes), Ok(snapshot));
            if cut < bytes.len() {
                prop_assert_eq!(Snapshot::from_bytes(&bytes[..cut]), Err(NoSnapshot));
            }
            let mut other = bytes;
            other[3] = b'9';
            prop_assert_eq!(Snapshot::from_bytes(&other), Err(NoSnapshot));
        }
    }
}
