//! From settings to the tiers of the response cache.

use super::{AnswerCache, Counts, Rules};
use crate::redis::Redis;
use crate::settings::{CacheBackend, CacheSettings, L2Type};
use actors::response_cache::{
    LockSettings, Memory, MemoryUse, ResponseCache, ResponseCacheSettings, StoreTierSettings,
    TierStats,
};
use std::path::PathBuf;
use std::sync::Arc;
use storage::{Credentials, DiskSettings, DiskStore, Lock, S3Settings, S3Store, Store};

/// Room for what an entry has beside the answer's own bytes.
const ENTRY_HEAD_MAX: u64 = 1024;
/// Calls to an object store at a time.
const OBJECT_CALLS_MAX: usize = 64;

/// Whether the tiers could be used as configured; asks none of them.
///
/// # Errors
/// What is wrong; the message names the section.
pub fn check(settings: &CacheSettings) -> Result<(), String> {
    if settings.enabled && settings.l1() == CacheBackend::Redis {
        Redis::new(&settings.redis)?;
    }
    let tiered = settings.enabled && settings.backend == CacheBackend::Tiered;
    if tiered && settings.l2.kind == L2Type::S3 {
        object_store(settings)?;
    }
    Ok(())
}

/// Starts the cache, if it is on.
///
/// # Errors
/// When a tier cannot be used as configured; the message names the section.
pub async fn start(
    settings: &CacheSettings,
    redis: Option<&Redis>,
) -> Result<Option<Arc<AnswerCache>>, String> {
    if !settings.enabled {
        return Ok(None);
    }
    let redis = redis.filter(|_| settings.l1() == CacheBackend::Redis);
    let redis = redis.map(|redis| Arc::new(redis.store(value_max(settings))));
    let l1 = redis.as_ref().map(|store| StoreTierSettings {
        store: store.clone() as Arc<dyn Store>,
        budget: settings.l1_lookup_budget,
        put_timeout: settings.redis.command_timeout,
        sweep: None, // Redis forgets by itself
        place: place_of_redis(settings).into(),
        stats: Arc::new(TierStats::new("redis")),
    });
    let l2 = match settings.backend {
        CacheBackend::Tiered => Some(warm(settings).await?),
        CacheBackend::Memory | CacheBackend::Redis => None,
    };
    let stands_in = l1.is_some();
    let memory = (!stands_in || settings.redis.fallback_to_memory).then(|| {
        let stats = Arc::new(TierStats::new("memory"));
        MemoryUse {
            memory: Memory::new(settings.l1_max_bytes, stats.clone()),
            stats,
            stands_in,
        }
    });
    let wait = settings.other_gateway_wait;
    let lock = redis.filter(|_| !wait.is_zero()).map(|lock| LockSettings {
        lock: lock as Arc<dyn Lock>,
        wait,
    });
    let tiers = ResponseCache::supervised(ResponseCacheSettings {
        memory,
        l1,
        l2,
        ttl: settings.ttl,
        l2_ttl: settings.l2.ttl_override.unwrap_or(settings.ttl),
        l1_value_max: settings.l1_max_value_size,
        promotion_ttl: settings.promote_on_hit.then_some(settings.l1_promotion_ttl),
        lock,
    });
    Ok(Some(Arc::new(AnswerCache {
        tiers,
        flights: Arc::default(),
        rules: Rules {
            key_version: settings.key_version,
            allow_force: settings.allow_force,
            keep_truncated: settings.cache_truncated,
            response_max: bytes(settings.max_response_size),
            stream_max: bytes(settings.max_stream_buffer_size),
        },
        bypassed: Counts::default(),
        unkept: Counts::default(),
        handovers: 0.into(),
        waits: Default::default(),
    })))
}

fn bytes(size: u64) -> usize {
    usize::try_from(size).unwrap_or(usize::MAX)
}

