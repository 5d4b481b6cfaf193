//! SGLang's rooms: both legs have the same body, which names a room at the prefill engine. Neither goes on without the other: the
//! prefill waits for its decode before it computes, the decode for the blocks before it is scheduled.

use super::leg::Leg;
use super::peer::{Take, fetch, promise};
use super::{Connector, Kv, KvFault, Loaded};
use crate::config::KvRole;
use crate::engine_client::Pin;
use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use serde_json::Value;
use std::sync::Arc;
use tokio::time::timeout;

/// SGLang's default.
const BOOTSTRAP_PORT: u16 = 8998;

pub struct Sglang;

impl Connector for Sglang {
    fn pins(&self, kv: &Kv, leg: &Leg) -> bool {
        is_prefill(kv, leg)
    }

    fn load<'a>(
        &'a self,
        kv: &'a Arc<Kv>,
        leg: &'a Leg,
    ) -> LocalBoxFuture<'a, Result<Loaded, KvFault>> {
        async move {
            match is_prefill(kv, leg) {
                true => meet(kv, &key(leg)?).await,
                false => load(kv, leg).await,
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

/// The prefill leg opens the room and waits for the decode leg.
async fn meet(kv: &Arc<Kv>, key: &str) -> Result<Loaded, KvFault> {
    promise(kv, key)?;
    match timeout(kv.partner_patience(), kv.depot.until_awaited(key)).await {
        Ok(()) => Ok(0..0),
        Err(_) => {
            kv.depot.withdraw(key, "was given up");
            Err(KvFault::Fatal(format!("{key}: the decode leg never came")))
        }
    }
}

async fn load(kv: &Kv, leg: &Leg) -> Result<Loaded, KvFault> {
    let host = match &leg.wish.bootstrap_host {
        Some(Value::String(host)) => host,
        _ => return Err(KvFault::Fatal("bootstrap_host is missing".to_owned())),
    };
    let wanted = Take {
        key: key(leg)?,
        engine_id: None,
        block_ids: None,
        from: 0,
        wait_ms: kv.partner_patience().as_millis() as u64,
    };
    let address = format!("{host}:{}", port(leg));
    fetch(kv, leg, &address, wanted).await
}

/// By its role; an engine that plays both is asked as the one whose bootstrap port the body names.
fn is_prefill(kv: &Kv, leg: &Leg) -> bool {
    match kv.role {
        KvRole::KvProducer => true,
        KvRole::KvConsumer => false,
        KvRole::KvBoth => port(leg) == u64::from(kv.port),
    }
}

fn port(leg: &Leg) -> u64 {
    let port = leg.wish.bootstrap_port.as_ref().and_then(Value::as_u64);
    port.unwrap_or(u64::from(BOOTSTRAP_PORT))
}

fn key(leg: &Leg) -> Result<String, KvFault> {
    let room = leg.wish.bootstrap_room.as_ref().and_then(Value::as_u64);
    room.map(|room| format!("room {room}"))
        .ok_or_else(|| KvFault::Fatal("bootstrap_room is no integer".to_owned()))
}
