//! Tokens by an engine's word: its `/tokenize` is asked, and what it said is kept.

use crate::gateway::Worker;
use crate::upstream::{self, Client};
use actors::backend::Backend;
use serde::Deserialize;
use std::cell::RefCell;
use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// An engine that takes longer is not waited for in the background either.
const TOKENIZE_TIMEOUT: Duration = Duration::from_secs(2);
/// Tokens that one worker thread keeps of texts that engines tokenised.
const CACHED_TOKENS_MAX: usize = 4 << 20;
/// Longer texts are not sent to be tokenised.
const QUESTION_BYTES_MAX: usize = 1 << 20;
/// Questions that one worker thread asks at one time.
const ASKS_MAX: usize = 16;
/// The largest answer of `/tokenize` that is read.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// Tokens of texts that engines tokenised. One per worker thread.
#[derive(Clone, Default)]
pub struct TokenCache(Rc<RefCell<Cached>>);

/// Stands for a question: two hashes with random keys of this process.
type Digest = (u64, u64);

#[derive(Default)]
struct Cached {
    keys: (RandomState, RandomState),
    by_question: HashMap<Digest, Arc<[u32]>>,
    in_order: VecDeque<Digest>,
    tokens: usize,
    asking: HashSet<Digest>,
}

/// What an entry takes beside its tokens, in tokens.
const ENTRY_TOKENS: usize = 32;

impl TokenCache {
    fn digest(&self, question: &str) -> Digest {
        let cached = self.0.borrow();
        (
            cached.keys.0.hash_one(question),
            cached.keys.1.hash_one(question),
        )
    }

    fn get(&self, question: Digest) -> Option<Arc<[u32]>> {
        self.0.borrow().by_question.get(&question).cloned()
    }

    fn put(&self, question: Digest, tokens: Arc<[u32]>) {
        let mut cached = self.0.borrow_mut();
        if tokens.len() > CACHED_TOKENS_MAX / 2 || cached.by_question.contains_key(&question) {
            return;
        }
        cached.tokens += tokens.len() + ENTRY_TOKENS;
        cached.in_order.push_back(question);
        cached.by_question.insert(question, tokens);
        while cached.tokens > CACHED_TOKENS_MAX {
            let Some(oldest) = cached.in_order.pop_front() else {
                break;
            };
            let gone = cached.by_question.remove(&oldest);
            cached.tokens -= gone.map_or(0, |tokens| tokens.len() + ENTRY_TOKENS);
        }
    }

    /// Leave to ask an engine: one at a time for the same question, and not too many in all.
    fn start_asking(&self, question: Digest) -> Option<Asking> {
        let mut cached = self.0.borrow_mut();
        let free = cached.asking.len() < ASKS_MAX && cached.asking.insert(question);
        free.then(|| Asking(self.clone(), question))
    }
}

/// A question that is being asked.
struct Asking(TokenCache, Digest);

impl Drop for Asking {
    fn drop(&mut self) {
        self.0.0.borrow_mut().asking.remove(&self.1);
    }
}

/// What an engine says to a question, waiting for it no longer than `budget`. It is asked to the
/// end also when that is too late for this request: the next turn will need the same.
pub(super) async fn tokens(
    question: String,
    worker: &Worker,
    engine: &Arc<Backend>,
    budget: Duration,
) -> Result<Arc<[u32]>, &'static str> {
    if question.len() > QUESTION_BYTES_MAX {
        return Err("no_tokens");
    }
    let digest = worker.tokens.digest(&question);
    if let Some(tokens) = worker.tokens.get(digest) {
        return Ok(tokens);
    }
    let asking = worker.tokens.start_asking(digest).ok_or("late_tokens")?;
    let (client, engine) = (worker.client.clone(), engine.clone());
    let answer = actix_rt::spawn(async move {
        let asked = ask(&client, &engine, question);
        let tokens = tokio::time::timeout(TOKENIZE_TIMEOUT, asked).await.ok()??;
        asking.0.put(digest, tokens.clone());
        Some(tokens)
    });
    let answer = tokio::time::timeout(budget, answer).await;
    let answer = answer.map_err(|_| "late_tokens")?;
    answer.ok().flatten().ok_or("no_tokens")
}

/// Asks an engine; none when it does not answer as it should.
pub(super) async fn ask(client: &Client, engine: &Backend, question: String) -> Option<Arc<[u32]>> {
    #[derive(Deserialize)]
    struct Answer {
        tokens: Vec<u32>,
    }
    let asked = upstream::ask(client, engine, ("/tokenize", question), ANSWER_BYTES_MAX);
    let body = asked.await.ok()?;
    let answer: Answer = serde_json::from_slice(&body).ok()?;
    Some(answer.tokens.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_is_bounded_in_tokens_and_entries() {
        let cache = TokenCache::default();
        let many: Arc<[u32]> = vec![0; CACHED_TOKENS_MAX / 4 - ENTRY_TOKENS].into();
        for n in 0..10 {
            cache.put((n, 0), many.clone());
            assert!(cache.0.borrow().tokens <= CACHED_TOKENS_MAX);
        }
        assert!(cache.get((0, 0)).is_none() && cache.get((9, 0)).is_some());
        assert_eq!(cache.0.borrow().in_order.len(), 4);
        for n in 0..1_000_000 {
            cache.put((n, 1), Arc::from([]));
        }
        assert!(cache.0.borrow().in_order.len() <= CACHED_TOKENS_MAX / ENTRY_TOKENS);
    }

    #[test]
    fn a_question_is_asked_once_at_a_time_and_few_at_all() {
        let cache = TokenCache::default();
        let first = cache.start_asking((0, 0));
        assert!(first.is_some() && cache.start_asking((0, 0)).is_none());
        let others: Vec<_> = (1..100)
            .filter_map(|n| cache.start_asking((n, 0)))
            .collect();
        assert_eq!(others.len(), ASKS_MAX - 1);
        drop((first, others));
        assert!(cache.start_asking((0, 0)).is_some());
    }
}
