//! Counts the messages that wait in the mailboxes of one kind of actor: each carries a [`Queued`],
//! which counts itself out when the message has been handled, or was dropped unhandled. A mailbox
//! itself does not tell its length.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The actors whose mailboxes are counted: those that requests or engines fill from other threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mailbox {
    /// Of [`crate::index_shard::IndexShard`].
    IndexShard,
    /// Of [`crate::response_cache::ResponseCache`].
    ResponseCache,
    /// Of [`crate::disagg_coordinator::DisaggCoordinator`].
    DisaggCoordinator,
    /// Answers on their way into the tiers outside of this process: until they are there.
    StoreTier,
}

static DEPTHS: [AtomicUsize; 4] = [const { AtomicUsize::new(0) }; 4];

impl Mailbox {
    /// All of them.
    pub const ALL: [Mailbox; 4] = [
        Mailbox::IndexShard,
        Mailbox::ResponseCache,
        Mailbox::DisaggCoordinator,
        Mailbox::StoreTier,
    ];

    /// The word used in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Mailbox::IndexShard => "index_shard",
            Mailbox::ResponseCache => "response_cache",
            Mailbox::DisaggCoordinator => "disagg_coordinator",
            Mailbox::StoreTier => "store_tier",
        }
    }

    /// Messages that were sent and have not been handled.
    pub fn depth(self) -> usize {
        DEPTHS[self as usize].load(Relaxed)
    }

    /// Counts a message in.
    pub fn enter(self) -> Queued {
        DEPTHS[self as usize].fetch_add(1, Relaxed);
        Queued(self)
    }
}

/// A message's place in a mailbox. A clone is another message's.
#[derive(Debug)]
pub struct Queued(Mailbox);

impl Clone for Queued {
    fn clone(&self) -> Self {
        self.0.enter()
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        DEPTHS[self.0 as usize].fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_counts_until_it_is_gone_and_so_does_its_clone() {
        let mailbox = Mailbox::DisaggCoordinator;
        let (before, first) = (mailbox.depth(), mailbox.enter());
        let second = first.clone();
        assert_eq!(mailbox.depth(), before + 2);
        drop(first);
        assert_eq!(mailbox.depth(), before + 1);
        drop(second);
        assert_eq!(mailbox.depth(), before);
    }
}
