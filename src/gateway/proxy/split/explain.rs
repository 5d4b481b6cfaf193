//! How a request would be split, for `/admin/explain`.

use super::reserve::COORDINATOR_DEADLINE;
use super::{Way, tokens_of, way};
use crate::gateway::Worker;
use crate::kv::Found;
use crate::proxy::{Call, route};
use actors::disagg_coordinator::{ExplainPair, ReservePair};
use actors::support::mailbox::Mailbox;
use routing::disagg::{Path, Step};
use routing::pairing::Pairing;
use std::sync::Arc;

/// How a request would be split at this moment.
pub enum SplitPlan {
    /// Not at all.
    Whole(Path),
    /// So, with the backends' names by slot.
    Pair(Pairing, Vec<Arc<str>>),
    /// Nobody can do this step.
    Nobody(Step),
    /// The coordinator does not answer.
    Unknown,
}

/// Says how a request would be split; sends nothing.
pub async fn explain_split(worker: &Worker, call: &Call, found: Option<&Found>) -> SplitPlan {
    let splitting = match (way(call, worker), worker.gateway.splitting()) {
        (Way::Split, Some(splitting)) => splitting,
        _ => return SplitPlan::Whole(Path::Unified),
    };
    let ask = ExplainPair(ReservePair {
        route: route(call, found, None, &[]),
        tokens: tokens_of(call, found),
        queued: Mailbox::DisaggCoordinator.enter(),
    });
    let address = splitting.coordinator.address.load();
    let Some(address) = address.as_ref() else {
        return SplitPlan::Unknown;
    };
    match tokio::time::timeout(COORDINATOR_DEADLINE, address.send(ask)).await {
        Ok(Ok(Ok((pairing, names)))) => SplitPlan::Pair(pairing, names),
        Ok(Ok(Err(unserved))) => SplitPlan::Nobody(unserved.step),
        _ => SplitPlan::Unknown,
    }
}
