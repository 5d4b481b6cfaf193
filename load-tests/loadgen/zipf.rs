//! Draws numbers of which the first are the most popular: number k with a probability in proportion to 1 / (k+1)^s.

/// See the module.
pub struct Zipf {
    /// The sum of the shares up to each number.
    up_to: Vec<f64>,
}

impl Zipf {
    /// Numbers below `count`, which must be at least 1.
    pub fn new(count: usize, exponent: f64) -> Self {
        let mut sum = 0.0;
        let up_to = (1..=count).map(|k| {
            sum += (k as f64).powf(-exponent);
            sum
        });
        Zipf {
            up_to: up_to.collect(),
        }
    }

    /// One of them.
    pub fn draw(&self, chance: &mut fastrand::Rng) -> usize {
        let all = self.up_to.last().copied().unwrap_or(0.0);
        let ticket = chance.f64() * all;
        let found = self.up_to.partition_point(|sum| *sum <= ticket);
        found.min(self.up_to.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::Zipf;

    #[test]
    fn popularity_falls_as_the_exponent_says_and_zero_makes_all_alike() {
        let mut chance = fastrand::Rng::with_seed(3);
        let mut count = |exponent| {
            let zipf = Zipf::new(4, exponent);
            let mut drawn = [0u32; 4];
            (0..40_000).for_each(|_| drawn[zipf.draw(&mut chance)] += 1);
            drawn.map(f64::from)
        };
        let falling = count(1.0);
        assert!((falling[0] / falling[1] - 2.0).abs() < 0.15, "{falling:?}");
        assert!((falling[0] / falling[3] - 4.0).abs() < 0.4, "{falling:?}");
        let alike = count(0.0);
        assert!(
            alike.iter().all(|n| (n / 10_000.0 - 1.0).abs() < 0.05),
            "{alike:?}"
        );
    }
}
