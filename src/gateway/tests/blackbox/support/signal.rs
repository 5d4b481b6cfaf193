//! A flag that threads wait for: lets a test say when its engine goes on.

use super::DEADLINE;
use std::sync::{Arc, Condvar, Mutex};

/// Clones are the same flag.
#[derive(Clone, Default)]
pub struct Signal(Arc<(Mutex<bool>, Condvar)>);

impl Signal {
    /// Not raised yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Lets all waiters go, now and later.
    pub fn raise(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }

    /// Whether it was raised.
    pub fn is_raised(&self) -> bool {
        *self.0.0.lock().unwrap()
    }

    /// Blocks until it is raised, or the test's deadline has passed.
    pub fn wait(&self) {
        let raised = self.0.0.lock().unwrap();
        drop(
            self.0
                .1
                .wait_timeout_while(raised, DEADLINE, |raised| !*raised)
                .unwrap(),
        );
    }
}
