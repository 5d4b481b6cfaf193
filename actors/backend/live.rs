//! Numbers of one backend that change with every request.

use crate::kv_share::LOAD_LAPSES;
use routing::averages::{SUCCESS_ONE, TTFT_FRESH, averaged, faded};
use routing::health::Probe;
use routing::view::Load;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// The longest that a backend is spared on its own word.
pub const REST_MAX: Duration = Duration::from_secs(5);
/// How long it is spared when it gives no `Retry-After`.
pub const REST_DEFAULT: Duration = Duration::from_secs(1);

/// Atomics, written by guards and actors, read by everybody.
#[derive(Debug)]
pub struct LiveNumbers {
    born: Instant,
    in_flight: AtomicU32,
    successes: AtomicU64,
    progress: AtomicU64,
    ttft_us: AtomicU64,
    ttft_at_ms: AtomicU64,
    resting_until_ms: AtomicU64,
    queued_tokens: AtomicU64,
    held_tokens: AtomicU64,
    recent_work: AtomicU64,
    recent_work_at_ms: AtomicU64,
    success: AtomicU32,
    // what other gateways have sent, and when they said so
    others_in_flight: AtomicU32,
    others_queued_tokens: AtomicU64,
    others_at_ms: AtomicU64,
    /// Facts for `/metrics`.
    pub counters: Counters,
}

/// Monotone counts for `/metrics`.
#[derive(Debug, Default)]
pub struct Counters {
    /// Changes of health after the first.
    pub flaps: AtomicU64,
    /// Probes by result: ok, timeout, refused, bad status, neutral timeout.
    pub probes: [AtomicU64; 5],
    /// Fresh starts of its health checker and its circuit breaker.
    pub actor_restarts: [AtomicU64; 2],
    /// How requests came by their connections.
    pub connections: ConnectionCounts,
}

/// Connections by how a request came by them.
#[derive(Debug, Default)]
pub struct ConnectionCounts {
    /// Opened for the request.
    pub new: AtomicU64,
    /// Taken from the pool.
    pub reused: AtomicU64,
    /// Taken from the pool, and closed by the backend before it answered.
    pub stale: AtomicU64,
}

impl Counters {
    /// The labels of [`Counters::probes`], in order.
    pub const PROBE_RESULTS: [&'static str; 5] =
        ["ok", "timeout", "refused", "bad_status", "neutral"];

    /// Counts one probe.
    pub fn count_probe(&self, probe: Probe, progressed: bool) {
        let index = match probe {
            Probe::Ok => 0,
            Probe::TimedOut if progressed => 4,
            Probe::TimedOut => 1,
            Probe::Refused => 2,
            Probe::BadStatus(_) => 3,
        };
        self.probes[index].fetch_add(1, Relaxed);
    }
}

impl Default for LiveNumbers {
    fn default() -> Self {
        LiveNumbers {
            born: now(),
            in_flight: AtomicU32::new(0),
            successes: AtomicU64::new(0),
            progress: AtomicU64::new(0),
            ttft_us: AtomicU64::new(0),
            ttft_at_ms: AtomicU64::new(0),
            resting_until_ms: AtomicU64::new(0),
            queued_tokens: AtomicU64::new(0),
            held_tokens: AtomicU64::new(0),
            recent_work: AtomicU64::new(0),
            recent_work_at_ms: AtomicU64::new(0),
            success: AtomicU32::new(SUCCESS_ONE),
            others_in_flight: AtomicU32::new(0),
            others_queued_tokens: AtomicU64::new(0),
            others_at_ms: AtomicU64::new(0),
            counters: Counters::default(),
        }
    }
}

fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

impl LiveNumbers {
    fn age_ms(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.born).as_millis() as u64
    }

