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
    // runs that reach the block before, and those that reach this one
    let (mut open, mut reached): (Vec<usize>, Vec<usize>) = (Vec::new(), Vec::new());
    for (at, own) in (0u32..).zip(chain) {
        reached.clear();
        for (holder, tier) in blocks.holders(*own) {
            // holders mostly stand in the same order from block to block
            let likely = open.get(reached.len()).copied();
            let is_it = |run: &usize| runs[*run].holder == holder && runs[*run].tier == tier;
            let continued = likely
                .filter(is_it)
                .or_else(|| open.iter().copied().find(is_it));
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
            reached.push(run);
        }
        if reached.is_empty() {
            break;
        }
        std::mem::swap(&mut open, &mut reached);
    }
    runs
}
