//! What every choice must hold to, whatever the cluster looks like.

#![allow(clippy::unwrap_used)] // all of this is a test

use proptest::prelude::*;
use routing::choose::{Ask, ChoiceRules, NoBackend, Plan, Reason, choose};
use routing::eligible::LeftOut;
use routing::explain::explain;
use routing::health::HealthState;
use routing::ids::{BackendId, PrefixKey, SessionKey, Slot};
use routing::knowledge::Mode;
use routing::prefix_index::{HolderId, Run, Tier};
use routing::ring::load_bound;
use routing::score::{Basis, Known, PromptOverlap, Weights, reach};
use routing::strategy::{Chance, Rotation, Strategy as Selection};
use routing::view::{BackendView, ClusterView, HandOffGroup, Live, Load, Memory, Passage, Role};
use std::collections::HashMap;
use std::sync::Arc;

fn backend(index: usize, name: &str, models: &[&str]) -> BackendView {
    BackendView {
        id: BackendId(index as u32),
        name: name.into(),
        role: Role::Unified,
        weight: 1,
        models: Some(models.iter().map(|m| Arc::from(*m)).collect()),
        health: HealthState::Healthy,
        passage: Passage::Closed,
        draining: false,
        memories: Arc::from([Memory {
            rank: None,
            holder: HolderId(index as u32),
        }]),
        reads: Arc::from([]),
        group: HandOffGroup::default(),
    }
}

fn cluster(names: &[&str]) -> ClusterView {
    let backends = names
        .iter()
        .enumerate()
        .map(|(i, n)| backend(i, n, &["m"]))
        .collect();
    view(backends)
}

fn view(backends: Vec<BackendView>) -> ClusterView {
    ClusterView::new(backends, 200, &ClusterView::default())
}

#[derive(Default, Clone)]
struct Loads {
    loads: HashMap<usize, Load>,
    probes_taken: bool,
}

impl Loads {
    fn in_flight(loads: &[u32]) -> Self {
        let loads = loads.iter().enumerate();
        let load = |in_flight: u32| Load {
            in_flight,
            ..Load::default()
        };
        Loads {
            loads: loads.map(|(i, n)| (i, load(*n))).collect(),
            probes_taken: false,
        }
    }
}

impl Live for Loads {
    fn load(&self, slot: Slot) -> Load {
        self.loads.get(&slot.0).copied().unwrap_or_default()
    }
    fn probe_free(&self, _: Slot) -> bool {
        !self.probes_taken
    }
}

struct Chooser {
    rules: ChoiceRules,
    rotation: Rotation,
    chance: Chance,
}

impl Chooser {
    fn new(strategy: Selection, prefix_routing: bool) -> Self {
        Chooser {
            rules: ChoiceRules {
                strategy,
                prefix_routing,
                load_factor_epsilon: 0.2,
                weights: WEIGHTS,
            },
            rotation: Rotation::default(),
            chance: Chance(7),
        }
    }

    fn ask(&mut self, view: &ClusterView, live: &Loads, ask: &Ask<'_>) -> Result<Plan, NoBackend> {
        choose(
            &self.rules,
            view,
            live,
            ask,
            &mut self.rotation,
            &mut self.chance,
        )
    }

    fn name(&mut self, view: &ClusterView, live: &Loads, ask: &Ask<'_>) -> String {
        let plan = self.ask(view, live, ask).unwrap();
        view.backend(plan.slot).name.to_string()
    }
}

const WEIGHTS: Weights = Weights {
    overlap: 0.6,
    load: 0.3,
    health: 0.1,
    min_overlap: 0.3,
    gpu: 1.0,
    cpu: 0.8,
    storage: 0.6,
};

const ANY: Ask<'static> = Ask {
    model: "m",
    known: None,
    prefix: None,
    session: None,
    role: None,
    group: None,
    tried: &[],
};

fn strategies() -> impl Strategy<Value = Selection> {
    proptest::sample::select(
        Selection::ALL
            .iter()
            .map(|(_, s)| *s)
            .collect::<Vec<Selection>>(),
    )
}