    /// The numbers at `at`; what is known of the KV cache stands elsewhere.
    pub fn load(&self, at: Instant) -> Load {
        let age = self.age_ms(at);
        let ttft = self.ttft_us.load(Relaxed);
        let sampled_ago = age.saturating_sub(self.ttft_at_ms.load(Relaxed));
        let fresh = ttft > 0 && sampled_ago <= TTFT_FRESH.as_millis() as u64;
        let (others, others_tokens) = self.others_at(age);
        Load {
            in_flight: self.in_flight.load(Relaxed).saturating_add(others),
            ttft_us: fresh.then_some(ttft),
            queued_tokens: self
                .queued_tokens
                .load(Relaxed)
                .saturating_add(others_tokens),
            held_tokens: self.held_tokens.load(Relaxed),
            recent_work: self.recent_work_at(age),
            success: Some(f64::from(self.success.load(Relaxed)) / f64::from(SUCCESS_ONE)),
            resting: age < self.resting_until_ms.load(Relaxed),
            ..Load::default()
        }
    }

    /// What other gateways have sent to this backend; counts for a while.
    pub fn others(&self, in_flight: u32, queued_tokens: u64) {
        self.others_in_flight.store(in_flight, Relaxed);
        self.others_queued_tokens.store(queued_tokens, Relaxed);
        self.others_at_ms.store(self.age_ms(now()), Relaxed);
    }

    fn others_at(&self, age_ms: u64) -> (u32, u64) {
        let said_ago = age_ms.saturating_sub(self.others_at_ms.load(Relaxed));
        if said_ago > LOAD_LAPSES.as_millis() as u64 {
            return (0, 0);
        }
        (
            self.others_in_flight.load(Relaxed),
            self.others_queued_tokens.load(Relaxed),
        )
    }

    /// Requests that were sent from here and have not ended.
    pub fn in_flight(&self) -> u32 {
        self.in_flight.load(Relaxed)
    }

    /// All requests that the backend answered as it should.
    pub fn successes(&self) -> u64 {
        self.successes.load(Relaxed)
    }

    /// Answer chunks so far: moves while tokens flow.
    pub fn progress(&self) -> u64 {
        self.progress.load(Relaxed)
    }

    /// An answer chunk came.
    pub fn record_progress(&self) {
        self.progress.fetch_add(1, Relaxed);
    }

    /// A stream's first byte came.
    pub fn record_ttft(&self, ttft: Duration) {
        let at = now();
        let sample = (ttft.as_micros() as u64).max(1);
        let old = self.load(at).ttft_us.unwrap_or(sample);
        // a lost update between two threads costs one sample of weight an eighth
        self.ttft_us.store(averaged(old, sample).max(1), Relaxed);
        self.ttft_at_ms.store(self.age_ms(at), Relaxed);
    }

    /// The backend asked for patience.
    pub fn rest(&self, retry_after: Option<Duration>) {
        let wait = retry_after.unwrap_or(REST_DEFAULT).min(REST_MAX);
        let until = self.age_ms(now()) + wait.as_millis() as u64;
        self.resting_until_ms.fetch_max(until, Relaxed);
    }

    /// An answer did not begin, by the fault of something that the backend waits for: no failure of its own, but
    /// it is spared for a while, and thought less of.
    pub fn stalled(&self) {
        self.average_success(0);
        self.rest(Some(REST_MAX));
    }

    pub(super) fn enter(&self) {
        self.in_flight.fetch_add(1, Relaxed);
    }

    pub(super) fn leave(&self) {
        self.in_flight.fetch_sub(1, Relaxed);
    }

    pub(super) fn count_success(&self) {
        self.successes.fetch_add(1, Relaxed);
        self.average_success(SUCCESS_ONE);
    }

    pub(super) fn count_failure(&self) {
        self.average_success(0);
    }

    fn average_success(&self, sample: u32) {
        // a lost update between two threads costs one sample of weight an eighth
        let old = self.success.load(Relaxed);
        let new = averaged(u64::from(old), u64::from(sample));
        self.success.store(new as u32, Relaxed);
    }

    pub(super) fn queue_tokens(&self, tokens: u64) {
        self.queued_tokens.fetch_add(tokens, Relaxed);
    }

