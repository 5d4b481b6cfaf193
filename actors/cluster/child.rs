//! One backend within the cluster: its two actors and what they last said.

use super::{ChildExited, ChildKind, Cluster};
use crate::backend::{Backend, BreakerLink, ProbeTicket};
use crate::circuit_breaker::{CircuitBreaker, RetireBreaker};
use crate::directory::{Entry, Snapshot};
use crate::health_checker::{
    HealthChecker, HealthListeners, HealthSettings, Prober, RetireChecker,
};
use crate::support::watch::{Intensity, Watch};
use actix::{Actor, Addr};
use routing::breaker::{BreakerRules, Era};
use routing::health::HealthState;
use routing::view::{BackendView, Passage};
use std::rc::Rc;
use std::sync::Arc;

pub(super) struct Member {
    pub(super) backend: Arc<Backend>,
    pub(super) health: HealthState,
    pub(super) models: Option<Arc<[Arc<str>]>>,
    pub(super) draining: bool,
    pub(super) checker: Option<Addr<HealthChecker>>,
    pub(super) breaker: Option<Addr<CircuitBreaker>>,
    passage: Passage,
    era: Era,
    ticket: Arc<ProbeTicket>,
    present: [u64; 2],
    deaths: [Intensity; 2],
}

impl Member {
    pub(super) fn new(backend: Arc<Backend>) -> Self {
        let configured = &backend.spec.models;
        let models = (!configured.is_empty()).then(|| configured.clone().into());
        Member {
            backend,
            health: HealthState::Starting,
            models,
            draining: false,
            checker: None,
            breaker: None,
            passage: Passage::Closed,
            era: Era::default(),
            ticket: Arc::default(),
            present: [0; 2],
            deaths: Default::default(),
        }
    }

    /// Takes over what an earlier cluster knew, so that its death does not stop traffic.
    pub(super) fn resume(&mut self, previous: &Snapshot, probed: bool) {
        if !probed {
            self.health = HealthState::Healthy;
        }
        let known = previous.view.backends.iter().zip(&previous.entries);
        for (view, entry) in known.filter(|(view, _)| view.id == self.backend.id) {
            if view.health == HealthState::Healthy {
                self.health = HealthState::Healthy;
            }
            self.draining = view.draining;
            self.models = self.models.take().or(view.models.clone());
            self.era = entry.era;
        }
    }

    pub(super) fn start_health_checker(
        &mut self,
        settings: HealthSettings,
        prober: Rc<dyn Prober>,
        (cluster, generation): (Addr<Cluster>, u64),
        watch: Watch<ChildExited>,
    ) {
        let listeners = HealthListeners {
            health: cluster.clone().recipient(),
            models: cluster.recipient(),
            generation,
        };
        let checker = HealthChecker::new(
            self.backend.clone(),
            (settings, self.health),
            prober,
            (listeners, watch),
        );
        self.present[ChildKind::HealthChecker as usize] = generation;
        self.checker = Some(checker.start());
    }

    /// A fresh breaker starts closed, in an era of its own: better one more failure than a
    /// backend that stays shut because its breaker died.
    pub(super) fn start_breaker(
        &mut self,
        rules: BreakerRules,
        (cluster, generation): (Addr<Cluster>, u64),
        watch: Watch<ChildExited>,
    ) {
        self.set_passage(Passage::Closed, Era(self.era.0 + 1));
        let breaker = CircuitBreaker::new(
            self.backend.id,
            (rules, self.era),
            cluster.recipient(),
            watch,
        );
        self.present[ChildKind::CircuitBreaker as usize] = generation;
        self.breaker = Some(breaker.start());
    }

    /// The same engine with other settings; its models are asked for anew where they are no longer said.
    pub(super) fn respecify(&mut self, backend: Arc<Backend>) {
        let configured = &backend.spec.models;
        if !configured.is_empty() {
            self.models = Some(configured.clone().into());
        } else if !self.backend.spec.models.is_empty() {
            self.models = None;
        }
        self.backend = backend;
    }

    /// Ends its checker. What it says from now on is of no interest.
    pub(super) fn retire_checker(&mut self) {
        self.present[ChildKind::HealthChecker as usize] = 0;
        if let Some(checker) = self.checker.take() {
            checker.do_send(RetireChecker);
        }
    }

    /// Ends its breaker, likewise.
    pub(super) fn retire_breaker(&mut self) {
        self.present[ChildKind::CircuitBreaker as usize] = 0;
        if let Some(breaker) = self.breaker.take() {
            breaker.do_send(RetireBreaker);
        }
        self.passage = Passage::Closed;
    }

    pub(super) fn is_present(&self, kind: ChildKind, generation: u64) -> bool {
        self.present[kind as usize] == generation
    }

    pub(super) fn intensity(&mut self, kind: ChildKind) -> &mut Intensity {
        &mut self.deaths[kind as usize]
    }

    /// Whether an era comes after the present one, and there is a breaker to say so: a fresh breaker begins in
    /// the era that its predecessor would have entered next.
    pub(super) fn follows(&self, era: Era) -> bool {
        self.breaker.is_some() && era > self.era
    }

    pub(super) fn set_passage(&mut self, passage: Passage, era: Era) -> Passage {
        self.era = era;
        self.ticket = Arc::default();
        std::mem::replace(&mut self.passage, passage)
    }

    pub(super) fn view(&self) -> BackendView {
        BackendView {
            id: self.backend.id,
            name: self.backend.spec.name.clone(),
            role: self.backend.spec.role,
            weight: self.backend.spec.weight,
            models: self.models.clone(),
            health: self.health,
            passage: self.passage,
            draining: self.draining,
            memories: self.backend.spec.kv.memories.clone(),
            reads: self.backend.spec.kv.reads.clone(),
            group: self.backend.spec.group,
        }
    }

    pub(super) fn entry(&self) -> Entry {
        Entry {
            backend: self.backend.clone(),
            era: self.era,
            ticket: self.ticket.clone(),
            breaker: self.breaker.as_ref().map(|breaker| BreakerLink {
                failed: breaker.clone().recipient(),
                succeeded: breaker.clone().recipient(),
            }),
        }
    }
}
