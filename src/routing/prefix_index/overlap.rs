//! From a prompt's chain to runs of blocks per holder.

use super::HolderId;
use super::residency::{Blocks, Tier};
use crate::block::BlockHash;

/// Consecutive blocks of a prompt that one holder has in one tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Who.
    pub holder: HolderId,
    /// The best tier of these blocks there.
    pub tier: Tier,
    /// The first block, counted from the start of the prompt.
    pub from: u32,
    /// Behind the last block.
    pub to: u32,
}

/// All runs up to the first block that nobody has, by their beginnings.
pub(super) fn find(blocks: &Blocks, chain: &[BlockHash]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    let mut open: Vec<usize> = Vec::new(); // runs that reach the block before
    for (at, own) in (0u32..).zip(chain) {
        let mut anybody = false;
        let mut still_open = Vec::with_capacity(open.len());
        for (holder, tier) in blocks.holders(*own) {
            anybody = true;
            let continued = open
                .iter()
                .copied()
                .find(|run| runs[*run].holder == holder && runs[*run].tier == tier);
            let run = continued.unwrap_or_else(|| {
                runs.push(Run {
                    holder,
                    tier,
                    from: at,
                    to: at,
                });
                runs.len() - 1
            });
            runs[run].to = at + 1;
            still_open.push(run);
        }
        if !anybody {
            break;
        }
        open = still_open;
    }
    runs
}
