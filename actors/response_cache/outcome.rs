//! How calls to tiers end, for counters and for what follows.

use std::time::Duration;

/// How a call to a tier ended; a label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The entry was there.
    Hit,
    /// It was not.
    Miss,
    /// It did not come in time.
    Slow,
    /// The tier failed.
    Failed,
    /// The tier was left alone, since it fails.
    Skipped,
    /// The entry is kept.
    Stored,
    /// It is larger than the tier takes.
    TooLarge,
    /// Too many entries wait to be written.
    Dropped,
}

impl Outcome {
    /// How keeping an entry can end.
    pub const STORES: [Outcome; 6] = [
        Outcome::Stored,
        Outcome::TooLarge,
        Outcome::Slow,
        Outcome::Failed,
        Outcome::Skipped,
        Outcome::Dropped,
    ];

    /// The word used in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Outcome::Hit => "hit",
            Outcome::Miss => "miss",
            Outcome::Slow => "slow",
            Outcome::Failed => "error",
            Outcome::Skipped => "skipped",
            Outcome::Stored => "stored",
            Outcome::TooLarge => "too_large",
            Outcome::Dropped => "dropped",
        }
    }
}

/// A call to a tier.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    /// The tier.
    pub tier: &'static str,
    /// How it ended.
    pub outcome: Outcome,
    /// How long it took.
    pub took: Duration,
}
