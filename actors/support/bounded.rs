//! Bounds for messages: a permit travels inside the message and is free again when the message has
//! been handled. A mailbox's own capacity is no bound: a waiting sender queues past it.

use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A number of messages that may be on their way at one time.
#[derive(Debug, Clone)]
pub struct Permits(Arc<Semaphore>);

/// One message's permit.
#[derive(Debug)]
pub struct Permit(#[expect(dead_code, reason = "held for its drop")] OwnedSemaphorePermit);

impl Permits {
    /// `n` messages.
    pub fn new(n: usize) -> Self {
        Permits(Arc::new(Semaphore::new(n)))
    }

    /// Waits for a permit.
    pub async fn acquire(&self) -> Permit {
        let permit = self.0.clone().acquire_owned().await;
        Permit(permit.expect("the semaphore is never closed"))
    }

    /// How many are free.
    pub fn free(&self) -> usize {
        self.0.available_permits()
    }
}
