//! Against a model that keeps every fact in plain maps.

use super::*;
use crate::block::{Realm, chain};
use proptest::prelude::*;
use std::collections::BTreeMap;

const ENGINE: HolderId = HolderId(1);
const OTHER: HolderId = HolderId(2);
const STORE: HolderId = HolderId(100);
const FOREVER: Limits = Limits {
    max_entries: usize::MAX,
    ttl: u32::MAX,
};

const REALM: Realm<'static> = Realm {
    model: "m",
    cache_salt: None,
    block_size: 2,
};

const GONE: (Afterwards, Seconds) = (Afterwards::Gone, 0);

fn run<'a>(hashes: &'a [u64], parent: Option<u64>, tokens: &'a [u32]) -> StoredRun<'a> {
    StoredRun {
        realm: REALM,
        hashes,
        parent,
        tokens,
        tier: Tier::Gpu,
    }
}

fn covered(index: &PrefixIndex, holder: HolderId, tokens: &[u32]) -> u32 {
    let runs = index.find_overlap(&chain(&REALM, tokens));
    let mut end = 0;
    for run in runs.iter().filter(|run| run.holder == holder) {
        if run.from == end {
            end = run.to;
        }
    }
    end
}

#[test]
fn a_prompt_is_found_as_far_as_its_blocks_are_held() {
    let mut index = PrefixIndex::new(FOREVER);
    let prompt = [1, 2, 3, 4, 5, 6, 7];
    index.store(ENGINE, &run(&[71, 72, 73], None, &prompt[..6]), 0);
    assert_eq!(covered(&index, ENGINE, &prompt), 3);
    assert_eq!(covered(&index, ENGINE, &[1, 2, 3, 9]), 1);
    assert_eq!(covered(&index, OTHER, &prompt), 0);
    let salted = Realm {
        cache_salt: Some("s"),
        ..REALM
    };
    assert!(index.find_overlap(&chain(&salted, &prompt)).is_empty());
    index.remove(ENGINE, &[73], Tier::Gpu, GONE);
    assert_eq!(covered(&index, ENGINE, &prompt), 2);
}

#[test]
fn a_child_finds_its_parent_by_the_engines_hash_and_an_unknown_parent_is_counted() {
    let mut index = PrefixIndex::new(FOREVER);
    index.store(ENGINE, &run(&[71], None, &[1, 2]), 0);
    let applied = index.store(ENGINE, &run(&[72], Some(71), &[3, 4]), 0);
    assert_eq!(
        applied,
        Applied {
            blocks: 1,
            unknown: 0
        }
    );
    assert_eq!(covered(&index, ENGINE, &[1, 2, 3, 4]), 2);
    let applied = index.store(OTHER, &run(&[72], Some(71), &[3, 4]), 0);
    assert_eq!(
        applied,
        Applied {
            blocks: 0,
            unknown: 1
        },
        "the hash is another engine's"
    );
}

#[test]
fn a_block_is_gone_after_as_many_removes_as_stores() {
    let mut index = PrefixIndex::new(FOREVER);
    for _ in 0..2 {
        index.store(ENGINE, &run(&[71], None, &[1, 2]), 0);
    }
    assert_eq!(index.remove(ENGINE, &[71], Tier::Gpu, GONE).1, 0);
    assert_eq!(covered(&index, ENGINE, &[1, 2]), 1);
    assert_eq!(index.remove(ENGINE, &[71], Tier::Gpu, GONE).1, 1);
    assert_eq!(covered(&index, ENGINE, &[1, 2]), 0);
    // announced again and again unmarked: a bounded number of removes is enough
    for _ in 0..1000 {
        index.store(ENGINE, &run(&[71], None, &[1, 2]), 0);
    }
    for _ in 0..8 {
        index.remove(ENGINE, &[71], Tier::Gpu, GONE);
    }
    assert_eq!((covered(&index, ENGINE, &[1, 2]), index.entries()), (0, 0));
}

