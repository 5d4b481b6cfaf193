//! Probes one backend: fast until it answers for the first time, then at the configured interval.
//! Also asks it which models it serves, where the settings do not say.

use crate::backend::{Backend, BackendSpec};
use crate::cluster::{ChildExited, HealthChanged, ModelsDiscovered};
use crate::support::watch::Watch;
use actix::{
    Actor, ActorContext, ActorFutureExt, AsyncContext, Context, Handler, Message, Recipient,
    WrapFuture,
};
use futures_util::future::LocalBoxFuture;
use routing::health::{Change, Health, HealthRules, HealthState, Probe};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tracing::warn;

/// How often a backend that never answered is probed: engines load for minutes, and the first
/// request should not wait for a full interval after that.
pub const WARM_UP_INTERVAL: Duration = Duration::from_millis(500);
/// Models beyond this many of one backend are not learned.
pub const MODELS_PER_BACKEND_MAX: usize = 256;

/// `health_checks` of the settings.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HealthSettings {
    /// When changes happen.
    pub rules: HealthRules,
    /// Between two probes.
    pub interval: Duration,
    /// For one probe.
    pub timeout: Duration,
}

/// Asks backends how they are. The gateway's upstream client implements it.
pub trait Prober {
    /// One probe; must end within `timeout`.
    fn probe(&self, spec: &BackendSpec, timeout: Duration) -> LocalBoxFuture<'static, Probe>;
    /// The models it serves, or why it does not say.
    fn models(
        &self,
        spec: &BackendSpec,
        timeout: Duration,
    ) -> LocalBoxFuture<'static, Result<Vec<Arc<str>>, String>>;
}

/// The ejection that a [`HealthChanged`] announced did not happen: too few others are healthy.
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "()")]
pub struct EjectionVetoed;

/// Whom the checker tells.
#[derive(Clone)]
pub struct HealthListeners {
    /// Told of changes of health.
    pub health: Recipient<HealthChanged>,
    /// Told of models.
    pub models: Recipient<ModelsDiscovered>,
    /// Which start of the checker tells.
    pub generation: u64,
}

/// See the module. Started by the [`crate::cluster::Cluster`], one per backend.
pub struct HealthChecker {
    backend: Arc<Backend>,
    settings: HealthSettings,
    health: Health,
    progress_seen: u64,
    models_seen: Vec<Arc<str>>,
    models_fault: Option<String>,
    prober: Rc<dyn Prober>,
    cluster: HealthListeners,
    _watch: Watch<ChildExited>,
}

impl HealthChecker {
    /// A checker that goes on from what is known of the backend.
    pub fn new(
        backend: Arc<Backend>,
        (settings, known): (HealthSettings, HealthState),
        prober: Rc<dyn Prober>,
        (cluster, watch): (HealthListeners, Watch<ChildExited>),
    ) -> Self {
        HealthChecker {
            backend,
            settings,
            health: Health::new(settings.rules, known),
            progress_seen: 0,
            models_seen: Vec::new(),
            models_fault: None,
            prober,
            cluster,
            _watch: watch,
        }
    }

    fn probe(&mut self, ctx: &mut Context<Self>) {
        if !self.cluster.health.connected() {
            return; // the cluster is gone; its successor starts checkers of its own
        }
        let probe = self.prober.probe(&self.backend.spec, self.settings.timeout);
        ctx.spawn(probe.into_actor(self).map(|probe, this, ctx| {
            this.on_probe(probe);
            if probe == Probe::Ok && this.backend.spec.models.is_empty() {
                this.ask_models(ctx);
            }
            ctx.run_later(this.pause(), Self::probe);
        }));
    }

    /// Until the next probe, spread by a tenth so that many gateways do not beat in time.
    fn pause(&self) -> Duration {
        let pause = match self.health.state() {
            HealthState::Starting => WARM_UP_INTERVAL.min(self.settings.interval),
            _ => self.settings.interval,
        };
        pause.mul_f64(0.95 + 0.1 * fastrand::f64())
    }

    fn on_probe(&mut self, probe: Probe) {
        let progress = self.backend.live.progress();
        let progressed = progress != self.progress_seen;
        self.progress_seen = progress;
        self.backend.live.counters.count_probe(probe, progressed);
        if let Some(change) = self.health.on_probe(probe, progressed) {
            let Change {
                to,
                by_timeouts_only,
            } = change;
            self.cluster.health.do_send(HealthChanged {
                backend: self.backend.id,
                to,
                by_timeouts_only,
                last_probe: probe,
                generation: self.cluster.generation,
            });
        }
    }

    /// Once per reason, not once per probe.
    fn warn_of_models(&mut self, reason: String) {
        if self.models_fault.as_ref() != Some(&reason) {
            let name = &*self.backend.spec.name;
            warn!(
                backend = name,
                reason,
                "backend does not say which models it serves: it gets no requests until it does, or until `models` is set"
            );
            self.models_fault = Some(reason);
        }
    }

    fn ask_models(&mut self, ctx: &mut Context<Self>) {
        let models = self
            .prober
            .models(&self.backend.spec, self.settings.timeout);
        ctx.spawn(models.into_actor(self).map(|models, this, _| {
            let mut models = match models {
                Ok(models) => models,
                Err(reason) => return this.warn_of_models(reason),
            };
            this.models_fault = None;
            models.sort_unstable();
            models.dedup();
            models.truncate(MODELS_PER_BACKEND_MAX);
            if models != this.models_seen {
                this.models_seen.clone_from(&models);
                this.cluster.models.do_send(ModelsDiscovered {
                    backend: this.backend.id,
                    models: models.into(),
                    generation: this.cluster.generation,
                });
            }
        }));
    }
}

impl Actor for HealthChecker {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        self.progress_seen = self.backend.live.progress();
        self.probe(ctx);
    }
}

/// Ends a checker whose backend has gone, or is checked by another from now on.
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "()")]
pub struct RetireChecker;

impl Handler<RetireChecker> for HealthChecker {
    type Result = ();
    fn handle(&mut self, _: RetireChecker, ctx: &mut Self::Context) {
        ctx.stop();
    }
}

impl Handler<EjectionVetoed> for HealthChecker {
    type Result = ();
    fn handle(&mut self, _: EjectionVetoed, _: &mut Self::Context) {
        self.health.vetoed();
    }
}

crate::support::fault::panics_on_request!(HealthChecker);
