//! What a lookup and a change of the index cost against how much is in it (`--scale`): one JSON line for each size and
//! round, for `load-tests/scaling`.
//!
//! Chains are of 128 blocks. Half of the holders have the same chains, the other half each its own. Two kinds of times: of
//! chains from anywhere in the index, which its memory has to be reached for, and of a few chains again and again, which the
//! processor's caches hold at every size: what these cost is what the structure itself costs.
//!
//! What is asked for is in the caches in both: a gateway has just computed the prompt's hashes, or decoded the event. So each
//! question is read once before it is asked, and the time of the same reading alone is taken off.

use crate::fleet::realm;
use crate::ours::Ours;
use crate::waits::wait_ns;
use routing::block::{BlockHash, chain};
use std::hint::black_box;
use std::time::Instant;

const CHAIN: usize = 128;
const BLOCK_SIZE: u32 = 16;
const HOLDERS: u32 = 8;
/// Those that have the same chains.
const ALIKE: u32 = 4;
/// Pairs of a group: a chain that `ALIKE` holders have, and one of each other holder.
const GROUP_PAIRS: usize = HOLDERS as usize * CHAIN;
/// Blocks of one change, the last of their chain.
const CHANGED: usize = 64;
/// Different chains that are looked up or changed in a round, at most.
const SAMPLES_MAX: usize = 10_000;
/// The few: they fit into the caches, and the smallest index has as many.
const FEW: usize = 8;
/// Lookups of a round, so that one interruption is not all that is measured: samples are gone through again.
const LOOKUPS_MIN: usize = 50_000;
/// The same of changes.
const CHANGES_MIN: usize = 5_000;

/// Measures all sizes, given in pairs of block and holder.
pub fn run(sizes: &[usize], rounds: u32) {
    for pairs in sizes {
        let mut grown = Grown::new(*pairs);
        for round in 0..rounds {
            println!("{}", grown.measure(round));
        }
    }
}

/// An index of a size, and how its chains are named.
struct Grown {
    ours: Ours,
    groups: usize,
}

/// A chain, by its group and who has it: 0 for the holders that are alike, else one of the others.
#[derive(Clone, Copy)]
struct Name {
    group: usize,
    owner: u32,
}

impl Name {
    /// Its tokens, unlike those of any other.
    fn tokens(self) -> Vec<u32> {
        let name = (self.group as u32) << 3 | self.owner;
        let first = name.wrapping_mul(2_654_435_761);
        let all = 0..CHAIN as u32 * BLOCK_SIZE;
        all.map(|i| first.wrapping_add(i.wrapping_mul(40_503)) ^ i)
            .collect()
    }

    /// What engines call its blocks.
    fn hashes(self) -> Vec<u64> {
        let name = (self.group as u64) << 3 | u64::from(self.owner);
        let number = |i: usize| name << 8 | i as u64;
        (0..CHAIN)
            .map(|i| number(i).wrapping_mul(0x9e37_79b9_7f4a_7c15))
            .collect()
    }
}

/// A change, made ready outside of the measured time.
struct Change {
    holder: u32,
    hashes: Vec<u64>,
    tokens: Vec<u32>,
}

impl Grown {
    fn new(pairs: usize) -> Self {
        let groups = pairs.div_ceil(GROUP_PAIRS);
        let mut ours = Ours::new(BLOCK_SIZE);
        for group in 0..groups {
            for holder in 0..HOLDERS {
                let owner = holder.saturating_sub(ALIKE - 1);
                let name = Name { group, owner };
                ours.store(holder, &name.hashes(), None, &name.tokens());
            }
        }
        Grown { ours, groups }
    }

    /// Groups from all over the index, in no order; another selection each round.
    fn sample(&self, round: u32) -> Vec<usize> {
        let mut chance = u64::from(round) + 1;
        let mut next = || {
            chance = chance
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (chance >> 33) as usize
        };
        let mut all: Vec<usize> = (0..self.groups).collect();
        for at in 0..all.len() {
            let with = at + next() % (all.len() - at);
            all.swap(at, with);
        }
        all.truncate(SAMPLES_MAX);
        all
    }

