//! When a failed request may be tried again on another backend.

/// What happened to an attempt before any byte of it reached the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Setback {
    /// The connection was refused, or could not be made in time: nothing was sent.
    Refused,
    /// The connection was cut before the first byte of an answer.
    Reset,
    /// 502 or 503 without a body that says more, or an answer that is no HTTP.
    BadGateway,
    /// 503 that asks for patience.
    Unavailable,
    /// 429.
    RateLimited,
    /// A stream whose first event is an error of the engine's.
    FirstEventError,
    /// Nothing came within `first_byte_timeout`: the work may be under way, so it is not repeated.
    FirstByteTimeout,
    /// An answer that another backend would not give differently, or that shows work was done.
    Settled,
}

impl Setback {
    /// Those after which another backend may be tried.
    pub const RETRYABLE: [Setback; 6] = [
        Setback::Refused,
        Setback::Reset,
        Setback::BadGateway,
        Setback::Unavailable,
        Setback::RateLimited,
        Setback::FirstEventError,
    ];

    /// The word used in metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Setback::Refused => "refused",
            Setback::Reset => "reset",
            Setback::BadGateway => "bad_gateway",
            Setback::Unavailable => "unavailable",
            Setback::RateLimited => "rate_limited",
            Setback::FirstEventError => "first_event_error",
            Setback::FirstByteTimeout => "first_byte_timeout",
            Setback::Settled => "settled",
        }
    }

    /// Whether another backend may be tried at all.
    pub fn is_retryable(self) -> bool {
        Self::RETRYABLE.contains(&self)
    }
}

/// Keeps retries from multiplying the load of a fleet that is already failing: each request
/// earns a fraction of a retry, each retry spends one.
#[derive(Debug)]
pub struct RetryBudget {
    ratio_milli: u64,
    balance_milli: u64,
}

/// What a budget starts with and what it can hold: enough to carry a restart of one worker
/// while its breaker has not opened yet, too little to carry a storm.
pub const BUDGET_MAX_RETRIES: u64 = 50;

impl RetryBudget {
    /// A full budget.
    pub fn new(budget_ratio: f64) -> Self {
        RetryBudget {
            ratio_milli: (budget_ratio * 1000.0).round() as u64,
            balance_milli: if budget_ratio > 0.0 {
                BUDGET_MAX_RETRIES * 1000
            } else {
                0
            },
        }
    }

    /// A request came in.
    pub fn earn(&mut self) {
        self.balance_milli = (self.balance_milli + self.ratio_milli).min(BUDGET_MAX_RETRIES * 1000);
    }

    /// Takes one retry; false when there is none left.
    pub fn spend(&mut self) -> bool {
        match self.balance_milli.checked_sub(1000) {
            Some(rest) => {
                self.balance_milli = rest;
                true
            }
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_the_long_run_retries_are_the_configured_share_of_requests() {
        let mut budget = RetryBudget::new(0.2);
        let mut retries = 0;
        for _ in 0..10_000 {
            budget.earn();
            retries += u64::from(budget.spend());
        }
        assert!(
            (2000..=2000 + BUDGET_MAX_RETRIES).contains(&retries),
            "{retries}"
        );
    }

    #[test]
    fn a_ratio_of_zero_means_no_retries() {
        let mut budget = RetryBudget::new(0.0);
        budget.earn();
        assert!(!budget.spend());
    }

    #[test]
    fn work_that_may_be_under_way_is_not_repeated() {
        assert!(!Setback::FirstByteTimeout.is_retryable());
        assert!(Setback::Refused.is_retryable());
    }
}
