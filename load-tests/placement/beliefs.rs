//! What the router believes of caches: the real index, told what the gateway's shard would be told, at the same moments.

use crate::request::{BLOCK_SIZE, REALM, Request};
use engine_sim::CacheEvent;
use routing::averages;
use routing::block::{BlockHash, TEXT_BLOCK_TOKENS};
use routing::knowledge::Mode;
use routing::prefix_index::{Afterwards, HolderId, Limits, PrefixIndex, Seconds, StoredRun, Tier};
use routing::score::{Basis, Known, PromptOverlap};
use std::sync::Arc;
use std::time::Duration;

/// `kv_cache_index.max_entries` and `entry_ttl_seconds` by default.
const LIMITS: Limits = Limits {
    max_entries: 500_000,
    ttl: 900,
};
/// How often the shard looks for expired entries, and at how many at a time.
const SWEEP_INTERVAL: Duration = Duration::from_millis(100);
const SWEEP_BUDGET: usize = 500;

/// See the module.
pub struct Beliefs {
    index: PrefixIndex,
    mode: Mode,
    swept: Duration,
}

fn seconds(now: Duration) -> Seconds {
    now.as_secs() as Seconds
}

impl Beliefs {
    /// Nothing is known yet.
    pub fn new(mode: Mode) -> Self {
        Beliefs {
            index: PrefixIndex::new(LIMITS),
            mode,
            swept: Duration::ZERO,
        }
    }

    /// Tokens per block, where events say so.
    pub fn block_size(&self) -> Option<u32> {
        (self.mode == Mode::Exact).then_some(BLOCK_SIZE as u32)
    }

    fn chain<'a>(&self, request: &'a Request) -> &'a Arc<[BlockHash]> {
        match self.mode {
            Mode::Exact => &request.by_tokens,
            _ => &request.by_text,
        }
    }

    /// Who has how much of a prompt; none when it has no full block.
    pub fn look(&self, request: &Request) -> Option<Known> {
        let chain = self.chain(request);
        if self.mode == Mode::Blind || chain.is_empty() {
            return None;
        }
        let (basis, block_size) = match self.mode {
            Mode::Exact => (Basis::Tokens, BLOCK_SIZE as u32),
            _ => (Basis::Text, TEXT_BLOCK_TOKENS),
        };
        Some(Known(vec![PromptOverlap {
            basis,
            runs: self.index.find_overlap(chain),
            blocks: chain.len() as u32,
            tokens: request.prompt.len() as u32,
            block_size,
        }]))
    }

    /// A prompt goes to a worker of this time to first token.
    pub fn sent(&mut self, worker: usize, request: &Request, (ttft, now): (Option<u64>, Duration)) {
        let chain = self.chain(request).clone();
        if self.mode == Mode::Blind || chain.is_empty() {
            return;
        }
        let hold = averages::hold(ttft.map(Duration::from_micros))
            .as_secs()
            .max(1);
        let now = seconds(now);
        let until = now + hold as Seconds;
        self.index.speculate(holder(worker), &chain, (now, until));
    }

    /// It ended, with or without a first byte.
    pub fn ended(&mut self, worker: usize, request: &Request, (served, now): (bool, Duration)) {
        let chain = self.chain(request).clone();
        if self.mode == Mode::Blind || chain.is_empty() {
            return;
        }
        let (holder, now) = (holder(worker), seconds(now));
        match (served, self.mode) {
            (false, _) => self.index.withdraw(holder, &chain, now),
            (true, Mode::Approximate) => {
                self.index.believe(holder, &chain, now);
                self.index.served(holder, &chain, now);
            }
            (true, _) => self.index.served(holder, &chain, now),
        }
    }

    /// What was believed of a worker was checked: whether about as much was found there.
    pub fn checked(&mut self, worker: usize, (found, now): (bool, Duration)) {
        if self.mode == Mode::Approximate {
            self.index.checked(holder(worker), found, seconds(now));
        }
    }

    /// An engine announced this; only heard where events are read.
    pub fn heard(&mut self, worker: usize, event: &CacheEvent, now: Duration) {
        if self.mode != Mode::Exact {
            return;
        }
        let (holder, now) = (holder(worker), seconds(now));
        match event {
            CacheEvent::Stored {
                hashes,
                parent,
                tokens,
                ..
            } => {
                let hashes: Vec<u64> = hashes.iter().map(|hash| hash.0).collect();
                let run = StoredRun {
                    realm: REALM,
                    hashes: &hashes,
                    parent: parent.map(|hash| hash.0),
                    tokens,
                    tier: Tier::Gpu,
                };
                self.index.store(holder, &run, now);
            }
            CacheEvent::Removed { hashes } => {
                let hashes: Vec<u64> = hashes.iter().map(|hash| hash.0).collect();
                let gone = (Afterwards::Gone, now);
                self.index.remove(holder, &hashes, Tier::Gpu, gone);
            }
            CacheEvent::Cleared => self.index.forget(holder),
            CacheEvent::Offloaded { .. } | CacheEvent::Copied { .. } => {}
        }
    }

    /// A worker's event stream broke; without events nobody notices.
    pub fn lost(&mut self, worker: usize) {
        if self.mode == Mode::Exact {
            self.index.forget(holder(worker));
            self.index.forget_assumed(holder(worker));
        }
    }

    /// Lets go of what has expired, as often as the shard does.
    pub fn sweep(&mut self, now: Duration) {
        if now - self.swept >= SWEEP_INTERVAL {
            self.swept = now;
            self.index.sweep(seconds(now), SWEEP_BUDGET);
        }
    }
}

/// A worker's name in the index.
pub fn holder(worker: usize) -> HolderId {
    HolderId(worker as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> Request {
        Request::new((0..400).collect(), vec![1], (0, 0))
    }

    fn blocks(beliefs: &Beliefs) -> u32 {
        let known = beliefs.look(&request());
        let runs = known
            .into_iter()
            .flat_map(|known| known.0)
            .flat_map(|of| of.runs);
        runs.map(|run| run.to).max().unwrap_or(0)
    }

    #[test]
    fn what_was_sent_counts_at_once_and_what_failed_no_longer() {
        for (mode, all) in [(Mode::Exact, 25), (Mode::Approximate, 3)] {
            let mut beliefs = Beliefs::new(mode);
            beliefs.sent(2, &request(), (None, Duration::ZERO));
            assert_eq!(blocks(&beliefs), all);
            beliefs.ended(2, &request(), (false, Duration::ZERO));
            assert_eq!(blocks(&beliefs), 0);
        }
    }

    #[test]
    fn served_prompts_are_believed_only_where_nothing_is_announced() {
        for (mode, left) in [(Mode::Exact, 0), (Mode::Approximate, 3)] {
            let mut beliefs = Beliefs::new(mode);
            beliefs.sent(2, &request(), (None, Duration::ZERO));
            beliefs.ended(2, &request(), (true, Duration::ZERO));
            for second in 1..60 {
                beliefs.sweep(Duration::from_secs(second));
            }
            assert_eq!(blocks(&beliefs), left);
        }
    }
}
