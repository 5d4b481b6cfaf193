//! Takes changed settings into a running gateway: at SIGHUP, when the files change, and when an operator
//! asks for it. They are read and checked whole before anything is touched; what did not change keeps its
//! state; what only a restart can bring about is named, and stays as it is until then.

mod apply;
mod files;

use crate::access;
use crate::gateway::Gateway;
use crate::settings::difference::{Difference, difference, needs_restart};
use crate::settings::{Known, Loaded};
use crate::telemetry::names;
use crate::tls::Trust;
use actors::cluster::Reconciled;
pub use apply::{Parts, Wiring};
use arc_swap::ArcSwap;
pub use files::Files;
use metrics::{counter, gauge};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::signal::unix::Signal;
use tokio::sync::{mpsc, oneshot};
use tracing::{error, info, warn};

/// Operators whose reloads wait for each other.
const ASKS_MAX: usize = 8;

/// Where the settings come from, to be read again.
pub struct Origin {
    /// Reads and checks all of them.
    pub read: Box<dyn Fn() -> Result<Loaded, String>>,
    /// The files, as they were before they were read.
    pub files: Files,
}

/// What a reload did.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Keys that took effect.
    pub applied: Vec<String>,
    /// Keys that wait for a restart.
    pub needs_restart: Vec<String>,
    /// Whether the keys of `api_keys.file` are others.
    pub key_file_changed: bool,
    /// What became of the backends.
    pub backends: Reconciled,
}

impl Outcome {
    /// Whether anything took effect.
    pub fn is_change(&self) -> bool {
        !self.applied.is_empty() || self.key_file_changed
    }
}

/// Why settings were not taken in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotReloaded {
    /// They are faulty: nothing has changed.
    Faulty(String),
    /// An actor that must follow them was being replaced: to be tried again.
    Interrupted,
    /// This gateway was not started from settings that can be read again, or it is ending.
    Unable,
}

type Answer = oneshot::Sender<Result<Outcome, NotReloaded>>;

/// Asks for reloads, from any thread, and knows what is in effect.
#[derive(Clone)]
pub struct ReloadHandle {
    asks: mpsc::Sender<Answer>,
    effective: Arc<ArcSwap<Vec<Known>>>,
}

impl ReloadHandle {
    /// One reload; its end is waited for.
    ///
    /// # Errors
    /// Why nothing has changed.
    pub async fn reload(&self) -> Result<Outcome, NotReloaded> {
        let (answer, answered) = oneshot::channel();
        let asked = self.asks.send(answer).await;
        asked.map_err(|_| NotReloaded::Unable)?;
        answered.await.map_err(|_| NotReloaded::Unable)?
    }

    /// Every key with its value, secrets masked: what is in effect, and for keys that wait for a
    /// restart what was.
    pub fn effective(&self) -> Arc<Vec<Known>> {
        self.effective.load_full()
    }
}

/// The handle, and what the reloader listens to.
pub fn channel(effective: Vec<Known>) -> (ReloadHandle, Asked) {
    let (asks, asked) = mpsc::channel(ASKS_MAX);
    let handle = ReloadHandle {
        asks,
        effective: Arc::new(ArcSwap::from_pointee(effective)),
    };
    (handle, Asked(asked))
}

/// Reloads that are asked for.
pub struct Asked(mpsc::Receiver<Answer>);

/// See the module. Lives on the main thread, beside the roots of the actors.
pub struct Reloader {
    origin: Origin,
    gateway: Arc<Gateway>,
    parts: Parts,
}

impl Reloader {
    /// For a gateway that has been started.
    pub fn new(origin: Origin, gateway: Arc<Gateway>, parts: Parts) -> Self {
        Reloader {
            origin,
            gateway,
            parts,
        }
    }

