//! How a backend's live numbers follow what happens: averages that move, work that fades, and how long what was
//! sent counts as held. The numbers themselves stand with whoever keeps them.

use std::time::Duration;

/// A time to first token older than this says nothing about the backend of today.
pub const TTFT_FRESH: Duration = Duration::from_secs(60);
/// After this, what a backend has computed counts half.
pub const WORK_HALF_LIFE: Duration = Duration::from_secs(30);
/// A success average of 1.
pub const SUCCESS_ONE: u32 = 1 << 16;
/// Each sample moves an average by an eighth.
const EWMA_SHIFT: u32 = 3;
/// For how long a dispatch counts as held: twice the backend's time to first token, within these.
const HOLD_MIN: Duration = Duration::from_secs(2);
const HOLD_MAX: Duration = Duration::from_secs(30);

/// An average after one more sample.
pub fn averaged(old: u64, sample: u64) -> u64 {
    old - (old >> EWMA_SHIFT) + (sample >> EWMA_SHIFT)
}

/// What is left of work after a while: half after each [`WORK_HALF_LIFE`].
pub fn faded(work: u64, since: Duration) -> u64 {
    if work == 0 {
        return 0; // asked of every backend for every request
    }
    let halves = since.as_millis() as f64 / WORK_HALF_LIFE.as_millis() as f64;
    (work as f64 * (-halves).exp2()) as u64
}

/// For how long a prompt that is sent to a backend of this time to first token counts as held there.
pub fn hold(ttft: Option<Duration>) -> Duration {
    (2 * ttft.unwrap_or_default()).clamp(HOLD_MIN, HOLD_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_average_goes_an_eighth_of_the_way() {
        assert_eq!(averaged(800, 800), 800);
        assert_eq!(averaged(800, 1600), 900);
    }

    #[test]
    fn work_counts_half_after_each_half_life() {
        assert_eq!(faded(1000, Duration::ZERO), 1000);
        assert_eq!(faded(1000, WORK_HALF_LIFE), 500);
        assert_eq!(faded(1000, 3 * WORK_HALF_LIFE), 125);
    }

    #[test]
    fn a_dispatch_is_held_for_two_times_to_first_token_within_limits() {
        assert_eq!(hold(None), HOLD_MIN);
        assert_eq!(hold(Some(Duration::from_secs(4))), Duration::from_secs(8));
        assert_eq!(hold(Some(Duration::from_secs(60))), HOLD_MAX);
    }
}
