//! From a prompt's chain to runs of blocks per holder.

use super::HolderId;
use super::blocks::Blocks;
use super::holder_sets::{Member, SetId};
use super::ledger::Ledger;
use super::slab::Place;
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
/// side and have the same set of holders are jumped over.
pub(super) fn find(ledger: &Ledger, chain: &[BlockHash]) -> Vec<Run> {
    let mut runs = Runs::default();
    let (mut at, mut before, mut set) = (0, None, SetId::EMPTY);
    while let Some(own) = chain.get(at) {
        let Some(place) = ledger.blocks.find(before, *own) else {
            break;
        };
        let holders = ledger.blocks[place].holders();
        if holders == SetId::EMPTY {
            break;
        }
        if holders != set {
            runs.turn(ledger, (set, holders), at as u32);
            set = holders;
        }
        let more = continued(&ledger.blocks, place, &chain[at + 1..]);
        at += 1 + more;
        before = Some(place + more as Place);
    }
    runs.end(at as u32)
}

/// How many blocks of a chain stand behind `place`, with the same holders. The end of the stretch
/// is looked at first; where that is another prompt's, the fork is searched by halves.
fn continued(blocks: &Blocks, place: Place, chain: &[BlockHash]) -> usize {
    let behind = &blocks.as_slice()[place as usize + 1..];
    // looked at before it is known whether the stretch goes so far: memory is waited for once then, not twice
    let last = chain.last().zip(behind.get(chain.len().wrapping_sub(1)));
    let is_whole = last.is_some_and(|(own, block)| block.own == *own);
    let stretch = blocks.continued(place, chain.len());
    let is_chains = |at: usize| behind[at].own == chain[at];
    if stretch == chain.len() && is_whole || stretch == 0 || is_chains(stretch - 1) {
        return stretch;
    }
    let (mut alike, mut other) = (0, stretch - 1);
    while alike < other {
        let middle = (alike + other) / 2;
        if is_chains(middle) {
            alike = middle + 1;
        } else {
            other = middle;
        }
    }
    alike
}

#[derive(Default)]
struct Runs {
    runs: Vec<Run>,
    // the run of each member of the set that was last turned to
    open: Vec<u32>,
    next: Vec<u32>,
}

impl Runs {
    /// From block `at` on another set of holders has the prompt.
    fn turn(&mut self, ledger: &Ledger, (from, to): (SetId, SetId), at: u32) {
        // for those that end here; the others get a later end
        for run in &self.open {
            self.runs[*run as usize].to = at;
        }
        let mut old = ledger.sets.members(from);
        let new = ledger.sets.members(to);
        let mut open = &self.open[..];
        self.next.clear();
        self.next.reserve(new.len());
        self.runs.reserve(new.len());
        for member in new {
            let smaller = if old.first() == Some(member) {
                0
            } else {
                old.partition_point(|other| other < member)
            };
            (old, open) = (&old[smaller..], &open[smaller..]);
            if old.first() == Some(member) {
                self.next.push(open[0]);
                (old, open) = (&old[1..], &open[1..]);
            } else {
                self.next.push(self.runs.len() as u32);
                self.runs.push(begun(ledger, *member, at));
            }
        }
        std::mem::swap(&mut self.open, &mut self.next);
    }

    fn end(mut self, at: u32) -> Vec<Run> {
        for run in self.open {
            self.runs[run as usize].to = at;
        }
        self.runs
    }
}

fn begun(ledger: &Ledger, member: Member, at: u32) -> Run {
    Run {
        holder: ledger.holders.id(member.holder()),
        tier: member.tier(),
        from: at,
        to: at,
    }
}
