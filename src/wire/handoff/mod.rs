//! Split serving as engines speak it: what of a request each leg gets, so that one engine computes the
//! prompt's KV cache and another generates from it. One file per way of handing over (a connector);
//! nothing here sends anything.

mod mooncake;
mod nixl;
mod p2p_nccl;
mod params;
mod prefill;
mod sglang;
mod shared_storage;

pub use mooncake::Mooncake;
pub use nixl::Nixl;
pub use p2p_nccl::P2pNccl;
pub use params::{ParamsFault, transfer_params};
pub use sglang::{BOOTSTRAP_PORT, SgLang};
pub use shared_storage::SharedStorage;

use bytes::Bytes;

/// Which leg may begin when.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Decode is sent once prefill has answered.
    PrefillFirst,
    /// Both are sent at once and find each other.
    Together,
}

/// One engine of a pair, as far as the other must know of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Peer {
    /// Its host, as the other engine reaches it.
    pub host: String,
    /// `host:port` of its ZeroMQ socket, for connectors that push KV.
    pub zmq_address: Option<String>,
    /// The port where engines meet.
    pub bootstrap_port: Option<u16>,
    /// Its engine id, as it says it itself.
    pub engine_id: Option<String>,
}

/// A request that is to be split.
#[derive(Debug, Clone, Copy)]
pub struct Split<'a> {
    /// The client's body, a JSON object, without `kv_transfer_params` of its own.
    pub body: &'a Bytes,
    /// The same for both legs, and of no other request.
    pub request_id: &'a str,
    /// Of no other hand-off, also when a request is handed over once more: below 2^63.
    pub transfer_id: u64,
    /// Who computes the prompt.
    pub prefill: &'a Peer,
    /// Who generates.
    pub decode: &'a Peer,
}

/// What one engine is sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leg {
    /// The body.
    pub body: Bytes,
    /// For `X-Request-Id`.
    pub request_id: String,
}

/// What prefill answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prefilled<'a> {
    /// Nothing yet: both legs go together.
    NotAwaited,
    /// Its top-level `kv_transfer_params`, as they stand there.
    Params(&'a str),
    /// An answer without any.
    WithoutParams,
}

/// A way to hand a prompt's KV cache from one engine to another.
pub trait Connector: std::fmt::Debug + Send + Sync {
    /// As `connector` in the settings has it.
    fn name(&self) -> &'static str;

    /// Which leg may begin when.
    fn order(&self) -> Order;

    /// What the prefill engine is sent.
    ///
    /// # Errors
    /// What the pair lacks.
    fn prefill(&self, split: &Split<'_>) -> Result<Leg, Lack>;

    /// What the decode engine is sent.
    ///
    /// # Errors
    /// What the pair lacks.
    fn decode(&self, split: &Split<'_>, prefilled: Prefilled<'_>) -> Result<Leg, Lack>;

    /// Whether prefill holds blocks for decode alone, until decode has fetched them: then decode must be sent the
    /// request also when the client has left meanwhile, and be cancelled afterwards.
    fn pins(&self) -> bool {
        false
    }

    /// What is wrong with the parameters that prefill answered with, if they cannot be what this connector hands
    /// over: then decode is not sent anything.
    fn fault_of(&self, _: Prefilled<'_>) -> Option<&'static str> {
        None
    }
}

/// What must be known of an engine for this connector, and is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lack(pub &'static str);

#[cfg(test)]
mod tests;
