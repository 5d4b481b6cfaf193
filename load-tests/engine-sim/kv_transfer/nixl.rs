//! vLLM's `NixlConnector`: the prefill engine keeps the prompt's blocks and tells where; the decode engine fetches them within a
//! lease. What is told goes through the client, opaque and verbatim.

use super::leg::Leg;
use super::peer::{Take, fetch};
use super::{Connector, Kv, KvFault, Loaded};
use crate::engine_client::Pin;
use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use serde_json::{Value, json};
use std::sync::Arc;

/// Set in each block id, so that it is exact only as a 64-bit integer: who reads it as a float hands over another one.
const WIDE: u64 = 1 << 62;
/// Where a block id's place in the pool ends and the hand-off's number begins.
const PLACE_BITS: u32 = 32;

pub struct Nixl;

impl Connector for Nixl {
    fn pins(&self, _: &Kv, leg: &Leg) -> bool {
        leg.wish.says("do_remote_decode")
    }

    fn load<'a>(
        &'a self,
        kv: &'a Arc<Kv>,
        leg: &'a Leg,
    ) -> LocalBoxFuture<'a, Result<Loaded, KvFault>> {
        async move {
            match leg.wish.says("do_remote_prefill") {
                true => load(kv, leg).await,
                false => Ok(0..0),
            }
        }
        .boxed_local()
    }

    fn save<'a>(
        &'a self,
        kv: &'a Arc<Kv>,
        leg: &'a Leg,
        pin: Option<Pin>,
    ) -> LocalBoxFuture<'a, Option<Value>> {
        async move { Some(save(kv, leg, pin?)) }.boxed_local()
    }
}

async fn load(kv: &Kv, leg: &Leg) -> Result<Loaded, KvFault> {
    let wish = &leg.wish;
    let needed = |name: &str| {
        let told = wish.text(name);
        told.ok_or_else(|| KvFault::Missing(format!("kv_transfer_params have no {name}")))
    };
    let (host, port) = (needed("remote_host")?, needed("remote_port")?);
    let wanted = Take {
        key: key(&needed("remote_request_id")?),
        engine_id: Some(needed("remote_engine_id")?),
        block_ids: Some(block_ids(wish.param("remote_block_ids"))?),
        from: 0,
        wait_ms: 0,
    };
    fetch(kv, leg, &format!("{host}:{port}"), wanted).await
}

fn block_ids(told: Option<&Value>) -> Result<Vec<u64>, KvFault> {
    let ids = told.and_then(Value::as_array);
    ids.and_then(|ids| ids.iter().map(Value::as_u64).collect())
        .ok_or_else(|| KvFault::Missing("remote_block_ids are no list of integers".to_owned()))
}

fn save(kv: &Arc<Kv>, leg: &Leg, pin: Pin) -> Value {
    let number = fastrand::u64(..1 << 29);
    let request = match leg.request_id.as_str() {
        "" => format!("{number:08x}"),
        id => format!("{id}-{number:08x}"),
    };
    let wide = |place: &u32| WIDE | number << PLACE_BITS | u64::from(*place);
    let block_ids: Vec<u64> = pin.blocks().iter().map(wide).collect();
    let told = json!({
        "do_remote_prefill": true,
        "do_remote_decode": false,
        "remote_block_ids": block_ids,
        "remote_engine_id": kv.engine_id,
        "remote_request_id": request,
        "remote_host": kv.host,
        "remote_port": kv.port,
        "tp_size": kv.config.tensor_parallel_size,
    });
    kv.offer(key(&request), kv.parcel(leg, block_ids, Some(pin)));
    told
}

fn key(request: &str) -> String {
    format!("nixl/{request}")
}