fn arbitrary_backend(index: usize) -> impl Strategy<Value = BackendView> {
    (0u8..4, 0u8..3, any::<bool>(), 1u32..4, 0u8..3).prop_map(
        move |(health, passage, draining, weight, role)| BackendView {
            weight,
            draining: draining && index.is_multiple_of(2),
            health: match health {
                0 => HealthState::Starting,
                1 => HealthState::Unhealthy,
                _ => HealthState::Healthy,
            },
            passage: match passage {
                0 => Passage::Open,
                _ => Passage::Closed,
            },
            role: [Role::Prefill, Role::Decode, Role::Unified][role as usize],
            ..backend(index, &format!("w{index}"), &["m"])
        },
    )
}

proptest! {
    #[test]
    fn every_strategy_skips_workers_that_may_not_serve(
        strategy in strategies(),
        prefix_routing: bool,
        backends in (1usize..8).prop_flat_map(|n| (0..n).map(arbitrary_backend).collect::<Vec<_>>()),
        in_flight in proptest::collection::vec(0u32..20, 8),
        prefix in proptest::option::of(any::<u64>()),
        session in proptest::option::of(any::<u64>()),
        role in proptest::option::of(Just(Role::Decode)),
        tried in proptest::option::of(0usize..8),
    ) {
        let fits = |b: &BackendView, i: usize| {
            b.health == HealthState::Healthy && b.passage == Passage::Closed && !b.draining
                && role.is_none_or(|r| r == b.role) && tried != Some(i)
        };
        let expected = backends.iter().enumerate().any(|(i, b)| fits(b, i));
        let view = view(backends);
        let mut chooser = Chooser::new(strategy, prefix_routing);
        let tried: Vec<BackendId> = tried.map(|i| BackendId(i as u32)).into_iter().collect();
        for _ in 0..10 {
            let ask = Ask { prefix: prefix.map(PrefixKey), session: session.map(SessionKey), role, tried: &tried, ..ANY };
            match chooser.ask(&view, &Loads::in_flight(&in_flight), &ask) {
                Ok(plan) => prop_assert!(fits(view.backend(plan.slot), plan.slot.0), "{:?}", plan),
                Err(why) => {
                    prop_assert!(!expected, "{:?}", why);
                    prop_assert_eq!(why, NoBackend::NoneServing);
                }
            }
        }
    }

    #[test]
    fn the_load_bound_holds_on_every_prefix_choice(
        weights in proptest::collection::vec(1u32..4, 1..9),
        keys in proptest::collection::vec(0u64..3, 1..300),
    ) {
        let backends: Vec<BackendView> = weights.iter().enumerate()
            .map(|(i, weight)| BackendView { weight: *weight, ..backend(i, &format!("w{i}"), &["m"]) })
            .collect();
        let view = view(backends);
        let mut loads = vec![0u32; weights.len()];
        let mut chooser = Chooser::new(Selection::Random, true);
        for key in keys {
            // few keys and nothing ever ends: the worst case for affinity
            let total: u64 = loads.iter().map(|n| u64::from(*n)).sum();
            let total_weight: u64 = weights.iter().map(|w| u64::from(*w)).sum();
            let ask = Ask { prefix: Some(PrefixKey(key.wrapping_mul(0x9E37_79B9_7F4A_7C15))), ..ANY };
            let plan = chooser.ask(&view, &Loads::in_flight(&loads), &ask).unwrap();
            let by_prefix = matches!(plan.reason, Reason::Prefix { .. });
            prop_assert!(by_prefix);
            loads[plan.slot.0] += 1;
            let bound = load_bound(total, weights[plan.slot.0], total_weight, 0.2);
            prop_assert!(u64::from(loads[plan.slot.0]) <= bound);
        }
    }

    #[test]
    fn two_gateways_place_a_prefix_alike_whatever_the_order_of_registration(key: u64, rotate in 0usize..5) {
        let mut names = vec!["a", "b", "c", "d", "e"];
        let first = cluster(&names);
        names.rotate_left(rotate);
        let second = cluster(&names);
        let ask = Ask { prefix: Some(PrefixKey(key)), ..ANY };
        let mut one = Chooser::new(Selection::LeastLatency, true);
        let mut other = Chooser::new(Selection::LeastLatency, true);
        let none = Loads::default();
        prop_assert_eq!(one.name(&first, &none, &ask), other.name(&second, &none, &ask));
    }
}