#[test]
fn copies_in_other_tiers_are_told_apart_and_the_best_counts() {
    let mut index = PrefixIndex::new(FOREVER);
    index.store(ENGINE, &run(&[71, 72], None, &[1, 2, 3, 4]), 0);
    let copy = StoredRun {
        tier: Tier::Cpu,
        ..run(&[72], None, &[])
    };
    assert_eq!(index.store(ENGINE, &copy, 0).blocks, 1);
    let tiers = |index: &PrefixIndex| -> Vec<Tier> {
        let runs = index.find_overlap(&chain(&REALM, &[1, 2, 3, 4]));
        runs.iter().map(|run| run.tier).collect()
    };
    assert_eq!(tiers(&index), [Tier::Gpu]);
    index.remove(ENGINE, &[72], Tier::Gpu, GONE);
    assert_eq!(tiers(&index), [Tier::Gpu, Tier::Cpu]);
    let unknown = StoredRun {
        tier: Tier::Cpu,
        ..run(&[99], None, &[])
    };
    assert_eq!(index.store(ENGINE, &unknown, 0).unknown, 1);
}

#[test]
fn forgetting_an_engine_leaves_others_and_storage() {
    let mut index = PrefixIndex::new(FOREVER);
    let tokens = [1, 2, 3, 4];
    index.store(ENGINE, &run(&[71, 72], None, &tokens), 0);
    index.store(OTHER, &run(&[81, 82], None, &tokens), 0);
    let kept = (Afterwards::KeptBy(STORE, Tier::Assumed), 0);
    assert_eq!(index.remove(ENGINE, &[72], Tier::Gpu, kept).1, 1);
    index.forget(ENGINE);
    assert_eq!(covered(&index, ENGINE, &tokens), 0);
    assert_eq!(covered(&index, OTHER, &tokens), 2);
    let stored = index.find_overlap(&chain(&REALM, &tokens));
    assert!(stored.contains(&Run {
        holder: STORE,
        tier: Tier::Assumed,
        from: 1,
        to: 2
    }));
    index.take_stored(STORE, (&chain(&REALM, &tokens), 1));
    index.forget(OTHER);
    assert_eq!((index.entries(), index.blocks()), (0, 0));
}

#[test]
fn what_was_sent_counts_until_its_time_or_its_withdrawal() {
    let mut index = PrefixIndex::new(FOREVER);
    let prompt: Arc<[BlockHash]> = chain(&REALM, &[1, 2, 3, 4]).into();
    index.speculate(ENGINE, &prompt, (0, 10));
    index.speculate(ENGINE, &prompt, (0, 20));
    index.withdraw(ENGINE, &prompt, 0);
    assert_eq!(
        covered(&index, ENGINE, &[1, 2, 3, 4]),
        2,
        "another request still counts on it"
    );
    index.sweep(10, 100);
    assert_eq!(covered(&index, ENGINE, &[1, 2, 3, 4]), 2);
    index.sweep(20, 100);
    assert_eq!(index.entries(), 0);
    index.speculate(ENGINE, &prompt, (20, 30));
    index.store(ENGINE, &run(&[71, 72], None, &[1, 2, 3, 4]), 21);
    index.sweep(30, 100);
    assert_eq!(
        covered(&index, ENGINE, &[1, 2, 3, 4]),
        2,
        "the event has confirmed it"
    );
}

#[test]
fn a_late_ending_of_an_old_request_does_not_end_a_newer_ones_time() {
    let mut index = PrefixIndex::new(FOREVER);
    let prompt: Arc<[BlockHash]> = chain(&REALM, &[1, 2, 3, 4]).into();
    let held = |index: &PrefixIndex| covered(index, ENGINE, &[1, 2, 3, 4]);
    index.speculate(ENGINE, &prompt, (0, 10));
    index.sweep(10, 100);
    assert_eq!(held(&index), 0);
    index.speculate(ENGINE, &prompt, (20, 30));
    index.withdraw(ENGINE, &prompt, 21); // the one of second 0
    assert_eq!(held(&index), 2);
    index.served(ENGINE, &prompt, 22);
    index.speculate(ENGINE, &prompt, (23, 33));
    index.withdraw(ENGINE, &prompt, 24);
    assert_eq!(held(&index), 2, "one was served: it holds until its time");
    index.sweep(33, 100);
    assert_eq!(held(&index), 0);
    assert!(index.speculations.is_empty());
    index.speculate(ENGINE, &prompt, (40, 41));
    index.served(ENGINE, &prompt, 50); // its time was over, and no sweep has come by yet
    assert_eq!(held(&index), 0);
    assert!(index.speculations.is_empty());
}

