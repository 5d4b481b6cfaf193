//! Chance with the shapes that workloads need. The generator is the router's own, so that one seed repeats a whole run.

use routing::strategy::Chance;
use std::ops::RangeInclusive;

/// From 0 up to, but not including, 1.
pub fn unit(chance: &mut Chance) -> f64 {
    (chance.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

/// A whole number of a range, each as likely.
pub fn within(chance: &mut Chance, range: RangeInclusive<usize>) -> usize {
    let width = range.end() - range.start() + 1;
    range.start() + chance.below(width as u64) as usize
}

/// A number of a range, its logarithm evenly spread: many small ones, few large.
pub fn log_within(chance: &mut Chance, (low, high): (f64, f64)) -> usize {
    (low * (high / low).powf(unit(chance))) as usize
}

/// Times between arrivals that know nothing of each other: of mean 1.
pub fn exponential(chance: &mut Chance) -> f64 {
    -(1.0 - unit(chance)).ln()
}

/// Around 0, of variance 1. Source: Box and Muller (1958).
pub fn normal(chance: &mut Chance) -> f64 {
    let radius = (-2.0 * (1.0 - unit(chance)).ln()).sqrt();
    radius * (std::f64::consts::TAU * unit(chance)).cos()
}

/// Tokens that nobody else has, in all likelihood.
pub fn tokens(chance: &mut Chance, count: usize) -> Vec<u32> {
    let token = |_| (chance.next_u64() >> 40) as u32;
    (0..count).map(token).collect()
}

/// Ranks from 0 on, the first the most popular: of weight 1 / (rank + 1).
pub struct Zipf(Vec<f64>);

impl Zipf {
    /// Of so many ranks.
    pub fn new(ranks: usize) -> Self {
        let mut sum = 0.0;
        let weight = |rank: usize| {
            sum += 1.0 / (rank + 1) as f64;
            sum
        };
        Zipf((0..ranks).map(weight).collect())
    }

    /// One of them.
    pub fn draw(&self, chance: &mut Chance) -> usize {
        let all = self.0.last().copied().unwrap_or(0.0);
        let ticket = unit(chance) * all;
        self.0.partition_point(|sum| *sum <= ticket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn popular_ranks_come_as_often_as_zipf_says() {
        let (zipf, mut chance) = (Zipf::new(4), Chance(1));
        let mut counts = [0u32; 4];
        (0..25_000).for_each(|_| counts[zipf.draw(&mut chance)] += 1);
        for (rank, count) in counts.iter().enumerate() {
            let expected = 12_000.0 / (rank + 1) as f64;
            assert!(
                (f64::from(*count) / expected - 1.0).abs() < 0.05,
                "{counts:?}"
            );
        }
    }

    #[test]
    fn arrivals_are_one_apart_on_average() {
        let mut chance = Chance(2);
        let sum: f64 = (0..50_000).map(|_| exponential(&mut chance)).sum();
        assert!((sum / 50_000.0 - 1.0).abs() < 0.02, "{sum}");
    }
}
