//! Pieces of texts that were encoded, with their tokens. Bounded; what was not used for long goes
//! first.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use xxhash_rust::xxh3::xxh3_128_with_seed;

/// Tokens that are kept, of all pieces together: 32 MiB.
const TOKENS_MAX: usize = 8 << 20;
/// What an entry takes beside its tokens, in tokens.
const ENTRY_TOKENS: usize = 24;

/// Stands for a piece of text.
type Digest = u128;

/// See the module. Shared by the threads that encode.
pub(super) struct Segments {
    seed: u64,
    kept: Mutex<Generations>,
}

/// Two generations instead of a list by use: when the young one is full it becomes the old one,
/// and what is not used until the next time is gone.
#[derive(Default)]
struct Generations {
    young: HashMap<Digest, Arc<[u32]>>,
    old: HashMap<Digest, Arc<[u32]>>,
    young_tokens: usize,
}

impl Segments {
    /// None yet. The seed keeps clients from making texts that stand for each other.
    pub(super) fn new() -> Self {
        Segments {
            seed: fastrand::u64(..),
            kept: Mutex::default(),
        }
    }

    fn digest(&self, text: &str) -> Digest {
        xxh3_128_with_seed(text.as_bytes(), self.seed)
    }

    /// The tokens of a piece: kept ones, else those that `encode` makes, which are kept.
    pub(super) fn tokens<E>(
        &self,
        text: &str,
        encode: impl FnOnce(&str) -> Result<Arc<[u32]>, E>,
    ) -> Result<Arc<[u32]>, E> {
        let digest = self.digest(text);
        if let Some(tokens) = self.lock().get(digest) {
            return Ok(tokens);
        }
        let tokens = encode(text)?; // not under the lock: it may take long
        self.lock().put(digest, tokens.clone());
        Ok(tokens)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Generations> {
        // a thread that panicked left nothing half done
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Generations {
    fn get(&mut self, digest: Digest) -> Option<Arc<[u32]>> {
        if let Some(tokens) = self.young.get(&digest) {
            return Some(tokens.clone());
        }
        let tokens = self.old.remove(&digest)?;
        self.put(digest, tokens.clone());
        Some(tokens)
    }

    fn put(&mut self, digest: Digest, tokens: Arc<[u32]>) {
        let room = tokens.len() + ENTRY_TOKENS;
        if room > TOKENS_MAX / 4 {
            return;
        }
        if self.young_tokens + room > TOKENS_MAX / 2 {
            self.old = std::mem::take(&mut self.young);
            self.young_tokens = 0;
        }
        if self.young.insert(digest, tokens).is_none() {
            self.young_tokens += room;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(segments: &Segments, text: &str, n: usize) -> bool {
        let mut encoded = false;
        let made = segments.tokens(text, |_| {
            encoded = true;
            Ok::<_, ()>(vec![7; n].into())
        });
        assert_eq!(made.unwrap().len(), n);
        encoded
    }

    #[test]
    fn what_is_used_stays_and_what_is_not_used_goes() {
        let segments = Segments::new();
        let large = TOKENS_MAX / 16;
        assert!(tokens(&segments, "used", 10));
        for n in 0..40 {
            assert!(tokens(&segments, &format!("{n}"), large), "each is new");
            assert!(!tokens(&segments, "used", 10), "after {n}");
            let kept = segments.lock();
            let all = kept.young.values().chain(kept.old.values());
            assert!(all.map(|t| t.len()).sum::<usize>() <= TOKENS_MAX);
        }
        assert!(tokens(&segments, "0", large), "long gone");
    }

    #[test]
    fn a_piece_that_would_push_out_everything_else_is_not_kept() {
        let segments = Segments::new();
        assert!(tokens(&segments, "a", 5));
        assert!(tokens(&segments, "huge", TOKENS_MAX / 2));
        assert!(tokens(&segments, "huge", TOKENS_MAX / 2));
        assert!(!tokens(&segments, "a", 5));
    }
}