#[test]
fn dispatches_end_when_their_time_is_over_however_many_there_are() {
    let mut index = PrefixIndex::new(FOREVER);
    for n in 0..2000u32 {
        let tokens: Vec<u32> = (0..20).map(|i| n * 20 + i).collect();
        // long holds first: they must not keep the short ones behind them
        let until = if n % 2 == 0 { 30 } else { 2 };
        index.speculate(ENGINE, &chain(&REALM, &tokens).into(), (0, until));
    }
    for _ in 0..3 {
        index.sweep(2, 500);
    }
    assert_eq!((index.dispatches(), index.entries()), (1000, 10_000));
    for _ in 0..3 {
        index.sweep(30, 500);
    }
    assert_eq!((index.dispatches(), index.entries()), (0, 0));
}

#[test]
fn expired_entries_go_and_their_children_still_find_a_parent() {
    let mut index = PrefixIndex::new(Limits {
        ttl: 100,
        ..FOREVER
    });
    index.store(ENGINE, &run(&[71], None, &[1, 2]), 0);
    index.sweep(100, 10);
    assert_eq!(index.entries(), 0);
    let applied = index.store(ENGINE, &run(&[72], Some(71), &[3, 4]), 100);
    assert_eq!(applied.unknown, 0);
    index.store(ENGINE, &run(&[71], None, &[1, 2]), 150);
    index.refresh(ENGINE, &chain(&REALM, &[1, 2, 3, 4]), 180);
    index.sweep(260, 10);
    assert_eq!(covered(&index, ENGINE, &[1, 2, 3, 4]), 2, "used since");
}

#[test]
fn room_is_made_by_guesses_before_storage_before_tails_before_heads() {
    let mut index = PrefixIndex::new(Limits {
        max_entries: 4,
        ttl: 1000,
    });
    let tokens: Vec<u32> = (0..8).collect();
    index.store(ENGINE, &run(&[71, 72, 73], None, &tokens[..6]), 0);
    index.speculate(OTHER, &chain(&REALM, &[90, 91]).into(), (0, 50));
    index.store(ENGINE, &run(&[74], Some(73), &tokens[6..]), 0);
    assert_eq!(covered(&index, OTHER, &[90, 91]), 0, "the guess made room");
    assert_eq!(covered(&index, ENGINE, &tokens), 4);
    index.store(OTHER, &run(&[81], None, &[50, 51]), 1);
    assert_eq!(
        covered(&index, ENGINE, &tokens),
        3,
        "the tail of the older chain made room"
    );
    assert_eq!(covered(&index, OTHER, &[50, 51]), 1);
}

#[test]
fn memory_stays_flat_under_churn() {
    let mut index = PrefixIndex::new(Limits {
        max_entries: 1000,
        ttl: 1000,
    });
    for n in 0..50_000u32 {
        let tokens = [n, n + 1];
        index.store(ENGINE, &run(&[u64::from(n)], None, &tokens), n / 100);
        if n >= 500 {
            index.remove(ENGINE, &[u64::from(n - 500)], Tier::Gpu, GONE);
        }
        index.sweep(n / 100, 4);
        assert!(index.entries() <= 1000);
    }
    assert_eq!(index.entries(), 500);
    index.ledger.assert_consistent();
    let places = index.ledger.holdings.len();
    assert!(places <= 1001, "{places}");
}

/// The model: every fact as it was told.
#[derive(Default)]
struct Naive {
    held: BTreeMap<(HolderId, BlockHash), BTreeMap<Tier, u8>>,
    hashes: BTreeMap<(HolderId, u64), BlockHash>,
}

#[derive(Debug, Clone)]
enum Op {
    Store {
        holder: u32,
        prompt: usize,
        blocks: usize,
        tier: Tier,
    },
    Remove {
        holder: u32,
        prompt: usize,
        block: usize,
        tier: Tier,
    },
    Forget {
        holder: u32,
    },
    Keep {
        prompt: usize,
        blocks: usize,
    },
}

fn prompts() -> Vec<Vec<u32>> {
    // they share beginnings of different lengths
    (0..6u32)
        .map(|p| {
            (0..12)
                .map(|i| if i < 2 * p { i } else { 100 * p + i })
                .collect()
        })
        .collect()
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let tier = prop_oneof![3 => Just(Tier::Gpu), 1 => Just(Tier::Cpu), 1 => Just(Tier::Storage)];
    let op = prop_oneof![
        5 => (1..4u32, 0..6usize, 1..7usize, tier.clone()).prop_map(|(holder, prompt, blocks, tier)| Op::Store { holder, prompt, blocks, tier }),
        4 => (1..4u32, 0..6usize, 0..6usize, tier).prop_map(|(holder, prompt, block, tier)| Op::Remove { holder, prompt, block, tier }),
        1 => (1..4u32).prop_map(|holder| Op::Forget { holder }),
        1 => (0..6usize, 1..7usize).prop_map(|(prompt, blocks)| Op::Keep { prompt, blocks }),
    ];
    proptest::collection::vec(op, 0..60)
}

