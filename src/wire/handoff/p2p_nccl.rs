//! P2P NCCL (vLLM): the request id names both engines' sockets, and prefill pushes the blocks.

use super::prefill::prefill_body;
use super::{Connector, Lack, Leg, Order, Peer, Prefilled, Split};

/// See the module.
#[derive(Debug, Clone, Copy, Default)]
pub struct P2pNccl;

fn address<'a>(peer: &'a Peer, lack: &'static str) -> Result<&'a str, Lack> {
    peer.zmq_address.as_deref().ok_or(Lack(lack))
}

/// `___prefill_addr_{P}___decode_addr_{D}_{id}`; the transfer id keeps hand-offs of one request apart.
fn request_id(split: &Split<'_>) -> Result<String, Lack> {
    let prefill = address(split.prefill, "the prefill engine's zmq_address")?;
    let decode = address(split.decode, "the decode engine's zmq_address")?;
    Ok(format!(
        "___prefill_addr_{prefill}___decode_addr_{decode}_{:032x}",
        u128::from(split.transfer_id)
    ))
}

impl Connector for P2pNccl {
    fn name(&self) -> &'static str {
        "p2p_nccl"
    }

    fn order(&self) -> Order {
        Order::PrefillFirst
    }

    fn prefill(&self, split: &Split<'_>) -> Result<Leg, Lack> {
        Ok(Leg {
            body: prefill_body(split.body, None),
            request_id: request_id(split)?,
        })
    }

    fn decode(&self, split: &Split<'_>, _: Prefilled<'_>) -> Result<Leg, Lack> {
        Ok(Leg {
            body: split.body.clone(),
            request_id: request_id(split)?,
        })
    }
}