    pub(super) fn unqueue_tokens(&self, tokens: u64) {
        self.queued_tokens.fetch_sub(tokens, Relaxed);
    }

    pub(super) fn hold_tokens(&self, tokens: u64) {
        self.held_tokens.fetch_add(tokens, Relaxed);
    }

    pub(super) fn let_go_of_tokens(&self, tokens: u64) {
        self.held_tokens.fetch_sub(tokens, Relaxed);
    }

    /// Tokens whose KV is held there for requests that were sent from here and have not ended.
    pub fn held_tokens(&self) -> u64 {
        self.held_tokens.load(Relaxed)
    }

    /// The backend has so many more tokens to compute, or fewer than was thought.
    pub fn add_work(&self, tokens: i64) {
        let age = self.age_ms(now());
        // a lost update between two threads costs one request's share
        let work = self.recent_work_at(age).saturating_add_signed(tokens);
        self.recent_work.store(work, Relaxed);
        self.recent_work_at_ms.store(age, Relaxed);
    }

    fn recent_work_at(&self, age_ms: u64) -> u64 {
        let since = age_ms.saturating_sub(self.recent_work_at_ms.load(Relaxed));
        faded(self.recent_work.load(Relaxed), Duration::from_millis(since))
    }

    /// Prompt tokens that were sent and have not led to a first byte.
    pub fn queued_tokens(&self) -> u64 {
        self.queued_tokens.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use routing::averages::WORK_HALF_LIFE;

    #[test]
    fn the_average_follows_and_a_stale_one_counts_as_unsampled() {
        let live = LiveNumbers::default();
        assert_eq!(live.load(now()).ttft_us, None);
        live.record_ttft(Duration::from_millis(80));
        assert_eq!(live.load(now()).ttft_us, Some(80_000));
        for _ in 0..60 {
            live.record_ttft(Duration::from_millis(8));
        }
        let settled = live.load(now()).ttft_us.unwrap();
        assert!((8_000..8_100).contains(&settled), "{settled}");
        let much_later = now() + TTFT_FRESH * 2;
        assert_eq!(live.load(much_later).ttft_us, None);
    }

    #[test]
    fn failures_lower_the_success_average_and_successes_raise_it_to_one() {
        let live = LiveNumbers::default();
        let success = || live.load(now()).success.unwrap();
        assert_eq!(success(), 1.0);
        for _ in 0..40 {
            live.count_failure();
        }
        assert!(success() < 0.01, "{}", success());
        for _ in 0..100 {
            live.count_success();
        }
        assert!(success() > 0.99, "{}", success());
    }

    #[test]
    fn work_adds_up_is_corrected_and_fades() {
        let live = LiveNumbers::default();
        live.add_work(1000);
        live.add_work(-200);
        let at = now();
        let work = |after| live.load(at + after).recent_work;
        assert!((795..=800).contains(&work(Duration::ZERO)));
        let half = work(WORK_HALF_LIFE);
        assert!((395..=400).contains(&half), "{half}");
        live.add_work(-5000);
        assert_eq!(live.load(now()).recent_work, 0);
    }

    #[test]
    fn what_others_have_sent_counts_until_it_lapses() {
        let live = LiveNumbers::default();
        live.enter();
        live.others(5, 700);
        let load = live.load(now());
        assert_eq!((load.in_flight, load.queued_tokens), (6, 700));
        assert_eq!(live.in_flight(), 1, "of this gateway");
        let later = live.load(now() + LOAD_LAPSES + Duration::from_millis(100));
        assert_eq!((later.in_flight, later.queued_tokens), (1, 0));
    }

    #[test]
    fn a_rest_is_never_longer_than_its_limit() {
        let live = LiveNumbers::default();
        live.rest(Some(Duration::from_secs(3600)));
        assert!(live.load(now()).resting);
        assert!(!live.load(now() + REST_MAX * 2).resting);
    }
}
