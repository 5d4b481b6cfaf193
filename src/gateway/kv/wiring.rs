//! From settings to the index's sources: who holds what, and which storage joins whom.

use crate::settings::{ExternalStorage, Settings};
use crate::upstream::{Client, events};
use actors::index_shard::SourceSpec;
use actors::kv_index::{KvIndexSettings, SourceSettings};
use routing::prefix_index::{HolderId, Limits};
use routing::score::Weights;
use routing::view::Role;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Holders from here on are storage namespaces; those before are backends' own memory, by their
/// place in the settings.
const FIRST_NAMESPACE: u32 = 1 << 20;

/// The weights of the settings.
pub fn weights(settings: &Settings) -> Weights {
    let scoring = &settings.kv_cache_index.scoring;
    Weights {
        overlap: scoring.overlap_weight,
        load: scoring.load_weight,
        health: scoring.health_weight,
        min_overlap: scoring.min_overlap_threshold,
        gpu: scoring.gpu_tier_weight,
        cpu: scoring.cpu_tier_weight,
        storage: scoring.storage_tier_weight,
    }
}

/// What one backend does with a namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Access {
    namespace: HolderId,
    reads: bool,
    writes: bool,
}

/// Numbers namespaces: backends that name the same endpoint, namespace and model share one.
#[derive(Default)]
struct Namespaces(BTreeMap<(String, String, Arc<str>), HolderId>);

impl Namespaces {
    fn number(&mut self, storage: &ExternalStorage, model: &Arc<str>) -> HolderId {
        let next = HolderId(FIRST_NAMESPACE + self.0.len() as u32);
        let key = (
            storage.endpoint.clone(),
            storage.kv_namespace.clone(),
            model.clone(),
        );
        *self.0.entry(key).or_insert(next)
    }
}

/// By default prefill workers write and decode workers read; a unified one does both in storage
/// that it names itself, and nothing in storage that it would only inherit.
fn access(settings: &Settings, at: usize, namespaces: &mut Namespaces) -> Option<Access> {
    let backend = &settings.backends[at];
    let own = settings.backend_storage.get(&backend.name);
    let inherited = settings
        .disaggregated_serving
        .default_external_storage
        .as_ref();
    let (reads, writes) = match (backend.role, own) {
        (Role::Prefill, _) => (false, true),
        (Role::Decode, _) => (true, false),
        (Role::Unified, Some(_)) => (true, true),
        (Role::Unified, None) => return None,
    };
    let model = model(settings, at);
    Some(Access {
        namespace: namespaces.number(own.or(inherited)?, &model),
        reads,
        writes,
    })
}

fn model(settings: &Settings, at: usize) -> Arc<str> {
    let models = &settings.backends[at].models;
    models.first().cloned().unwrap_or_else(|| Arc::from(""))
}

/// What stands for an engine's own model where blocks are hashed: holders and namespaces keep
/// models apart already. Adapters stand under their names.
pub const BASE_REALM: &str = "";

/// Tells every backend where it finds blocks, and answers the sources of the index, if it is on.
pub fn wire(settings: &mut Settings, client: &Client) -> Option<KvIndexSettings> {
    let mut namespaces = Namespaces::default();
    let mut accesses = Vec::new();
    for at in 0..settings.backends.len() {
        let access = access(settings, at, &mut namespaces);
        let mut holders = vec![HolderId(at as u32)];
        holders.extend(
            access
                .filter(|access| access.reads)
                .map(|access| access.namespace),
        );
        settings.backends[at].holders = holders.into();
        accesses.push(access);
    }
    let index = &settings.kv_cache_index;
    if !index.enabled {
        return None;
    }
    let sources = index.event_sources.iter().filter_map(|source| {
        let mut backends = settings.backends.iter();
        let at = backends.position(|backend| *backend.name == *source.backend_name)?;
        Some(SourceSettings {
            backend: settings.backends[at].name.clone(),
            holder: HolderId(at as u32),
            spec: SourceSpec {
                model: BASE_REALM.into(),
                writes: accesses[at]
                    .filter(|access| access.writes)
                    .map(|access| access.namespace),
                assume_offload: index.treat_eviction_as_offload,
                storage: index.storage_offloading,
            },
            reconnect: source.reconnect_interval,
            transport: events::transport(source, client, &settings.backends[at]),
        })
    });
    Some(KvIndexSettings {
        sources: sources.collect(),
        limits: Limits {
            max_entries: usize::try_from(index.max_entries).unwrap_or(usize::MAX),
            ttl: u32::try_from(index.entry_ttl.as_secs()).unwrap_or(u32::MAX),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{Environment, Source, load};
    use crate::upstream::ClientSettings;
    use std::time::Duration;

    fn wired(text: &str) -> (Settings, Option<KvIndexSettings>) {
        let source = Source {
            name: "test".into(),
            text: text.into(),
        };
        let keys = [("S3_ACCESS_KEY", "a"), ("S3_SECRET_KEY", "s")];
        let environment: Environment = keys.map(|(k, v)| (k.to_owned(), v.to_owned())).into();
        let mut settings = load(&[source], &environment)
            .unwrap_or_else(|f| panic!("{f}"))
            .settings;
        let client = Client::new(ClientSettings {
            connect_timeout: Duration::from_secs(1),
            pool_idle_timeout: Duration::from_secs(1),
            connection_max_age: Duration::from_secs(1),
            max_idle_per_backend: 1,
        });
        let index = wire(&mut settings, &client);
        (settings, index)
    }

    #[test]
    fn the_full_examples_workers_share_one_namespace_by_their_roles() {
        let (settings, index) = wired(include_str!("../../../config/seed/4-full-example.yaml"));
        let namespace = HolderId(FIRST_NAMESPACE);
        let holders: Vec<Vec<HolderId>> = settings
            .backends
            .iter()
            .map(|b| b.holders.to_vec())
            .collect();
        assert_eq!(
            holders[0],
            [HolderId(0)],
            "prefill workers write and do not read"
        );
        assert_eq!(holders[2], [HolderId(2), namespace], "decode workers read");
        assert_eq!(
            holders[5],
            [HolderId(5)],
            "a unified one does not inherit storage"
        );
        let sources = index.unwrap().sources;
        assert_eq!(sources.len(), 5);
        assert_eq!(sources[0].spec.writes, Some(namespace));
        assert_eq!(sources[2].spec.writes, None);
        assert!(sources[0].spec.assume_offload);
    }

    #[test]
    fn a_unified_backend_reads_and_writes_storage_of_its_own_and_models_keep_apart() {
        let (settings, index) = wired(
            "backends:
  - {name: a, url: 'http://a', models: [m], external_storage: {endpoint: 'http://v', kv_namespace: n}}
  - {name: b, url: 'http://b', models: [m], external_storage: {endpoint: 'http://v', kv_namespace: n}}
  - {name: c, url: 'http://c', models: [other], external_storage: {endpoint: 'http://v', kv_namespace: n}}
kv_cache_index: {enabled: true, event_sources: [{backend_name: b, endpoint: 'http://b/e'}]}",
        );
        let namespace = |at: usize| settings.backends[at].holders[1];
        assert_eq!(namespace(0), namespace(1));
        assert_ne!(namespace(0), namespace(2));
        assert_eq!(index.unwrap().sources[0].spec.writes, Some(namespace(1)));
        let (_, off) = wired("backends: [{name: a, url: 'http://a'}]");
        assert!(off.is_none());
    }
}