    /// Reloads whenever it is time to; runs for ever.
    pub async fn run(mut self, mut asked: Asked, mut hangups: Signal) {
        loop {
            let watch = self.gateway.settings().reload.watch;
            let answer = tokio::select! {
                answer = asked.0.recv() => match answer {
                    Some(answer) => Some(answer),
                    None => return,
                },
                _ = hangups.recv() => None,
                () = self.origin.files.changed(), if watch => None,
            };
            self.origin.files.take();
            let outcome = self.reload().await;
            if let Some(answer) = answer {
                let _ = answer.send(outcome); // nobody waits any more: it is done all the same
            }
        }
    }

    async fn reload(&mut self) -> Result<Outcome, NotReloaded> {
        let outcome = self.take_in().await;
        let result = match &outcome {
            Ok(outcome) if outcome.is_change() => "applied",
            Ok(_) => "unchanged",
            Err(_) => "rejected",
        };
        counter!(names::RELOADS, "result" => result).increment(1);
        match &outcome {
            Ok(outcome) => {
                say_loaded();
                info!(result, applied = ?outcome.applied, needs_restart = ?outcome.needs_restart, key_file_changed = outcome.key_file_changed, "settings read again");
            }
            Err(NotReloaded::Faulty(faults)) => {
                error!(
                    faults,
                    "settings are faulty, those of before stay in effect"
                );
            }
            Err(NotReloaded::Interrupted) => {
                error!("an actor was being replaced while settings were taken in; read them again");
            }
            Err(NotReloaded::Unable) => {}
        }
        outcome
    }

    async fn take_in(&mut self) -> Result<Outcome, NotReloaded> {
        let loaded = (self.origin.read)().map_err(NotReloaded::Faulty)?;
        for warning in &loaded.warnings {
            warn!(%warning, "settings");
        }
        let running = self.gateway.settings();
        let settings = loaded.settings.keeping(&running);
        settings.check().map_err(|faults| {
            let why = "these do not go together with what needs a restart first";
            NotReloaded::Faulty(format!("{why}: {faults}"))
        })?;
        let keys = access::ring(&settings.api_keys).map_err(NotReloaded::Faulty)?;
        let trust = Trust::load(&settings).map_err(NotReloaded::Faulty)?;
        let present = self.gateway.reload.effective();
        let all = difference(&present, &loaded.effective);
        let (waiting, applied): (Vec<Difference>, Vec<Difference>) =
            all.into_iter().partition(|of| of.needs_restart);
        let paths = |of: Vec<Difference>| of.into_iter().map(|of| of.path).collect();
        let mut outcome = Outcome {
            key_file_changed: *self.gateway.keys.load() != keys.clone().map(Arc::new),
            applied: paths(applied),
            needs_restart: paths(waiting),
            ..Outcome::default()
        };
        if outcome.is_change() {
            self.gateway.tls.trust.follow(trust);
            let key_file = settings.api_keys.file.clone();
            if running.api_keys.file != key_file {
                key_file
                    .into_iter()
                    .for_each(|file| self.origin.files.add(file.into()));
            }
            let applied = self.parts.apply(&self.gateway, settings, keys).await;
            outcome.backends = applied.ok_or(NotReloaded::Interrupted)?;
            let effective = in_effect(&present, loaded.effective);
            self.gateway.reload.effective.store(Arc::new(effective));
        }
        Ok(outcome)
    }
}

/// The new values, and those of before for what waits for a restart.
fn in_effect(before: &[Known], after: Vec<Known>) -> Vec<Known> {
    let kept = before.iter().filter(|of| needs_restart(&of.path)).cloned();
    let taken = after.into_iter().filter(|of| !needs_restart(&of.path));
    let mut all: Vec<Known> = taken.chain(kept).collect();
    all.sort_by(|a, b| a.path.cmp(&b.path)); // of no meaning, but the same every time
    all
}

/// Settings are in effect that were read at this moment.
pub fn say_loaded() {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    gauge!(names::LAST_RELOAD).set(now.unwrap_or_default().as_secs_f64());
}
