//! What the engine counts, written by the engine's thread and the HTTP thread, read by `/metrics` and by tests.
//! Names and meanings on the wire are in `api/metrics.rs`.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Upper bounds of the time buckets in seconds; vLLM's for the time to first token.
pub const SECONDS_BOUNDS: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];

/// All counters and gauges.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Requests that reached a model route.
    pub requests: AtomicU64,
    /// Sequences in the batch.
    pub running: AtomicU64,
    /// Sequences queued.
    pub waiting: AtomicU64,
    /// Requests that wait for keys and values from elsewhere.
    pub loading: AtomicU64,
    /// Requests whose client left before the end.
    pub aborted: AtomicU64,
    /// Prompt tokens of admitted sequences.
    pub prompt_tokens: AtomicU64,
    /// Of these, tokens that the prefix cache supplied.
    pub cached_tokens: AtomicU64,
    /// Prompt tokens that were looked up in the prefix cache.
    pub prefix_queries: AtomicU64,
    /// Prompt tokens that were found there.
    pub prefix_hits: AtomicU64,
    /// Answer tokens.
    pub generation_tokens: AtomicU64,
    /// Sequences sent back to the queue.
    pub preemptions: AtomicU64,
    /// Blocks in use by running sequences.
    pub blocks_used: AtomicU64,
    /// Of these, blocks that are kept for other engines.
    pub blocks_pinned: AtomicU64,
    /// Prompt tokens that came from elsewhere instead of being computed.
    pub loaded_tokens: AtomicU64,
    /// Blocks kept for other engines that nobody fetched in time, counted by request.
    pub expired_leases: AtomicU64,
    /// Loads that failed, whatever followed.
    pub load_failures: AtomicU64,
    /// Saves that failed.
    pub save_failures: AtomicU64,
    /// Sequences that ended by themselves or at a stop string.
    pub finished_stop: AtomicU64,
    /// Sequences that ended at a limit.
    pub finished_length: AtomicU64,
    /// From arrival to the first token, in wall time.
    pub time_to_first_token: Histogram,
    /// From arrival to the last token, in wall time.
    pub request_latency: Histogram,
}

impl Metrics {
    /// All that arrived and is not in the batch: vLLM counts those that wait for remote keys and values among them.
    pub fn all_waiting(&self) -> u64 {
        self.waiting.load(Relaxed) + self.loading.load(Relaxed)
    }

    /// Counts a request that waits for keys and values; as aborted, when the guard is dropped before [`Loading::end`].
    pub fn begin_loading(&self) -> Loading<'_> {
        add(&self.loading, 1);
        Loading {
            metrics: self,
            ended: false,
        }
    }
}

/// A request that waits for keys and values.
#[derive(Debug)]
pub struct Loading<'a> {
    metrics: &'a Metrics,
    ended: bool,
}

impl Loading<'_> {
    /// It waits no longer, whatever came of it.
    pub fn end(mut self) {
        self.ended = true;
    }
}

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        self.metrics.loading.fetch_sub(1, Relaxed);
        if !self.ended {
            add(&self.metrics.aborted, 1);
        }
    }
}

/// Adds to a counter.
pub fn add(counter: &AtomicU64, amount: usize) {
    counter.fetch_add(amount as u64, Relaxed);
}

/// Sets a gauge.
pub fn set(gauge: &AtomicU64, value: usize) {
    gauge.store(value as u64, Relaxed);
}

/// Times in buckets.
#[derive(Debug, Default)]
pub struct Histogram {
    buckets: [AtomicU64; SECONDS_BOUNDS.len()],
    count: AtomicU64,
    sum_micros: AtomicU64,
}

impl Histogram {
    /// Counts one time.
    pub fn record(&self, time: Duration) {
        if let Some(bucket) = SECONDS_BOUNDS
            .iter()
            .position(|bound| time.as_secs_f64() <= *bound)
        {
            self.buckets[bucket].fetch_add(1, Relaxed);
        }
        self.count.fetch_add(1, Relaxed);
        self.sum_micros.fetch_add(time.as_micros() as u64, Relaxed);
    }

    /// Cumulative counts by upper bound, as Prometheus wants them, then all, then the sum in seconds.
    pub fn read(&self) -> (Vec<(f64, u64)>, u64, f64) {
        let mut total = 0;
        let cumulative = SECONDS_BOUNDS
            .iter()
            .zip(&self.buckets)
            .map(|(bound, bucket)| {
                total += bucket.load(Relaxed);
                (*bound, total)
            });
        (
            cumulative.collect(),
            self.count.load(Relaxed),
            self.sum_micros.load(Relaxed) as f64 / 1e6,
        )
    }
}
