//! A bucket of tokens that fills over a minute. Requests are charged before anybody knows what they cost,
//! and settled when they have ended: what was charged too much comes back, and what was charged too little
//! is a debt that the next ones wait for.

use std::time::{Duration, Instant};

const MINUTE: f64 = 60.0;

/// See the module.
#[derive(Debug, Clone)]
pub struct Bucket {
    per_minute: u64,
    /// Below 0: a debt.
    level: f64,
    at: Instant,
}

/// There is not enough in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Short {
    /// When there will be.
    pub after: Duration,
}

impl Bucket {
    /// A full one of so many tokens, and so many more in every minute; at least 1.
    pub fn new(per_minute: u64, now: Instant) -> Self {
        let per_minute = per_minute.max(1);
        Bucket {
            per_minute,
            level: per_minute as f64,
            at: now,
        }
    }

    fn fill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        let full = self.per_minute as f64;
        self.level = (self.level + passed / MINUTE * full).min(full);
        self.at = self.at.max(now);
    }

    /// When the level has reached this, if nobody takes any.
    fn until(&self, level: f64) -> Duration {
        let missing = (level - self.level).max(0.0);
        Duration::from_secs_f64(missing / self.per_minute as f64 * MINUTE)
    }

    /// Takes tokens out. What is more than it ever holds is asked of a full one: such a request is not
    /// impossible, it uses up a minute, and leaves a debt.
    ///
    /// # Errors
    /// When there will be enough; nothing is taken then.
    pub fn take(&mut self, tokens: u64, now: Instant) -> Result<(), Short> {
        self.fill(now);
        let needed = tokens.min(self.per_minute) as f64;
        if self.level < needed {
            return Err(Short {
                after: self.until(needed),
            });
        }
        self.level -= tokens as f64;
        Ok(())
    }

    /// A request that was charged `charged` has used `used`.
    pub fn settle(&mut self, charged: u64, used: u64, now: Instant) {
        self.fill(now);
        let full = self.per_minute as f64;
        self.level = (self.level + charged as f64 - used as f64).min(full);
    }

    /// What can be taken now.
    pub fn remaining(&mut self, now: Instant) -> u64 {
        self.fill(now);
        self.level.max(0.0) as u64
    }

    /// When it will be full again, if nobody takes any.
    pub fn reset(&mut self, now: Instant) -> Duration {
        self.fill(now);
        self.until(self.per_minute as f64)
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)] // any moment will do
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn it_refuses_what_it_does_not_hold_and_says_when_it_will() {
        let now = Instant::now();
        let mut bucket = Bucket::new(600, now);
        assert_eq!(bucket.take(500, now), Ok(()));
        assert_eq!(bucket.remaining(now), 100);
        assert_eq!(bucket.take(200, now), Err(Short { after: SECOND * 10 }));
        assert_eq!(bucket.remaining(now), 100, "a refusal takes nothing");
        assert_eq!(bucket.take(200, now + SECOND * 10), Ok(()));
        assert_eq!(bucket.reset(now + SECOND * 10), SECOND * 60);
    }

    #[test]
    fn what_was_charged_too_much_comes_back_and_too_little_is_a_debt() {
        let now = Instant::now();
        let mut bucket = Bucket::new(60, now);
        bucket.take(50, now).unwrap();
        bucket.settle(50, 10, now);
        assert_eq!(bucket.remaining(now), 50);
        bucket.take(10, now).unwrap();
        bucket.settle(10, 100, now); // 40 - 90
        assert_eq!(bucket.remaining(now), 0);
        assert_eq!(bucket.take(1, now), Err(Short { after: SECOND * 51 }));
    }

    #[test]
    fn a_request_larger_than_the_bucket_is_served_once_it_is_full_and_pays_later() {
        let now = Instant::now();
        let mut bucket = Bucket::new(60, now);
        assert_eq!(bucket.take(180, now), Ok(()));
        assert_eq!(
            bucket.take(1, now + SECOND * 60),
            Err(Short { after: SECOND * 61 })
        );
    }

    proptest! {
        /// Over any time, no more is taken than what it held and what has come in.
        #[test]
        fn nobody_gets_more_than_has_come_in(
            asks in proptest::collection::vec((0u64..200, 0u64..20_000), 1..60)
        ) {
            let begin = Instant::now();
            let mut now = begin;
            let mut bucket = Bucket::new(600, begin);
            let (mut taken, mut largest) = (0u64, 0u64);
            for (tokens, pause) in asks {
                now += Duration::from_millis(pause);
                if bucket.take(tokens, now).is_ok() {
                    taken += tokens;
                    largest = largest.max(tokens);
                }
            }
            let came = 600.0 + (now - begin).as_secs_f64() * 10.0;
            prop_assert!(taken as f64 <= came + 1.0, "{taken} of {came}");
        }
    }
}
