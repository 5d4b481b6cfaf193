//! What gateways share of the KV index, in Redis: snapshots of event streams, who leads which, and
//! the loads of each gateway.

use crate::redis::Redis;
use crate::settings::Settings;
use actors::kv_index::KvIndexSettings;
use actors::kv_share::{
    LEASE_LAPSES, LOAD_LAPSES, Load, SNAPSHOT_LAPSES, ShareSettings, SharedStore, SharedStream,
    SharedTransport,
};
use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use routing::cache_key::short_digest;
use routing::event_stream::Recovery;
use serde_json::{Value, json};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use storage::{Pipeline, pipe};

/// Renews a lease that is ours, or takes one that is free.
const LEAD: &str = "\
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1";
/// Gateways that are told of each other.
const GATEWAYS_MAX: usize = 64;

/// Lets the streams of an index begin with what other gateways have left, where an engine does not
/// send all that it holds to whoever connects.
pub fn wire(settings: &Settings, redis: Redis, index: &mut KvIndexSettings) -> ShareSettings {
    let sharing = ShareSettings {
        store: Rc::new(RedisStore {
            redis,
            me: format!("{:016x}", fastrand::u64(..)),
        }),
        streams: Rc::default(),
    };
    follow(&sharing, settings, index, &[]);
    sharing
}

/// The same for another index in place of the one before; `kept`: sources of both, whose streams go on
/// as they are.
pub fn follow(
    sharing: &ShareSettings,
    settings: &Settings,
    index: &mut KvIndexSettings,
    kept: &[Arc<str>],
) {
    let mut streams = Vec::new();
    for source in &mut index.sources {
        if source.transport.recovery() == Recovery::Reconnect {
            continue; // it begins with all that the engine keeps
        }
        let rank = source
            .rank
            .map_or_else(String::new, |rank| format!("/{rank}"));
        let engine = engine(settings, &source.backend);
        let name: Rc<str> = format!("{}{rank}-{engine}", source.backend).into();
        let known = sharing
            .streams
            .borrow()
            .iter()
            .find(|of| of.name == name)
            .cloned();
        if let (Some(known), true) = (known, kept.contains(&source.key)) {
            streams.push(known);
            continue;
        }
        let led = Rc::new(Cell::new(false));
        let own = source
            .memories
            .iter()
            .find(|memory| memory.rank == source.rank);
        streams.push(SharedStream {
            name: name.clone(),
            holder: own.expect("a stream has a memory").holder,
            standing: source.standing.clone(),
            state: source.state.clone(),
            led: led.clone(),
        });
        source.transport = Rc::new(SharedTransport {
            inner: source.transport.clone(),
            store: sharing.store.clone(),
            stream: name,
            led,
            misled: Rc::default(),
        });
    }
    *sharing.streams.borrow_mut() = streams;
}

/// Tells engines apart that have the same name in the settings of different gateways.
fn engine(settings: &Settings, backend: &str) -> String {
    let mut sources = settings.kv_cache_index.event_sources.iter();
    let source = sources.find(|source| source.backend_name == *backend);
    let mut backends = settings.backends.iter();
    let models = backends
        .find(|spec| *spec.name == *backend)
        .map(|spec| &spec.models);
    let endpoint = source.map(|source| &source.endpoint);
    short_digest(&format!("{endpoint:?} {models:?}"))
}

struct RedisStore {
    redis: Redis,
    /// This gateway, among the others.
    me: String,
}

impl RedisStore {
    fn snapshot_key(&self, stream: &str) -> String {
        self.redis.kv_key(&format!("snapshot:{stream}"))
    }

    fn load_key(&self, gateway: &str) -> String {
        self.redis.kv_key(&format!("load:{gateway}"))
    }
}

fn millis(duration: Duration) -> u64 {
    duration.as_millis() as u64
}

fn commands(build: impl FnOnce(&mut Pipeline)) -> Pipeline {
    let mut commands = pipe();
    build(&mut commands);
    commands
}

