//! Where each step's events become a batch, and where listeners get them: at once over a channel, or later from the log. The
//! faults of [`KvEventQuirks`] that concern sequences are made here, so that ZeroMQ and HTTP show the same ones.

use super::{KvEventQuirks, KvEvents};
use crate::event_log::{CacheEvent, EventBatch, EventLog};
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::{broadcast, mpsc};

/// Batches that an HTTP listener may be behind. Further behind, it is disconnected and may resume from the log.
const LAG_MAX: usize = 1024;

/// One engine's events.
#[derive(Debug)]
pub struct Feed {
    quirks: KvEventQuirks,
    block_size: usize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    log: EventLog,
    /// Batches since the process started, whatever their numbers.
    published: u64,
    /// Waits for its successor, to be sent after it.
    held: Option<Arc<EventBatch>>,
    live: broadcast::Sender<Arc<EventBatch>>,
    publisher: Option<mpsc::Sender<Arc<EventBatch>>>,
}

/// Why a subscription is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The listener was too slow.
    Lagged,
    /// The engine is gone.
    Stopped,
}

/// What one listener is still to get, in order.
#[derive(Debug)]
pub struct Subscription {
    backlog: std::vec::IntoIter<Arc<EventBatch>>,
    live: broadcast::Receiver<Arc<EventBatch>>,
}

impl Feed {
    /// Nothing happened yet. Blocks have `block_size` tokens.
    pub fn new(settings: &KvEvents, quirks: KvEventQuirks, block_size: usize) -> Self {
        Self {
            quirks,
            block_size,
            state: Mutex::new(State {
                log: EventLog::new(settings.buffer_steps),
                published: 0,
                held: None,
                live: broadcast::channel(LAG_MAX).0,
                publisher: None,
            }),
        }
    }

    /// Appends one step's events and sends them out; a step without any makes no batch. True when the settings want a restart now.
    pub fn publish(&self, ts: f64, events: Vec<CacheEvent>) -> bool {
        if events.is_empty() {
            return false;
        }
        let events = self.disfigured(events);
        let mut state = self.state();
        state.published += 1;
        let restart = self.quirks.restart_after == Some(state.published);
        if self.quirks.lose_seq == Some(state.log.next_seq()) {
            state.log.skip();
            return restart;
        }
        let batch = state.log.append(ts, events);
        let is_nth = |every: Option<u64>| {
            every.is_some_and(|every| (batch.seq + 1).is_multiple_of(every.max(1)))
        };
        if is_nth(self.quirks.drop_every) {
            return restart;
        }
        let held = state.held.take();
        if held.is_none() && is_nth(self.quirks.reorder_every) {
            state.held = Some(batch);
            return restart;
        }
        state.send(batch);
        if let Some(held) = held {
            state.send(held);
        }
        restart
    }

    /// Forgets all batches and counts from 0 again, as a new process does. Listeners stay connected.
    pub fn restart(&self) {
        let mut state = self.state();
        state.held = None;
        state.log.restart();
    }

    /// The batches still kept, from `seq` on.
    pub fn since(&self, seq: u64) -> Vec<Arc<EventBatch>> {
        self.state().log.since(seq)
    }

    /// What follows `seen`, kept or to come. Everything that is kept when nothing was seen, and also when what was seen does not
    /// exist here: the engine has started over since then, and the first number tells it.
    pub fn subscribe(&self, seen: Option<u64>) -> Subscription {
        let state = self.state();
        let from = match seen {
            Some(seen) if seen < state.log.next_seq() => seen + 1,
            _ => 0,
        };
        Subscription {
            backlog: state.log.since(from).into_iter(),
            live: state.live.subscribe(),
        }
    }

    /// The queue of the one publisher; `capacity` batches may wait in it.
    pub fn attach_publisher(&self, capacity: usize) -> mpsc::Receiver<Arc<EventBatch>> {
        let (queue, batches) = mpsc::channel(capacity);
        self.state().publisher = Some(queue);
        batches
    }

    /// The events as the settings want them.
    fn disfigured(&self, events: Vec<CacheEvent>) -> Vec<CacheEvent> {
        let mut changed = Vec::with_capacity(events.len());
        for event in events {
            let event = match event {
                CacheEvent::Removed { hashes } if self.quirks.offload => CacheEvent::Offloaded {
                    hashes,
                    block_size: self.block_size,
                },
                event => event,
            };
            if self.quirks.duplicate && event != CacheEvent::Cleared {
                changed.push(event.clone());
            }
            changed.push(event);
        }
        changed
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nobody panics with this lock")
    }
}

impl State {
    fn send(&self, batch: Arc<EventBatch>) {
        if let Some(publisher) = &self.publisher
            && let Err(mpsc::error::TrySendError::Full(batch)) = publisher.try_send(batch.clone())
        {
            tracing::warn!(seq = batch.seq, "publisher's queue is full, batch not sent");
        }
        let _ = self.live.send(batch); // nobody may be listening
    }
}

impl Subscription {
    /// The next batch. Safe to cancel.
    ///
    /// # Errors
    /// The reason why none will follow.
    pub async fn next(&mut self) -> Result<Arc<EventBatch>, Ended> {
        if let Some(batch) = self.backlog.next() {
            return Ok(batch);
        }
        self.live.recv().await.map_err(|fault| match fault {
            broadcast::error::RecvError::Lagged(_) => Ended::Lagged,
            broadcast::error::RecvError::Closed => Ended::Stopped,
        })
    }
}

#[cfg(test)]
#[path = "feed_test.rs"]
mod test;
