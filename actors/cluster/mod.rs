//! Owns the backends and their actors: starts them, replaces those that die, and publishes the
//! directory whenever anything about a backend changes.

mod child;
mod reconcile;

pub use reconcile::{Reconcile, Reconciled};

use crate::backend::{Backend, BackendSpec};
use crate::directory::{Directory, Snapshot};
use crate::health_checker::{EjectionVetoed, HealthSettings, Prober};
use crate::support::supervise::{Root, RootExited, supervise};
use crate::support::watch::{RESTARTS_MAX, Watch};
use actix::{Actor, AsyncContext, Context, Handler, Message, Recipient};
use child::Member;
use routing::breaker::{BreakerRules, Era};
use routing::health::{HealthState, Probe, may_eject};
use routing::ids::BackendId;
use routing::view::{ClusterView, Passage};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use tracing::{error, info, warn};

/// Which of a backend's actors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ChildKind {
    /// Its [`crate::health_checker::HealthChecker`].
    HealthChecker,
    /// Its [`crate::circuit_breaker::CircuitBreaker`].
    CircuitBreaker,
}

impl ChildKind {
    /// Both, in the order of [`crate::backend::Counters::actor_restarts`].
    pub const ALL: [ChildKind; 2] = [ChildKind::HealthChecker, ChildKind::CircuitBreaker];

    /// The word used in metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            ChildKind::HealthChecker => "health_checker",
            ChildKind::CircuitBreaker => "circuit_breaker",
        }
    }
}

/// A child actor has ended.
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "()")]
pub struct ChildExited {
    /// Whose.
    pub backend: BackendId,
    /// Which.
    pub kind: ChildKind,
    /// Which start of it.
    pub generation: u64,
}

/// Probes changed their mind about a backend.
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "()")]
pub struct HealthChanged {
    /// Which.
    pub backend: BackendId,
    /// Its new state.
    pub to: HealthState,
    /// Whether only timeouts led here, which may be vetoed.
    pub by_timeouts_only: bool,
    /// The probe that decided.
    pub last_probe: Probe,
    /// Which start of the checker says so.
    pub generation: u64,
}

/// A breaker changed its mind about a backend.
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "()")]
pub struct PassageChanged {
    /// Which.
    pub backend: BackendId,
    /// What passes now.
    pub passage: Passage,
    /// The era that begins.
    pub era: Era,
}

/// A backend said which models it serves.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct ModelsDiscovered {
    /// Which.
    pub backend: BackendId,
    /// Sorted, without duplicates.
    pub models: Arc<[Arc<str>]>,
    /// Which start of the checker says so.
    pub generation: u64,
}

/// Takes a backend out of rotation, or back in; its running requests go on. Answers whether
/// there is one of that name.
#[derive(Debug, Clone, Message)]
#[rtype(result = "bool")]
pub struct SetDraining {
    /// The backend's name.
    pub backend: Arc<str>,
    /// Whether it drains from now on.
    pub draining: bool,
}

/// What the cluster is made of.
#[derive(Clone)]
pub struct ClusterSettings {
    /// The backends.
    pub backends: Vec<BackendSpec>,
    /// Probes; none: every backend counts as healthy.
    pub health: Option<HealthSettings>,
    /// Breakers; none: everything passes.
    pub breaker: Option<BreakerRules>,
    /// Ring points per unit of weight.
    pub virtual_nodes: u32,
}

/// What a cluster is made of, and what its successor takes over.
struct Fleet {
    settings: ClusterSettings,
    backends: Vec<Arc<Backend>>,
    next_id: u32,
}

impl Fleet {
    /// A number that no backend has had.
    fn next_id(&mut self) -> BackendId {
        let id = BackendId(self.next_id);
        self.next_id += 1;
        id
    }
}

/// See the module.
pub struct Cluster {
    fleet: Rc<RefCell<Fleet>>,
    prober: Rc<dyn Prober>,
    directory: Directory,
    members: Vec<Member>,
    generation: u64,
    restarts: u64,
    drain: Option<Recipient<SetDraining>>,
    _watch: Watch<RootExited>,
}

