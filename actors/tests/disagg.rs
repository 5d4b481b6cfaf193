//! Pairs are leased while a request lasts, on every ending, and over the death of the actor.

#![allow(clippy::unwrap_used)] // all of this is a test

use actors::backend::{BackendSpec, BackendUrl, KvSeat};
use actors::cluster::{Cluster, ClusterSettings};
use actors::directory::Directory;
use actors::disagg_coordinator::{
    CoordinatorHandle, CoordinatorSettings, DisaggCoordinator, GroupSpec, HANDOFF_FAILURES,
    ListLeases, ReservePair, Reserved,
};
use actors::health_checker::Prober;
use actors::router::Route;
use actors::support::fault::Panic;
use actors::support::mailbox::Mailbox;
use actors::support::supervise::Root;
use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use routing::choose::ChoiceRules;
use routing::disagg::{Path, SplitRules, Step};
use routing::health::Probe;
use routing::pairing::Unserved;
use routing::score::Weights;
use routing::strategy::Strategy;
use routing::view::{HandOffGroup, Role};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

struct Unasked;

impl Prober for Unasked {
    fn probe(&self, _: &BackendSpec, _: Duration) -> LocalBoxFuture<'static, Probe> {
        async { Probe::Ok }.boxed_local()
    }

    fn models(
        &self,
        _: &BackendSpec,
        _: Duration,
    ) -> LocalBoxFuture<'static, Result<Vec<Arc<str>>, String>> {
        async { Ok(vec!["m".into()]) }.boxed_local()
    }
}

struct Fleet {
    directory: Directory,
    coordinator: CoordinatorHandle,
    _roots: (Root<Cluster>, Root<DisaggCoordinator>),
}

