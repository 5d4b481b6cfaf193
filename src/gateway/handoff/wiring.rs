//! From settings to seats and groups.

use super::{EngineIds, Seat, Splitting};
use crate::settings::{ConnectorKind, Settings};
use actors::directory::Directory;
use actors::disagg_coordinator::{CoordinatorSettings, DisaggCoordinator, GroupSpec};
use routing::choose::ChoiceRules;
use routing::disagg::SplitRules;
use routing::view::{HandOffGroup, Role};
use std::collections::HashMap;
use std::sync::Arc;
use wire::handoff::Peer;

/// Gives every backend its group; answers what the groups are.
pub fn group(settings: &mut Settings) -> Arc<[GroupSpec]> {
    let mut of = Vec::new();
    let mut known = Vec::new();
    let mut specs: Vec<GroupSpec> = Vec::new();
    for backend in &settings.backends {
        let group = settings.hand_off_group(&backend.name);
        let number = known.iter().position(|other| *other == group);
        let number = number.unwrap_or_else(|| {
            known.push(group);
            specs.push(spec(group));
            known.len() - 1
        });
        specs[number].decoders += usize::from(backend.role == Role::Decode);
        of.push(HandOffGroup(number as u32));
    }
    for (backend, group) in settings.backends.iter_mut().zip(of) {
        backend.group = group;
    }
    specs.into()
}

fn spec((kind, place): (ConnectorKind, Option<(&str, &str)>)) -> GroupSpec {
    let mut all = ConnectorKind::ALL.iter();
    let name = all.find(|(_, other)| *other == kind);
    let name = name.map_or("", |(name, _)| name);
    GroupSpec {
        name: match place {
            Some((_, namespace)) => format!("{name} {namespace}"),
            None => name.to_owned(),
        },
        pairs_only: kind.pairs_only(),
        decoders: 0,
    }
}

/// Starts split serving, if it is on.
pub fn start(
    settings: &Settings,
    groups: Arc<[GroupSpec]>,
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
    let seats = settings.backends.iter().map(|backend| {
        let peers = &settings.backend_extras.peers;
        let peer = peers.get(&backend.name).cloned().unwrap_or_default();
        let storage = settings.storage_of(&backend.name);
        let seat = Seat {
            connector: settings.connector_of(&backend.name),
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