impl Cluster {
    /// Starts a cluster that is replaced when it dies, and the directory that it publishes.
    /// Numbers of the backends survive a replacement.
    pub fn supervised(
        settings: ClusterSettings,
        prober: Rc<dyn Prober>,
    ) -> (Root<Self>, Directory) {
        let backends = settings.backends.iter().enumerate();
        let backends: Vec<Arc<Backend>> = backends
            .map(|(i, spec)| Arc::new(Backend::new(BackendId(i as u32), spec.clone())))
            .collect();
        let fleet = Rc::new(RefCell::new(Fleet {
            next_id: backends.len() as u32,
            settings,
            backends,
        }));
        let directory = Directory::new(Snapshot::default());
        let published = directory.clone();
        let restarts = Rc::new(std::cell::Cell::new(0u64));
        let counted = restarts.clone();
        let root = supervise(
            "cluster",
            move |warden| {
                let backends = fleet.borrow().backends.clone();
                let members = backends.into_iter().map(Member::new).collect();
                let cluster = Cluster {
                    fleet: fleet.clone(),
                    prober: prober.clone(),
                    directory: published.clone(),
                    members,
                    generation: 0,
                    restarts: restarts.get(),
                    drain: None,
                    _watch: Watch::new(warden.recipient(), RootExited),
                };
                cluster.start()
            },
            move || counted.set(counted.get() + 1),
        );
        (root, directory)
    }

    fn member(&mut self, backend: BackendId) -> Option<&mut Member> {
        self.members.iter_mut().find(|m| m.backend.id == backend)
    }

    fn publish(&self) {
        let previous = self.directory.load();
        let backends = self.members.iter().map(Member::view).collect();
        let virtual_nodes = self.fleet.borrow().settings.virtual_nodes;
        self.directory.publish(Snapshot {
            view: ClusterView::new(backends, virtual_nodes, &previous.view),
            entries: self.members.iter().map(Member::entry).collect(),
            cluster_restarts: self.restarts,
            drain: self.drain.clone(),
        });
    }

    fn start_child(&mut self, backend: BackendId, kind: ChildKind, ctx: &mut Context<Self>) {
        self.generation += 1;
        let generation = self.generation;
        let watch = Watch::new(
            ctx.address().recipient(),
            ChildExited {
                backend,
                kind,
                generation,
            },
        );
        let (health, breaker) = {
            let fleet = self.fleet.borrow();
            (fleet.settings.health, fleet.settings.breaker)
        };
        let prober = self.prober.clone();
        let Some(member) = self.member(backend) else {
            return;
        };
        match (kind, health, breaker) {
            (ChildKind::HealthChecker, Some(settings), _) => {
                member.start_health_checker(settings, prober, (ctx.address(), generation), watch);
            }
            (ChildKind::CircuitBreaker, _, Some(rules)) => {
                member.start_breaker(rules, (ctx.address(), generation), watch);
            }
            _ => {}
        }
    }

    /// Whether timeouts may take this backend out of every pool it is in.
    fn may_eject(&self, backend: BackendId) -> bool {
        let Some(leaving) = self.members.iter().find(|m| m.backend.id == backend) else {
            return false;
        };
        let models: Vec<&Arc<str>> = leaving.models.iter().flat_map(|m| m.iter()).collect();
        models.into_iter().all(|model| {
            // whatever their roles: while serving is not split, all serve whole requests
            let serves = |m: &&Member| m.models.iter().any(|models| models.contains(model));
            let pool = self.members.iter().filter(serves);
            let (mut members, mut healthy) = (0, 0);
            for member in pool {
                members += 1;
                healthy += usize::from(member.view().can_serve());
            }
            may_eject(healthy, members)
        })
    }
}

impl Actor for Cluster {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        self.drain = Some(ctx.address().recipient());
        let previous = self.directory.load();
        let probed = self.fleet.borrow().settings.health.is_some();
        for member in &mut self.members {
            member.resume(&previous, probed);
        }
        let ids: Vec<BackendId> = self.members.iter().map(|m| m.backend.id).collect();
        for backend in ids {
            self.start_child(backend, ChildKind::HealthChecker, ctx);
            self.start_child(backend, ChildKind::CircuitBreaker, ctx);
        }
        self.publish();
    }
}

impl Handler<ChildExited> for Cluster {
    type Result = ();

    fn handle(&mut self, exited: ChildExited, ctx: &mut Self::Context) {
        let now = tokio::time::Instant::now().into_std();
        let ChildExited { backend, kind, .. } = exited;
        let Some(member) = self.member(backend) else {
            return;
        };
        if !member.is_present(kind, exited.generation) {
            return; // a child that was replaced already
        }
        let name = member.backend.spec.name.clone();
        member.backend.live.counters.actor_restarts[kind as usize].fetch_add(1, Relaxed);
        match member.intensity(kind).next_start(now) {
            Some(wait) => {
                warn!(backend = %name, actor = kind.as_str(), wait_ms = wait.as_millis() as u64, "actor died, starting a fresh one");
                let dead = exited.generation;
                ctx.run_later(wait, move |this, ctx| {
                    let member = this.member(backend);
                    if !member.is_some_and(|member| member.is_present(kind, dead)) {
                        return; // gone, or replaced already
                    }
                    this.start_child(backend, kind, ctx);
                    this.publish();
                });
            }
            None => {
                error!(backend = %name, actor = kind.as_str(), restarts = RESTARTS_MAX, "actor keeps dying, backend is out of rotation until a restart of the gateway");
                member.health = HealthState::Failed;
                self.publish();
            }
        }
    }
}

