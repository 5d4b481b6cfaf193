//! Requests and tokens within a minute, by whom they are. Requests are counted by `governor`; tokens are
//! charged before they are known and put right later, which its cells cannot.

use super::note::Weighed;
use governor::clock::{Clock, MonotonicClock};
use governor::middleware::StateInformationMiddleware;
use governor::state::{InMemoryState, NotKeyed};
use governor::{Quota, RateLimiter};
use routing::quota::{Bucket, Limits, Scope};
use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Addresses, and others, of which something is remembered. Beyond it those go that have rested for a
/// minute; while there are none, newcomers share one set of limits.
const REMEMBERED_MAX: usize = 50_000;
/// Between two looks for those that have rested.
const SWEEP_PAUSE: Duration = Duration::from_secs(1);

type Requests = RateLimiter<NotKeyed, InMemoryState, MonotonicClock, StateInformationMiddleware>;

/// What one key, tenant, model or address has used of its minute.
#[derive(Debug)]
pub struct Rate {
    limits: Limits,
    requests: Option<(Requests, Quota)>,
    tokens: Option<Mutex<Bucket>>,
}

/// Tokens that a request was charged; put right when this is dropped.
#[derive(Debug)]
pub struct Charge {
    rate: Arc<Rate>,
    charged: u64,
    used: u64,
}

impl Charge {
    /// What was used; none: as much as was charged.
    pub fn used(&mut self, tokens: Option<u64>) {
        self.used = tokens.unwrap_or(self.charged);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        if let Some(mut bucket) = self.rate.bucket() {
            bucket.settle(self.charged, self.used, Instant::now());
        }
    }
}

impl Rate {
    fn new(limits: Limits) -> Self {
        let requests = limits.requests_per_minute.and_then(NonZeroU32::new);
        Rate {
            limits,
            requests: requests.map(|per_minute| {
                let quota = Quota::per_minute(per_minute);
                let limiter = RateLimiter::direct_with_clock(quota, MonotonicClock);
                (limiter.with_middleware(), quota)
            }),
            tokens: limits
                .tokens_per_minute
                .map(|tokens| Mutex::new(Bucket::new(tokens, Instant::now()))),
        }
    }

