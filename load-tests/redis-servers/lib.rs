//! Redis servers of a test's own: one, or a cluster of three. They may be killed, started again, and held still.
//!
//! Needs `redis-server` 7 or newer. Everything ends when it is dropped, and nothing is left on the disk.

mod cluster;
mod node;
mod single;

pub use cluster::Cluster;
pub use node::{Tls, command};
pub use single::Single;

use std::thread::sleep;
use std::time::{Duration, Instant};

/// How long a server may take for anything. Generous: test machines are slow and noisy.
pub const DEADLINE: Duration = Duration::from_secs(20);

/// Waits until `condition` holds.
///
/// # Panics
/// When it does not hold within [`DEADLINE`]; says `what` was waited for.
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + DEADLINE;
    while !condition() {
        assert!(Instant::now() < end, "waited {DEADLINE:?} in vain: {what}");
        sleep(Duration::from_millis(5));
    }
}
