//! What split serving knows of each backend beside its place in the cluster: which connector it speaks and how
//! other engines reach it. Built once at the start.

mod engine_ids;
pub mod wiring;

pub use engine_ids::EngineIds;

use crate::settings::ConnectorKind;
use actors::disagg_coordinator::CoordinatorHandle;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use wire::handoff::{Connector, Mooncake, Nixl, P2pNccl, Peer, SgLang, SharedStorage};

/// How one backend hands over.
#[derive(Debug, Clone)]
pub struct Seat {
    /// In which way.
    pub connector: ConnectorKind,
    /// How others reach it.
    pub peer: Peer,
    /// `kv_transfer_params` for what is sent to it, by the operator.
    pub params: Option<String>,
}

/// Split serving, when `disaggregated_serving` is on; another one when the settings change.
pub struct Splitting {
    /// Pairs workers.
    pub coordinator: CoordinatorHandle,
    /// By backend.
    pub seats: HashMap<Arc<str>, Seat>,
    /// For the prefill leg.
    pub prefill_timeout: Duration,
    /// For a streamed decode leg to its first event.
    pub transfer_timeout: Duration,
    /// Whether unified backends stand in for failed steps.
    pub fallback: bool,
    /// What engines said their ids are.
    pub engine_ids: Arc<EngineIds>,
}

/// The connector of two workers of one group.
pub fn connector(prefill: &Seat, decode: &Seat) -> Box<dyn Connector> {
    match prefill.connector {
        ConnectorKind::SharedStorage => Box::new(SharedStorage {
            prefill_params: prefill.params.clone(),
            decode_params: decode.params.clone(),
        }),
        ConnectorKind::Nixl => Box::new(Nixl),
        ConnectorKind::Mooncake => Box::new(Mooncake),
        ConnectorKind::P2pNccl => Box::new(P2pNccl),
        ConnectorKind::SgLang => Box::new(SgLang),
    }
}
