//! Death watch: an actor holds a [`Watch`], whose drop, also while a panic unwinds, tells its
//! parent. The parent starts a fresh child: the old state may be what caused the panic.

use actix::{Message, Recipient};
use std::time::{Duration, Instant};

/// Sends `exit` to the parent when dropped.
pub struct Watch<M>
where
    M: Message + Send + 'static,
    M::Result: Send,
{
    parent: Recipient<M>,
    exit: Option<M>,
}

impl<M> Watch<M>
where
    M: Message + Send + 'static,
    M::Result: Send,
{
    /// Watches the actor that will hold this.
    pub fn new(parent: Recipient<M>, exit: M) -> Self {
        Watch {
            parent,
            exit: Some(exit),
        }
    }
}

impl<M> Drop for Watch<M>
where
    M: Message + Send + 'static,
    M::Result: Send,
{
    fn drop(&mut self) {
        if let Some(exit) = self.exit.take() {
            self.parent.do_send(exit);
        }
    }
}

/// Restarts that are allowed within [`INTENSITY_WINDOW`]; an actor that dies more often than this
/// will not get better by another start.
pub const RESTARTS_MAX: usize = 5;
/// See [`RESTARTS_MAX`].
pub const INTENSITY_WINDOW: Duration = Duration::from_secs(30);
const BACKOFF_FIRST: Duration = Duration::from_millis(20);
const BACKOFF_MAX: Duration = Duration::from_secs(2);

/// Decides how long to wait before a restart, and when to give up.
#[derive(Debug, Default)]
pub struct Intensity {
    deaths: Vec<Instant>,
}

impl Intensity {
    /// The wait before the next start; none when the limit is reached.
    pub fn next_start(&mut self, now: Instant) -> Option<Duration> {
        self.deaths
            .retain(|at| now.saturating_duration_since(*at) < INTENSITY_WINDOW);
        let recent = self.deaths.len();
        if recent >= RESTARTS_MAX {
            return None; // not counted: being refused is not dying
        }
        self.deaths.push(now);
        let doublings = u32::try_from(recent).unwrap_or(u32::MAX);
        let wait = BACKOFF_FIRST.saturating_mul(2u32.saturating_pow(doublings));
        Some(wait.min(BACKOFF_MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restarts_wait_longer_each_time_and_stop_at_the_limit() {
        let now = Instant::now();
        let mut intensity = Intensity::default();
        let waits: Vec<_> = (0..RESTARTS_MAX)
            .map(|_| intensity.next_start(now).unwrap())
            .collect();
        assert!(waits.windows(2).all(|w| w[0] < w[1]), "{waits:?}");
        for _ in 0..100 {
            assert_eq!(intensity.next_start(now), None);
        }
        let later = now + INTENSITY_WINDOW;
        assert_eq!(intensity.next_start(later), Some(BACKOFF_FIRST));
    }
}
