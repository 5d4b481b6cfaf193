//! Watches what is believed of each backend: gives up predictions that are wrong too often, trusts
//! them again when they were made anew, and says in the log whenever a mode changes.

use super::{Member, SourceHandle};
use routing::knowledge::{Mode, Why};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tracing::{info, warn};

/// How often it looks.
pub(super) const JUDGE_INTERVAL: Duration = Duration::from_secs(1);

/// See the module.
#[derive(Default)]
pub(super) struct Judge(HashMap<Arc<str>, Seen>);

#[derive(Default)]
struct Seen {
    mode: Option<(Mode, Why)>,
    resyncs: u64,
}

impl Judge {
    /// Looks at every backend. What was given up is tried again after `ttl`, when all that it was
    /// made from has expired.
    pub(super) fn turn(&mut self, members: &[Member], sources: &[SourceHandle], ttl: Duration) {
        let now = tokio::time::Instant::now().into_std();
        for member in members {
            let seen = self.0.entry(member.backend.clone()).or_default();
            let own = sources.iter().filter(|s| s.backend == member.backend);
            let resyncs = own.map(|source| source.state.load().resyncs).sum();
            // fewer: another stream in its place, which has learned nothing yet
            if resyncs > std::mem::replace(&mut seen.resyncs, resyncs) {
                member.standing.trust_again(Mode::Exact);
            }
            member.standing.forgive(now, ttl);
            if let Some((mode, error)) = member.standing.judge(now) {
                warn!(backend = %member.backend, mode = mode.as_str(), mean_error_percent = error as f64 / 10.0, "predictions of cached tokens are wrong too often, giving them up");
            }
            let mode = member.standing.mode();
            if seen.mode.replace(mode) != Some(mode) {
                info!(backend = %member.backend, mode = mode.0.as_str(), why = mode.1.as_str(), "KV cache knowledge of a backend");
            }
        }
    }
}
