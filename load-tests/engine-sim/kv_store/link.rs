//! How long keys and values travel: a link of one bandwidth, on which transfers follow each other. Pure.

use std::time::Duration;
use tokio::time::Instant;

/// A link, with its figures in simulated time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkSpeed {
    /// Bytes per second.
    pub bytes_per_second: f64,
    /// Added to each transfer.
    pub latency: Duration,
}

/// Its state.
#[derive(Debug)]
pub struct Link {
    speed: LinkSpeed,
    time_scale: f64,
    /// When the last transfer has left it.
    free_at: Option<Instant>,
}

impl Link {
    /// An idle link; `time_scale` turns simulated time into wall time.
    pub fn new(speed: LinkSpeed, time_scale: f64) -> Self {
        Self {
            speed,
            time_scale,
            free_at: None,
        }
    }

    /// Begins a transfer as soon as those before it are through; answers when it has arrived.
    pub fn transfer(&mut self, bytes: u64, now: Instant) -> Instant {
        let start = self.free_at.map_or(now, |free| free.max(now));
        let seconds = bytes as f64 / self.speed.bytes_per_second * self.time_scale;
        let through = start + Duration::from_secs_f64(seconds);
        self.free_at = Some(through);
        through + self.speed.latency.mul_f64(self.time_scale)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn transfers_share_the_bandwidth_and_not_the_latency() {
        let speed = LinkSpeed {
            bytes_per_second: 1000.0,
            latency: Duration::from_millis(10),
        };
        let mut link = Link::new(speed, 0.5);
        let now = Instant::now();
        assert_eq!(link.transfer(100, now) - now, Duration::from_millis(55));
        assert_eq!(link.transfer(100, now) - now, Duration::from_millis(105));
        let later = now + Duration::from_secs(1);
        assert_eq!(link.transfer(0, later) - later, Duration::from_millis(5));
    }
}
