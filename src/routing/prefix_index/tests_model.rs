//! Everything at once against plain maps: names that are reused and second names, parents in the
//! middle, several tiers and realms, speculation, namespaces, expiry, and holes in chains. What is
//! compared is every run of every prompt; and after each step all parts of the index agree.

use super::*;
use crate::block::{Realm, chain};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const TTL: Seconds = 60;
const HOLD: Seconds = 10;
const LIMITS: Limits = Limits {
    max_entries: usize::MAX,
    ttl: TTL,
};
const STORE: HolderId = HolderId(100);
const PROMPT_BLOCKS: usize = 80;

fn realm(adapter: bool) -> Realm<'static> {
    Realm {
        model: if adapter { "adapter" } else { "m" },
        cache_salt: None,
        block_size: 1,
    }
}

/// Prompts that fork from the first after 0, 1, 9, 40 and 79 blocks; and one of the same tokens under
/// an adapter.
fn prompts() -> Vec<(Realm<'static>, Vec<u32>)> {
    let forked = |(p, shared): (u32, u32)| -> Vec<u32> {
        let token = |at| if at < shared { at } else { 1000 * p + at };
        (0..PROMPT_BLOCKS as u32).map(token).collect()
    };
    let forks = [(1, 80), (2, 0), (3, 1), (4, 9), (5, 40), (6, 79)];
    let mut prompts: Vec<_> = forks.map(|fork| (realm(false), forked(fork))).into();
    prompts.push((realm(true), forked((1, 80))));
    prompts
}

#[derive(Debug, Clone)]
enum Op {
    Store {
        blocks: (usize, usize),
        tier: Tier,
        second_name: bool,
    },
    Copy {
        blocks: (usize, usize),
        tier: Tier,
    },
    Remove {
        blocks: (usize, usize),
        tier: Tier,
        keep: u8,
    },
    Forget,
    Put {
        blocks: (usize, usize),
        tier: Tier,
    },
    Take {
        from: usize,
    },
    Speculate {
        to: usize,
    },
    Withdraw {
        to: usize,
    },
    Served {
        to: usize,
    },
    Sweep,
}

type Step = (Op, u32, usize, Seconds);

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let engine_tier =
        || prop_oneof![4 => Just(Tier::Gpu), 1 => Just(Tier::Cpu), 1 => Just(Tier::Storage)];
    let stored_tier = prop_oneof![Just(Tier::Storage), Just(Tier::Assumed)];
    let blocks = || (0..PROMPT_BLOCKS, 1..PROMPT_BLOCKS);
    let op = prop_oneof![
        8 => ((0..3usize).prop_map(|third| third * 30), 1..PROMPT_BLOCKS, engine_tier(), prop::bool::weighted(0.1))
            .prop_map(|(from, length, tier, second_name)| Op::Store { blocks: (from, length), tier, second_name }),
        2 => (blocks(), engine_tier()).prop_map(|(blocks, tier)| Op::Copy { blocks, tier }),
        6 => (blocks(), engine_tier(), 0..3u8).prop_map(|(blocks, tier, keep)| Op::Remove { blocks, tier, keep }),
        1 => Just(Op::Forget),
        2 => (blocks(), stored_tier).prop_map(|(blocks, tier)| Op::Put { blocks, tier }),
        1 => (0..PROMPT_BLOCKS).prop_map(|from| Op::Take { from }),
        3 => (1..PROMPT_BLOCKS).prop_map(|to| Op::Speculate { to }),
        1 => (1..PROMPT_BLOCKS).prop_map(|to| Op::Withdraw { to }),
        1 => (1..PROMPT_BLOCKS).prop_map(|to| Op::Served { to }),
        1 => Just(Op::Sweep),
    ];
    proptest::collection::vec((op, 0..6u32, 0..7usize, 0..8u32), 0..60)
}

#[derive(Default)]
struct Naive {
    names: BTreeMap<(HolderId, u64), (BlockHash, BTreeMap<Tier, u32>)>,
    held: BTreeMap<(HolderId, BlockHash), (BTreeSet<Tier>, Seconds)>,
    // until, pending, proven
    speculations: BTreeMap<(HolderId, BlockHash), (Seconds, u32, bool)>,
    due: Vec<(Seconds, HolderId, Vec<BlockHash>)>,
}

impl Naive {
    fn put(&mut self, key: (HolderId, BlockHash), tier: Tier, now: Seconds) {
        let (tiers, touched) = self.held.entry(key).or_default();
        tiers.insert(tier);
        *touched = now;
    }