    fn bucket(&self) -> Option<MutexGuard<'_, Bucket>> {
        let bucket = self.tokens.as_ref()?;
        Some(bucket.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Counts a request in.
    ///
    /// # Errors
    /// When it is one too many; both ways it says how the limit stands.
    pub fn count_request(&self) -> Result<Weighed, Weighed> {
        let Some((limiter, quota)) = &self.requests else {
            return Ok(Weighed::places(u32::MAX));
        };
        let limit = quota.burst_size().get();
        let each = quota.replenish_interval();
        let weighed = |remaining: u32, retry_after| Weighed {
            limit: u64::from(limit),
            remaining: u64::from(remaining),
            reset: each * (limit - remaining),
            retry_after,
        };
        match limiter.check() {
            Ok(state) => Ok(weighed(state.remaining_burst_capacity(), Duration::ZERO)),
            Err(not) => Err(weighed(0, not.wait_time_from(MonotonicClock.now()))),
        }
    }

    /// Charges tokens, to be put right when the charge ends.
    ///
    /// # Errors
    /// When there are not as many; nothing is charged then.
    pub fn charge(
        self: Arc<Self>,
        tokens: u64,
        charges: &mut Vec<Charge>,
    ) -> Result<Weighed, Weighed> {
        let now = Instant::now();
        let Some(mut bucket) = self.bucket() else {
            return Ok(Weighed::places(u32::MAX));
        };
        // a minute's worth at most: what a client says it might want must not shut others out for longer
        let tokens = tokens.min(self.limits.tokens_per_minute.unwrap_or(tokens));
        let taken = bucket.take(tokens, now);
        let weighed = Weighed {
            limit: self.limits.tokens_per_minute.unwrap_or(0),
            remaining: bucket.remaining(now),
            reset: bucket.reset(now),
            retry_after: taken.err().map_or(Duration::ZERO, |short| short.after),
        };
        drop(bucket);
        match taken {
            Ok(()) => {
                charges.push(Charge {
                    rate: self,
                    charged: tokens,
                    used: 0, // a request that never ran
                });
                Ok(weighed)
            }
            Err(_) => Err(weighed),
        }
    }
}

/// All of them.
#[derive(Debug, Default)]
pub struct Rates(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    rates: HashMap<(Scope, Arc<str>), (Arc<Rate>, Instant)>,
    swept: Option<Instant>,
}

/// After so long without a request every limit is whole again.
const REST: Duration = Duration::from_secs(60);

impl Rates {
    /// What somebody has used. Other limits than before begin anew.
    pub fn of(&self, scope: Scope, name: &Arc<str>, limits: Limits) -> Arc<Rate> {
        let now = Instant::now();
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut key = (scope, name.clone());
        // keys, tenants and models are as many as the settings and the fleet name
        let may_crowd = scope == Scope::Address;
        if may_crowd && known.rates.len() >= REMEMBERED_MAX && !known.rates.contains_key(&key) {
            known.sweep(now);
            if known.rates.len() >= REMEMBERED_MAX {
                key.1 = Arc::from("others");
            }
        }
        let entry = known.rates.entry(key);
        let fresh = || (Arc::new(Rate::new(limits)), now);
        let (rate, seen) = entry.or_insert_with(fresh);
        *seen = now;
        let per_minute = |of: &Limits| (of.requests_per_minute, of.tokens_per_minute);
        if per_minute(&rate.limits) != per_minute(&limits) {
            *rate = Arc::new(Rate::new(limits));
        }
        rate.clone()
    }
}

impl Known {
    fn sweep(&mut self, now: Instant) {
        let ago = |at: Instant| now.saturating_duration_since(at);
        if self.swept.is_some_and(|at| ago(at) < SWEEP_PAUSE) {
            return;
        }
        self.swept = Some(now);
        self.rates.retain(|_, (rate, seen)| {
            let idle = Arc::strong_count(rate) == 1; // no charge is open
            let in_debt = rate.bucket().is_some_and(|mut b| !b.reset(now).is_zero());
            !(idle && ago(*seen) >= REST && !in_debt)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(requests: u32, tokens: u64) -> Limits {
        Limits {
            requests_per_minute: Some(requests),
            tokens_per_minute: Some(tokens),
            concurrent: None,
        }
    }

    #[test]
    fn requests_beyond_the_limit_are_told_when_to_come_back() {
        let rate = Rate::new(limits(2, 100));
        assert_eq!(rate.count_request().unwrap().remaining, 1);
        assert_eq!(rate.count_request().unwrap().remaining, 0);
        let over = rate.count_request().unwrap_err();
        assert_eq!((over.limit, over.remaining), (2, 0));
        assert!((29..=30).contains(&over.retry_seconds()), "{over:?}");
    }

    #[test]
    fn charges_are_put_right_when_they_end() {
        let rates = Rates::default();
        let rate = || rates.of(Scope::Key, &"k".into(), limits(9, 1000));
        let mut charges = Vec::new();
        assert_eq!(rate().charge(600, &mut charges).unwrap().remaining, 400);
        assert!(rate().charge(500, &mut charges).is_err());
        charges[0].used(Some(100));
        charges.clear();
        let left = rate().charge(1, &mut charges).unwrap().remaining;
        assert!((899..=901).contains(&left), "{left}");
        charges[0].used(None);
        drop(charges); // what nobody counted stays charged
        let mut charges = Vec::new();
        let left = rate().charge(0, &mut charges).unwrap().remaining;
        assert!((899..=901).contains(&left), "{left}");
    }

    #[test]
    fn other_limits_begin_anew_and_the_same_go_on() {
        let rates = Rates::default();
        let of = |requests| rates.of(Scope::Tenant, &"t".into(), limits(requests, 1));
        assert!(of(1).count_request().is_ok());
        assert!(of(1).count_request().is_err());
        assert!(of(2).count_request().is_ok());
    }

    #[test]
    fn more_addresses_than_are_remembered_share_one_set_of_limits() {
        let rates = Rates::default();
        let of = |n: usize| rates.of(Scope::Address, &n.to_string().into(), limits(1, 1));
        for n in 0..REMEMBERED_MAX {
            of(n);
        }
        assert!(of(REMEMBERED_MAX).count_request().is_ok());
        assert!(of(REMEMBERED_MAX + 1).count_request().is_err());
        assert!(rates.0.lock().unwrap().rates.len() <= REMEMBERED_MAX + 1);
        assert!(
            of(0).count_request().is_ok(),
            "one that is known keeps its own"
        );
    }
}
