//! From settings to the index's sources: who holds what, and which storage joins whom.

use crate::settings::{EventSource, ExternalStorage, Settings, Tokenizer};
use crate::upstream::{Client, events};
use actors::backend::{BackendSpec, KvSeat, Standing};
use actors::index_shard::SourceSpec;
use actors::kv_index::{KvIndexSettings, Member, Next, SourceSettings};
use actors::kv_subscriber::StreamState;
use actors::support::published::Published;
use routing::cache_key::short_digest;
use routing::prefix_index::{HolderId, Limits};
use routing::score::Weights;
use routing::view::{Memory, Role};
use std::collections::BTreeMap;
use std::sync::Arc;

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

/// Numbers holders: one for each memory, and one for each storage namespace. Backends that name the
/// same endpoint, namespace and model share one.
#[derive(Default)]
struct Holders {
    memories: u32,
    namespaces: BTreeMap<(String, String, Arc<str>), HolderId>,
}

/// What a seat follows from. While it stays, the backend keeps its memories and what is believed of it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct SeatKey {
    name: Arc<str>,
    url: String,
    dp_size: u32,
    has_source: bool,
    tokens: bool,
    approximate: bool,
}

type Seated = (SeatKey, Arc<[Memory]>, Arc<Standing>);

/// Seats that were given, over changes of the settings.
#[derive(Default)]
pub struct Seats {
    holders: Holders,
    given: Vec<Seated>,
}

impl Seats {
    /// The seat of before, or a fresh one.
    fn give(&mut self, key: SeatKey) -> Seated {
        let known = self.given.iter().find(|(of, ..)| *of == key);
        known.cloned().unwrap_or_else(|| {
            let standing = Standing::new(key.has_source, key.tokens, key.approximate);
            let memories = self.holders.memories(key.dp_size);
            (key, memories, Arc::new(standing))
        })
    }
}

impl Holders {
    fn next(&self) -> HolderId {
        HolderId(self.memories + self.namespaces.len() as u32)
    }

    /// An engine's memory: of unknown rank, and of each of its ranks where there are several.
    fn memories(&mut self, dp_size: u32) -> Arc<[Memory]> {
        let ranks = (0..dp_size).map(Some).filter(|_| dp_size > 1);
        let memories = std::iter::once(None).chain(ranks).map(|rank| {
            let holder = self.next();
            self.memories += 1;
            Memory { rank, holder }
        });
        memories.collect()
    }

    fn namespace(&mut self, storage: &ExternalStorage, model: &Arc<str>) -> HolderId {
        let next = self.next();
        let key = (
            storage.endpoint.clone(),
            storage.kv_namespace.clone(),
            model.clone(),
        );
        *self.namespaces.entry(key).or_insert(next)
    }
}

