//! What everybody may know of the cluster: a snapshot, replaced whole by the one actor that
//! writes it, and read by routers without a message.

use crate::backend::{Backend, BreakerLink, InFlight, ProbeTicket};
use crate::cluster::SetDraining;
use crate::support::published::Published;
use actix::Recipient;
use routing::breaker::Era;
use routing::ids::Slot;
use routing::view::{ClusterView, Live, Load, Passage};
use std::sync::Arc;
use std::time::Instant;

/// The published snapshot.
pub type Directory = Published<Snapshot>;

/// One backend's handles; stands at the same index as its view.
#[derive(Clone)]
pub struct Entry {
    /// Its settings and numbers.
    pub backend: Arc<Backend>,
    /// The breaker's era, for outcomes of requests sent now.
    pub era: Era,
    /// The half-open probe of this era.
    pub ticket: Arc<ProbeTicket>,
    /// Whom to tell of outcomes; none when the breaker is switched off.
    pub breaker: Option<BreakerLink>,
}

/// The cluster at one moment.
#[derive(Clone, Default)]
pub struct Snapshot {
    /// What decisions read.
    pub view: ClusterView,
    /// What is needed to act on one.
    pub entries: Vec<Entry>,
    /// Restarts of the cluster actor itself.
    pub cluster_restarts: u64,
    /// Takes a backend out of rotation, or back in; none before the cluster has started.
    pub drain: Option<Recipient<SetDraining>>,
}

impl Snapshot {
    /// The live numbers at `now`.
    pub fn live(&self, now: Instant) -> LiveAt<'_> {
        LiveAt {
            snapshot: self,
            now,
        }
    }

    /// Counts an attempt on a backend in; for a half-open one, takes its probe. None when another
    /// request was faster.
    pub fn enter(&self, slot: Slot) -> Option<InFlight> {
        let entry = &self.entries[slot.0];
        let half_open = self.view.backend(slot).passage == Passage::HalfOpen;
        if half_open && !entry.ticket.take() {
            return None;
        }
        Some(InFlight::enter(
            entry.backend.clone(),
            entry.era,
            half_open.then(|| entry.ticket.clone()),
            entry.breaker.clone(),
        ))
    }
}

/// See [`Snapshot::live`].
pub struct LiveAt<'a> {
    snapshot: &'a Snapshot,
    now: Instant,
}

impl Live for LiveAt<'_> {
    fn load(&self, slot: Slot) -> Load {
        self.snapshot.entries[slot.0].backend.load(self.now)
    }

    fn probe_free(&self, slot: Slot) -> bool {
        self.snapshot.entries[slot.0].ticket.is_free()
    }
}
