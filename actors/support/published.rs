//! A value with one writer and many readers on any thread; reading costs tens of nanoseconds.

use arc_swap::ArcSwap;
use std::sync::Arc;

/// The readers' side; clones read the same value.
#[derive(Debug)]
pub struct Published<T>(Arc<ArcSwap<T>>);

impl<T> Clone for Published<T> {
    fn clone(&self) -> Self {
        Published(self.0.clone())
    }
}

impl<T> Published<T> {
    /// Publishes a first value.
    pub fn new(value: T) -> Self {
        Published(Arc::new(ArcSwap::from_pointee(value)))
    }

    /// The value of this moment. Hold it for one decision, not longer.
    pub fn load(&self) -> Arc<T> {
        self.0.load_full()
    }

    /// Replaces the value. Only the one actor that owns it does this.
    pub(crate) fn publish(&self, value: T) {
        self.0.store(Arc::new(value));
    }
}
