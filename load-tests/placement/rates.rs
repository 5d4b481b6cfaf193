//! What it costs to place a prompt at a backend, in seconds until its first token: the tokens that have to be computed
//! before, at the speed that this backend has shown, and a little for what it decodes meanwhile.
//!
//! The speed is learned from pairs of tokens and times to first token, as the slope of a line through the least time seen:
//! what is the same for each request (the network, tokenizing) is the line's height, and cancels out between backends. A
//! slope with a free height would be exact, and much too restless: who seems fast by chance gets all requests.

use std::time::Duration;

/// Each pair moves the averages by this share, the first few by more.
const LEARNED_PER_PAIR: f64 = 1.0 / 64.0;
/// Fewer pairs say too little about a slope.
const PAIRS_MIN: u32 = 8;
/// Until then: a small model on one large GPU.
const PRIOR_SECONDS_PER_TOKEN: f64 = 0.000_15;
/// A slope outside of this comes from noise, or from tokens that were not known.
const SECONDS_PER_TOKEN: (f64, f64) = (0.000_001, 0.01);
/// The least time follows a shorter one at once, and longer ones by this part of an average's share.
const LEAST_RISES: f64 = 1.0 / 16.0;
/// What one running request adds: a step reads its keys and values, too. Small, as steps hide decodes behind prefills;
/// enough to spread prompts of which nothing has to be computed.
pub const SECONDS_PER_RUNNING: f64 = 0.000_5;

/// How fast one backend computes prompts, as learned from what it did. In tokens and seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Rates {
    pairs: u32,
    least: f64,
    tokens: f64,
    tokens_squared: f64,
    product: f64,
}

impl Rates {
    /// A prompt had its first token `ttft` after it was sent; until then so many tokens were computed: its own, and
    /// those that waited before it.
    pub fn learn(&mut self, computed: u64, ttft: Duration) {
        self.pairs = self.pairs.saturating_add(1);
        let share = LEARNED_PER_PAIR.max(1.0 / f64::from(self.pairs));
        let (x, y) = (computed as f64, ttft.as_secs_f64());
        let follow = |average: &mut f64, sample: f64| *average += share * (sample - *average);
        follow(&mut self.tokens, x);
        follow(&mut self.tokens_squared, x * x);
        follow(&mut self.product, x * y);
        let risen = self.least + share * LEAST_RISES * (y - self.least);
        self.least = if self.pairs == 1 { y } else { y.min(risen) };
    }

    /// The time of one prompt token.
    pub fn seconds_per_token(&self) -> f64 {
        if self.pairs < PAIRS_MIN || self.tokens_squared < 1.0 {
            return PRIOR_SECONDS_PER_TOKEN;
        }
        let slope = (self.product - self.least * self.tokens) / self.tokens_squared;
        slope.clamp(SECONDS_PER_TOKEN.0, SECONDS_PER_TOKEN.1)
    }
}

/// Seconds until the first token of a prompt of which `uncached` tokens have to be computed, at a backend where `queued`
/// tokens wait and `running` requests have not ended.
pub fn seconds(rates: &Rates, (queued, uncached): (u64, u64), running: u32) -> f64 {
    let tokens = queued.saturating_add(uncached) as f64;
    tokens * rates.seconds_per_token() + f64::from(running) * SECONDS_PER_RUNNING
}

#[cfg(test)]
mod tests {
    use super::*;

    fn learned(ms_per_token: f64, overhead_ms: f64) -> Rates {
        let mut rates = Rates::default();
        for n in 0..500u64 {
            let tokens = 100 + n * 37 % 2000;
            let ms = overhead_ms + ms_per_token * tokens as f64;
            rates.learn(tokens, Duration::from_secs_f64(ms / 1000.0));
        }
        rates
    }

    #[test]
    fn the_slope_is_learned_whatever_is_the_same_for_all() {
        for overhead in [0.0, 40.0, 300.0] {
            let per_token = learned(0.3, overhead).seconds_per_token();
            assert!((per_token - 0.000_3).abs() < 0.000_03, "{per_token}");
        }
    }

    #[test]
    fn a_backend_that_has_become_slower_is_noticed() {
        let mut rates = learned(0.15, 40.0);
        for n in 0..500u64 {
            let tokens = 100 + n * 37 % 2000;
            rates.learn(
                tokens,
                Duration::from_secs_f64(0.04 + 0.000_6 * tokens as f64),
            );
        }
        assert!((rates.seconds_per_token() - 0.000_6).abs() < 0.000_06);
    }

    #[test]
    fn nothing_and_nonsense_learned_give_a_usable_speed() {
        assert_eq!(
            Rates::default().seconds_per_token(),
            PRIOR_SECONDS_PER_TOKEN
        );
        let mut constant = Rates::default();
        for tokens in 0..100 {
            constant.learn(tokens, Duration::from_millis(50));
        }
        assert_eq!(constant.seconds_per_token(), SECONDS_PER_TOKEN.0);
    }

    #[test]
    fn the_queue_and_the_own_tokens_weigh_alike_and_running_requests_little() {
        let rates = learned(0.2, 40.0);
        let cost = |queued, uncached, running| seconds(&rates, (queued, uncached), running);
        assert!((cost(1000, 500, 0) - cost(0, 1500, 0)).abs() < 1e-9);
        assert!((cost(1000, 500, 0) - 0.3).abs() < 0.03);
        assert!(cost(0, 0, 9) > cost(0, 0, 8));
        assert!(cost(0, 0, 9) < cost(0, 100, 8));
    }
}
