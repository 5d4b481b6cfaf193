//! Storage that engines share, such as VAST: who writes leaves the prompt's full blocks there when the prefill is done, who reads
//! loads those that are there and computes the rest. Nothing needs to be said in requests, and nothing can be refused.

use super::leg::Leg;
use super::{Connector, Kv, KvFault, Loaded, StoreAt};
use crate::config::{KvRole, SimConfig};
use crate::engine_client::Pin;
use crate::event_log::CacheEvent;
use crate::kv_cache::BlockHash;
use crate::kv_store::client::StoreClient;
use crate::kv_store::{Blocks, in_process};
use crate::metrics::{Metrics, add};
use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use serde_json::Value;
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Runs of evicted blocks that may wait for the store.
const OFFLOADS_MAX: usize = 1024;

pub struct SharedStorage;

impl Connector for SharedStorage {
    fn pins(&self, _: &Kv, _: &Leg) -> bool {
        false
    }

    fn load<'a>(
        &'a self,
        kv: &'a Arc<Kv>,
        leg: &'a Leg,
    ) -> LocalBoxFuture<'a, Result<Loaded, KvFault>> {
        async move { Ok(load(kv, leg).await) }.boxed_local()
    }

    fn save<'a>(
        &'a self,
        kv: &'a Arc<Kv>,
        leg: &'a Leg,
        _: Option<Pin>,
    ) -> LocalBoxFuture<'a, Option<Value>> {
        async move {
            if kv.writes() {
                save(kv, leg).await;
            }
            None
        }
        .boxed_local()
    }
}

/// A store that does not answer in time counts as an empty one.
async fn load(kv: &Kv, leg: &Leg) -> Loaded {
    let Some(store) = kv.store.as_ref().filter(|_| kv.reads()) else {
        return 0..0;
    };
    let block_size = kv.config.block_size;
    let hashes = leg.reusable(kv.config.seed, block_size);
    let cached = kv.engine.find(hashes.clone()).await;
    let wanted = hashes[cached..].to_vec();
    if wanted.is_empty() {
        return 0..0;
    }
    match timeout(kv.load_patience(), store.get(&blocks(kv, wanted))).await {
        Ok(Ok(found)) => cached * block_size..(cached + found) * block_size,
        late => {
            let why = late.map_or("no answer in time".to_owned(), |answer| {
                answer.err().unwrap_or_default()
            });
            tracing::warn!(why, "store gave no KV blocks, computing");
            add(&kv.metrics.load_failures, 1);
            0..0
        }
    }
}

async fn save(kv: &Kv, leg: &Leg) {
    let hashes = leg.full_blocks(kv.config.seed, kv.config.block_size);
    let Some(store) = kv.store.as_ref().filter(|_| !hashes.is_empty()) else {
        return;
    };
    match timeout(kv.load_patience(), store.put(&blocks(kv, hashes.clone()))).await {
        Ok(Ok(0)) => {} // whoever wrote them has said so
        Ok(Ok(_)) => {
            let block_size = kv.config.block_size;
            let copied = CacheEvent::Copied { hashes, block_size };
            kv.engine.announce(copied).await;
        }
        late => {
            let why = late.map_or("no answer in time".to_owned(), |answer| {
                answer.err().unwrap_or_default()
            });
            tracing::warn!(why, "store took no KV blocks");
            add(&kv.metrics.save_failures, 1);
        }
    }
}

fn blocks(kv: &Kv, hashes: Vec<BlockHash>) -> Blocks {
    Blocks {
        namespace: kv.namespace.clone(),
        hashes,
        block_bytes: kv.config.kv_bytes_per_token * kv.config.block_size as u64,
    }
}

/// Takes blocks that an engine offloads when it evicts them, and writes them to its store. None where it does not.
pub fn offload(config: &SimConfig, metrics: &Arc<Metrics>) -> Option<mpsc::Sender<Vec<BlockHash>>> {
    let role = config.kv_transfer.as_ref()?.kv_role;
    if !config.kv_event_quirks.offload || role == KvRole::KvConsumer {
        return None;
    }
    let store = store_of(config)?;
    let block_bytes = config.kv_bytes_per_token * config.block_size as u64;
    let (namespace, metrics) = (namespace_of(config), metrics.clone());
    let (offloads, mut evicted) = mpsc::channel(OFFLOADS_MAX);
    actix_rt::spawn(async move {
        while let Some(hashes) = evicted.recv().await {
            let blocks = Blocks {
                namespace: namespace.clone(),
                hashes,
                block_bytes,
            };
            if let Err(why) = store.put(&blocks).await {
                tracing::warn!(why, "store took no evicted KV blocks");
                add(&metrics.save_failures, 1);
            }
        }
    });
    Some(offloads)
}

/// The store behind a shared-storage connector.
pub fn store_of(config: &SimConfig) -> Option<StoreClient> {
    let sharing = &config.kv_sharing;
    let extra = &config.kv_transfer.as_ref()?.kv_connector_extra_config;
    match sharing.store.as_ref()? {
        StoreAt::Url(url) => Some(StoreClient::There(url.clone())),
        StoreAt::InProcess => {
            let endpoint = extra.get("vast_endpoint").and_then(Value::as_str);
            let mut settings = sharing.store_settings;
            settings.time_scale = config.time_scale;
            let store = in_process(endpoint.unwrap_or_default(), settings);
            Some(StoreClient::Here(store))
        }
    }
}

/// The namespace of an engine's blocks in its store. The block names in it depend on the engine's seed as well, as those of a vLLM
/// depend on its hash seed.
pub fn namespace_of(config: &SimConfig) -> String {
    let extra = config.kv_transfer.as_ref();
    let namespace = extra
        .and_then(|transfer| {
            transfer
                .kv_connector_extra_config
                .get("kv_namespace")?
                .as_str()
        })
        .unwrap_or("default");
    let (model, block, dtype) = (config.model(), config.block_size, &config.kv_cache_dtype);
    format!("{namespace}|{model}|{block}|{dtype}")
}
