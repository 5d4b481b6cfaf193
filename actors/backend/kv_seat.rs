//! A backend's place in the KV index: where its blocks stand there, and how far what is believed of
//! them can be trusted. Atomics, written by the subscribers, the judge and requests that ended,
//! read by every decision.

use routing::knowledge::{self, Events, Facts, Mode, Parity, Why};
use routing::prefix_index::HolderId;
use routing::view::Memory;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// See the module.
#[derive(Debug, Clone, Default)]
pub struct KvSeat {
    /// Its own memory: of unknown rank first, then one per data-parallel rank.
    pub memories: Arc<[Memory]>,
    /// The storage namespaces that it reads.
    pub reads: Arc<[HolderId]>,
    /// The storage namespace that it writes, if any.
    pub writes: Option<HolderId>,
    /// How far beliefs can be trusted.
    pub standing: Arc<Standing>,
}

impl PartialEq for KvSeat {
    /// The same seat: what changes with time is not compared.
    fn eq(&self, other: &Self) -> bool {
        self.memories == other.memories && self.reads == other.reads && self.writes == other.writes
    }
}

/// What is known of a backend's engine and of predictions about it.
#[derive(Debug, Default)]
pub struct Standing {
    has_source: bool,
    tokens: bool,
    approximate: bool,
    streams_open: AtomicU32,
    block_size: AtomicU32,
    parity: AtomicU8,
    judged: [Judged; 2],
    served: AtomicU64,
}

/// Predictions of one kind.
#[derive(Debug, Default)]
struct Judged {
    samples: AtomicU32,
    error_permille: AtomicU64,
    distrusted: AtomicBool,
    /// Since when.
    fell: Mutex<Option<Instant>>,
}

/// An event stream that is open; closed when dropped.
#[derive(Debug)]
pub struct OpenStream(Arc<Standing>);

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.0.streams_open.fetch_sub(1, Relaxed);
    }
}

const PARITIES: [Parity; 4] = [
    Parity::Unknown,
    Parity::Holds,
    Parity::TokensDiffer,
    Parity::BlocksDiffer,
];

impl Standing {
    /// A backend with or without an event source, whose prompts can or cannot be tokenised, and
    /// whose cache may or may not be guessed.
    pub fn new(has_source: bool, tokens: bool, approximate: bool) -> Self {
        Standing {
            has_source,
            tokens,
            approximate,
            ..Standing::default()
        }
    }

    /// An event stream has opened.
    pub fn open_stream(self: &Arc<Self>) -> OpenStream {
        self.streams_open.fetch_add(1, Relaxed);
        OpenStream(self.clone())
    }

    /// Tokens per block, as its events say; none while they have not.
    pub fn block_size(&self) -> Option<u32> {
        Some(self.block_size.load(Relaxed)).filter(|size| *size > 0)
    }

    /// Its events said how many tokens a block has.
    pub fn saw_block_size(&self, size: u32) {
        self.block_size.store(size, Relaxed);
    }

    /// A probe prompt was compared.
    pub fn set_parity(&self, parity: Parity) {
        let at = PARITIES.iter().position(|p| *p == parity).unwrap_or(0);
        self.parity.store(at as u8, Relaxed);
    }

    /// What came of the probe prompt.
    pub fn parity(&self) -> Parity {
        let at = self.parity.load(Relaxed) as usize;
        PARITIES.get(at).copied().unwrap_or_default()
    }

    /// Where the knowledge of its cache comes from at this moment, and why from there.
    pub fn mode(&self) -> (Mode, Why) {
        let events = match (self.has_source, self.streams_open.load(Relaxed)) {
            (false, _) => Events::None,
            (true, 0) => Events::Closed,
            (true, _) if self.block_size().is_none() => Events::Silent,
            (true, _) => Events::Live,
        };
        knowledge::mode(&Facts {
            events,
            tokens: self.tokens,
            parity: self.parity(),
            approximate: self.approximate,
            distrusted: [0, 1].map(|kind| self.judged[kind].distrusted.load(Relaxed)),
        })
    }

    /// A prompt that the index knows was computed there: its engine should have announced blocks.
    pub fn count_served(&self) {
        self.served.fetch_add(1, Relaxed);
    }

    /// Such prompts so far.
    pub fn served(&self) -> u64 {
        self.served.load(Relaxed)
    }

