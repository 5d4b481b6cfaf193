//! What the router counts of each worker, by the same arithmetic and at the same moments as the gateway's actors:
//! `LiveNumbers`, `InFlight`, `Placement` and the judge of predictions.

use routing::averages::{SUCCESS_ONE, TTFT_FRESH, averaged, faded};
use routing::ids::Slot;
use routing::knowledge::{Mode, error_permille, is_wrong};
use routing::view::{Live, Load};
use std::time::Duration;

/// Of one worker.
#[derive(Debug, Clone)]
pub struct Numbers {
    in_flight: u32,
    queued_tokens: u64,
    work: (u64, Duration),
    success: u32,
    ttft: Option<(u64, Duration)>,
    /// Predictions that were checked, and their errors in thousandths.
    judged: (u32, u64),
    distrusted: bool,
}

impl Default for Numbers {
    fn default() -> Self {
        Numbers {
            in_flight: 0,
            queued_tokens: 0,
            work: (0, Duration::ZERO),
            success: SUCCESS_ONE,
            ttft: None,
            judged: (0, 0),
            distrusted: false,
        }
    }
}

impl Numbers {
    /// A request goes there, with so many tokens to compute as far as is known.
    pub fn enter(&mut self, tokens: Option<u64>, now: Duration) {
        self.in_flight += 1;
        if let Some(tokens) = tokens {
            self.queued_tokens += tokens;
            self.add_work(tokens as i64, now);
        }
    }

    /// Its first byte came.
    pub fn first_byte(&mut self, tokens: u64, ttft: Duration, now: Duration) {
        self.queued_tokens -= tokens;
        let sample = (ttft.as_micros() as u64).max(1);
        let old = self.ttft_us(now).unwrap_or(sample);
        self.ttft = Some((averaged(old, sample).max(1), now));
    }

    /// It ended; `queued` are its tokens that still wait.
    pub fn leave(&mut self, queued: u64, succeeded: bool) {
        self.in_flight -= 1;
        self.queued_tokens -= queued;
        let sample = if succeeded { SUCCESS_ONE } else { 0 };
        self.success = averaged(u64::from(self.success), u64::from(sample)) as u32;
    }

    /// It has so many more tokens to compute, or fewer than was thought.
    pub fn add_work(&mut self, tokens: i64, now: Duration) {
        self.work = (self.work_at(now).saturating_add_signed(tokens), now);
    }

    /// A prediction was checked against what the engine said; given up when too often wrong.
    pub fn judge(&mut self, predicted: u64, actual: u64, prompt: u64) {
        self.judged.0 += 1;
        self.judged.1 += error_permille(predicted, actual, prompt);
        if let Some(wrong) = is_wrong(self.judged.0, self.judged.1) {
            self.judged = (0, 0);
            self.distrusted |= wrong;
        }
    }

    /// Whether its predictions were given up. For good: a run is shorter than any pardon.
    pub fn is_distrusted(&self) -> bool {
        self.distrusted
    }

    fn work_at(&self, now: Duration) -> u64 {
        faded(self.work.0, now.saturating_sub(self.work.1))
    }

    /// Average time to first token.
    pub fn ttft_us(&self, now: Duration) -> Option<u64> {
        let (us, at) = self.ttft?;
        (now.saturating_sub(at) <= TTFT_FRESH).then_some(us)
    }

    fn load(&self, now: Duration, mode: Mode, block_size: Option<u32>) -> Load {
        Load {
            in_flight: self.in_flight,
            ttft_us: self.ttft_us(now),
            queued_tokens: self.queued_tokens,
            recent_work: self.work_at(now),
            success: Some(f64::from(self.success) / f64::from(SUCCESS_ONE)),
            mode: if self.distrusted { Mode::Blind } else { mode },
            block_size,
            ..Load::default()
        }
    }
}

/// The numbers of all workers at one moment.
pub struct At<'a> {
    /// By slot.
    pub numbers: &'a [Numbers],
    /// Which.
    pub now: Duration,
    /// Where knowledge of caches comes from.
    pub mode: Mode,
    /// Tokens per block, when events say so.
    pub block_size: Option<u32>,
}

impl Live for At<'_> {
    fn load(&self, slot: Slot) -> Load {
        self.numbers[slot.0].load(self.now, self.mode, self.block_size)
    }

    fn probe_free(&self, _: Slot) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn tokens_wait_until_the_first_byte_and_work_stays() {
        let mut numbers = Numbers::default();
        numbers.enter(Some(1000), SECOND);
        let load = |numbers: &Numbers, now| numbers.load(now, Mode::Exact, None);
        assert_eq!(load(&numbers, SECOND).queued_tokens, 1000);
        numbers.first_byte(1000, SECOND, 2 * SECOND);
        numbers.leave(0, true);
        let after = load(&numbers, SECOND);
        assert_eq!((after.in_flight, after.queued_tokens), (0, 0));
        assert_eq!(load(&numbers, 31 * SECOND).recent_work, 500);
        assert_eq!(after.success, Some(1.0));
    }

    #[test]
    fn fifty_wrong_predictions_make_it_blind() {
        let mut numbers = Numbers::default();
        for _ in 0..49 {
            numbers.judge(900, 0, 1000);
        }
        assert!(!numbers.is_distrusted());
        numbers.judge(900, 0, 1000);
        let load = numbers.load(SECOND, Mode::Approximate, None);
        assert_eq!(load.mode, Mode::Blind);
    }
}
