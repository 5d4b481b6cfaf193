//! The scheduler's promises, by hand-made cases and under random load.

use super::*;
use crate::event_log::CacheEvent;
use crate::kv_cache::chain_seed;
use proptest::prelude::*;
use std::collections::HashMap;

fn state(blocks: usize, budget: usize, sequences: usize) -> State {
    State::new(
        Limits {
            batched_tokens_max: budget,
            sequences_max: sequences,
        },
        KvCache::new(blocks, 4, true),
    )
}

fn sequence(id: u64, prompt: std::ops::Range<u32>, answer: usize) -> NewSequence {
    NewSequence {
        id: SequenceId(id),
        prompt: prompt.collect(),
        answer: vec![7; answer].into(),
        chain: chain_seed(0, ""),
        salt: None,
        loaded: 0..0,
        pin: false,
    }
}

fn run_dry(state: &mut State) -> Vec<StepReport> {
    let mut reports = Vec::new();
    while !state.is_idle() {
        reports.push(step(state));
        assert!(reports.len() < 10_000, "the engine makes no progress");
    }
    reports
}

#[test]
fn a_long_prompt_is_prefilled_in_chunks_of_the_budget() {
    let mut state = state(100, 16, 4);
    state.add(sequence(1, 0..40, 2));
    let prefills: Vec<usize> = run_dry(&mut state)
        .iter()
        .map(|report| report.prefill_tokens)
        .collect();
    assert_eq!(prefills, [16, 16, 8, 0]);
}

#[test]
fn decodes_go_on_beside_a_prefill_that_fills_the_budget() {
    let mut state = state(200, 16, 4);
    state.add(sequence(1, 0..8, 20));
    step(&mut state);
    state.add(sequence(2, 100..300, 1));
    for _ in 0..10 {
        let report = step(&mut state);
        assert_eq!(report.decodes, 1);
        assert_eq!(report.prefill_tokens, 15);
        assert_eq!(
            report
                .outputs
                .iter()
                .filter(|output| output.id == SequenceId(1))
                .count(),
            1
        );
    }
}

#[test]
fn loaded_tokens_are_announced_and_not_computed() {
    let mut state = state(100, 100, 4);
    let loaded = NewSequence {
        loaded: 0..40,
        ..sequence(1, 0..40, 2)
    };
    state.add(loaded);
    let first = step(&mut state);
    assert_eq!((first.prefill_tokens, first.outputs[0].cached), (1, 39));
    assert_eq!(
        (state.loaded_tokens(), state.prefix_counts()),
        (39, (40, 0))
    );
    let events = state.cache_mut().take_events();
    let stored = |event: &CacheEvent| match event {
        CacheEvent::Stored { hashes, .. } => hashes.len(),
        _ => 0,
    };
    assert_eq!(events.iter().map(stored).sum::<usize>(), 10);
}

#[test]
fn what_was_loaded_behind_a_gap_is_computed() {
    let mut state = state(100, 100, 4);
    state.add(NewSequence {
        loaded: 8..40,
        ..sequence(1, 0..40, 2)
    });
    assert_eq!(step(&mut state).prefill_tokens, 40);
    run_dry(&mut state);
    state.add(NewSequence {
        loaded: 8..56,
        ..sequence(2, 0..60, 2)
    });
    assert_eq!(
        step(&mut state).prefill_tokens,
        4,
        "the cache has the first 40"
    );
}

#[test]
fn pinned_blocks_take_room_until_they_are_given_back() {
    let mut state = state(12, 100, 4);
    let pinned = NewSequence {
        pin: true,
        ..sequence(1, 0..30, 10)
    };
    state.add(pinned);
    run_dry(&mut state);
    let kept = state.pinned(SequenceId(1)).map(<[_]>::len);
    assert_eq!(
        (kept, state.pinned_blocks(), state.cache().used()),
        (Some(8), 8, 8)
    );
    state.add(sequence(2, 100..140, 1));
    assert_eq!(
        step(&mut state),
        StepReport::default(),
        "no room for ten blocks"
    );
    state.unpin(SequenceId(1));
    assert_eq!(state.cache().used(), 0);
    assert_eq!(run_dry(&mut state).len(), 1);
}

#[test]
fn an_equal_prompt_shares_pinned_blocks() {
    let mut state = state(12, 100, 4);
    state.add(NewSequence {
        pin: true,
        ..sequence(1, 0..40, 1)
    });
    run_dry(&mut state);
    state.add(sequence(2, 0..40, 1));
    assert_eq!(step(&mut state).prefill_tokens, 4);
    state.unpin(SequenceId(1));
    run_dry(&mut state);
    assert_eq!(state.cache().used(), 0);
}

#[test]
fn an_equal_prompt_hits_all_but_its_last_token() {
    let mut state = state(100, 64, 4);
    state.add(sequence(1, 0..16, 1));
    run_dry(&mut state);
    state.add(sequence(2, 0..16, 1));
    let report = step(&mut state);
    assert_eq!(
        report.outputs[0].cached, 12,
        "four blocks match, and the one with the last token is computed again"
    );
    assert_eq!(report.prefill_tokens, 4);
    assert_eq!(state.prefix_counts(), (32, 12));
}

#[test]
fn equal_prompts_in_one_step_share_blocks() {
    let mut state = state(100, 64, 4);
    state.add(sequence(1, 0..17, 1));
    state.add(sequence(2, 0..17, 1));
    let report = step(&mut state);
    assert_eq!(report.outputs[1].cached, 16);
}