#[test]
fn a_prefix_does_not_lead_to_a_worker_whose_breaker_is_open() {
    let mut view = cluster(&["a", "b"]);
    let ask = Ask {
        prefix: Some(PrefixKey(1)),
        ..ANY
    };
    let mut chooser = Chooser::new(Selection::Random, true);
    let home = chooser.ask(&view, &Loads::default(), &ask).unwrap().slot;
    view.backends[home.0].passage = Passage::Open;
    for _ in 0..20 {
        let plan = chooser.ask(&view, &Loads::default(), &ask).unwrap();
        assert_ne!(plan.slot, home);
    }
}

#[test]
fn a_second_attempt_never_goes_to_the_worker_that_failed_the_first() {
    let view = cluster(&["a", "b"]);
    let ask = Ask {
        prefix: Some(PrefixKey(1)),
        ..ANY
    };
    let mut chooser = Chooser::new(Selection::Random, true);
    let home = chooser.ask(&view, &Loads::default(), &ask).unwrap().slot;
    let tried = [view.backend(home).id];
    let again = Ask {
        tried: &tried,
        ..ask
    };
    assert_ne!(
        chooser.ask(&view, &Loads::default(), &again).unwrap().slot,
        home
    );
}

#[test]
fn unknown_models_are_told_from_models_whose_workers_are_down() {
    let mut chooser = Chooser::new(Selection::RoundRobin, false);
    let mut backends = vec![backend(0, "a", &["m"]), backend(1, "b", &["n"])];
    let nope = Ask {
        model: "nope",
        ..ANY
    };
    let none = Loads::default();
    assert_eq!(
        chooser.ask(&view(backends.clone()), &none, &nope),
        Err(NoBackend::UnknownModel)
    );
    backends[1].models = None;
    assert_eq!(
        chooser.ask(&view(backends.clone()), &none, &nope),
        Err(NoBackend::ModelsNotKnownYet)
    );
    backends[0].health = HealthState::Unhealthy;
    assert_eq!(
        chooser.ask(&view(backends), &none, &ANY),
        Err(NoBackend::NoneServing)
    );
}

#[test]
fn round_robin_turns_per_model_and_survives_a_worker_leaving_and_returning() {
    let all = view(vec![
        backend(0, "a", &["m"]),
        backend(1, "b", &["m"]),
        backend(2, "c", &["n"]),
        backend(3, "d", &["n"]),
    ]);
    let none = Loads::default();
    let mut chooser = Chooser::new(Selection::RoundRobin, false);
    let n = Ask { model: "n", ..ANY };
    let mut seen = String::new();
    for _ in 0..3 {
        seen += &chooser.name(&all, &none, &ANY);
        seen += &chooser.name(&all, &none, &n);
    }
    assert_eq!(seen, "acbdac", "each model has a turn of its own");

    let mut names = vec!["a", "b", "c"];
    let mut chooser = Chooser::new(Selection::RoundRobin, false);
    assert_eq!(chooser.name(&cluster(&names), &none, &ANY), "a");
    names.reverse();
    assert_eq!(
        chooser.name(&cluster(&names), &none, &ANY),
        "b",
        "rediscovered in another order"
    );
    assert_eq!(
        chooser.name(&cluster(&["a", "c"]), &none, &ANY),
        "c",
        "b is gone"
    );
    assert_eq!(chooser.name(&cluster(&names), &none, &ANY), "a");
}