async fn fleet() -> Fleet {
    let rules = ChoiceRules {
        strategy: Strategy::LeastConnections,
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
    let members = [
        ("p1", Role::Prefill),
        ("p2", Role::Prefill),
        ("d1", Role::Decode),
        ("d2", Role::Decode),
        ("u", Role::Unified),
    ];
    let backends = members.map(|(name, role)| BackendSpec {
        name: name.into(),
        url: BackendUrl::parse(&format!("http://{name}")).unwrap(),
        role,
        weight: 1,
        models: vec!["m".into()],
        kv: KvSeat::default(),
        group: HandOffGroup::default(),
        api_key: None,
    });
    let settings = ClusterSettings {
        backends: backends.into(),
        health: None,
        breaker: None,
        virtual_nodes: 10,
    };
    let (cluster, directory) = Cluster::supervised(settings, Rc::new(Unasked));
    let settings = CoordinatorSettings {
        rules,
        split: SplitRules {
            min_prefill_tokens: 512,
            fallback_to_unified: true,
        },
        groups: Arc::from([GroupSpec {
            name: "shared_storage".into(),
            pairs_only: false,
            decoders: 2,
        }]),
    };
    until("the cluster is known", || {
        !directory.load().entries.is_empty()
    })
    .await;
    let (root, coordinator) = DisaggCoordinator::supervised(settings, directory.clone());
    Fleet {
        directory,
        coordinator,
        _roots: (cluster, root),
    }
}

fn ask(tokens: u64) -> ReservePair {
    ReservePair {
        route: Route {
            model: "m".into(),
            known: None,
            prefix: None,
            session: None,
            role: None,
            tried: vec![],
        },
        tokens,
        queued: Mailbox::DisaggCoordinator.enter(),
    }
}

impl Fleet {
    async fn reserve(&self, tokens: u64) -> Result<Reserved, Unserved> {
        let address = self.coordinator.address.load().as_ref().clone().unwrap();
        address.send(ask(tokens)).await.unwrap()
    }

    async fn leases(&self) -> usize {
        let address = self.coordinator.address.load().as_ref().clone().unwrap();
        address.send(ListLeases).await.unwrap().len()
    }

    /// Requests in flight and KV tokens held, over all workers.
    fn load(&self) -> (u32, u64) {
        let snapshot = self.directory.load();
        let live = snapshot.entries.iter().map(|entry| &entry.backend.live);
        live.fold((0, 0), |sum, live| {
            (sum.0 + live.in_flight(), sum.1 + live.held_tokens())
        })
    }

    fn steps(&self) -> (u64, u64) {
        let steps = &self.coordinator.state.steps;
        (steps.prefill.load(Relaxed), steps.decode.load(Relaxed))
    }
}

async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = tokio::time::Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(tokio::time::Instant::now() < end, "{what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[actix_rt::test]
async fn a_pair_counts_at_both_workers_until_it_is_let_go_of() {
    let fleet = fleet().await;
    let mut reserved = fleet.reserve(2000).await.unwrap();
    assert_eq!(reserved.path, Path::PrefillThenDecode);
    assert_eq!(
        (fleet.load().0, fleet.steps(), fleet.leases().await),
        (2, (1, 0), 1)
    );
    assert!(fleet.load().1 > 2000, "the prompt, and some of the answer");
    reserved.lease.decodes();
    reserved.prefill = None;
    assert_eq!((fleet.load().0, fleet.steps()), (1, (0, 1)));
    drop(reserved);
    assert_eq!(
        (fleet.load(), fleet.steps(), fleet.leases().await),
        ((0, 0), (0, 0), 0)
    );
}

#[actix_rt::test]
async fn a_pair_that_nobody_waits_for_any_more_is_let_go_of() {
    let fleet = fleet().await;
    let address = fleet.coordinator.address.load().as_ref().clone().unwrap();
    for _ in 0..50 {
        drop(address.send(ask(2000))); // before it is asked at all
        let asked = address.send(ask(2000));
        let _ = tokio::time::timeout(Duration::ZERO, asked).await;
    }
    let settled = fleet.reserve(2000).await.unwrap(); // behind all of those
    drop(settled);
    until("all pairs are let go of", || {
        fleet.load() == (0, 0) && fleet.steps() == (0, 0)
    })
    .await;
    assert_eq!(fleet.leases().await, 0);
}

#[actix_rt::test]
async fn pairs_spread_over_the_workers_while_they_are_held() {
    let fleet = fleet().await;
    let mut held = Vec::new();
    for _ in 0..10 {
        held.push(fleet.reserve(2000).await.unwrap());
    }
    let snapshot = fleet.directory.load();
    let loads: Vec<u32> = snapshot
        .entries
        .iter()
        .map(|entry| entry.backend.live.in_flight())
        .collect();
    assert_eq!(loads, [5, 5, 5, 5, 0]);
}

#[actix_rt::test]
async fn leases_outlive_a_coordinator_that_dies_and_the_next_one_pairs() {
    let fleet = fleet().await;
    let before = fleet.reserve(2000).await.unwrap();
    let address = fleet.coordinator.address.load().as_ref().clone().unwrap();
    address.do_send(Panic);
    until("there is another one", || {
        fleet.coordinator.state.restarts.load(Relaxed) == 1
    })
    .await;
    assert_eq!(
        (fleet.load().0, fleet.steps()),
        (2, (1, 0)),
        "it still counts"
    );
    let after = fleet.reserve(2000).await.unwrap();
    assert_eq!((fleet.load().0, fleet.leases().await), (4, 1));
    drop((before, after));
    assert_eq!(
        (fleet.load(), fleet.steps(), fleet.leases().await),
        ((0, 0), (0, 0), 0)
    );
}

#[actix_rt::test]
async fn a_group_whose_hand_offs_fail_is_left_alone() {
    let fleet = fleet().await;
    // both decode workers must fail, and chance says when the second one is chosen
    let mut failed = 0;
    let reserved = loop {
        let reserved = fleet.reserve(2000).await.unwrap();
        if reserved.path != Path::PrefillThenDecode || failed == 100 {
            break reserved;
        }
        reserved.lease.handed_over(false);
        failed += 1;
    };
    assert!(failed >= HANDOFF_FAILURES, "{failed}");
    assert_eq!(
        (reserved.path, reserved.missing),
        (Path::Fallback, Some((Step::Prefill, true)))
    );
    assert_eq!(fleet.coordinator.state.suspended.load(Relaxed), 1);
    let short = fleet.reserve(100).await.unwrap();
    assert_eq!(short.path, Path::FastDecode, "which needs no hand-off");
}
