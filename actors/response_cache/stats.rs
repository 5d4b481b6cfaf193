//! Numbers of the tiers that are counted where they happen, and read when somebody asks for metrics.

use super::Outcome;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// Of one tier.
#[derive(Debug)]
pub struct TierStats {
    /// `memory`, `redis`, `s3` or `disk`.
    pub name: &'static str,
    /// Whether it is asked at present, for lookups and for keeping.
    pub up: AtomicBool,
    /// How often it went away or came back.
    pub changes: AtomicU64,
    /// Bytes that it holds, where that is known.
    pub bytes: AtomicU64,
    /// Entries that it holds, where that is known.
    pub entries: AtomicU64,
    /// Entries that went for want of room.
    pub crowded_out: AtomicU64,
    /// Entries that went because they were too old.
    pub expired: AtomicU64,
    /// Entries that were to be kept, by what came of it.
    pub stores: [AtomicU64; Outcome::STORES.len()],
    /// Fresh starts of its actor.
    pub restarts: AtomicU64,
}

impl TierStats {
    /// Of a tier that nobody has asked yet.
    pub fn new(name: &'static str) -> Self {
        TierStats {
            name,
            up: AtomicBool::new(true),
            changes: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            entries: AtomicU64::new(0),
            crowded_out: AtomicU64::new(0),
            expired: AtomicU64::new(0),
            stores: Default::default(),
            restarts: AtomicU64::new(0),
        }
    }

    pub(super) fn stored(&self, outcome: Outcome) {
        let at = Outcome::STORES.iter().position(|of| *of == outcome);
        if let Some(at) = at {
            self.stores[at].fetch_add(1, Relaxed);
        }
    }
}
