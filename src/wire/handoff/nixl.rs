//! NIXL (vLLM): prefill keeps the blocks and says where they are; decode fetches them. What it says is
//! for the other engine alone and passes as it stands. Blocks are pinned until fetched, or for 30 s.

use super::prefill::{decode_body, prefill_body};
use super::{Connector, Lack, Leg, Order, Prefilled, Split};

/// See the module.
#[derive(Debug, Clone, Copy, Default)]
pub struct Nixl;

const ASK_TO_KEEP: &str = r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;

impl Connector for Nixl {
    fn name(&self) -> &'static str {
        "nixl"
    }

    fn order(&self) -> Order {
        Order::PrefillFirst
    }

    fn prefill(&self, split: &Split<'_>) -> Result<Leg, Lack> {
        Ok(Leg {
            body: prefill_body(split.body, Some(ASK_TO_KEEP)),
            request_id: split.request_id.into(),
        })
    }

    /// Without parameters decode computes the prompt itself: prefill had nothing to hand over.
    fn decode(&self, split: &Split<'_>, prefilled: Prefilled<'_>) -> Result<Leg, Lack> {
        let params = match prefilled {
            Prefilled::Params(params) => Some(params),
            // prefill has nothing to hand over: decode computes the prompt itself
            Prefilled::WithoutParams | Prefilled::NotAwaited => None,
        };
        Ok(Leg {
            body: decode_body(split.body, params),
            request_id: split.request_id.into(),
        })
    }

    fn pins(&self) -> bool {
        true
    }

    fn fault_of(&self, prefilled: Prefilled<'_>) -> Option<&'static str> {
        let Prefilled::Params(params) = prefilled else {
            return None;
        };
        #[derive(serde::Deserialize)]
        struct Params<'a> {
            #[serde(borrow, default)]
            remote_engine_id: Option<&'a serde_json::value::RawValue>,
            #[serde(borrow, default)]
            remote_block_ids: Option<&'a serde_json::value::RawValue>,
        }
        match serde_json::from_str::<Params<'_>>(params) {
            Ok(Params {
                remote_engine_id: None,
                ..
            }) => Some("kv_transfer_params without remote_engine_id"),
            Ok(Params {
                remote_block_ids: None,
                ..
            }) => Some("kv_transfer_params without remote_block_ids"),
            Ok(_) => None,
            Err(_) => Some("kv_transfer_params that cannot be read"),
        }
    }
}
