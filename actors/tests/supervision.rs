//! Dead actors are replaced by fresh ones, and requests go on meanwhile.

#![allow(clippy::unwrap_used)] // all of this is a test

use actix::Addr;
use actors::backend::{BackendSpec, BackendUrl, KvSeat, Outcome};
use actors::cluster::{ChildKind, Cluster, ClusterSettings, PanicChild, SetDraining};
use actors::directory::{Directory, Snapshot};
use actors::health_checker::{HealthSettings, Prober};
use actors::router::{Placement, Route, Router, RouterSeed};
use actors::support::fault::Panic;
use actors::support::supervise::Root;
use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use routing::breaker::BreakerRules;
use routing::choose::{ChoiceRules, NoBackend};
use routing::health::{HealthRules, HealthState, Probe};
use routing::ids::{BackendId, Slot};
use routing::score::Weights;
use routing::strategy::Strategy;
use routing::view::{HandOffGroup, Live, Passage, Role};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

const INTERVAL: Duration = Duration::from_secs(1);
const RECOVERY: Duration = Duration::from_secs(30);

/// Answers every probe with what the test says.
#[derive(Clone)]
struct Fake {
    answer: Rc<Cell<Probe>>,
    probes: Rc<Cell<u32>>,
}

impl Prober for Fake {
    fn probe(&self, _: &BackendSpec, _: Duration) -> LocalBoxFuture<'static, Probe> {
        self.probes.set(self.probes.get() + 1);
        let answer = self.answer.get();
        async move { answer }.boxed_local()
    }

    fn models(
        &self,
        spec: &BackendSpec,
        _: Duration,
    ) -> LocalBoxFuture<'static, Result<Vec<Arc<str>>, String>> {
        let name = format!("model-of-{}", spec.name);
        async move { Ok(vec![name.into(), "m".into()]) }.boxed_local()
    }
}

struct Tree {
    cluster: Root<Cluster>,
    directory: Directory,
    fake: Fake,
}

fn spec(name: &str, models: &[&str]) -> BackendSpec {
    BackendSpec {
        name: name.into(),
        url: BackendUrl::parse(&format!("http://{name}")).unwrap(),
        role: Role::Unified,
        weight: 1,
        models: models.iter().map(|m| Arc::from(*m)).collect(),
        kv: KvSeat::default(),
        group: HandOffGroup::default(),
        api_key: None,
    }
}

fn tree(names: &[&str], models: &[&str]) -> Tree {
    let settings = ClusterSettings {
        backends: names.iter().map(|name| spec(name, models)).collect(),
        health: Some(HealthSettings {
            rules: HealthRules {
                unhealthy_threshold: 3,
                healthy_threshold: 2,
            },
            interval: INTERVAL,
            timeout: INTERVAL,
        }),
        breaker: Some(BreakerRules {
            failure_threshold: 3,
            recovery_timeout: RECOVERY,
        }),
        virtual_nodes: 20,
    };
    let fake = Fake {
        answer: Rc::new(Cell::new(Probe::Ok)),
        probes: Rc::default(),
    };
    let (cluster, directory) = Cluster::supervised(settings, Rc::new(fake.clone()));
    Tree {
        cluster,
        directory,
        fake,
    }
}

