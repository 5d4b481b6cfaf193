//! What came of a run, in numbers.

use crate::request::Request;
use routing::score::Reach;
use serde::Serialize;
use std::time::Duration;

/// The first fifth of a run meets empty caches and is not measured.
const WARMING_SHARE: usize = 5;

/// How one request fared.
#[derive(Debug, Default, Clone)]
pub struct Trip {
    /// From its arrival to its first token, over all attempts.
    pub ttft: Option<Duration>,
    /// When its last token came.
    pub ended: Option<Duration>,
    /// Tokens of its prompt that the engine had.
    pub cached: u64,
    /// What the router believed of that.
    pub predicted: Option<Reach>,
    /// Its client saw an error.
    pub failed: bool,
}

/// Of one run. Tokens are sums over the measured requests.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Outcome {
    /// Median time to first token.
    pub ttft_p50_ms: f64,
    /// The one that one request of a hundred exceeds.
    pub ttft_p99_ms: f64,
    /// Of all prompts.
    pub prompt_tokens: u64,
    /// Of these, what engines had cached.
    pub hit_tokens: u64,
    /// What was predicted of that, and what came of these predictions.
    pub predicted_tokens: u64,
    /// See above.
    pub predicted_hit_tokens: u64,
    /// The busiest worker's computed tokens, against the mean.
    pub imbalance: f64,
    /// Share of time with a queue at one worker and another one idle.
    pub wasted: f64,
    /// Requests whose clients saw an error.
    pub errors: usize,
    /// Requests that had their whole answer.
    pub served: usize,
    /// Served requests a second, warming and the end left out.
    pub throughput: f64,
    /// Workers whose predictions were given up.
    pub distrusted: usize,
}

impl Outcome {
    /// The first request that is measured, of so many.
    pub fn first_measured(requests: usize) -> usize {
        requests / WARMING_SHARE
    }

    /// Of trips in the order of their requests; with the work of each worker, the wasted time, and workers distrusted.
    pub fn of(
        trips: &[Trip],
        requests: &[Request],
        (work, wasted, distrusted): (&[u64], f64, usize),
    ) -> Self {
        let first = Self::first_measured(trips.len());
        let measured = || trips.iter().zip(requests).skip(first);
        let ttfts = measured().filter_map(|(trip, _)| trip.ttft);
        let mut ttfts: Vec<f64> = ttfts.map(|ttft| ttft.as_secs_f64() * 1e3).collect();
        ttfts.sort_by(f64::total_cmp);
        let served = || measured().filter(|(trip, _)| trip.ttft.is_some());
        let predicted = || served().filter_map(|(trip, _)| Some((trip, trip.predicted?)));
        let all: u64 = work.iter().sum();
        let busiest = work.iter().copied().max().unwrap_or(0);
        Outcome {
            ttft_p50_ms: quantile(&ttfts, 0.5),
            ttft_p99_ms: quantile(&ttfts, 0.99),
            prompt_tokens: served().map(|(_, of)| of.prompt.len() as u64).sum(),
            hit_tokens: served().map(|(trip, _)| trip.cached).sum(),
            predicted_tokens: predicted().map(|(_, of)| of.tokens - of.uncached).sum(),
            predicted_hit_tokens: predicted().map(|(trip, _)| trip.cached).sum(),
            imbalance: busiest as f64 * work.len() as f64 / all.max(1) as f64,
            wasted,
            errors: trips.iter().filter(|trip| trip.failed).count(),
            served: trips.iter().filter(|trip| trip.ended.is_some()).count(),
            throughput: throughput(trips),
            distrusted,
        }
    }

    /// The share of prompt tokens that were cached.
    pub fn hit_rate(&self) -> f64 {
        self.hit_tokens as f64 / self.prompt_tokens.max(1) as f64
    }
}

/// Of sorted numbers, the one that this share does not exceed.
pub fn quantile(sorted: &[f64], share: f64) -> f64 {
    let at = (sorted.len().max(1) - 1) as f64 * share;
    sorted.get(at.round() as usize).copied().unwrap_or(0.0)
}

/// The one in the middle.
pub fn median(numbers: impl Iterator<Item = f64>) -> f64 {
    let mut numbers: Vec<f64> = numbers.collect();
    numbers.sort_by(f64::total_cmp);
    quantile(&numbers, 0.5)
}

/// From a fifth of the endings to nine tenths of them.
fn throughput(trips: &[Trip]) -> f64 {
    let ended = trips.iter().filter_map(|trip| trip.ended);
    let mut ended: Vec<f64> = ended.map(|at| at.as_secs_f64()).collect();
    ended.sort_by(f64::total_cmp);
    let (from, to) = (ended.len() / WARMING_SHARE, ended.len() * 9 / 10);
    if to <= from {
        return 0.0;
    }
    (to - from) as f64 / (ended[to] - ended[from]).max(1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_and_the_middle_are_of_the_numbers_themselves() {
        let numbers: Vec<f64> = (1..=101).map(f64::from).collect();
        assert_eq!(quantile(&numbers, 0.99), 100.0);
        assert_eq!(median([3.0, 1.0, 2.0].into_iter()), 2.0);
        assert_eq!(quantile(&[], 0.5), 0.0);
    }

    #[test]
    fn only_what_came_after_the_warming_is_measured() {
        let request = Request::new((0..100).collect(), vec![1], (0, 0));
        let trip = |ms| Trip {
            ttft: Some(Duration::from_millis(ms)),
            cached: 32,
            ..Trip::default()
        };
        let trips = [trip(900), trip(10), trip(10), trip(10), trip(10)];
        let requests = vec![request; 5];
        let outcome = Outcome::of(&trips, &requests, (&[300, 100], 0.0, 0));
        assert_eq!(outcome.ttft_p99_ms, 10.0);
        assert_eq!((outcome.hit_rate(), outcome.imbalance), (0.32, 1.5));
    }
}