impl Handler<HealthChanged> for Cluster {
    type Result = ();

    fn handle(&mut self, changed: HealthChanged, _: &mut Self::Context) {
        let HealthChanged { backend, to, .. } = changed;
        let veto =
            to == HealthState::Unhealthy && changed.by_timeouts_only && !self.may_eject(backend);
        let Some(member) = self.member(backend) else {
            return;
        };
        if !member.is_present(ChildKind::HealthChecker, changed.generation) {
            return; // of a checker that was replaced meanwhile, and would never take it back
        }
        let name = member.backend.spec.name.clone();
        if veto {
            warn!(backend = %name, "probes time out, but too few others are healthy: it stays in rotation");
            if let Some(checker) = &member.checker {
                checker.do_send(EjectionVetoed);
            }
            return;
        }
        if member.health == HealthState::Failed || member.health == to {
            return;
        }
        let from = std::mem::replace(&mut member.health, to);
        if from != HealthState::Starting {
            member.backend.live.counters.flaps.fetch_add(1, Relaxed);
        }
        match to {
            HealthState::Healthy => {
                info!(backend = %name, url = %member.backend.spec.url, from = from.as_str(), "backend is healthy")
            }
            _ => {
                warn!(backend = %name, url = %member.backend.spec.url, probe = ?changed.last_probe, "backend is unhealthy")
            }
        }
        self.publish();
    }
}

impl Handler<PassageChanged> for Cluster {
    type Result = ();

    fn handle(&mut self, changed: PassageChanged, _: &mut Self::Context) {
        let Some(member) = self.member(changed.backend) else {
            return;
        };
        if !member.follows(changed.era) {
            return; // of a breaker that was replaced meanwhile, and would never take it back
        }
        let name = member.backend.spec.name.clone();
        let from = member.set_passage(changed.passage, changed.era);
        match changed.passage {
            Passage::Open => {
                warn!(backend = %name, from = from.as_str(), "circuit breaker opened");
            }
            Passage::HalfOpen if from == Passage::HalfOpen => {}
            Passage::HalfOpen => {
                info!(backend = %name, "circuit breaker half open, trying one request")
            }
            Passage::Closed => info!(backend = %name, "circuit breaker closed"),
        }
        self.publish();
    }
}

impl Handler<ModelsDiscovered> for Cluster {
    type Result = ();

    fn handle(&mut self, discovered: ModelsDiscovered, _: &mut Self::Context) {
        let Some(member) = self.member(discovered.backend) else {
            return;
        };
        if !member.is_present(ChildKind::HealthChecker, discovered.generation) {
            return;
        }
        let name = member.backend.spec.name.clone();
        info!(backend = %name, models = ?discovered.models, "backend serves models");
        member.models = Some(discovered.models);
        self.publish();
    }
}

impl Handler<SetDraining> for Cluster {
    type Result = bool;

    fn handle(&mut self, set: SetDraining, _: &mut Self::Context) -> bool {
        let found = self
            .members
            .iter_mut()
            .find(|m| m.backend.spec.name == set.backend);
        let Some(member) = found else {
            return false;
        };
        member.draining = set.draining;
        info!(backend = %set.backend, draining = set.draining, "drain state set");
        self.publish();
        true
    }
}

#[cfg(feature = "fault-injection")]
mod fault {
    use super::*;
    use crate::support::fault::Panic;

    /// Makes a child panic.
    #[derive(Debug, Clone, Copy, Message)]
    #[rtype(result = "()")]
    pub struct PanicChild(pub BackendId, pub ChildKind);

    impl Handler<PanicChild> for Cluster {
        type Result = ();
        fn handle(&mut self, panic: PanicChild, _: &mut Self::Context) {
            let Some(member) = self.member(panic.0) else {
                return;
            };
            match panic.1 {
                ChildKind::HealthChecker => {
                    member.checker.iter().for_each(|a| a.do_send(Panic));
                }
                ChildKind::CircuitBreaker => {
                    member.breaker.iter().for_each(|a| a.do_send(Panic));
                }
            }
        }
    }
}
#[cfg(feature = "fault-injection")]
pub use fault::PanicChild;

crate::support::fault::panics_on_request!(Cluster);
