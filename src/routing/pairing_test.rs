//! Pairs over small fleets, and over any.

use super::*;
use crate::health::HealthState;
use crate::ids::BackendId;
use crate::knowledge::Mode;
use crate::prefix_index::{HolderId, Run, Tier};
use crate::score::{Basis, PromptOverlap, Weights};
use crate::strategy::Strategy as Selection;
use crate::view::{BackendView, Load, Memory, Passage};
use proptest::prelude::*;
use std::collections::HashMap;

const STORAGE: HolderId = HolderId(100);
const RULES: ChoiceRules = ChoiceRules {
    strategy: Selection::LeastConnections,
    prefix_routing: false,
    load_factor_epsilon: 0.2,
    weights: Weights {
        overlap: 0.6,
        load: 0.3,
        health: 0.1,
        min_overlap: 0.3,
        gpu: 1.0,
        cpu: 0.8,
        storage: 0.6,
    },
};
const SPLIT: SplitRules = SplitRules {
    min_prefill_tokens: 512,
    fallback_to_unified: true,
};

/// A backend by its name: p, d or u, and further letters.
fn backend(at: usize, name: &str, group: u32) -> BackendView {
    let role = match name.as_bytes()[0] {
        b'p' => Role::Prefill,
        b'd' => Role::Decode,
        _ => Role::Unified,
    };
    BackendView {
        id: BackendId(at as u32),
        name: name.into(),
        role,
        weight: 1,
        models: Some(Arc::from([Arc::from("m")])),
        health: HealthState::Healthy,
        passage: Passage::Closed,
        draining: false,
        memories: Arc::from([Memory {
            rank: None,
            holder: HolderId(at as u32),
        }]),
        reads: if role == Role::Decode {
            Arc::from([STORAGE])
        } else {
            Arc::from([])
        },
        group: HandOffGroup(group),
    }
}

fn view(names: &[&str]) -> ClusterView {
    let backends = names
        .iter()
        .enumerate()
        .map(|(at, name)| backend(at, name, 0));
    ClusterView::new(backends.collect(), 10, &ClusterView::default())
}

#[derive(Default)]
struct Loads(HashMap<usize, Load>);

impl Live for Loads {
    fn load(&self, slot: Slot) -> Load {
        let mode = Mode::Exact;
        Load {
            mode,
            ..self.0.get(&slot.0).copied().unwrap_or_default()
        }
    }
    fn probe_free(&self, _: Slot) -> bool {
        true
    }
}

const ASK: PairAsk<'static> = PairAsk {
    ask: Ask {
        model: "m",
        known: None,
        prefix: None,
        session: None,
        role: None,
        group: None,
        tried: &[],
    },
    tokens: 1600,
    suspended: &[],
    pairs_only: &[],
};

fn pairs(view: &ClusterView, loads: &Loads, ask: &PairAsk<'_>) -> Result<Pairing, Unserved> {
    let chance = (&mut Rotation::default(), &mut Chance(7));
    pair((&RULES, &SPLIT), view, loads, ask, chance)
}

fn known(runs: &[(u32, Tier, u32)]) -> Known {
    let runs = runs.iter().map(|(holder, tier, to)| Run {
        holder: HolderId(*holder),
        tier: *tier,
        from: 0,
        to: *to,
    });
    Known(vec![PromptOverlap {
        basis: Basis::Tokens,
        runs: runs.collect(),
        blocks: 100,
        tokens: 1600,
        block_size: 16,
    }])
}

fn names(view: &ClusterView, pairing: &Pairing) -> (Option<String>, String) {
    let name = |plan: &Plan| view.backend(plan.slot).name.to_string();
    (pairing.prefill.as_ref().map(name), name(&pairing.worker))
}