/// The engine's hash of a block: its own way, per engine.
fn engine_hash(holder: u32, own: BlockHash) -> u64 {
    own.0.rotate_left(holder) ^ u64::from(holder)
}

#[test]
fn what_nobody_announced_makes_no_room_by_what_an_engine_did_and_goes_when_it_starts_anew() {
    let limits = Limits {
        max_entries: 6,
        ttl: 100,
    };
    let mut index = PrefixIndex::new(limits);
    let announced = [1, 2, 3, 4, 5, 6, 7, 8];
    index.store(ENGINE, &run(&[1, 2, 3, 4], None, &announced), 0);
    let hoped = |seed: u32| -> Arc<[BlockHash]> {
        let tokens: Vec<u32> = (0..8).map(|i| seed + i).collect();
        chain(&REALM, &tokens).into()
    };
    index.speculate(OTHER, &hoped(100), (0, 10));
    assert_eq!(index.entries(), 4, "four more do not fit");
    let short: Arc<[BlockHash]> = hoped(200)[..2].into();
    index.believe(OTHER, &short, 0);
    assert_eq!(index.entries(), 6);
    let other: Arc<[BlockHash]> = hoped(300)[..2].into();
    index.believe(OTHER, &other, 1);
    assert_eq!(
        (index.entries(), covered(&index, ENGINE, &announced)),
        (6, 4)
    );
    assert!(index.find_overlap(&short).is_empty(), "it made room");
    index.forget(OTHER);
    assert_eq!(index.entries(), 6);
    index.forget_assumed(OTHER);
    assert_eq!(
        (index.entries(), covered(&index, ENGINE, &announced)),
        (4, 4)
    );
    index.ledger.assert_consistent();
}

fn apply(index: &mut PrefixIndex, prompts: &[Vec<u32>], op: &Op) {
    match *op {
        Op::Store {
            holder,
            prompt,
            blocks,
            tier,
        } => {
            let own = chain(&REALM, &prompts[prompt]);
            let hashes: Vec<u64> = own[..blocks]
                .iter()
                .map(|h| engine_hash(holder, *h))
                .collect();
            let stored = StoredRun {
                tier,
                ..run(&hashes, None, &prompts[prompt][..2 * blocks])
            };
            index.store(HolderId(holder), &stored, 0);
        }
        Op::Remove {
            holder,
            prompt,
            block,
            tier,
        } => {
            let own = chain(&REALM, &prompts[prompt])[block];
            index.remove(HolderId(holder), &[engine_hash(holder, own)], tier, GONE);
        }
        Op::Forget { holder } => index.forget(HolderId(holder)),
        Op::Keep { .. } => {}
    }
}

