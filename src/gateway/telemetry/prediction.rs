//! What was predicted of a prompt's cached tokens, against what the engine then says.

use crate::gateway::Worker;
use crate::kv;
use actors::backend::Backend;
use routing::knowledge::{Mode, error_permille, is_found};
use routing::score::{Basis, Reach};
use std::sync::Arc;
use wire::openai::Usage;

/// What a decision believed of the backend that it chose.
pub struct Prediction {
    /// What the prompt finds there.
    pub reach: Reach,
    /// Where the knowledge of its cache came from.
    pub mode: Mode,
    /// Whom it is of.
    pub backend: Arc<Backend>,
}

impl Prediction {
    /// Tokens of the prompt that were believed to be cached.
    fn tokens(&self, usage: &Usage) -> u64 {
        match self.reach.basis {
            Basis::Tokens => self.reach.tokens - self.reach.uncached,
            // of a text, only the share is known
            Basis::Text => (self.reach.overlap.raw * usage.prompt_tokens as f64) as u64,
        }
    }

    /// Compares it with what the engine says it had cached. An engine that does not say is counted
    /// apart, never as 0.
    pub fn check(&self, usage: &Usage, worker: &Worker) {
        self.correct_work(usage);
        if self.reach.of_blocks == 0 {
            return; // nothing was known of this prompt here
        }
        let predicted = self.tokens(usage);
        let actual = usage.cached_tokens();
        worker
            .handles
            .prediction(&self.backend.spec.name, predicted, actual);
        let Some(actual) = actual else { return };
        // what was sent a moment ago is a hope: it may not have been computed yet
        let by_mode = match self.mode {
            Mode::Exact => self.reach.basis == Basis::Tokens,
            Mode::Approximate => true,
            Mode::Blind => false,
        };
        if by_mode && !self.reach.overlap.speculative {
            let error = error_permille(predicted, actual, usage.prompt_tokens);
            self.backend.spec.kv.standing.record(self.mode, error);
            if let (Mode::Approximate, Some(index)) = (self.mode, &worker.gateway.kv)
                && predicted > 0
            {
                kv::checked(index, &self.reach, is_found(predicted, actual));
            }
        }
    }

    /// The backend was charged with what was thought to be uncached; it has computed this.
    fn correct_work(&self, usage: &Usage) {
        let cached = usage.cached_tokens();
        let prompt = match cached {
            Some(cached) => usage.prompt_tokens.saturating_sub(cached),
            None => self.reach.uncached,
        };
        let computed = prompt.saturating_add(usage.completion_tokens.unwrap_or(0));
        let more = i128::from(computed) - i128::from(self.reach.uncached);
        self.backend.live.add_work(i64::try_from(more).unwrap_or(0));
    }
}