/// Lets actors and timers run until the condition holds. Time is paused: it jumps from timer to
/// timer, so that a limit in simulated time costs nothing.
async fn until(directory: &Directory, what: &str, holds: impl Fn(&Snapshot) -> bool) {
    let limit = tokio::time::Instant::now() + Duration::from_secs(600);
    while !holds(&directory.load()) {
        assert!(tokio::time::Instant::now() < limit, "never: {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

impl Tree {
    async fn until(&self, what: &str, holds: impl Fn(&Snapshot) -> bool) {
        until(&self.directory, what, holds).await;
    }

    async fn until_healthy(&self) {
        let all = |s: &Snapshot| {
            !s.view.backends.is_empty()
                && s.view
                    .backends
                    .iter()
                    .all(|b| b.health == HealthState::Healthy)
        };
        self.until("all are healthy", all).await;
    }

    fn seed(&self) -> RouterSeed {
        let rules = ChoiceRules {
            strategy: Strategy::RoundRobin,
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
        RouterSeed::new(self.directory.clone(), rules)
    }
}

async fn route(seed: &RouterSeed) -> Result<Placement, NoBackend> {
    let route = Route {
        model: "m".into(),
        known: None,
        prefix: None,
        session: None,
        role: None,
        tried: vec![],
    };
    let router: Addr<Router> = seed.router().expect("a router");
    router.send(route).await.expect("an answer")
}

fn health(snapshot: &Snapshot, i: usize) -> HealthState {
    snapshot.view.backends[i].health
}

fn passage(snapshot: &Snapshot, i: usize) -> Passage {
    snapshot.view.backends[i].passage
}

#[actix::test]
async fn a_health_checker_that_panics_is_replaced_and_the_backend_stays_routable() {
    tokio::time::pause();
    let tree = tree(&["a"], &["m"]);
    tree.until_healthy().await;
    let seed = tree.seed();
    tree.cluster
        .addr()
        .do_send(PanicChild(BackendId(0), ChildKind::HealthChecker));
    let restarts = |s: &Snapshot| {
        s.entries[0].backend.live.counters.actor_restarts[ChildKind::HealthChecker as usize]
            .load(std::sync::atomic::Ordering::Relaxed)
    };
    tree.until("a restart", |s| restarts(s) == 1).await;
    assert!(route(&seed).await.is_ok());
    // the fresh one goes on from healthy: it takes three failures to take the backend out
    tree.fake.answer.set(Probe::Refused);
    tree.until("unhealthy", |s| health(s, 0) == HealthState::Unhealthy)
        .await;
}

#[actix::test]
async fn a_circuit_breaker_that_panics_is_replaced_and_still_opens() {
    tokio::time::pause();
    let tree = tree(&["a"], &["m"]);
    tree.until_healthy().await;
    let seed = tree.seed();
    let before = tree.directory.load().entries[0].era;
    tree.cluster
        .addr()
        .do_send(PanicChild(BackendId(0), ChildKind::CircuitBreaker));
    tree.until("a fresh breaker", |s| s.entries[0].era > before)
        .await;
    for _ in 0..3 {
        route(&seed)
            .await
            .unwrap()
            .in_flight
            .finish(Outcome::Failure);
    }
    tree.until("open", |s| passage(s, 0) == Passage::Open).await;
    assert!(matches!(route(&seed).await, Err(NoBackend::NoneServing)));
}

#[actix::test]
async fn a_cluster_that_panics_is_replaced_and_keeps_counts_and_routes() {
    tokio::time::pause();
    let tree = tree(&["a"], &[]);
    tree.until_healthy().await;
    tree.until("models are discovered", |s| s.view.pools.contains_key("m"))
        .await;
    let seed = tree.seed();
    let held = route(&seed).await.unwrap();
    tree.cluster.addr().do_send(Panic);
    let fresh = |s: &Snapshot| s.cluster_restarts == 1;
    tree.until("a fresh cluster", fresh).await;
    let again = route(&seed).await.expect("routable at once");
    let live = || tree.directory.load().entries[0].backend.live.in_flight();
    assert_eq!(live(), 2, "both requests are counted on the same backend");
    drop((held, again));
    assert_eq!(live(), 0);
    // and the fresh tree works: its own checker takes the backend out
    tree.fake.answer.set(Probe::Refused);
    tree.until("unhealthy", |s| health(s, 0) == HealthState::Unhealthy)
        .await;
}

#[actix::test]
async fn a_router_that_panics_is_replaced_at_the_next_request() {
    tokio::time::pause();
    let tree = tree(&["a"], &["m"]);
    tree.until_healthy().await;
    let seed = tree.seed();
    let router = seed.router().unwrap();
    assert!(router.send(Panic).await.is_err());
    assert!(route(&seed).await.is_ok());
    assert_eq!(seed.restarts().get(), 1);
    for _ in 0..10 {
        if let Some(router) = seed.router() {
            assert!(router.send(Panic).await.is_err());
        }
    }
    assert!(
        seed.router().is_none(),
        "a router that keeps dying is given up"
    );
    tokio::time::sleep(Duration::from_secs(31)).await;
    assert!(route(&seed).await.is_ok(), "and tried again later");
}

#[actix::test]
async fn a_backend_whose_actor_keeps_dying_is_taken_out_and_others_go_on() {
    tokio::time::pause();
    let tree = tree(&["a", "b"], &["m"]);
    tree.until_healthy().await;
    let restarts = |s: &Snapshot| {
        s.entries[0].backend.live.counters.actor_restarts[ChildKind::HealthChecker as usize]
            .load(std::sync::atomic::Ordering::Relaxed)
    };
    for death in 1..=6 {
        // a fresh one probes at its start
        let probed = tree.fake.probes.get();
        tree.cluster
            .addr()
            .do_send(PanicChild(BackendId(0), ChildKind::HealthChecker));
        tree.until("it died", |s| restarts(s) == death).await;
        if death <= 5 {
            let probes = tree.fake.probes.clone();
            tree.until("a fresh one", |_| probes.get() > probed).await;
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    tree.until("a is out", |s| health(s, 0) == HealthState::Failed)
        .await;
    let seed = tree.seed();
    for _ in 0..4 {
        assert_eq!(
            &*route(&seed).await.unwrap().in_flight.backend().spec.name,
            "b"
        );
    }
}

#[actix::test]
async fn a_half_open_probe_is_given_out_once_and_put_back_by_every_neutral_ending() {
    tokio::time::pause();
    let tree = tree(&["a"], &["m"]);
    tree.until_healthy().await;
    let seed = tree.seed();
    for _ in 0..3 {
        route(&seed)
            .await
            .unwrap()
            .in_flight
            .finish(Outcome::Failure);
    }
    tree.until("open", |s| passage(s, 0) == Passage::Open).await;
    tree.until("half open", |s| passage(s, 0) == Passage::HalfOpen)
        .await;
    for outcome in [Outcome::Cancelled, Outcome::Backpressure] {
        let probe = route(&seed).await.expect("the probe");
        assert!(route(&seed).await.is_err(), "only one at a time");
        probe.in_flight.finish(outcome);
    }
    drop(route(&seed).await.expect("put back by the neutral endings")); // dropped without a word
    let lapsing = route(&seed).await.expect("put back by a drop");
    let era = tree.directory.load().entries[0].era;
    tree.until("a new probe, as that one never ends", |s| {
        s.entries[0].era > era
    })
    .await;
    let second = route(&seed).await.expect("a probe of the new era");
    lapsing.in_flight.finish(Outcome::Failure);
    assert_eq!(passage(&tree.directory.load(), 0), Passage::HalfOpen);
    let mut second = second.in_flight;
    second.first_byte(None);
    tree.until("closed", |s| passage(s, 0) == Passage::Closed)
        .await;
    drop(second);
    assert_eq!(tree.directory.load().entries[0].backend.live.in_flight(), 0);
}

#[actix::test]
async fn a_client_error_counts_as_a_sign_of_life() {
    tokio::time::pause();
    let tree = tree(&["a"], &["m"]);
    tree.until_healthy().await;
    let seed = tree.seed();
    for _ in 0..10 {
        route(&seed)
            .await
            .unwrap()
            .in_flight
            .finish(Outcome::Failure);
        route(&seed)
            .await
            .unwrap()
            .in_flight
            .finish(Outcome::ClientError);
    }
    for _ in 0..20 {
        route(&seed)
            .await
            .unwrap()
            .in_flight
            .finish(Outcome::Cancelled);
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(passage(&tree.directory.load(), 0), Passage::Closed);
}

#[actix::test]
async fn timeouts_of_all_probes_do_not_empty_a_pool_and_refused_connections_do() {
    tokio::time::pause();
    let tree = tree(&["a", "b", "c", "d"], &["m"]);
    tree.until_healthy().await;
    let healthy = |s: &Snapshot| {
        s.view
            .backends
            .iter()
            .filter(|b| b.health == HealthState::Healthy)
            .count()
    };
    tree.fake.answer.set(Probe::TimedOut);
    tree.until("some are out", |s| healthy(s) == 2).await;
    tokio::time::sleep(INTERVAL * 20).await;
    assert_eq!(healthy(&tree.directory.load()), 2, "never below half");
    tree.fake.answer.set(Probe::Refused);
    tree.until("nobody is there", |s| healthy(s) == 0).await;
    tree.fake.answer.set(Probe::Ok);
    tree.until("all are back", |s| healthy(s) == 4).await;
}

#[actix::test]
async fn a_probe_timeout_is_neutral_while_the_backend_sends_tokens() {
    tokio::time::pause();
    let tree = tree(&["a", "b", "c", "d"], &["m"]);
    tree.until_healthy().await;
    tree.fake.answer.set(Probe::TimedOut);
    let busy = tree.directory.load().entries[0].backend.clone();
    for _ in 0..30 {
        busy.live.record_progress();
        tokio::time::sleep(INTERVAL / 2).await;
    }
    assert_eq!(health(&tree.directory.load(), 0), HealthState::Healthy);
}

#[actix::test]
async fn a_draining_backend_gets_nothing_new_and_keeps_its_running_requests() {
    tokio::time::pause();
    let tree = tree(&["a", "b"], &["m"]);
    tree.until_healthy().await;
    let seed = tree.seed();
    let running = route(&seed).await.unwrap();
    let name = running.in_flight.backend().spec.name.clone();
    let drain = |draining| SetDraining {
        backend: name.clone(),
        draining,
    };
    assert!(tree.cluster.addr().send(drain(true)).await.unwrap());
    for _ in 0..6 {
        assert_ne!(
            route(&seed).await.unwrap().in_flight.backend().spec.name,
            name
        );
    }
    assert_eq!(running.in_flight.backend().live.in_flight(), 1);
    tree.cluster.addr().send(drain(false)).await.unwrap();
    let back = route(&seed)
        .await
        .unwrap()
        .in_flight
        .backend()
        .spec
        .name
        .clone();
    let next = route(&seed)
        .await
        .unwrap()
        .in_flight
        .backend()
        .spec
        .name
        .clone();
    assert!(back == name || next == name);
    let unknown = SetDraining {
        backend: "nobody".into(),
        draining: true,
    };
    assert!(!tree.cluster.addr().send(unknown).await.unwrap());
}

#[actix::test]
async fn health_checks_do_not_touch_the_counts_of_running_requests() {
    tokio::time::pause();
    let tree = tree(&["a"], &["m"]);
    tree.until_healthy().await;
    let seed = tree.seed();
    let mut running = vec![];
    for _ in 0..20 {
        running.push(route(&seed).await.unwrap());
    }
    tokio::time::sleep(INTERVAL * 5).await;
    let snapshot = tree.directory.load();
    let live = snapshot.live(tokio::time::Instant::now().into_std());
    assert_eq!(live.load(Slot(0)).in_flight, 20);
    drop(running);
    assert_eq!(snapshot.entries[0].backend.live.in_flight(), 0);
}

#[actix::test]
async fn without_probes_every_backend_counts_as_healthy() {
    tokio::time::pause();
    let settings = ClusterSettings {
        backends: vec![spec("a", &["m"])],
        health: None,
        breaker: None,
        virtual_nodes: 20,
    };
    let fake = Fake {
        answer: Rc::new(Cell::new(Probe::Refused)),
        probes: Rc::default(),
    };
    let (_cluster, directory) = Cluster::supervised(settings, Rc::new(fake.clone()));
    until(&directory, "healthy", |s| {
        !s.view.backends.is_empty() && health(s, 0) == HealthState::Healthy
    })
    .await;
    assert_eq!(fake.probes.get(), 0);
}