proptest! {
    #[test]
    fn what_is_carried_to_another_index_goes_on_there_as_here(before in ops(), after in ops()) {
        let prompts = prompts();
        let mut here = PrefixIndex::new(FOREVER);
        before.iter().for_each(|op| apply(&mut here, &prompts, op));
        let mut there = PrefixIndex::new(FOREVER);
        for holder in 0..8 {
            let carried = here.carry(HolderId(holder));
            there.take_over(HolderId(holder), &carried, 0);
            let again = there.carry(HolderId(holder));
            let sorted = |mut blocks: Vec<Carried>| {
                blocks.iter_mut().for_each(|block| block.follows = false);
                blocks.sort_unstable_by_key(|block| block.name);
                blocks
            };
            prop_assert_eq!(sorted(again), sorted(carried));
        }
        after.iter().for_each(|op| {
            apply(&mut here, &prompts, op);
            apply(&mut there, &prompts, op);
        });
        there.ledger.assert_consistent();
        prop_assert_eq!(there.entries(), here.entries());
        for prompt in &prompts {
            let runs = |index: &PrefixIndex| {
                let mut runs = index.find_overlap(&chain(&REALM, prompt));
                runs.sort_unstable_by_key(|run| (run.holder, run.from));
                runs
            };
            prop_assert_eq!(runs(&there), runs(&here));
        }
    }

    #[test]
    fn the_index_agrees_with_the_model_on_every_prompt(ops in ops()) {
        let prompts = prompts();
        let (mut index, mut naive) = (PrefixIndex::new(FOREVER), Naive::default());
        for op in ops {
            match op {
                Op::Store { holder, prompt, blocks, tier } => {
                    let own = chain(&REALM, &prompts[prompt]);
                    let hashes: Vec<u64> = own[..blocks].iter().map(|h| engine_hash(holder, *h)).collect();
                    let stored = StoredRun { tier, ..run(&hashes, None, &prompts[prompt][..2 * blocks]) };
                    index.store(HolderId(holder), &stored, 0);
                    for (own, hash) in own[..blocks].iter().zip(hashes) {
                        naive.hashes.insert((HolderId(holder), hash), *own);
                        let copies = naive.held.entry((HolderId(holder), *own)).or_default().entry(tier).or_default();
                        *copies = (*copies + 1).min(8);
                    }
                }
                Op::Remove { holder, prompt, block, tier } => {
                    let own = chain(&REALM, &prompts[prompt])[block];
                    let holder_id = HolderId(holder);
                    index.remove(holder_id, &[engine_hash(holder, own)], tier, GONE);
                    if let Some(tiers) = naive.held.get_mut(&(holder_id, own)) {
                        if let Some(copies) = tiers.get_mut(&tier) {
                            *copies -= 1;
                        }
                        tiers.retain(|_, copies| *copies > 0);
                    }
                    naive.held.retain(|_, tiers| !tiers.is_empty());
                }
                Op::Forget { holder } => {
                    index.forget(HolderId(holder));
                    naive.held.retain(|(h, _), _| *h != HolderId(holder));
                }
                Op::Keep { prompt, blocks } => {
                    let own = chain(&REALM, &prompts[prompt]);
                    index.put_stored(STORE, (&own[..blocks], 0), Tier::Storage, 0);
                    for own in &own[..blocks] {
                        naive.held.entry((STORE, *own)).or_default().insert(Tier::Storage, 1);
                    }
                }
            }
            prop_assert_eq!(index.entries(), naive.held.len());
            index.ledger.assert_consistent();
        }
        for prompt in &prompts {
            let own = chain(&REALM, prompt);
            let known = own.iter().take_while(|h| naive.held.keys().any(|(_, held)| held == *h)).count();
            let mut seen = BTreeMap::new();
            for run in index.find_overlap(&own) {
                prop_assert!(run.from < run.to && run.to as usize <= known);
                for at in run.from..run.to {
                    prop_assert!(seen.insert((run.holder, at), run.tier).is_none(), "told twice");
                }
            }
            let mut expected = BTreeMap::new();
            for (at, own) in own[..known].iter().enumerate() {
                for ((holder, held), tiers) in &naive.held {
                    if held == own {
                        expected.insert((*holder, at as u32), *tiers.keys().max().unwrap());
                    }
                }
            }
            prop_assert_eq!(seen, expected);
        }
    }

    #[test]
    fn the_cap_holds_whatever_comes(ops in ops(), cap in 1usize..20) {
        let prompts = prompts();
        let mut index = PrefixIndex::new(Limits { max_entries: cap, ttl: 50 });
        for (now, op) in (0u32..).zip(ops) {
            match op {
                Op::Store { holder, prompt, blocks, tier } => {
                    let own = chain(&REALM, &prompts[prompt]);
                    let hashes: Vec<u64> = own[..blocks].iter().map(|h| engine_hash(holder, *h)).collect();
                    let stored = StoredRun { tier, ..run(&hashes, None, &prompts[prompt][..2 * blocks]) };
                    index.store(HolderId(holder), &stored, now);
                }
                Op::Remove { holder, prompt, block, tier } => {
                    let own = chain(&REALM, &prompts[prompt])[block];
                    index.remove(HolderId(holder), &[engine_hash(holder, own)], tier, GONE);
                }
                Op::Forget { holder } => index.forget(HolderId(holder)),
                Op::Keep { prompt, blocks } => index.speculate(STORE, &chain(&REALM, &prompts[prompt])[..blocks].into(), (now, now + 5)),
            }
            index.sweep(now, 2);
            prop_assert!(index.entries() <= cap);
            index.ledger.assert_consistent();
        }
        index.sweep(u32::MAX, usize::MAX);
        prop_assert_eq!((index.entries(), index.blocks()), (0, 0));
    }
}
