//! Replays recorded operations on an index and measures it: events per second, lookups, live heap.

use crate::fleet::Op;
use crate::heap;
use std::time::Instant;

/// An index under measurement.
pub trait Subject {
    /// An operation in the form that this index takes; made outside of the measured time.
    type Ready;
    /// Its name in the results.
    const NAME: &'static str;

    /// Brings an operation into that form.
    fn ready(&self, op: &Op) -> Self::Ready;
    /// Applies an event.
    fn apply(&mut self, event: &Self::Ready);
    /// Looks a prompt up; answers the most blocks from its start that one worker has.
    fn look(&self, prompt: &Self::Ready) -> u32;
}

/// What was measured.
pub struct Measured {
    /// Of what.
    pub name: &'static str,
    /// Blocks stored and removed.
    pub block_ops: u64,
    /// In so many nanoseconds.
    pub event_ns: u64,
    /// Every lookup's nanoseconds, sorted.
    pub lookups: Vec<u64>,
    /// The best overlap of each lookup, in order.
    pub best: Vec<u32>,
    /// Live heap afterwards, less what was there before.
    pub bytes: u64,
}

impl Measured {
    /// Millions of block operations per second.
    pub fn rate(&self) -> f64 {
        self.block_ops as f64 * 1e3 / self.event_ns.max(1) as f64
    }

    /// The lookup time in us that this share of the lookups does not exceed.
    pub fn lookup_us(&self, share: f64) -> f64 {
        let at = ((self.lookups.len().max(1) - 1) as f64 * share) as usize;
        self.lookups.get(at).copied().unwrap_or(0) as f64 / 1e3
    }

    /// The mean lookup in us.
    pub fn lookup_mean_us(&self) -> f64 {
        let sum: u64 = self.lookups.iter().sum();
        sum as f64 / self.lookups.len().max(1) as f64 / 1e3
    }

    /// One row of the results.
    pub fn row(&self, pairs: usize) -> String {
        format!(
            "{:<24} {:>6.2} M block-ops/s | lookup mean {:>5.2} us, p50 {:>5.2}, p99 {:>6.2}, max {:>7.2} | {:>6.1} MiB, {:>5.1} B per pair",
            self.name,
            self.rate(),
            self.lookup_mean_us(),
            self.lookup_us(0.5),
            self.lookup_us(0.99),
            self.lookup_us(1.0),
            heap::mib(self.bytes),
            self.bytes as f64 / pairs.max(1) as f64,
        )
    }
}

/// Runs all operations in order on an index that `new` makes; answers the index, too.
pub fn replay<S: Subject>(ops: &[Op], new: impl FnOnce() -> S) -> (Measured, S) {
    let looks = ops.iter().filter(|op| matches!(op, Op::Look { .. }));
    let looks = looks.count();
    let mut measured = Measured {
        name: S::NAME,
        block_ops: 0,
        event_ns: 0,
        lookups: Vec::with_capacity(looks),
        best: Vec::with_capacity(looks),
        bytes: 0,
    };
    let before = heap::live();
    let mut subject = new();
    for op in ops {
        let ready = subject.ready(op);
        let start = Instant::now();
        if matches!(op, Op::Look { .. }) {
            let best = subject.look(&ready);
            measured.lookups.push(start.elapsed().as_nanos() as u64);
            measured.best.push(best);
        } else {
            subject.apply(&ready);
            measured.event_ns += start.elapsed().as_nanos() as u64;
            measured.block_ops += op.blocks() as u64;
        }
    }
    measured.bytes = heap::live().saturating_sub(before);
    measured.lookups.sort_unstable();
    (measured, subject)
}
