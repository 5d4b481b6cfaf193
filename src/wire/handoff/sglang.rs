//! SGLang: both engines get the same body with a room of their own at the prefill engine's bootstrap
//! port. The client gets decode's answer; prefill's is read and dropped.

use super::{Connector, Lack, Leg, Order, Prefilled, Split};
use crate::splice::{Change, change_members};

/// Where SGLang's engines meet, unless told otherwise.
pub const BOOTSTRAP_PORT: u16 = 8998;

/// See the module.
#[derive(Debug, Clone, Copy, Default)]
pub struct SgLang;

fn leg(split: &Split<'_>) -> Leg {
    let host = serde_json::Value::from(split.prefill.host.as_str()).to_string();
    let port = split.prefill.bootstrap_port.unwrap_or(BOOTSTRAP_PORT);
    let (port, room) = (port.to_string(), split.transfer_id.to_string());
    let changes = [
        ("bootstrap_host", Change::Put(&host)),
        ("bootstrap_port", Change::Put(&port)),
        ("bootstrap_room", Change::Put(&room)),
    ];
    let body = change_members(split.body, &changes);
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
