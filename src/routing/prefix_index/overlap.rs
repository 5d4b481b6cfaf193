//! From a prompt's chain to runs of blocks per holder.

use super::HolderId;
use super::holder_sets::{Member, SetId};
use super::ledger::Ledger;
use super::tier::Tier;
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

/// All runs up to the first block that nobody has, by their beginnings. Blocks that stand side by
/// side and have the same set of holders are only counted.
pub(super) fn find(ledger: &Ledger, chain: &[BlockHash]) -> Vec<Run> {
    let mut runs = Runs::default();
    let (mut at, mut before, mut set) = (0, None, SetId::EMPTY);
    while let Some(own) = chain.get(at) {
        let Some(place) = ledger.blocks.find(before, *own) else {
            break;
        };
        let holders = ledger.blocks[place].holders;
        if holders == SetId::EMPTY {
            break;
        }
        if holders != set {
            runs.turn(ledger, (set, holders), at as u32);
            set = holders;
        }
        let behind = &ledger.blocks.as_slice()[place as usize..];
        let stretch = behind.iter().zip(&chain[at..]);
        let length = stretch
            .take_while(|(block, own)| block.own == **own && block.holders == holders)
            .count();
        at += length;
        before = Some(place + length as u32 - 1);
    }
    runs.end(at as u32)
}

#[derive(Default)]
struct Runs {
    runs: Vec<Run>,
    // the run of each member of the set that was last turned to
    open: Vec<usize>,
    next: Vec<usize>,
}

impl Runs {
    /// From block `at` on another set of holders has the prompt.
    fn turn(&mut self, ledger: &Ledger, (from, to): (SetId, SetId), at: u32) {
        let old = ledger.sets.members(from);
        let mut old = old.iter().zip(self.open.drain(..)).peekable();
        let new = ledger.sets.members(to);
        self.next.clear();
        self.next.reserve(new.len());
        self.runs.reserve(new.len());
        for member in new {
            while let Some((_, run)) = old.next_if(|(other, _)| *other < member) {
                self.runs[run].to = at;
            }
            let run = match old.next_if(|(other, _)| *other == member) {
                Some((_, run)) => run,
                None => {
                    self.runs.push(begun(ledger, *member, at));
                    self.runs.len() - 1
                }
            };
            self.next.push(run);
        }
        for (_, run) in old {
            self.runs[run].to = at;
        }
        std::mem::swap(&mut self.open, &mut self.next);
    }

    fn end(mut self, at: u32) -> Vec<Run> {
        for run in self.open {
            self.runs[run].to = at;
        }
        self.runs
    }
}

fn begun(ledger: &Ledger, member: Member, at: u32) -> Run {
    Run {
        holder: ledger.holders[member.holder()].id,
        tier: member.tier(),
        from: at,
        to: at,
    }
}