/// The largest value of any tier.
fn value_max(settings: &CacheSettings) -> usize {
    let answer = settings
        .max_response_size
        .max(settings.max_stream_buffer_size);
    bytes(answer + ENTRY_HEAD_MAX)
}

/// The host and port of the url, which may hold a password before them.
fn place_of_redis(settings: &CacheSettings) -> String {
    let url = settings.redis.url.as_ref().map_or("", |url| &*url.0);
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
    let host = host.split(['/', '?']).next().unwrap_or_default();
    format!("response_cache.redis.url: {host}")
}

async fn warm(settings: &CacheSettings) -> Result<StoreTierSettings, String> {
    let l2 = &settings.l2;
    let said = |value: &Option<String>| value.clone().unwrap_or_default();
    let place = match l2.kind {
        L2Type::S3 => format!(
            "response_cache.l2: bucket {} at {}",
            said(&l2.bucket),
            said(&l2.endpoint)
        ),
        L2Type::Disk => format!("response_cache.l2.directory: {}", said(&l2.directory)),
    };
    let (store, name): (Arc<dyn Store>, _) = match l2.kind {
        L2Type::S3 => (Arc::new(object_store(settings)?), "s3"),
        L2Type::Disk => {
            let disk = DiskSettings {
                directory: PathBuf::from(l2.directory.as_deref().unwrap_or_default()),
                bytes_max: l2.max_bytes,
                value_bytes_max: value_max(settings),
                request_timeout: l2.request_timeout,
            };
            let disk = DiskStore::open(disk).await;
            let disk = disk.map_err(|e| format!("response_cache.l2.directory: {}", e.detail))?;
            (Arc::new(disk), "disk")
        }
    };
    let ttl = l2.ttl_override.unwrap_or(settings.ttl);
    Ok(StoreTierSettings {
        store,
        budget: l2.lookup_budget,
        put_timeout: l2.request_timeout,
        place: place.into(),
        sweep: l2.sweep_interval.map(|every| (every, ttl)),
        stats: Arc::new(TierStats::new(name)),
    })
}

fn object_store(settings: &CacheSettings) -> Result<S3Store, String> {
    let l2 = &settings.l2;
    let fault = |error: storage::StoreError| format!("response_cache.l2: {}", error.detail);
    let credentials = match (&l2.access_key, &l2.secret_key) {
        (Some(key), Some(secret)) => Credentials::new(&*key.0, &*secret.0),
        _ => Credentials::from_environment().map_err(fault)?,
    };
    let store = S3Store::open(S3Settings {
        endpoint: l2.endpoint.clone().unwrap_or_default(),
        bucket: l2.bucket.clone().unwrap_or_default(),
        key_prefix: l2.key_prefix.clone(),
        region: l2.region.clone(),
        credentials,
        ca_file: l2.ca_file.as_ref().map(PathBuf::from),
        connect_timeout: l2.connect_timeout,
        request_timeout: l2.request_timeout,
        value_bytes_max: value_max(settings),
        requests_max: OBJECT_CALLS_MAX,
    });
    store.map_err(fault)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{Environment, Source, load};

    #[test]
    fn log_lines_name_the_host_of_redis_and_never_its_password() {
        for (url, place) in [
            ("redis://host:6379", "host:6379"),
            ("rediss://user:p@ss@host:6379/2", "host:6379"),
            ("redis://:secret@[::1]:7000?x=1", "[::1]:7000"),
        ] {
            let text = format!(
                "backends: [{{name: a, url: 'http://a'}}]\nresponse_cache: {{enabled: true, backend: redis, redis: {{url: '{url}'}}}}"
            );
            let name = "test".into();
            let loaded = load(&[Source { name, text }], &Environment::new());
            let settings = loaded.unwrap_or_else(|faults| panic!("{faults}")).settings;
            let said = place_of_redis(&settings.response_cache);
            assert_eq!(said, format!("response_cache.redis.url: {place}"));
        }
    }
}
