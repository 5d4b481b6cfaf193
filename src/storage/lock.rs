//! A short lock between processes: so that one of them does what all were about to do.

use crate::store::Answer;
use std::fmt::Debug;
use std::time::Duration;

/// A lock that lapses by itself.
///
/// Best effort: it saves work, and must not be what keeps data whole. Whoever holds it may be late and find that it has lapsed; a
/// lock whose answer was lost on the way looks taken until then.
pub trait Lock: Debug + Send + Sync {
    /// Takes the lock of this name; false: somebody else has it. It is gone after `lapses`, at least a millisecond.
    fn lock<'a>(&'a self, name: &'a str, lapses: Duration) -> Answer<'a, bool>;

    /// Gives a lock back that this process took. One that lapsed, and that somebody else has taken since, stays theirs.
    fn unlock<'a>(&'a self, name: &'a str) -> Answer<'a, ()>;
}