#[test]
fn generated_tokens_serve_the_next_turn() {
    let mut state = state(100, 64, 4);
    state.add(sequence(1, 0..8, 9));
    run_dry(&mut state);
    let next: Vec<u32> = (0..8).chain([7; 9]).chain(50..60).collect();
    state.add(NewSequence {
        id: SequenceId(2),
        prompt: next.into(),
        answer: vec![7].into(),
        chain: chain_seed(0, ""),
        salt: None,
        loaded: 0..0,
        pin: false,
    });
    assert_eq!(step(&mut state).outputs[0].cached, 16);
}

#[test]
fn another_salt_shares_nothing() {
    let mut state = state(100, 64, 4);
    state.add(sequence(1, 0..17, 1));
    run_dry(&mut state);
    state.add(NewSequence {
        chain: chain_seed(0, "other"),
        salt: None,
        loaded: 0..0,
        pin: false,
        ..sequence(2, 0..17, 1)
    });
    assert_eq!(step(&mut state).outputs[0].cached, 0);
}

#[test]
fn want_of_blocks_preempts_the_youngest_and_it_recovers() {
    let mut state = state(6, 64, 4);
    state.add(sequence(1, 0..8, 12));
    state.add(sequence(2, 100..108, 12));
    let reports = run_dry(&mut state);
    assert!(reports.iter().map(|report| report.preempted).sum::<usize>() > 0);
    let mut tokens: HashMap<SequenceId, usize> = HashMap::new();
    for output in reports.iter().flat_map(|report| &report.outputs) {
        *tokens.entry(output.id).or_default() += 1;
    }
    assert_eq!(
        tokens,
        HashMap::from([(SequenceId(1), 12), (SequenceId(2), 12)])
    );
    assert_eq!(state.cache().used(), 0);
}

#[test]
fn an_embedding_ends_with_its_prefill() {
    let mut state = state(100, 64, 4);
    state.add(sequence(1, 0..9, 0));
    let report = step(&mut state);
    assert_eq!(
        report.outputs,
        [Output {
            id: SequenceId(1),
            token: None,
            last: true,
            cached: 0
        }]
    );
    assert!(state.is_idle());
}

#[test]
fn an_aborted_sequence_frees_its_place_and_blocks() {
    let mut state = state(100, 16, 1);
    state.add(sequence(1, 0..40, 100));
    state.add(sequence(2, 50..60, 100));
    step(&mut state);
    assert!(state.abort(SequenceId(1)));
    assert!(!state.abort(SequenceId(1)));
    assert_eq!(
        (state.running(), state.waiting(), state.cache().used()),
        (0, 1, 0)
    );
    assert!(state.abort(SequenceId(2)));
    assert!(state.is_idle());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any mix of prompts, answers, aborts, loads and pins: no step exceeds the budget or the places, every running decode gets its token
    /// unless somebody had to be preempted, every sequence gets all its tokens, and no block leaks.
    #[test]
    fn random_load_keeps_every_promise(
        requests in prop::collection::vec((0u32..3, 1u32..60, 0usize..30, 0usize..12, prop::option::of(1usize..20), 0usize..30, 0usize..60, any::<bool>()), 1..20),
        budget in 8usize..40,
        blocks in 23usize..60,
    ) {
        let mut state = state(blocks, budget, 8);
        let mut expected = HashMap::new();
        let mut got: HashMap<u64, usize> = HashMap::new();
        let mut aborts = Vec::new();
        let mut queue: Vec<_> = requests.iter().enumerate().collect();
        queue.sort_by_key(|(_, request)| request.3);
        let mut queue = queue.into_iter().peekable();
        for round in 0.. {
            prop_assert!(round < 5_000, "no progress");
            while let Some((id, (family, length, answer, _, abort, start, loaded, pin))) = queue.next_if(|(_, request)| request.3 <= round) {
                state.add(NewSequence {
                    loaded: *start..(*loaded).max(*start),
                    pin: *pin,
                    ..sequence(id as u64, family * 1000..family * 1000 + length, *answer)
                });
                expected.insert(id as u64, (*answer).max(1));
                aborts.extend(abort.map(|after| (round + after, id as u64)));
            }
            for (_, id) in aborts.extract_if(.., |(when, _)| *when <= round).collect::<Vec<_>>() {
                if state.abort(SequenceId(id)) {
                    expected.remove(&id);
                    got.remove(&id);
                }
            }
            if state.is_idle() && queue.peek().is_none() {
                break;
            }
            let decoding: Vec<SequenceId> = state.running.iter()
                .filter(|sequence| sequence.generated() > 0 && sequence.computed + 1 == sequence.tokens.len())
                .map(|sequence| sequence.id).collect();
            let before = state.running();
            let report = step(&mut state);
            if report.preempted > 0 {
                let ended = report.outputs.iter().filter(|output| output.last).count();
                prop_assert_eq!(state.running() + ended, before - report.preempted, "admitted while preempting");
            }
            prop_assert!(report.tokens() <= budget);
            prop_assert!(state.running() <= 8);
            if report.preempted == 0 {
                for id in decoding {
                    prop_assert!(report.outputs.iter().any(|output| output.id == id), "a decode starved");
                }
            }
            for output in &report.outputs {
                *got.entry(output.id.0).or_default() += 1;
            }
            let held: usize = state.running.iter().map(|sequence| sequence.blocks.len()).sum();
            prop_assert!(state.cache().used() <= held + state.pinned_blocks(), "a block is held by nobody");
            if round % 4 == 0 {
                (0..requests.len()).for_each(|id| state.unpin(SequenceId(id as u64)));
            }
        }
        (0..requests.len()).for_each(|id| state.unpin(SequenceId(id as u64)));
        prop_assert_eq!(got, expected);
        prop_assert_eq!(state.cache().used(), 0);
        prop_assert_eq!(state.cache().free(), blocks);
    }
}
