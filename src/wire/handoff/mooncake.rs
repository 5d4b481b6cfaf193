//! Mooncake (vLLM): both legs carry the same transfer id and meet at the prefill engine's bootstrap
//! address. The engine id is what `GET {bootstrap}/query` says.

use super::prefill::{decode_body, prefill_body};
use super::{Connector, Lack, Leg, Order, Prefilled, Split};

/// See the module.
#[derive(Debug, Clone, Copy, Default)]
pub struct Mooncake;

/// A string as JSON.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

impl Connector for Mooncake {
    fn name(&self) -> &'static str {
        "mooncake"
    }

    fn order(&self) -> Order {
        Order::Together
    }

    fn prefill(&self, split: &Split<'_>) -> Result<Leg, Lack> {
        let id = quoted(&split.transfer_id.to_string());
        let params =
            format!(r#"{{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":{id}}}"#);
        Ok(Leg {
            body: prefill_body(split.body, Some(&params)),
            request_id: split.request_id.into(),
        })
    }

    fn decode(&self, split: &Split<'_>, _: Prefilled<'_>) -> Result<Leg, Lack> {
        let engine = split.prefill.engine_id.as_ref();
        let engine = quoted(engine.ok_or(Lack("the prefill engine's id"))?);
        let port = split
            .prefill
            .bootstrap_port
            .ok_or(Lack("the prefill engine's bootstrap port"))?;
        let address = quoted(&format!("{}:{port}", split.prefill.host));
        let id = quoted(&split.transfer_id.to_string());
        let params = format!(
            r#"{{"do_remote_prefill":true,"do_remote_decode":false,"transfer_id":{id},"remote_bootstrap_addr":{address},"remote_engine_id":{engine}}}"#
        );
        Ok(Leg {
            body: decode_body(split.body, Some(&params)),
            request_id: split.request_id.into(),
        })
    }
}