#[test]
fn weighted_strategies_give_shares_in_proportion() {
    let mut backends = vec![backend(0, "a", &["m"]), backend(1, "b", &["m"])];
    backends[0].weight = 3;
    let view = view(backends);
    for (strategy, slack) in [(Selection::WeightedRoundRobin, 0), (Selection::Random, 300)] {
        let mut chooser = Chooser::new(strategy, false);
        let a = (0..4000)
            .filter(|_| chooser.name(&view, &Loads::default(), &ANY) == "a")
            .count();
        assert!(
            a.abs_diff(3000) <= slack,
            "{strategy:?} gave {a} of 4000 to a weight of 3 in 4"
        );
    }
}

#[test]
fn least_connections_and_power_of_two_avoid_the_busy_worker() {
    let view = cluster(&["a", "b", "c"]);
    let loads = Loads::in_flight(&[9, 1, 9]);
    let mut least = Chooser::new(Selection::LeastConnections, false);
    let mut two = Chooser::new(Selection::PowerOfTwo, false);
    for _ in 0..50 {
        assert_eq!(least.name(&view, &loads, &ANY), "b");
    }
    let b = (0..3000)
        .filter(|_| two.name(&view, &loads, &ANY) == "b")
        .count();
    // b is in two of three pairs
    assert!((1850..2150).contains(&b), "{b} of 3000");
}

#[test]
fn least_latency_tries_an_unsampled_worker_once_and_returns_to_the_fast_one() {
    let view = cluster(&["fast", "new", "slow"]);
    let load = |ttft_us: Option<u64>, in_flight| Load {
        ttft_us,
        in_flight,
        ..Load::default()
    };
    let mut loads = Loads::default();
    loads.loads.insert(0, load(Some(20_000), 0));
    loads.loads.insert(1, load(None, 0));
    loads.loads.insert(2, load(Some(200_000), 0));
    let mut chooser = Chooser::new(Selection::LeastLatency, false);
    assert_eq!(chooser.name(&view, &loads, &ANY), "new");
    loads.loads.insert(1, load(None, 1));
    assert_eq!(
        chooser.name(&view, &loads, &ANY),
        "fast",
        "one explorer is enough"
    );
    loads.loads.insert(1, load(Some(25_000), 0));
    loads.loads.insert(0, load(Some(20_000), 5));
    assert_eq!(
        chooser.name(&view, &loads, &ANY),
        "new",
        "a queue outweighs a little speed"
    );
}

#[test]
fn sessions_stick_and_requests_without_one_spread() {
    let view = cluster(&["a", "b", "c", "d"]);
    let none = Loads::default();
    let mut chooser = Chooser::new(Selection::ConsistentHash, false);
    for session in 0..20u64 {
        let ask = Ask {
            session: Some(SessionKey(session.wrapping_mul(0x9E37_79B9_7F4A_7C15))),
            ..ANY
        };
        let first = chooser.name(&view, &none, &ask);
        assert!((0..5).all(|_| chooser.name(&view, &none, &ask) == first));
    }
    let mut counts = HashMap::new();
    for _ in 0..1000 {
        *counts
            .entry(chooser.name(&view, &none, &ANY))
            .or_insert(0u32) += 1;
    }
    assert!(
        counts.len() == 4 && counts.values().all(|n| *n < 400),
        "{counts:?}"
    );
}

