//! From settings to seats and groups.

use super::{EngineIds, Seat, Splitting};
use crate::settings::{ConnectorKind, Settings};
use actors::directory::Directory;
use actors::disagg_coordinator::{CoordinatorSettings, DisaggCoordinator};
use routing::choose::ChoiceRules;
use routing::disagg::SplitRules;
use routing::prefix_index::HolderId;
use routing::view::{HandOffGroup, Role};
use std::collections::HashMap;
use std::sync::Arc;
use wire::handoff::Peer;

/// Gives every backend its group: workers of one connector, and for storage of one namespace. Answers what
/// the groups are, for people. The seats of the KV index must have been given.
pub fn group(settings: &mut Settings) -> Arc<[String]> {
    let mut groups: Vec<(ConnectorKind, Option<HolderId>)> = Vec::new();
    let mut names = Vec::new();
    for at in 0..settings.backends.len() {
        let backend = &settings.backends[at];
        let kind = kind(settings, &backend.name);
        let namespace = match backend.role {
            Role::Prefill => backend.kv.writes,
            Role::Decode | Role::Unified => backend.kv.reads.first().copied(),
        };
        let key = (
            kind,
            namespace.filter(|_| kind == ConnectorKind::SharedStorage),
        );
        let number = groups.iter().position(|known| *known == key);
        let number = number.unwrap_or_else(|| {
            groups.push(key);
            names.push(described(settings, at, kind));
            groups.len() - 1
        });
        settings.backends[at].group = HandOffGroup(number as u32);
    }
    names.into()
}

fn kind(settings: &Settings, backend: &str) -> ConnectorKind {
    let peer = settings.backend_extras.peers.get(backend);
    let own = peer.and_then(|peer| peer.connector);
    own.unwrap_or(settings.disaggregated_serving.connector)
}

fn described(settings: &Settings, at: usize, kind: ConnectorKind) -> String {
    let mut all = ConnectorKind::ALL.iter();
    let name = all
        .find(|(_, other)| *other == kind)
        .map_or("", |(name, _)| name);
    let own = settings
        .backend_extras
        .storage
        .get(&settings.backends[at].name);
    let storage = own.or(settings
        .disaggregated_serving
        .default_external_storage
        .as_ref());
    match storage.filter(|_| kind == ConnectorKind::SharedStorage) {
        Some(storage) => format!("{name} {}", storage.kv_namespace),
        None => name.to_owned(),
    }
}

/// Starts split serving, if it is on.
pub fn start(
    settings: &Settings,
    groups: Arc<[String]>,
    rules: ChoiceRules,
    directory: &Directory,
) -> Option<Splitting> {
    let split = &settings.disaggregated_serving;
    if !split.enabled {
        return None;
    }
    let coordinator = CoordinatorSettings {
        rules,
        split: SplitRules {
            min_prefill_tokens: split.min_prefill_tokens,
            fallback_to_unified: split.fallback_to_unified,
        },
        groups,
    };
    let (_, coordinator) = DisaggCoordinator::supervised(coordinator, directory.clone());
    Some(Splitting {
        coordinator,
        seats: seats(settings),
        prefill_timeout: split.prefill_timeout,
        transfer_timeout: split.kv_transfer_timeout,
        fallback: split.fallback_to_unified,
        engine_ids: EngineIds::default(),
    })
}

fn seats(settings: &Settings) -> HashMap<Arc<str>, Seat> {
    let default = settings
        .disaggregated_serving
        .default_external_storage
        .as_ref();
    let seats = settings.backends.iter().map(|backend| {
        let extras = &settings.backend_extras;
        let peer = extras.peers.get(&backend.name).cloned().unwrap_or_default();
        let storage = extras.storage.get(&backend.name).or(default);
        let seat = Seat {
            connector: kind(settings, &backend.name),
            peer: Peer {
                host: peer.host.unwrap_or_else(|| backend.url.host().to_owned()),
                zmq_address: peer.zmq_address,
                bootstrap_port: peer.bootstrap_port,
                engine_id: peer.engine_id,
            },
            params: storage.and_then(|storage| storage.kv_transfer_params.clone()),
        };
        (backend.name.clone(), seat)
    });
    seats.collect()
}
