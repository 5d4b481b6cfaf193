//! Failures on demand: from the command line, and settable while the engine runs, as tests and demos need them.
//! Each is one atomic, read once per request.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};

/// "Off" for token counts.
const NEVER: u32 = u32::MAX;

/// Failures from the start.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FaultSettings {
    /// Share of requests that fail at once with `fail_status`.
    pub fail_rate: f64,
    /// Status of random failures.
    pub fail_status: u16,
    /// Answers end with an error after this many tokens.
    pub fail_after_tokens: Option<u32>,
    /// Connections are cut after this many tokens of an answer.
    pub drop_after_tokens: Option<u32>,
    /// Share of requests that never get an answer.
    pub hang_rate: f64,
}

impl Default for FaultSettings {
    fn default() -> Self {
        Self {
            fail_rate: 0.0,
            fail_status: 500,
            fail_after_tokens: None,
            drop_after_tokens: None,
            hang_rate: 0.0,
        }
    }
}

/// The faults of a running engine. Changes hold from the next request on.
#[derive(Debug)]
pub struct Faults {
    refuse: AtomicU16,
    hang: AtomicBool,
    health: AtomicU16,
    fail_rate: AtomicU64,
    fail_status: AtomicU16,
    hang_rate: AtomicU64,
    fail_after: AtomicU32,
    drop_after: AtomicU32,
    chance: Mutex<fastrand::Rng>,
}

/// What is to happen to one request before the engine sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    Serve,
    Refuse(u16),
    Hang,
}

/// Where one answer breaks off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Break {
    /// An error in place of the rest.
    Error,
    /// The connection is cut.
    Drop,
}

impl Faults {
    pub(crate) fn new(settings: FaultSettings, seed: u64) -> Self {
        Self {
            refuse: AtomicU16::new(0),
            hang: AtomicBool::new(false),
            health: AtomicU16::new(200),
            fail_rate: AtomicU64::new(settings.fail_rate.to_bits()),
            fail_status: AtomicU16::new(settings.fail_status),
            hang_rate: AtomicU64::new(settings.hang_rate.to_bits()),
            fail_after: AtomicU32::new(settings.fail_after_tokens.unwrap_or(NEVER)),
            drop_after: AtomicU32::new(settings.drop_after_tokens.unwrap_or(NEVER)),
            chance: Mutex::new(fastrand::Rng::with_seed(seed)),
        }
    }

    /// Answers every model request with this status; none serves again.
    pub fn refuse_with(&self, status: Option<u16>) {
        self.refuse.store(status.unwrap_or(0), Relaxed);
    }

    /// Leaves every model request without an answer.
    pub fn hang(&self, on: bool) {
        self.hang.store(on, Relaxed);
    }

    /// Ends answers with an error after this many tokens: an error event in a stream, status 500 otherwise.
    pub fn fail_after_tokens(&self, tokens: Option<u32>) {
        self.fail_after.store(tokens.unwrap_or(NEVER), Relaxed);
    }

    /// Cuts the connection after this many tokens of an answer.
    pub fn drop_after_tokens(&self, tokens: Option<u32>) {
        self.drop_after.store(tokens.unwrap_or(NEVER), Relaxed);
    }

    /// Fails this share of requests, 0 to 1, with a status.
    pub fn fail_rate(&self, share: f64, status: u16) {
        self.fail_status.store(status, Relaxed);
        self.fail_rate.store(share.to_bits(), Relaxed);
    }

    /// Leaves this share of requests, 0 to 1, without an answer.
    pub fn hang_rate(&self, share: f64) {
        self.hang_rate.store(share.to_bits(), Relaxed);
    }

    /// What `/health` answers; 200 is healthy.
    pub fn health_status(&self, status: u16) {
        self.health.store(status, Relaxed);
    }

    pub(crate) fn health(&self) -> u16 {
        self.health.load(Relaxed)
    }

    pub(crate) fn fate(&self) -> Fate {
        if self.hang.load(Relaxed) || self.strikes(&self.hang_rate) {
            return Fate::Hang;
        }
        match self.refuse.load(Relaxed) {
            0 if self.strikes(&self.fail_rate) => Fate::Refuse(self.fail_status.load(Relaxed)),
            0 => Fate::Serve,
            status => Fate::Refuse(status),
        }
    }

    /// The token before which an answer breaks off, and how.
    pub(crate) fn break_off(&self) -> Option<(u32, Break)> {
        let (error, drop) = (self.fail_after.load(Relaxed), self.drop_after.load(Relaxed));
        match error.min(drop) {
            NEVER => None,
            at if at == drop => Some((at, Break::Drop)),
            at => Some((at, Break::Error)),
        }
    }

    fn strikes(&self, rate: &AtomicU64) -> bool {
        let share = f64::from_bits(rate.load(Relaxed));
        share > 0.0
            && self
                .chance
                .lock()
                .expect("nobody panics with this lock")
                .f64()
                < share
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn rates_strike_about_as_often_as_they_say() {
        let faults = Faults::new(
            FaultSettings {
                fail_rate: 0.25,
                fail_status: 503,
                ..Default::default()
            },
            1,
        );
        let refused = (0..1000)
            .filter(|_| faults.fate() == Fate::Refuse(503))
            .count();
        assert!((200..300).contains(&refused), "{refused}");
    }

    #[test]
    fn the_earlier_break_wins() {
        let faults = Faults::new(FaultSettings::default(), 1);
        assert_eq!(faults.break_off(), None);
        faults.fail_after_tokens(Some(5));
        assert_eq!(faults.break_off(), Some((5, Break::Error)));
        faults.drop_after_tokens(Some(3));
        assert_eq!(faults.break_off(), Some((3, Break::Drop)));
    }
}