#[test]
fn distinct_sequential_prefixes_use_all_workers_though_none_is_ever_busy() {
    let view = cluster(&["a", "b"]);
    let none = Loads::default();
    let mut chooser = Chooser::new(Selection::LeastConnections, true);
    let mut counts = HashMap::new();
    for session in 0..50u64 {
        let key = PrefixKey(session.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let ask = Ask {
            prefix: Some(key),
            ..ANY
        };
        let first = chooser.name(&view, &none, &ask);
        for _ in 0..8 {
            assert_eq!(
                chooser.name(&view, &none, &ask),
                first,
                "a session stays where it is"
            );
        }
        *counts.entry(first).or_insert(0u32) += 1;
    }
    assert!(counts.values().all(|n| *n >= 12), "{counts:?}");
}

#[test]
fn one_hot_worker_spills_its_own_keys_only() {
    let view = cluster(&["a", "b", "c", "d", "e"]);
    let ask_for = |key: u64| Ask {
        prefix: Some(PrefixKey(key.wrapping_mul(0x9E37_79B9_7F4A_7C15))),
        ..ANY
    };
    let mut chooser = Chooser::new(Selection::LeastConnections, true);
    let homes: Vec<String> = (0..200)
        .map(|k| chooser.name(&view, &Loads::default(), &ask_for(k)))
        .collect();
    let hot = Loads::in_flight(&[100, 2, 2, 2, 2]);
    for (key, home) in homes.iter().enumerate() {
        let now = chooser.name(&view, &hot, &ask_for(key as u64));
        match home.as_str() {
            "a" => assert_ne!(now, "a"),
            calm => assert_eq!(now, calm, "keys of calm workers stay"),
        }
    }
}

#[test]
fn a_resting_worker_is_spared_unless_all_rest() {
    let view = cluster(&["a", "b"]);
    let mut loads = Loads::default();
    let resting = Load {
        resting: true,
        ..Load::default()
    };
    loads.loads.insert(0, resting);
    let mut chooser = Chooser::new(Selection::RoundRobin, false);
    for _ in 0..4 {
        assert_eq!(chooser.name(&view, &loads, &ANY), "b");
    }
    loads.loads.insert(1, resting);
    assert!(chooser.ask(&view, &loads, &ANY).is_ok());
}

#[test]
fn a_half_open_worker_gets_the_first_request_and_no_second_while_its_probe_is_out() {
    let mut view = cluster(&["a", "b"]);
    view.backends[0].passage = Passage::HalfOpen;
    let mut loads = Loads::in_flight(&[0, 5]);
    let mut chooser = Chooser::new(Selection::LeastConnections, true);
    let plan = chooser.ask(&view, &loads, &ANY).unwrap();
    assert_eq!((plan.slot, plan.reason), (Slot(0), Reason::Probe));
    let tried = [BackendId(1)];
    let second_attempt = Ask {
        tried: &tried,
        ..ANY
    };
    assert_eq!(
        chooser.ask(&view, &loads, &second_attempt),
        Err(NoBackend::NoneServing)
    );
    loads.probes_taken = true;
    assert_eq!(chooser.name(&view, &loads, &ANY), "b");
    loads.probes_taken = false;
    let resting = Load {
        resting: true,
        ..Load::default()
    };
    loads.loads.insert(0, resting);
    assert_eq!(
        chooser.name(&view, &loads, &ANY),
        "b",
        "it asked for patience"
    );
    view.backends[1].draining = true;
    assert_eq!(
        chooser.name(&view, &loads, &ANY),
        "a",
        "but somebody must be asked"
    );
}

#[test]
fn a_change_of_health_keeps_the_ring_and_a_change_of_members_rebuilds_it() {
    let first = cluster(&["a", "b"]);
    let mut backends = first.backends.clone();
    backends[0].health = HealthState::Unhealthy;
    let second = ClusterView::new(backends, 200, &first);
    assert!(Arc::ptr_eq(&first.pools["m"].ring, &second.pools["m"].ring));
    let third = ClusterView::new(vec![backend(0, "a", &["m"])], 200, &second);
    assert!(!Arc::ptr_eq(
        &second.pools["m"].ring,
        &third.pools["m"].ring
    ));
}

/// A prompt of `blocks` blocks, of which each holder has the first so many on its GPU.
fn held(blocks: u32, holders: &[(u32, u32)]) -> Known {
    let run = |(holder, to): &(u32, u32)| Run {
        holder: HolderId(*holder),
        tier: Tier::Gpu,
        from: 0,
        to: *to,
    };
    Known(vec![PromptOverlap {
        basis: Basis::Tokens,
        runs: holders.iter().filter(|(_, to)| *to > 0).map(run).collect(),
        blocks,
        tokens: blocks * 16 + 3,
        block_size: 16,
    }])
}

fn queued(in_flight: u32, queued_tokens: u64) -> Load {
    Load {
        in_flight,
        queued_tokens,
        ..Load::default()
    }
}

#[test]
fn a_prompt_goes_where_most_of_it_is_held() {
    let view = cluster(&["a", "b", "c"]);
    let prompt = held(100, &[(0, 40), (1, 90), (2, 0)]);
    let ask = Ask {
        known: Some(&prompt),
        prefix: Some(PrefixKey(1)),
        ..ANY
    };
    let mut chooser = Chooser::new(Selection::RoundRobin, true);
    for _ in 0..5 {
        let plan = chooser.ask(&view, &Loads::default(), &ask).unwrap();
        assert_eq!(
            (plan.slot, plan.reason),
            (Slot(1), Reason::KvIndex { blocks: 90 })
        );
    }
}

#[test]
fn below_the_threshold_work_decides_however_storage_is_weighted() {
    let view = cluster(&["a", "b"]);
    let mut chooser = Chooser::new(Selection::RoundRobin, true);
    let prefix = Some(PrefixKey(1));
    let little = held(100, &[(0, 29)]);
    let ask = Ask {
        known: Some(&little),
        prefix,
        ..ANY
    };
    let plan = chooser.ask(&view, &Loads::default(), &ask).unwrap();
    assert!(matches!(plan.reason, Reason::Prefix { .. }));
    // the threshold is on raw coverage: 40 % in storage counts as 24 %, and is enough
    let mut stored = held(100, &[(0, 40)]);
    stored.0[0].runs[0].tier = Tier::Storage;
    let ask = Ask {
        known: Some(&stored),
        prefix,
        ..ANY
    };
    let plan = chooser.ask(&view, &Loads::default(), &ask).unwrap();
    assert_eq!(plan.reason, Reason::KvIndex { blocks: 40 });
}

#[test]
fn a_long_queue_outweighs_a_full_overlap_for_that_backend_only() {
    let view = cluster(&["hot", "warm", "cold"]);
    let prompt = held(100, &[(0, 100), (1, 80), (2, 0)]);
    let ask = Ask {
        known: Some(&prompt),
        ..ANY
    };
    let mut chooser = Chooser::new(Selection::RoundRobin, false);
    let mut loads = Loads::default();
    loads.loads.insert(0, queued(1, 1_000));
    assert_eq!(
        chooser.name(&view, &loads, &ask),
        "hot",
        "its overlap saves more than its queue takes"
    );
    loads.loads.insert(0, queued(1, 1_700));
    assert_ne!(chooser.name(&view, &loads, &ask), "hot", "less");
    loads.loads.insert(0, queued(3, 50_000));
    assert_eq!(
        chooser.name(&view, &loads, &ask),
        "warm",
        "the near-idle holder takes it"
    );
    loads.loads.insert(1, queued(3, 50_000));
    assert_eq!(chooser.name(&view, &loads, &ask), "cold");
}

#[test]
fn a_prompt_that_nobody_holds_goes_where_it_is_computed_first() {
    let view = cluster(&["a", "b", "c"]);
    let nowhere = held(100, &[]);
    let ask = |key| Ask {
        known: Some(&nowhere),
        prefix: Some(PrefixKey(key)),
        ..ANY
    };
    let mut loads = Loads::default();
    let mut chooser = Chooser::new(Selection::RoundRobin, true);
    for (slot, load) in [queued(1, 900), queued(9, 300), queued(2, 300)]
        .into_iter()
        .enumerate()
    {
        loads.loads.insert(slot, load);
    }
    for key in 0..20 {
        let key = u64::MAX / 20 * key;
        assert_eq!(
            chooser.name(&view, &loads, &ask(key)),
            "c",
            "fewest tokens, then requests"
        );
        // an idle fleet is left to the ring: another gateway, with other chances, agrees
        let idle = Loads::default();
        let plan = chooser.ask(&view, &idle, &ask(key)).unwrap();
        assert_eq!(plan.reason, Reason::Prefix { spilled: false });
        let mut other = Chooser::new(Selection::RoundRobin, true);
        assert_eq!(other.ask(&view, &idle, &ask(key)).unwrap().slot, plan.slot);
    }
    // the little that somebody holds counts for what it saves, and no more
    let little = held(100, &[(1, 20)]);
    let known = Ask {
        known: Some(&little),
        ..ask(1)
    };
    assert_eq!(chooser.name(&view, &loads, &known), "b");
    loads.loads.insert(1, queued(1, 300 + 20 * 16 + 1));
    assert_eq!(chooser.name(&view, &loads, &known), "c");
}

#[test]
fn a_popular_beginning_spreads_once_its_holder_has_more_than_twice_the_mean() {
    let view = cluster(&["holder", "b", "c", "d"]);
    let prompt = held(100, &[(0, 90)]);
    let ask = Ask {
        known: Some(&prompt),
        prefix: Some(PrefixKey(1)),
        ..ANY
    };
    let mut chooser = Chooser::new(Selection::RoundRobin, true);
    let busy = |n| Loads::in_flight(&[n, 1, 1, 1]);
    assert_eq!(chooser.name(&view, &busy(5), &ask), "holder");
    assert_ne!(chooser.name(&view, &busy(8), &ask), "holder");
}

#[test]
fn failing_backends_and_busy_ones_lose_to_equals() {
    let view = cluster(&["a", "b"]);
    let prompt = held(100, &[(0, 90), (1, 90)]);
    let ask = Ask {
        known: Some(&prompt),
        ..ANY
    };
    let mut chooser = Chooser::new(Selection::RoundRobin, false);
    let mut loads = Loads::default();
    loads.loads.insert(0, queued(10, 0));
    assert_eq!(chooser.name(&view, &loads, &ask), "b");
    let failing = Load {
        success: Some(0.2),
        ..Load::default()
    };
    loads.loads.insert(0, Load::default());
    loads.loads.insert(1, failing);
    assert_eq!(chooser.name(&view, &loads, &ask), "a");
    let mut counts = HashMap::new();
    for _ in 0..200 {
        *counts
            .entry(chooser.name(&view, &Loads::default(), &ask))
            .or_insert(0) += 1;
    }
    assert!(counts.values().all(|n| *n > 60), "equals share: {counts:?}");
}

/// A prompt of 20 blocks by tokens and 10 by text, with what each holder has of both.
fn held_both(tokens: &[(u32, u32)], text: &[(u32, u32)]) -> Known {
    let mut by_text = held(10, text).0.remove(0);
    by_text.basis = Basis::Text;
    let mut known = held(20, tokens);
    known.0.push(by_text);
    known
}

fn in_mode(mode: Mode) -> Load {
    Load {
        mode,
        block_size: (mode == Mode::Exact).then_some(16),
        ..Load::default()
    }
}

#[test]
fn backends_with_events_go_by_tokens_those_without_by_text_and_blind_ones_by_nothing() {
    let view = cluster(&["exact", "guessed", "blind"]);
    let known = held_both(&[(0, 5), (1, 20), (2, 20)], &[(0, 10), (1, 6), (2, 10)]);
    let mut loads = Loads::default();
    let modes = [Mode::Exact, Mode::Approximate, Mode::Blind];
    for (slot, mode) in modes.into_iter().enumerate() {
        loads.loads.insert(slot, in_mode(mode));
    }
    let raw = |slot: usize| {
        let load = loads.load(Slot(slot));
        reach(&known, view.backend(Slot(slot)), &load, &WEIGHTS)
            .overlap
            .raw
    };
    assert_eq!([raw(0), raw(1), raw(2)], [0.25, 0.6, 0.0]);
    let ask = Ask {
        known: Some(&known),
        ..ANY
    };
    let mut chooser = Chooser::new(Selection::RoundRobin, false);
    assert_eq!(chooser.name(&view, &loads, &ask), "guessed");
}

#[test]
fn a_backends_own_block_size_counts_and_text_stands_in_where_tokens_are_not_had() {
    let view = cluster(&["a", "b"]);
    let mut known = held(20, &[(0, 10)]);
    let mut large = held(5, &[(1, 5)]).0.remove(0);
    large.block_size = 64;
    known.0.push(large);
    let of_size = |block_size| Load {
        block_size: Some(block_size),
        ..Load::default()
    };
    let blocks = |slot: usize, load: &Load, known: &Known| {
        reach(known, view.backend(Slot(slot)), load, &WEIGHTS)
            .overlap
            .blocks
    };
    assert_eq!(blocks(0, &of_size(16), &known), 10);
    assert_eq!(blocks(1, &of_size(16), &known), 0);
    assert_eq!(blocks(1, &of_size(64), &known), 5);
    assert_eq!(blocks(1, &of_size(32), &known), 0, "no chain of that size");
    let mut text = held(8, &[(1, 3)]);
    text.0[0].basis = Basis::Text;
    assert_eq!(blocks(1, &of_size(64), &text), 3);
}

#[test]
fn the_rank_that_holds_the_prompt_is_named_and_ranks_do_not_add_up() {
    let mut backends = cluster(&["a"]).backends;
    let memory = |rank, holder| Memory {
        rank,
        holder: HolderId(holder),
    };
    backends[0].memories = Arc::from([memory(None, 0), memory(Some(0), 1), memory(Some(1), 2)]);
    backends[0].reads = Arc::from([HolderId(9)]);
    let mut known = held(20, &[(1, 4), (2, 8)]);
    known.0[0].runs.push(Run {
        holder: HolderId(9),
        tier: Tier::Storage,
        from: 6,
        to: 12,
    });
    let load = Load::default();
    let found = reach(&known, &backends[0], &load, &WEIGHTS);
    assert_eq!(found.memory, Some(memory(Some(1), 2)));
    assert_eq!(found.overlap.blocks, 12, "its own 8, then from storage");
    let nothing = reach(&held(20, &[]), &backends[0], &load, &WEIGHTS);
    assert_eq!(nothing.memory, Some(memory(None, 0)));
}

#[test]
fn an_explanation_names_everybody_and_changes_nothing() {
    let mut backends = cluster(&["a", "b", "c", "d", "e"]).backends;
    backends[0].health = HealthState::Unhealthy;
    backends[1].passage = Passage::Open;
    backends[2].passage = Passage::HalfOpen;
    let view = view(backends);
    let mut loads = Loads {
        probes_taken: true,
        ..Loads::default()
    };
    loads.loads.insert(3, queued(1, 90_000));
    let known = held(100, &[(3, 50)]);
    let ask = Ask {
        known: Some(&known),
        ..ANY
    };
    let rules = Chooser::new(Selection::RoundRobin, false).rules;
    let (rotation, chance) = (Rotation::default(), Chance(1));
    let said = explain(&rules, &view, &loads, &ask, &rotation, &chance);
    assert_eq!(
        said.left_out,
        [
            (Slot(0), LeftOut::NotHealthy),
            (Slot(1), LeftOut::BreakerOpen),
            (Slot(2), LeftOut::BreakerHalfOpen),
        ]
    );
    let of = |slot: usize| {
        said.candidates
            .iter()
            .find(|t| t.candidate.slot == Slot(slot))
    };
    let (full, idle) = (of(3).unwrap(), of(4).unwrap());
    assert!(full.overloaded && !idle.overloaded);
    assert!(full.score > idle.score, "its overlap would have won");
    assert_eq!(full.reach.overlap.blocks, 50);
    assert_eq!(said.plan.unwrap().slot, Slot(4));
    assert_eq!(
        said,
        explain(&rules, &view, &loads, &ask, &rotation, &chance)
    );
}
