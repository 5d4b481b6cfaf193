//! Through storage that both engines reach, such as VAST: prefill writes the prompt's blocks there,
//! decode finds them by their hashes. Neither needs to know of the other. Operators may add parameters
//! of their engines' own.

use super::prefill::{decode_body, prefill_body};
use super::{Connector, Lack, Leg, Order, Prefilled, Split};

/// See the module.
#[derive(Debug, Clone, Default)]
pub struct SharedStorage {
    /// `kv_transfer_params` for the prefill leg, a JSON object; none: without.
    pub prefill_params: Option<String>,
    /// The same for the decode leg.
    pub decode_params: Option<String>,
}

impl Connector for SharedStorage {
    fn name(&self) -> &'static str {
        "shared_storage"
    }

    fn order(&self) -> Order {
        Order::PrefillFirst
    }

    fn prefill(&self, split: &Split<'_>) -> Result<Leg, Lack> {
        Ok(Leg {
            body: prefill_body(split.body, self.prefill_params.as_deref()),
            request_id: split.request_id.into(),
        })
    }

    fn decode(&self, split: &Split<'_>, _: Prefilled<'_>) -> Result<Leg, Lack> {
        Ok(Leg {
            body: decode_body(split.body, self.decode_params.as_deref()),
            request_id: split.request_id.into(),
        })
    }
}
