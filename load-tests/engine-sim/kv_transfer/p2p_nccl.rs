//! vLLM's `P2pNcclConnector`: the request's id names both engines, the prefill engine sends the blocks to the decode engine under
//! that id, and the decode engine finds them among what it was sent.

use super::leg::Leg;
use super::peer::{bring, own};
use super::{Connector, Kv, KvFault, Loaded};
use crate::config::KvRole;
use crate::engine_client::Pin;
use crate::metrics::add;
use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use serde_json::Value;
use std::sync::Arc;

const PREFILL: &str = "___prefill_addr_";
const DECODE: &str = "___decode_addr_";

pub struct P2pNccl;

/// The addresses in a request's id: `___prefill_addr_{host:port}___decode_addr_{host:port}_{anything unique}`.
#[derive(Debug, PartialEq, Eq)]
struct Addresses<'a> {
    prefill: &'a str,
    decode: &'a str,
}

impl<'a> Addresses<'a> {
    fn parse(request_id: &'a str) -> Option<Self> {
        let (_, rest) = request_id.split_once(PREFILL)?;
        let (prefill, rest) = rest.split_once(DECODE)?;
        let host_end = rest.rfind(':')?;
        let digits = rest[host_end + 1..].bytes().take_while(u8::is_ascii_digit);
        let end = host_end + 1 + digits.count();
        (end > host_end + 1).then_some(Self {
            prefill,
            decode: &rest[..end],
        })
    }

    /// Whether an engine is the one that sends.
    fn is_prefill(&self, kv: &Kv) -> bool {
        match kv.role {
            KvRole::KvProducer => true,
            KvRole::KvConsumer => false,
            KvRole::KvBoth => self.prefill == format!("{}:{}", kv.host, kv.port),
        }
    }
}

impl Connector for P2pNccl {
    /// The blocks leave before the answer ends.
    fn pins(&self, _: &Kv, _: &Leg) -> bool {
        false
    }

    fn load<'a>(
        &'a self,
        kv: &'a Arc<Kv>,
        leg: &'a Leg,
    ) -> LocalBoxFuture<'a, Result<Loaded, KvFault>> {
        async move {
            match Addresses::parse(&leg.request_id) {
                Some(addresses) if !addresses.is_prefill(kv) => {
                    own(kv, leg, &key(&leg.request_id)).await
                }
                _ => Ok(0..0),
            }
        }
        .boxed_local()
    }

    fn save<'a>(
        &'a self,
        kv: &'a Arc<Kv>,
        leg: &'a Leg,
        _: Option<Pin>,
    ) -> LocalBoxFuture<'a, Option<Value>> {
        async move {
            let addresses = Addresses::parse(&leg.request_id)?;
            if addresses.is_prefill(kv)
                && let Err(why) = bring(kv, leg, addresses.decode, key(&leg.request_id)).await
            {
                tracing::warn!(why, "decode engine did not get its KV blocks");
                add(&kv.metrics.save_failures, 1);
            }
            None
        }
        .boxed_local()
    }
}

fn key(request_id: &str) -> String {
    format!("request {request_id}")
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_request_id_names_both_engines() {
        let id = "cmpl-___prefill_addr_10.0.1.2:21001___decode_addr_my_host:22001_93923d63113b";
        let expected = Addresses {
            prefill: "10.0.1.2:21001",
            decode: "my_host:22001",
        };
        assert_eq!(Addresses::parse(id), Some(expected));
        assert_eq!(
            Addresses::parse("___prefill_addr_a:1___decode_addr_b"),
            None
        );
        assert_eq!(Addresses::parse("93923d63113b"), None);
    }
}