#[test]
fn only_confirmed_copies_spare_the_prefill() {
    let view = view(&["p", "d1", "d2", "u"]);
    for (runs, path, worker) in [
        (vec![(2, Tier::Gpu, 90)], Path::FastDecode, Some("d2")),
        (vec![(100, Tier::Storage, 90)], Path::FastDecode, None),
        (
            vec![(2, Tier::Speculative, 90)],
            Path::PrefillThenDecode,
            None,
        ),
        (
            vec![(100, Tier::Assumed, 90)],
            Path::PrefillThenDecode,
            None,
        ),
        (vec![(0, Tier::Gpu, 90)], Path::PrefillThenDecode, None),
        (
            vec![(100, Tier::Storage, 50)],
            Path::PrefillThenDecode,
            None,
        ),
    ] {
        let known = known(&runs);
        let ask = Ask {
            known: Some(&known),
            ..ASK.ask
        };
        let found = pairs(&view, &Loads::default(), &PairAsk { ask, ..ASK }).unwrap();
        assert_eq!(found.path, path, "{runs:?}");
        let (_, who) = names(&view, &found);
        assert!(worker.is_none_or(|worker| worker == who), "{runs:?}: {who}");
    }
}

#[test]
fn what_the_storage_of_a_suspended_group_holds_does_not_count() {
    let view = view(&["p", "d", "u"]);
    let known = known(&[(100, Tier::Storage, 100)]);
    let ask = Ask {
        known: Some(&known),
        ..ASK.ask
    };
    let suspended = [HandOffGroup(0)];
    let found = pairs(
        &view,
        &Loads::default(),
        &PairAsk {
            ask,
            suspended: &suspended,
            ..ASK
        },
    );
    let found = found.unwrap();
    assert_eq!(
        (found.path, found.missing),
        (Path::Fallback, Some(Step::Prefill))
    );
    let own = self::known(&[(1, Tier::Gpu, 100)]);
    let ask = Ask {
        known: Some(&own),
        ..ASK.ask
    };
    let found = pairs(
        &view,
        &Loads::default(),
        &PairAsk {
            ask,
            suspended: &suspended,
            ..ASK
        },
    );
    assert_eq!(
        found.unwrap().path,
        Path::FastDecode,
        "its own memory is no matter of storage"
    );
}

#[test]
fn a_decode_worker_is_chosen_by_room_and_load_for_its_weight_and_by_what_it_has() {
    let mut view = view(&["p", "d1", "d2"]);
    let load = |held, in_flight| Load {
        held_tokens: held,
        in_flight,
        ..Load::default()
    };
    let chosen = |view: &ClusterView, first, second, runs: &[(u32, Tier, u32)]| {
        let loads = Loads([(1, first), (2, second)].into());
        let known = known(runs);
        let ask = Ask {
            known: Some(&known),
            ..ASK.ask
        };
        let found = pairs(view, &loads, &PairAsk { ask, ..ASK }).unwrap();
        names(view, &found).1
    };
    assert_eq!(chosen(&view, load(9000, 1), load(5000, 1), &[]), "d2");
    assert_eq!(chosen(&view, load(5000, 2), load(5000, 1), &[]), "d2");
    let half = [(1, Tier::Gpu, 50)];
    assert_eq!(
        chosen(&view, load(5000, 1), load(5000, 1), &half),
        "d1",
        "half of it is there"
    );
    assert_eq!(
        chosen(&view, load(9000, 1), load(5000, 1), &half),
        "d2",
        "not at any price"
    );
    view.backends[1].weight = 2;
    assert_eq!(chosen(&view, load(9000, 1), load(5500, 1), &[]), "d1");
}

#[test]
fn workers_of_different_groups_are_never_paired() {
    let mut view = view(&["p1", "p2", "d1", "d2", "u"]);
    view.backends[1].group = HandOffGroup(1);
    view.backends[3].group = HandOffGroup(1);
    view.backends[0].health = HealthState::Unhealthy;
    // d1 would be cheaper, and has nobody to get it from
    let loads = Loads(
        [(
            3,
            Load {
                held_tokens: 50_000,
                ..Load::default()
            },
        )]
        .into(),
    );
    let found = pairs(&view, &loads, &ASK).unwrap();
    assert_eq!(names(&view, &found), (Some("p2".into()), "d2".into()));
    view.backends[3].draining = true;
    let found = pairs(&view, &loads, &ASK).unwrap();
    assert_eq!(
        (found.path, found.missing),
        (Path::Fallback, Some(Step::Prefill))
    );
}

