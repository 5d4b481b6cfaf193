//! SGLang: both engines get the same body with a room of their own at the prefill engine's bootstrap
//! port. The client gets decode's answer; prefill's is read and dropped.

use super::prefill::with_member;
use super::{Connector, Lack, Leg, Order, Prefilled, Split};

/// Where SGLang's engines meet, unless told otherwise.
pub const BOOTSTRAP_PORT: u16 = 8998;

/// See the module.
#[derive(Debug, Clone, Copy, Default)]
pub struct SgLang;

fn leg(split: &Split<'_>) -> Leg {
    let host = serde_json::Value::from(split.prefill.host.as_str()).to_string();
    let port = split.prefill.bootstrap_port.unwrap_or(BOOTSTRAP_PORT);
    let body = with_member(split.body, "bootstrap_host", &host);
    let body = with_member(&body, "bootstrap_port", &port.to_string());
    let body = with_member(&body, "bootstrap_room", &split.transfer_id.to_string());
    Leg {
        body,
        request_id: split.request_id.into(),
    }
}

impl Connector for SgLang {
    fn name(&self) -> &'static str {
        "sglang"
    }

    fn order(&self) -> Order {
        Order::Together
    }

    fn prefill(&self, split: &Split<'_>) -> Result<Leg, Lack> {
        Ok(leg(split))
    }

    fn decode(&self, split: &Split<'_>, _: Prefilled<'_>) -> Result<Leg, Lack> {
        Ok(leg(split))
    }
}