impl SharedStore for RedisStore {
    fn load(&self, stream: &str) -> LocalBoxFuture<'static, Result<Option<Vec<u8>>, String>> {
        let (redis, key) = (self.redis.clone(), self.snapshot_key(stream));
        async move {
            let ask = commands(|c| {
                c.get(key);
            });
            let (bytes,) = redis.run(ask).await?;
            Ok(bytes)
        }
        .boxed_local()
    }

    fn age(&self, stream: &str) -> LocalBoxFuture<'static, Result<Option<Duration>, String>> {
        let (redis, key) = (self.redis.clone(), self.snapshot_key(stream));
        async move {
            let ask = commands(|c| {
                c.pttl(key);
            });
            let (left,): (i64,) = redis.run(ask).await?;
            let left = u64::try_from(left).ok().map(Duration::from_millis); // negative: gone
            Ok(left.map(|left| SNAPSHOT_LAPSES.saturating_sub(left)))
        }
        .boxed_local()
    }

    fn lead(&self, stream: &str) -> LocalBoxFuture<'static, Result<bool, String>> {
        let key = self.redis.kv_key(&format!("leader:{stream}"));
        let (redis, me) = (self.redis.clone(), self.me.clone());
        async move {
            let mut commands = pipe();
            let eval = commands.cmd("EVAL").arg(LEAD).arg(1).arg(key);
            eval.arg(me).arg(millis(LEASE_LAPSES));
            let (leads,): (i64,) = redis.run(commands).await?;
            Ok(leads == 1)
        }
        .boxed_local()
    }

    fn save(&self, stream: &str, bytes: Vec<u8>) -> LocalBoxFuture<'static, Result<(), String>> {
        let (redis, key) = (self.redis.clone(), self.snapshot_key(stream));
        async move {
            let set = commands(|c| {
                c.pset_ex(key, bytes, millis(SNAPSHOT_LAPSES));
            });
            let ((),) = redis.run(set).await?;
            Ok(())
        }
        .boxed_local()
    }

    fn keep(&self, stream: &str) -> LocalBoxFuture<'static, Result<bool, String>> {
        let (redis, key) = (self.redis.clone(), self.snapshot_key(stream));
        async move {
            let keep = commands(|c| {
                c.pexpire(key, millis(SNAPSHOT_LAPSES) as i64);
            });
            let (there,) = redis.run(keep).await?;
            Ok(there)
        }
        .boxed_local()
    }

    fn exchange(&self, mine: Vec<Load>) -> LocalBoxFuture<'static, Result<Vec<Load>, String>> {
        let (all, own) = (self.redis.kv_key("gateways"), self.load_key(&self.me));
        let (redis, me) = (self.redis.clone(), self.me.clone());
        let prefix = self.load_key("");
        async move {
            let tell = commands(|c| {
                c.sadd(&all, &me).ignore();
                c.pset_ex(own, written(&mine), millis(LOAD_LAPSES)).ignore();
                c.smembers(&all);
            });
            let (gateways,): (Vec<String>,) = redis.run(tell).await?;
            let others: Vec<String> = gateways.into_iter().filter(|g| *g != me).collect();
            let others = &others[..others.len().min(GATEWAYS_MAX)];
            if others.is_empty() {
                return Ok(Vec::new());
            }
            let ask = commands(|c| {
                for gateway in others {
                    c.get(format!("{prefix}{gateway}"));
                }
            });
            let told: Vec<Option<String>> = redis.run(ask).await?;
            let gone = others.iter().zip(&told).filter(|(_, told)| told.is_none());
            let gone: Vec<&String> = gone.map(|(gateway, _)| gateway).collect();
            if !gone.is_empty() {
                let ((),) = redis
                    .run(commands(|c| {
                        c.srem(&all, gone);
                    }))
                    .await?;
            }
            Ok(told.iter().flatten().flat_map(|text| read(text)).collect())
        }
        .boxed_local()
    }
}

fn written(loads: &[Load]) -> String {
    let loads = loads
        .iter()
        .filter(|load| load.in_flight > 0 || load.queued_tokens > 0);
    let loads: Vec<Value> = loads
        .map(|load| json!([load.backend, load.in_flight, load.queued_tokens]))
        .collect();
    Value::from(loads).to_string()
}

/// What is not as it should be is left out: another version may have written it.
fn read(text: &str) -> Vec<Load> {
    let loads: Vec<(String, u32, u64)> = serde_json::from_str(text).unwrap_or_default();
    let loads = loads.into_iter();
    loads
        .map(|(backend, in_flight, queued_tokens)| Load {
            backend,
            in_flight,
            queued_tokens,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_are_read_as_written_and_nonsense_is_none() {
        let load = |backend: &str, in_flight, queued_tokens| Load {
            backend: backend.into(),
            in_flight,
            queued_tokens,
        };
        let loads = [load("a", 3, 900), load("idle", 0, 0), load("b\"", 1, 0)];
        let told = read(&written(&loads));
        assert_eq!(told, [load("a", 3, 900), load("b\"", 1, 0)]);
        assert!(read("nonsense").is_empty() && read(r#"[["a",-1,0]]"#).is_empty());
    }
}
