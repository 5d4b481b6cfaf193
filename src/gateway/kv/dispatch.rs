//! Tells the index where a request went, and how that ended: what was sent somewhere counts as held
//! there, until its own events say so, or for as long as an entry lives where there are none.

use super::Found;
use actix::Addr;
use actors::backend::{Backend, Standing};
use actors::index_shard::{Checked, DispatchEnded, Dispatched, Fate, HandedOver, IndexShard};
use actors::kv_index::KvIndexHandle;
use actors::placement::Placement;
use actors::support::mailbox::Mailbox;
use routing::averages;
use routing::block::BlockHash;
use routing::prefix_index::HolderId;
use routing::score::{Basis, Reach};
use std::sync::Arc;
use std::time::Duration;

/// A prompt that was sent to a backend: counts as held there, until it is told how it went.
pub struct Dispatch {
    shard: Addr<IndexShard>,
    holder: HolderId,
    cuts: Vec<Sent>,
    standing: Arc<Standing>,
    served: bool,
}

/// The prompt, cut in one way.
struct Sent {
    chain: Arc<[BlockHash]>,
    basis: Basis,
}

impl Dispatch {
    /// Tells the index that a request goes to this backend, where it finds this.
    pub fn new(found: &Found, backend: &Backend, reach: Option<&Reach>) -> Option<Self> {
        let reach = reach?;
        let holder = reach.memory?.holder;
        let ttft = backend.load(tokio::time::Instant::now().into_std()).ttft_us;
        let hold = averages::hold(ttft.map(Duration::from_micros));
        let cuts = found.cuts_at(backend, reach).map(|cut| {
            // bounded by the requests in flight
            found.shard.do_send(Dispatched {
                holder,
                chain: cut.chain.clone(),
                hold,
                queued: Mailbox::IndexShard.enter(),
            });
            Sent {
                chain: cut.chain.clone(),
                basis: cut.basis,
            }
        });
        Some(Dispatch {
            shard: found.shard.clone(),
            holder,
            cuts: cuts.collect(),
            standing: backend.spec.kv.standing.clone(),
            served: false,
        })
    }

    /// The first byte came: the backend has computed the prompt. What no event will tell is believed from now on, not
    /// from the end of an answer that may take longer than what was sent counts.
    pub fn served(&mut self) {
        self.served = true;
        self.standing.count_served();
        let by_text = self.cuts.extract_if(.., |sent| sent.basis == Basis::Text);
        let (shard, holder) = (&self.shard, self.holder);
        by_text.for_each(|sent| end(shard, holder, sent, Fate::Believed));
    }
}

/// Tells the index whether a prompt found about what it was believed to find at a backend that announces nothing.
pub fn checked(index: &KvIndexHandle, reach: &Reach, found: bool) {
    let shard = index.shard.load();
    if let (Some(shard), Some(memory)) = (&*shard, reach.memory) {
        let holder = memory.holder;
        // one for each answer
        shard.do_send(Checked { holder, found });
    }
}

/// A prompt that storage will have once its prefill is done.
pub struct Stored {
    shard: Addr<IndexShard>,
    namespace: HolderId,
    chains: Vec<Arc<[BlockHash]>>,
}

impl Stored {
    /// For a worker that writes its storage through; none where nothing is known of the prompt's blocks.
    pub fn new(found: &Found, placement: &Placement) -> Option<Self> {
        let backend = placement.in_flight.backend();
        let namespace = backend.spec.kv.writes?;
        let cuts = found.cuts_at(backend, placement.reach.as_ref()?);
        let by_tokens = cuts.filter(|cut| cut.basis == Basis::Tokens);
        Some(Stored {
            shard: found.shard.clone(),
            namespace,
            chains: by_tokens.map(|cut| cut.chain.clone()).collect(),
        })
    }

    /// It is done.
    pub fn tell(self) {
        for chain in self.chains {
            // bounded by the requests in flight
            self.shard.do_send(HandedOver {
                namespace: self.namespace,
                chain,
            });
        }
    }
}

impl Drop for Dispatch {
    fn drop(&mut self) {
        let fate = match self.served {
            false => Fate::Withdrawn,
            true => Fate::Served,
        };
        for sent in self.cuts.drain(..) {
            end(&self.shard, self.holder, sent, fate);
        }
    }
}

/// Bounded by the requests in flight.
fn end(shard: &Addr<IndexShard>, holder: HolderId, sent: Sent, fate: Fate) {
    let chain = sent.chain;
    shard.do_send(DispatchEnded {
        holder,
        chain,
        fate,
    });
}
