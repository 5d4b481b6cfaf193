//! One backend's circuit breaker: hears of failures, publishes what may pass.

use crate::cluster::{ChildExited, PassageChanged};
use crate::support::watch::Watch;
use actix::{Actor, ActorContext, AsyncContext, Context, Handler, Message, Recipient, SpawnHandle};
use routing::breaker::{Breaker, BreakerRules, Era, Event};
use routing::ids::BackendId;

/// A request failed by the backend's fault.
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "()")]
pub struct RequestFailed {
    /// The era in which it began.
    pub era: Era,
    /// The backend's successes so far.
    pub successes: u64,
}

/// A half-open probe went well.
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "()")]
pub struct ProbeSucceeded {
    /// The era in which it began.
    pub era: Era,
}

/// See the module. Started by the [`crate::cluster::Cluster`], one per backend.
pub struct CircuitBreaker {
    backend: BackendId,
    breaker: Breaker,
    cluster: Recipient<PassageChanged>,
    timer: Option<SpawnHandle>,
    _watch: Watch<ChildExited>,
}

impl CircuitBreaker {
    /// A closed breaker that continues counting eras after `era`.
    pub fn new(
        backend: BackendId,
        (rules, era): (BreakerRules, Era),
        cluster: Recipient<PassageChanged>,
        watch: Watch<ChildExited>,
    ) -> Self {
        let now = tokio::time::Instant::now().into_std();
        CircuitBreaker {
            backend,
            breaker: Breaker::new(rules, era, now),
            cluster,
            timer: None,
            _watch: watch,
        }
    }

    fn on(&mut self, event: Event, ctx: &mut Context<Self>) {
        let now = tokio::time::Instant::now().into_std();
        if !self.breaker.on(event, now) {
            return;
        }
        let (passage, era) = self.breaker.state();
        self.cluster.do_send(PassageChanged {
            backend: self.backend,
            passage,
            era,
        });
        if let Some(timer) = self.timer.take() {
            ctx.cancel_future(timer);
        }
        self.timer = self.breaker.next_tick().map(|at| {
            ctx.run_later(at.saturating_duration_since(now), |this, ctx| {
                this.timer = None;
                this.on(Event::Tick, ctx);
            })
        });
    }
}

impl Actor for CircuitBreaker {
    type Context = Context<Self>;
}

/// Ends a breaker whose backend has gone, or that is replaced by another.
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "()")]
pub struct RetireBreaker;

impl Handler<RetireBreaker> for CircuitBreaker {
    type Result = ();
    fn handle(&mut self, _: RetireBreaker, ctx: &mut Self::Context) {
        ctx.stop();
    }
}

impl Handler<RequestFailed> for CircuitBreaker {
    type Result = ();
    fn handle(&mut self, failed: RequestFailed, ctx: &mut Self::Context) {
        let RequestFailed { era, successes } = failed;
        self.on(Event::Failed { era, successes }, ctx);
    }
}

impl Handler<ProbeSucceeded> for CircuitBreaker {
    type Result = ();
    fn handle(&mut self, succeeded: ProbeSucceeded, ctx: &mut Self::Context) {
        let ProbeSucceeded { era } = succeeded;
        self.on(Event::ProbeSucceeded { era }, ctx);
    }
}

crate::support::fault::panics_on_request!(CircuitBreaker);
