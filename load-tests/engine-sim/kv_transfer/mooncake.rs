//! vLLM's `MooncakeConnector`: both legs begin at once and name the same transfer; the decode engine asks the prefill engine's
//! bootstrap server for it and waits until the prefill is done.

use super::leg::Leg;
use super::peer::{Take, fetch, promise};
use super::{Connector, Kv, KvFault, Loaded};
use crate::engine_client::Pin;
use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use serde_json::Value;
use std::sync::Arc;

pub struct Mooncake;

impl Connector for Mooncake {
    fn pins(&self, _: &Kv, leg: &Leg) -> bool {
        leg.wish.says("do_remote_decode") && key(leg).is_ok()
    }

    fn load<'a>(
        &'a self,
        kv: &'a Arc<Kv>,
        leg: &'a Leg,
    ) -> LocalBoxFuture<'a, Result<Loaded, KvFault>> {
        async move {
            if leg.wish.says("do_remote_decode") {
                promise(kv, &key(leg)?)?;
            }
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
        async move {
            if let (Some(pin), Ok(key)) = (pin, key(leg)) {
                kv.offer(key, kv.parcel(leg, Vec::new(), Some(pin)));
            }
            None
        }
        .boxed_local()
    }
}

async fn load(kv: &Kv, leg: &Leg) -> Result<Loaded, KvFault> {
    let needed = |name: &str| {
        let told = leg.wish.text(name);
        told.ok_or_else(|| KvFault::Missing(format!("kv_transfer_params have no {name}")))
    };
    let wanted = Take {
        key: key(leg)?,
        engine_id: Some(needed("remote_engine_id")?),
        block_ids: None,
        from: 0,
        wait_ms: kv.partner_patience().as_millis() as u64,
    };
    fetch(kv, leg, &needed("remote_bootstrap_addr")?, wanted).await
}

fn key(leg: &Leg) -> Result<String, KvFault> {
    let id = leg.wish.text("transfer_id");
    id.map(|id| format!("mooncake/{id}"))
        .ok_or_else(|| KvFault::Missing("kv_transfer_params have no transfer_id".to_owned()))
}