/// By default prefill workers write and decode workers read; a unified one does both in storage
/// that it names itself, and nothing in storage that it would only inherit.
fn access(settings: &Settings, at: usize, holders: &mut Holders) -> Option<Access> {
    let backend = &settings.backends[at];
    let own = settings.backend_extras.storage.get(&backend.name);
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
        namespace: holders.namespace(own.or(inherited)?, &model),
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

/// Gives every backend its seat in the index, and answers what the index is made of, if it is on.
pub fn wire(
    settings: &mut Settings,
    client: &Client,
    seats: &mut Seats,
) -> Option<KvIndexSettings> {
    let mut accesses = Vec::new();
    let mut given = Vec::new();
    for at in 0..settings.backends.len() {
        let access = access(settings, at, &mut seats.holders);
        let seated = seats.give(seat_key(settings, at));
        settings.backends[at].kv = seat(&seated, access);
        given.push(seated);
        accesses.push(access);
    }
    seats.given = given;
    let index = &settings.kv_cache_index;
    if !index.enabled {
        return None;
    }
    let sources = index.event_sources.iter().flat_map(|source| {
        let mut backends = settings.backends.iter();
        let at = backends.position(|backend| *backend.name == *source.backend_name);
        let at = at.expect("checked with the settings");
        let (backend, writes) = (&settings.backends[at], accesses[at]);
        let ranks: Vec<Option<u32>> = match source.per_rank() {
            true => (0..source.dp_size).map(Some).collect(),
            false => vec![None],
        };
        ranks.into_iter().map(move |rank| {
            let stream = rank.map_or_else(|| source.clone(), |rank| source.of_rank(rank));
            let spec = SourceSpec {
                model: BASE_REALM.into(),
                writes: writes.filter(|a| a.writes).map(|a| a.namespace),
                assume_offload: index.treat_eviction_as_offload,
                storage: index.storage_offloading,
            };
            SourceSettings {
                key: source_key(&stream, backend, &spec),
                backend: backend.name.clone(),
                memories: backend.kv.memories.clone(),
                rank,
                standing: backend.kv.standing.clone(),
                state: Published::new(StreamState::default()),
                spec,
                reconnect: source.reconnect_interval,
                transport: events::transport(&stream, client, backend),
            }
        })
    });
    Some(KvIndexSettings {
        sources: sources.collect(),
        members: settings.backends.iter().map(member).collect(),
        next: Next::default(),
        limits: Limits {
            max_entries: usize::try_from(index.max_entries).unwrap_or(usize::MAX),
            ttl: u32::try_from(index.entry_ttl.as_secs()).unwrap_or(u32::MAX),
        },
    })
}

fn member(backend: &BackendSpec) -> Member {
    Member {
        backend: backend.name.clone(),
        memories: backend.kv.memories.clone(),
        standing: backend.kv.standing.clone(),
    }
}

/// Equal for sources that are the same: a digest, since the backend's key is part of it.
fn source_key(stream: &EventSource, backend: &BackendSpec, spec: &SourceSpec) -> Arc<str> {
    let key = backend.api_key.as_ref().map(|key| &key.0);
    let (url, models, memories) = (&backend.url, &backend.models, &backend.kv.memories);
    short_digest(&format!(
        "{stream:?} {url} {models:?} {memories:?} {spec:?} {key:?}"
    ))
    .into()
}

fn seat_key(settings: &Settings, at: usize) -> SeatKey {
    let (index, backend) = (&settings.kv_cache_index, &settings.backends[at]);
    let mut sources = index.event_sources.iter();
    let source = sources.find(|source| *source.backend_name == *backend.name);
    let tokenizer = index.tokenizers.get(&model(settings, at));
    SeatKey {
        name: backend.name.clone(),
        url: backend.url.to_string(),
        dp_size: source.map_or(1, |source| source.dp_size),
        has_source: index.enabled && source.is_some(),
        tokens: tokenizer != Some(&Tokenizer::None),
        approximate: index.enabled && index.approximate,
    }
}

fn seat((_, memories, standing): &Seated, access: Option<Access>) -> KvSeat {
    let reads = access.filter(|access| access.reads);
    KvSeat {
        writes: access
            .filter(|access| access.writes)
            .map(|access| access.namespace),
        memories: memories.clone(),
        reads: reads.map(|access| access.namespace).into_iter().collect(),
        standing: standing.clone(),
    }
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
        let index = wire(&mut settings, &client, &mut Seats::default());
        (settings, index)
    }

    fn own(backend: &BackendSpec) -> HolderId {
        backend.kv.memories[0].holder
    }

    #[test]
    fn every_rank_has_a_memory_and_over_zeromq_a_stream_at_a_port_of_its_own() {
        let (settings, index) = wired(
            "backends: [{name: a, url: 'http://a'}, {name: b, url: 'http://b'}]
kv_cache_index:
  enabled: true
  event_sources:
    - {backend_name: a, endpoint: 'tcp://a:5557', replay_endpoint: 'tcp://a:6557', dp_size: 3}
    - {backend_name: b, endpoint: 'http://b/e', dp_size: 2}",
        );
        let ranks = |at: usize| -> Vec<Option<u32>> {
            let memories = settings.backends[at].kv.memories.iter();
            memories.map(|memory| memory.rank).collect()
        };
        assert_eq!(ranks(0), [None, Some(0), Some(1), Some(2)]);
        assert_eq!(ranks(1), [None, Some(0), Some(1)]);
        let sources = index.unwrap().sources;
        let streams: Vec<_> = sources.iter().map(|s| (&*s.backend, s.rank)).collect();
        assert_eq!(
            streams,
            [("a", Some(0)), ("a", Some(1)), ("a", Some(2)), ("b", None)]
        );
        let third = settings.kv_cache_index.event_sources[0].of_rank(2);
        assert_eq!(third.endpoint, "tcp://a:5559");
        assert_eq!(third.replay_endpoint.as_deref(), Some("tcp://a:6559"));
    }

    #[test]
    fn the_full_examples_workers_share_one_namespace_by_their_roles() {
        let (settings, index) = wired(include_str!("../../../config/seed/4-full-example.yaml"));
        let reads = |at: usize| settings.backends[at].kv.reads.to_vec();
        assert_eq!(reads(0), [], "prefill workers write and do not read");
        let namespace = reads(2)[0];
        assert_eq!(reads(3), [namespace], "decode workers read");
        assert_eq!(reads(5), [], "a unified one does not inherit storage");
        let mut all: Vec<HolderId> = settings.backends.iter().map(own).collect();
        all.push(namespace);
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 7, "everybody is a holder of their own");
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
        let namespace = |at: usize| settings.backends[at].kv.reads[0];
        assert_eq!(namespace(0), namespace(1));
        assert_ne!(namespace(0), namespace(2));
        assert_eq!(index.unwrap().sources[0].spec.writes, Some(namespace(1)));
        let (_, off) = wired("backends: [{name: a, url: 'http://a'}]");
        assert!(off.is_none());
    }
}