    fn take(&mut self, key: (HolderId, BlockHash), gone: &[Tier]) {
        if let Some((tiers, _)) = self.held.get_mut(&key) {
            tiers.retain(|tier| !gone.contains(tier));
            if tiers.is_empty() {
                self.held.remove(&key);
            }
        }
    }

    fn name(&mut self, holder: HolderId, name: u64, own: BlockHash, tier: Tier) {
        let fresh = (own, BTreeMap::new());
        let named = self.names.entry((holder, name)).or_insert(fresh.clone());
        if named.0 != own {
            *named = fresh;
        }
        let copies = named.1.entry(tier).or_default();
        *copies = (*copies + 1).min(8);
    }

    /// The block that a name stood for, if no copy of it is left in this tier.
    fn unname(&mut self, holder: HolderId, name: u64, tier: Tier) -> Option<BlockHash> {
        let (own, copies) = self.names.get_mut(&(holder, name))?;
        let own = *own;
        if let Some(count) = copies.get_mut(&tier) {
            *count -= 1;
        }
        copies.retain(|_, count| *count > 0);
        let left = copies.contains_key(&tier);
        if copies.is_empty() {
            self.names.remove(&(holder, name));
        }
        (!left).then_some(own)
    }

    fn ended(&mut self, key: (HolderId, BlockHash), served: bool, now: Seconds) {
        let Some((until, pending, proven)) = self.speculations.get_mut(&key) else {
            return;
        };
        *pending = pending.saturating_sub(1);
        *proven |= served;
        if *pending == 0 && (!*proven || *until <= now) {
            self.speculations.remove(&key);
            self.take(key, &[Tier::Speculative]);
        }
    }

    fn sweep(&mut self, now: Seconds) {
        let (over, due) = self.due.drain(..).partition(|due| due.0 <= now);
        self.due = due;
        let over: Vec<(Seconds, HolderId, Vec<BlockHash>)> = over;
        for key in over
            .iter()
            .flat_map(|(_, holder, chain)| chain.iter().map(|own| (*holder, *own)))
        {
            if let Some((until, pending, proven)) = self.speculations.get_mut(&key)
                && *until <= now
            {
                *proven = false;
                if *pending == 0 {
                    self.speculations.remove(&key);
                }
                self.take(key, &[Tier::Speculative]);
            }
        }
        self.held
            .retain(|_, (_, touched)| now.saturating_sub(*touched) < TTL);
    }

    fn holders(&self, own: BlockHash) -> impl Iterator<Item = (HolderId, Tier)> {
        let held = self.held.iter().filter(move |((_, held), _)| *held == own);
        held.map(|((holder, _), (tiers, _))| (*holder, *tiers.last().unwrap()))
    }
}

/// The engine's hash: of few values, so that it is used again for other blocks.
fn name(holder: HolderId, own: BlockHash, second: bool) -> u64 {
    own.0 % 150 + 1000 * u64::from(holder.0) + if second { 500 } else { 0 }
}

fn within((from, length): (usize, usize)) -> std::ops::Range<usize> {
    from..(from + length).min(PROMPT_BLOCKS)
}

struct Both {
    index: PrefixIndex,
    naive: Naive,
}

