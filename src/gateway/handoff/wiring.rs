//! From settings to seats and groups.

use super::{EngineIds, Seat, Splitting};
use crate::settings::{ConnectorKind, Settings};
use actors::directory::Directory;
use actors::disagg_coordinator::{
    CoordinatorHandle, CoordinatorSettings, DisaggCoordinator, GroupSpec,
};
use routing::choose::ChoiceRules;
use routing::disagg::SplitRules;
use routing::view::{HandOffGroup, Role};
use std::collections::HashMap;
use std::sync::Arc;
use wire::handoff::Peer;

/// Groups that were numbered, over changes of the settings: a number means the same one for ever.
#[derive(Default)]
pub struct Groups(Vec<(ConnectorKind, Option<(String, String)>)>);

impl Groups {
    fn number(&mut self, (kind, place): (ConnectorKind, Option<(&str, &str)>)) -> usize {
        let group = (kind, place.map(|(at, of)| (at.to_owned(), of.to_owned())));
        let known = self.0.iter().position(|other| *other == group);
        known.unwrap_or_else(|| {
            self.0.push(group);
            self.0.len() - 1
        })
    }

    fn specs(&self) -> Vec<GroupSpec> {
        let all = self.0.iter();
        all.map(|(kind, place)| {
            let place = place.as_ref().map(|(at, of)| (at.as_str(), of.as_str()));
            spec((*kind, place))
        })
        .collect()
    }
}

/// Gives every backend its group; answers what the groups are.
pub fn group(settings: &mut Settings, groups: &mut Groups) -> Arc<[GroupSpec]> {
    let numbers = settings.backends.iter();
    let numbers = numbers.map(|backend| groups.number(settings.hand_off_group(&backend.name)));
    let numbers: Vec<usize> = numbers.collect();
    let mut specs = groups.specs();
    for (backend, number) in settings.backends.iter_mut().zip(numbers) {
        specs[number].decoders += usize::from(backend.role == Role::Decode);
        backend.group = HandOffGroup(number as u32);
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
    let wanted = coordinator(settings, groups, rules);
    let (_, coordinator) = DisaggCoordinator::supervised(wanted, directory.clone());
    Some(splitting(settings, coordinator, Arc::default()))
}

/// Goes on with split serving by other settings.
pub fn follow(
    present: &Splitting,
    settings: &Settings,
    groups: Arc<[GroupSpec]>,
    rules: ChoiceRules,
) -> Splitting {
    let handle = present.coordinator.clone();
    handle.configure(coordinator(settings, groups, rules));
    splitting(settings, handle, present.engine_ids.clone())
}

fn coordinator(
    settings: &Settings,
    groups: Arc<[GroupSpec]>,
    rules: ChoiceRules,
) -> CoordinatorSettings {
    let split = &settings.disaggregated_serving;
    CoordinatorSettings {
        rules,
        split: SplitRules {
            min_prefill_tokens: split.min_prefill_tokens,
            fallback_to_unified: split.fallback_to_unified,
        },
        groups,
    }
}

fn splitting(
    settings: &Settings,
    coordinator: CoordinatorHandle,
    engine_ids: Arc<EngineIds>,
) -> Splitting {
    let split = &settings.disaggregated_serving;
    Splitting {
        coordinator,
        seats: seats(settings),
        prefill_timeout: split.prefill_timeout,
        transfer_timeout: split.kv_transfer_timeout,
        fallback: split.fallback_to_unified,
        engine_ids,
    }
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
