//! Other settings for a running cluster: what did not change keeps its numbers, its health and its
//! breaker; what left is not chosen again, and its requests go on.

use super::{ChildKind, Cluster, ClusterSettings, Member};
use crate::backend::{Backend, BackendSpec};
use actix::{Context, Handler, Message, MessageResult};
use routing::health::HealthState;
use std::sync::Arc;
use tracing::info;

/// The cluster is to be made of this from now on.
#[derive(Clone, Message)]
#[rtype(result = "Reconciled")]
pub struct Reconcile(pub ClusterSettings);

/// What became of the backends, by name.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Reconciled {
    /// Not there before; also engines that took another's name.
    pub added: Vec<Arc<str>>,
    /// The same engine, with other settings.
    pub changed: Vec<Arc<str>>,
    /// Gone; requests that run there end by themselves.
    pub removed: Vec<Arc<str>>,
}

impl Cluster {
    /// Takes one backend on as it shall be. The same engine is the one of the same name at the same URL.
    fn take(&mut self, spec: &BackendSpec, done: &mut Reconciled) -> Member {
        let known = |m: &Member| m.backend.spec.name == spec.name && m.backend.spec.url == spec.url;
        let Some(at) = self.members.iter().position(known) else {
            done.added.push(spec.name.clone());
            let id = self.fleet.borrow_mut().next_id();
            return Member::new(Arc::new(Backend::new(id, spec.clone())));
        };
        let mut member = self.members.swap_remove(at);
        if member.backend.spec != *spec {
            done.changed.push(spec.name.clone());
            let backend = member.backend.respecified(spec.clone());
            member.respecify(Arc::new(backend));
            member.retire_checker(); // it knows the old settings
        }
        member
    }

    fn leave(&mut self, mut member: Member, done: &mut Reconciled) {
        member.retire_checker();
        member.retire_breaker();
        let backend = &member.backend;
        let running = backend.live.in_flight();
        info!(backend = %backend.spec.name, url = %backend.spec.url, running, "backend is no longer in the settings, what runs there goes on");
        done.removed.push(backend.spec.name.clone());
    }
}

impl Handler<Reconcile> for Cluster {
    type Result = MessageResult<Reconcile>;

    fn handle(&mut self, Reconcile(settings): Reconcile, ctx: &mut Context<Self>) -> Self::Result {
        let mut done = Reconciled::default();
        let before = self.fleet.borrow().settings.clone();
        let probes_differ = before.health != settings.health;
        let breakers_differ = before.breaker != settings.breaker;
        let mut members = Vec::new();
        for spec in &settings.backends {
            members.push(self.take(spec, &mut done));
        }
        let left = std::mem::replace(&mut self.members, members);
        for member in left {
            self.leave(member, &mut done);
        }
        {
            let mut fleet = self.fleet.borrow_mut();
            fleet.backends = self.members.iter().map(|m| m.backend.clone()).collect();
            fleet.settings = settings;
        }
        for at in 0..self.members.len() {
            let unprobed = self.fleet.borrow().settings.health.is_none();
            let member = &mut self.members[at];
            if probes_differ {
                member.retire_checker();
            }
            if breakers_differ {
                member.retire_breaker();
            }
            if unprobed && member.health != HealthState::Failed {
                member.health = HealthState::Healthy;
            }
            let (id, unchecked, unbroken) = (
                member.backend.id,
                member.checker.is_none(),
                member.breaker.is_none(),
            );
            if unchecked {
                self.start_child(id, ChildKind::HealthChecker, ctx);
            }
            if unbroken {
                self.start_child(id, ChildKind::CircuitBreaker, ctx);
            }
        }
        self.publish();
        MessageResult(done)
    }
}