    fn judged(&self, mode: Mode) -> Option<&Judged> {
        match mode {
            Mode::Exact => Some(&self.judged[0]),
            Mode::Approximate => Some(&self.judged[1]),
            Mode::Blind => None,
        }
    }

    /// A prediction made in this mode was checked: `error` in thousandths of the prompt.
    pub fn record(&self, mode: Mode, error_permille: u64) {
        if let Some(judged) = self.judged(mode) {
            judged.error_permille.fetch_add(error_permille, Relaxed);
            judged.samples.fetch_add(1, Relaxed);
        }
    }

    /// Gives up the kind of prediction that was wrong too often; answers which, with its mean
    /// error in thousandths of the prompt.
    pub fn judge(&self, now: Instant) -> Option<(Mode, u64)> {
        let mut fallen = None;
        for (mode, judged) in [Mode::Exact, Mode::Approximate]
            .into_iter()
            .zip(&self.judged)
        {
            let samples = judged.samples.load(Relaxed);
            let error = judged.error_permille.load(Relaxed);
            let Some(wrong) = knowledge::is_wrong(samples, error) else {
                continue;
            };
            // a sample that comes in between is lost: the next fifty do without it
            judged.samples.store(0, Relaxed);
            judged.error_permille.store(0, Relaxed);
            if wrong && !judged.distrusted.swap(true, Relaxed) {
                *judged.fell() = Some(now);
                fallen = Some((mode, error / u64::from(samples)));
            }
        }
        fallen
    }

    /// Trusts again what was given up so long ago: it was made of what has expired since.
    pub fn forgive(&self, now: Instant, after: Duration) {
        for mode in [Mode::Exact, Mode::Approximate] {
            let fell = self.judged(mode).and_then(|judged| *judged.fell());
            if fell.is_some_and(|fell| now.saturating_duration_since(fell) >= after) {
                self.trust_again(mode);
            }
        }
    }

    /// What was believed was made anew: predictions of this kind are trusted again.
    pub fn trust_again(&self, mode: Mode) {
        if let Some(judged) = self.judged(mode) {
            judged.samples.store(0, Relaxed);
            judged.error_permille.store(0, Relaxed);
            judged.distrusted.store(false, Relaxed);
            *judged.fell() = None;
        }
    }
}

impl Judged {
    fn fell(&self) -> MutexGuard<'_, Option<Instant>> {
        // a thread that panicked left nothing half done
        self.fell.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_open_stream_with_a_block_size_makes_it_exact_until_it_closes() {
        let standing = Arc::new(Standing::new(true, true, true));
        assert_eq!(standing.mode(), (Mode::Approximate, Why::StreamClosed));
        let stream = standing.open_stream();
        assert_eq!(standing.mode(), (Mode::Approximate, Why::NoEventYet));
        standing.saw_block_size(16);
        assert_eq!(standing.mode(), (Mode::Exact, Why::EventsCome));
        drop(stream);
        assert_eq!(standing.mode().0, Mode::Approximate);
    }

    #[test]
    fn fifty_wrong_predictions_demote_and_a_resync_or_time_promotes() {
        let standing = Arc::new(Standing::new(true, true, true));
        let _stream = standing.open_stream();
        let now = Instant::now();
        standing.saw_block_size(16);
        for _ in 0..50 {
            standing.record(Mode::Exact, 100);
        }
        assert_eq!(standing.judge(now), None);
        for _ in 0..49 {
            standing.record(Mode::Exact, 900);
        }
        assert_eq!(standing.judge(now), None, "too few to say");
        standing.record(Mode::Exact, 900);
        assert_eq!(standing.judge(now), Some((Mode::Exact, 900)));
        assert_eq!(standing.mode(), (Mode::Approximate, Why::Mispredicted));
        for _ in 0..50 {
            standing.record(Mode::Approximate, 800);
        }
        assert_eq!(standing.judge(now), Some((Mode::Approximate, 800)));
        assert_eq!(standing.mode(), (Mode::Blind, Why::Mispredicted));
        standing.trust_again(Mode::Exact);
        assert_eq!(standing.mode().0, Mode::Exact);
        let ttl = Duration::from_secs(900);
        let guesses = || {
            standing
                .judged(Mode::Approximate)
                .unwrap()
                .distrusted
                .load(Relaxed)
        };
        standing.forgive(now + ttl / 2, ttl);
        assert!(guesses());
        standing.forgive(now + ttl, ttl);
        assert!(!guesses(), "after a while they may be right again");
    }
}