    fn measure(&mut self, round: u32) -> serde_json::Value {
        let sample = self.sample(round);
        let shared = |group: &usize| Name {
            group: *group,
            owner: 0,
        };
        let found: Vec<_> = sample.iter().map(|of| hashed(shared(of))).collect();
        let absent: Vec<_> = (0..sample.len())
            .map(|at| hashed(shared(&(self.groups + at))))
            .collect();
        let changes: Vec<Change> = sample.iter().map(|of| change(*of)).collect();
        let few = ..FEW.min(sample.len());
        let found = (self.look(&found), self.look(&found[few]));
        let absent = (self.look(&absent), self.look(&absent[few]));
        for (times, holders) in [(&found, ALIKE as usize), (&absent, 0)] {
            assert_eq!((times.0.1, times.1.1), (holders, holders));
        }
        let anywhere_change_ns = self.change(&changes);
        let few_change_ns = self.change(&changes[few]);
        serde_json::json!({
            "pairs": self.ours.index.entries(),
            "blocks": self.ours.index.blocks(),
            "bytes": self.ours.index.bytes(),
            "round": round,
            "anywhere_found_ns": found.0.0,
            "few_found_ns": found.1.0,
            "anywhere_absent_ns": absent.0.0,
            "few_absent_ns": absent.1.0,
            "anywhere_change_ns": anywhere_change_ns,
            "few_change_ns": few_change_ns,
            "wait_ns": wait_ns(self.ours.index.bytes()),
        })
    }

    /// The mean time of a lookup, and the runs that each found.
    fn look(&self, chains: &[Vec<BlockHash>]) -> (f64, usize) {
        let times = LOOKUPS_MIN.div_ceil(chains.len());
        let count = times * chains.len();
        let turns = || chains.iter().cycle().take(count);
        let reading = nanos(|| turns().for_each(|chain| read(chain)));
        let mut runs = 0;
        let taken = nanos(|| {
            for chain in turns() {
                read(chain);
                runs += black_box(self.ours.index.find_overlap(black_box(chain))).len();
            }
        });
        ((taken - reading) / count as f64, runs / count)
    }

    /// The mean time in which the last blocks of a chain are removed, and stored again when those of all others are
    /// removed, too.
    fn change(&mut self, changes: &[Change]) -> f64 {
        let times = CHANGES_MIN.div_ceil(changes.len());
        let before = self.ours.index.entries();
        let reading = nanos(|| {
            for _ in 0..times {
                changes.iter().for_each(Change::read_names);
                changes.iter().for_each(Change::read);
            }
        });
        let taken = nanos(|| {
            for _ in 0..times {
                for one in changes {
                    one.read_names();
                    self.ours.remove(one.holder, &one.hashes[CHAIN - CHANGED..]);
                }
                for one in changes {
                    one.read();
                    let (kept, last) = one.hashes.split_at(CHAIN - CHANGED);
                    let parent = kept.last().copied();
                    self.ours.store(one.holder, last, parent, &one.tokens);
                }
            }
        });
        assert_eq!(self.ours.index.entries(), before, "all is back");
        (taken - reading) / (times * changes.len()) as f64
    }
}

impl Change {
    fn read_names(&self) {
        black_box(self.hashes.iter().fold(0, |all, hash| all ^ hash));
    }

    fn read(&self) {
        self.read_names();
        black_box(self.tokens.iter().fold(0, |all, token| all ^ token));
    }
}

fn read(chain: &[BlockHash]) {
    black_box(chain.iter().fold(0, |all, hash| all ^ hash.0));
}

fn nanos(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_nanos() as f64
}

fn hashed(name: Name) -> Vec<BlockHash> {
    chain(&realm(BLOCK_SIZE), &name.tokens())
}

/// Of one of the chains that a single holder has.
fn change(group: usize) -> Change {
    let owner = 1 + (group as u32) % (HOLDERS - ALIKE);
    let name = Name { group, owner };
    let kept = (CHAIN - CHANGED) * BLOCK_SIZE as usize;
    Change {
        holder: owner + ALIKE - 1,
        hashes: name.hashes(),
        tokens: name.tokens().split_off(kept),
    }
}