impl Both {
    fn store(
        &mut self,
        holder: HolderId,
        (realm, tokens): &(Realm<'static>, Vec<u32>),
        (range, tier, second): (std::ops::Range<usize>, Tier, bool),
        now: Seconds,
    ) {
        let own = chain(realm, tokens);
        let hashes: Vec<u64> = own[range.clone()]
            .iter()
            .map(|own| name(holder, *own, second))
            .collect();
        let parent = range
            .start
            .checked_sub(1)
            .map(|at| name(holder, own[at], second));
        let run = StoredRun {
            realm: *realm,
            hashes: &hashes,
            parent,
            tokens: &tokens[range.clone()],
            tier,
        };
        let applied = self.index.store(holder, &run, now);
        let before = match parent {
            None => Some(realm.root()),
            Some(parent) => self.naive.names.get(&(holder, parent)).map(|named| named.0),
        };
        let Some(mut before) = before else {
            assert_eq!(
                applied,
                Applied {
                    blocks: 0,
                    unknown: hashes.len()
                }
            );
            return;
        };
        assert_eq!(
            applied,
            Applied {
                blocks: hashes.len(),
                unknown: 0
            }
        );
        for (hash, token) in hashes.iter().zip(&tokens[range]) {
            before = next(before, &[*token]);
            self.naive.name(holder, *hash, before, tier);
            self.naive.put((holder, before), tier, now);
        }
    }

    fn copy(
        &mut self,
        holder: HolderId,
        realm: Realm<'static>,
        hashes: &[u64],
        tier: Tier,
        now: Seconds,
    ) {
        let run = StoredRun {
            realm,
            hashes,
            parent: None,
            tokens: &[],
            tier,
        };
        self.index.store(holder, &run, now);
        for hash in hashes {
            if let Some((own, _)) = self.naive.names.get(&(holder, *hash)) {
                let own = *own;
                self.naive.name(holder, *hash, own, tier);
                self.naive.put((holder, own), tier, now);
            }
        }
    }

    fn remove(&mut self, holder: HolderId, hashes: &[u64], (tier, keep): (Tier, u8), now: Seconds) {
        let keepers = [
            Afterwards::Gone,
            Afterwards::KeptBy(STORE, Tier::Assumed),
            Afterwards::GoneFrom(STORE),
        ];
        let (_, gone) = self
            .index
            .remove(holder, hashes, tier, (keepers[usize::from(keep)], now));
        let left: Vec<_> = hashes
            .iter()
            .filter_map(|hash| {
                let own = self.naive.unname(holder, *hash, tier)?;
                self.naive.take((holder, own), &[tier]);
                Some(own)
            })
            .collect();
        assert_eq!(gone, left.len());
        for own in left {
            match keep {
                1 => self.naive.put((STORE, own), Tier::Assumed, now),
                2 => self
                    .naive
                    .take((STORE, own), &[Tier::Storage, Tier::Assumed]),
                _ => {}
            }
        }
    }

    fn forget(&mut self, holder: HolderId) {
        self.index.forget(holder);
        for ((_, _), (own, _)) in self.naive.names.extract_if(.., |key, _| key.0 == holder) {
            self.naive.held.remove(&(holder, own));
        }
    }

    fn speculate(&mut self, holder: HolderId, own: &[BlockHash], now: Seconds) {
        let until = now + HOLD;
        self.index.speculate(holder, &own.into(), (now, until));
        self.naive.due.push((until, holder, own.into()));
        for own in own {
            let key = (holder, *own);
            let speculation = self
                .naive
                .speculations
                .entry(key)
                .or_insert((until, 0, false));
            *speculation = (speculation.0.max(until), speculation.1 + 1, speculation.2);
            self.naive.put(key, Tier::Speculative, now);
        }
    }

    fn step(
        &mut self,
        prompts: &[(Realm<'static>, Vec<u32>)],
        (op, holder, prompt, _): Step,
        now: Seconds,
    ) {
        let (realm, tokens) = &prompts[prompt];
        let own = chain(realm, tokens);
        let holder = HolderId(holder);
        let named = |blocks| -> Vec<u64> {
            own[within(blocks)]
                .iter()
                .rev()
                .map(|own| name(holder, *own, false))
                .collect()
        };
        match op {
            Op::Store {
                blocks,
                tier,
                second_name,
            } => self.store(
                holder,
                &prompts[prompt],
                (within(blocks), tier, second_name),
                now,
            ),
            Op::Copy { blocks, tier } => self.copy(holder, *realm, &named(blocks), tier, now),
            Op::Remove { blocks, tier, keep } => {
                self.remove(holder, &named(blocks), (tier, keep), now)
            }
            Op::Forget => self.forget(holder),
            Op::Put { blocks, tier } => {
                let range = within(blocks);
                self.index
                    .put_stored(STORE, (&own[..range.end], range.start), tier, now);
                own[range]
                    .iter()
                    .for_each(|own| self.naive.put((STORE, *own), tier, now));
            }
            Op::Take { from } => {
                self.index.take_stored(STORE, (&own, from));
                own[from..].iter().for_each(|own| {
                    self.naive
                        .take((STORE, *own), &[Tier::Storage, Tier::Assumed])
                });
            }
            Op::Speculate { to } => self.speculate(holder, &own[..to], now),
            Op::Withdraw { to } => {
                self.index.withdraw(holder, &own[..to], now);
                own[..to]
                    .iter()
                    .for_each(|own| self.naive.ended((holder, *own), false, now));
            }
            Op::Served { to } => {
                self.index.served(holder, &own[..to], now);
                for own in &own[..to] {
                    self.naive.ended((holder, *own), true, now);
                    if let Some(held) = self.naive.held.get_mut(&(holder, *own)) {
                        held.1 = now;
                    }
                }
            }
            Op::Sweep => {
                self.index.sweep(now, usize::MAX);
                self.naive.sweep(now);
            }
        }
    }

    fn compare(&self, own: &[BlockHash]) {
        let known = own
            .iter()
            .take_while(|own| self.naive.holders(**own).next().is_some())
            .count();
        let mut expected = BTreeMap::new();
        for (at, own) in own[..known].iter().enumerate() {
            expected.extend(
                self.naive
                    .holders(*own)
                    .map(|(holder, tier)| ((holder, at as u32), tier)),
            );
        }
        let mut seen = BTreeMap::new();
        let mut from = 0;
        for run in self.index.find_overlap(own) {
            assert!(
                run.from >= from && run.from < run.to,
                "runs come by their beginnings"
            );
            from = run.from;
            for at in run.from..run.to {
                assert!(
                    seen.insert((run.holder, at), run.tier).is_none(),
                    "told twice"
                );
            }
            let before = run
                .from
                .checked_sub(1)
                .and_then(|at| seen.get(&(run.holder, at)));
            assert_ne!(before, Some(&run.tier), "one run told as two");
        }
        assert_eq!(seen, expected);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn every_run_of_every_prompt_is_what_plain_maps_say(steps in steps()) {
        let prompts = prompts();
        let mut both = Both { index: PrefixIndex::new(LIMITS), naive: Naive::default() };
        let mut now = 0;
        for step in steps {
            now += step.3;
            both.step(&prompts, step, now);
            both.index.ledger.assert_consistent();
            prop_assert_eq!(both.index.entries(), both.naive.held.len());
            let blocks: BTreeSet<_> = both.naive.held.keys().map(|(_, own)| *own).collect();
            prop_assert_eq!(both.index.blocks(), blocks.len());
            prop_assert_eq!(both.index.dispatches(), both.naive.due.len());
            for (realm, tokens) in &prompts {
                both.compare(&chain(realm, tokens));
            }
        }
    }
}

#[test]
fn a_hundred_holders_of_one_prompt_are_told_apart() {
    let mut both = Both {
        index: PrefixIndex::new(LIMITS),
        naive: Naive::default(),
    };
    let prompts = prompts();
    for holder in 0..100u32 {
        let blocks = 1 + holder as usize * 7 % PROMPT_BLOCKS;
        let what = (0..blocks, Tier::Gpu, false);
        both.store(HolderId(holder + 1000), &prompts[0], what, 0);
    }
    for (realm, tokens) in &prompts {
        both.compare(&chain(realm, tokens));
    }
    both.index.ledger.assert_consistent();
    for holder in (0..100u32).rev() {
        both.forget(HolderId(holder + 1000));
    }
    assert_eq!(both.index.entries(), both.naive.held.len());
    both.index.ledger.assert_consistent();
}

#[test]
fn the_index_gives_back_every_place_and_set() {
    let mut index = PrefixIndex::new(LIMITS);
    let prompts = prompts();
    for round in 0..50u32 {
        for (realm, tokens) in &prompts {
            let own = chain(realm, tokens);
            index.speculate(HolderId(round), &own.into(), (round, round + 1));
        }
        index.sweep(round + 1, usize::MAX);
    }
    assert_eq!(index.ledger.holdings.live(), 0);
    assert_eq!(index.ledger.sets.len(), 1, "the empty one");
    let (places, most) = (index.ledger.holdings.len(), prompts.len() * PROMPT_BLOCKS);
    assert!(places <= most + most / 16, "{places}");
    index.ledger.assert_consistent();
}

#[test]
fn a_chain_that_grows_at_one_end_and_goes_at_the_other_takes_no_more_room() {
    let mut index = PrefixIndex::new(LIMITS);
    for n in 0..20_000u64 {
        let parent = n.checked_sub(1);
        let run = StoredRun {
            realm: realm(false),
            hashes: &[n],
            parent,
            tokens: &[n as u32],
            tier: Tier::Gpu,
        };
        assert_eq!(index.store(HolderId(1), &run, 0).blocks, 1);
        if let Some(old) = n.checked_sub(1000) {
            index.remove(HolderId(1), &[old], Tier::Gpu, (Afterwards::Gone, 0));
        }
    }
    let places = index.ledger.holdings.len();
    assert!(places <= 1100, "{places}");
    index.ledger.assert_consistent();
}
