//! The last requests and why they went where they went, for operators who look. No prompts, no keys, and nothing of what engines
//! said: names, numbers and words of our own, but for the model and the request id, which may be the client's.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// Requests that are remembered.
pub const DECISIONS_MAX: usize = 100;

/// One request that has ended. Cheap to make: whatever is not a number is shared already.
#[derive(Debug, Clone)]
pub struct Decision {
    /// When it ended.
    pub at: SystemTime,
    /// Its id.
    pub request_id: Arc<str>,
    /// The path family.
    pub route: &'static str,
    /// The model, as backends name it.
    pub model: Option<Arc<str>>,
    /// How the backend was chosen.
    pub reason: &'static str,
    /// Who answered.
    pub backend: Option<Arc<str>>,
    /// Who computed the prompt, where that is somebody else.
    pub prefill_backend: Option<Arc<str>>,
    /// Blocks of the prompt that the backend was known to have, and all of them.
    pub overlap: Option<(u32, u32)>,
    /// How it was served, where serving is split.
    pub path: Option<&'static str>,
    /// What the response cache did.
    pub cache: &'static str,
    /// What the client was sent.
    pub status: Option<u16>,
    /// `ok`, or what went wrong.
    pub outcome: &'static str,
    /// Calls to backends.
    pub attempts: u32,
    /// To the first byte of the answer.
    pub first_byte: Option<Duration>,
    /// From the first byte in to the last byte out.
    pub took: Duration,
}

/// See the module.
#[derive(Debug)]
pub struct Recent {
    /// When the process began to serve.
    pub started: Instant,
    ring: Mutex<VecDeque<Decision>>,
}

impl Recent {
    /// Nothing yet.
    pub fn new(started: Instant) -> Self {
        Recent {
            started,
            ring: Mutex::new(VecDeque::with_capacity(DECISIONS_MAX)),
        }
    }

    /// Remembers a request; the oldest one makes room.
    pub fn push(&self, decision: Decision) {
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let oldest = match ring.len() {
            DECISIONS_MAX.. => ring.pop_front(),
            _ => None,
        };
        ring.push_back(decision);
        drop(ring);
        drop(oldest); // frees what it shared, without holding up others
    }

    /// All of them, the last one first.
    pub fn all(&self) -> Vec<Decision> {
        let ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        ring.iter().rev().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decision(status: u16) -> Decision {
        Decision {
            at: SystemTime::UNIX_EPOCH,
            request_id: "r".into(),
            route: "chat",
            model: None,
            reason: "strategy",
            backend: None,
            prefill_backend: None,
            overlap: None,
            path: None,
            cache: "off",
            status: Some(status),
            outcome: "ok",
            attempts: 1,
            first_byte: None,
            took: Duration::ZERO,
        }
    }

    #[test]
    fn the_last_ones_are_kept_and_told_first() {
        let recent = Recent::new(Instant::now());
        let all = DECISIONS_MAX as u16 + 7;
        for status in 0..all {
            recent.push(decision(status));
        }
        let kept: Vec<u16> = recent.all().iter().filter_map(|d| d.status).collect();
        assert_eq!(kept, (7..all).rev().collect::<Vec<u16>>());
    }
}