#[test]
fn a_decode_worker_that_cannot_compute_is_always_paired() {
    let view = view(&["p", "d", "u"]);
    let short = PairAsk { tokens: 3, ..ASK };
    let found = pairs(&view, &Loads::default(), &short).unwrap();
    assert_eq!(found.path, Path::FastDecode);
    let groups = [HandOffGroup(0)];
    let found = pairs(
        &view,
        &Loads::default(),
        &PairAsk {
            pairs_only: &groups,
            ..short
        },
    );
    assert_eq!(found.unwrap().path, Path::PrefillThenDecode);
}

#[test]
fn a_worker_that_has_not_said_what_it_serves_may_be_the_missing_half() {
    let mut backends: Vec<BackendView> = ["p", "d", "u"]
        .iter()
        .enumerate()
        .map(|(at, name)| backend(at, name, 0))
        .collect();
    backends[0].models = None;
    let view = ClusterView::new(backends.clone(), 10, &ClusterView::default());
    assert!(is_split(&view, "m"));
    backends[0].models = Some(Arc::from([Arc::from("other")]));
    let view = ClusterView::new(backends, 10, &ClusterView::default());
    assert!(!is_split(&view, "m") && !is_split(&view, "other") && !is_split(&view, "unknown"));
}

#[test]
fn a_decode_worker_that_waits_to_be_tried_is_tried() {
    let mut view = view(&["p", "d1", "d2"]);
    view.backends[1].passage = Passage::HalfOpen;
    let found = pairs(&view, &Loads::default(), &ASK).unwrap();
    assert_eq!(
        (names(&view, &found).1.as_str(), found.worker.reason),
        ("d1", Reason::Probe)
    );
    let tried = [BackendId(0)];
    let again = PairAsk {
        ask: Ask {
            tried: &tried,
            ..ASK.ask
        },
        ..ASK
    };
    let nobody = pairs(&view, &Loads::default(), &again).unwrap_err();
    assert_eq!(nobody.step, Step::Prefill, "and not by a second attempt");
}

proptest! {
    #[test]
    fn whoever_is_chosen_can_serve_in_its_role_and_the_pair_fits(
        members in proptest::collection::vec((0usize..3, any::<bool>(), 0u32..2, 0u64..5000), 1..9),
        tokens in 0u64..5000,
        suspended in any::<bool>(),
    ) {
        let backends: Vec<BackendView> = members.iter().enumerate().map(|(at, (role, healthy, group, _))| BackendView {
            health: if *healthy { HealthState::Healthy } else { HealthState::Unhealthy },
            ..backend(at, ["p", "d", "u"][*role], *group)
        }).collect();
        let view = ClusterView::new(backends, 10, &ClusterView::default());
        let loads = Loads(members.iter().enumerate().map(|(at, of)| (at, Load { held_tokens: of.3, ..Load::default() })).collect());
        let groups = [HandOffGroup(0)];
        let ask = PairAsk { tokens, suspended: if suspended { &groups } else { &[] }, ..ASK };
        let Ok(found) = pairs(&view, &loads, &ask) else {
            let unified = view.backends.iter().any(|b| b.role == Role::Unified && b.can_serve());
            prop_assert!(!unified, "a unified worker could have served");
            return Ok(());
        };
        let worker = view.backend(found.worker.slot);
        prop_assert!(worker.can_serve());
        match (found.path, found.prefill) {
            (Path::PrefillThenDecode, Some(prefill)) => {
                let prefill = view.backend(prefill.slot);
                prop_assert!(prefill.can_serve() && prefill.role == Role::Prefill);
                prop_assert_eq!(worker.role, Role::Decode);
                prop_assert_eq!(prefill.group, worker.group);
                prop_assert!(!ask.suspended.contains(&worker.group));
                prop_assert!(tokens >= SPLIT.min_prefill_tokens);
            }
            (Path::FastDecode, None) => {
                prop_assert_eq!(worker.role, Role::Decode);
                prop_assert!(tokens < SPLIT.min_prefill_tokens);
            }
            (Path::Fallback, None) => prop_assert_eq!(worker.role, Role::Unified),
            other => prop_assert!(false, "{:?}", other),
        }
    }
}
