//! Decides what the engine computes in its next step: vLLM's continuous batching with one token budget, chunked prefill and
//! preemption by recomputation. Pure: no clock, no I/O; the same state gives the same step.

use crate::kv_cache::{BlockId, KvCache, Run};
use crate::sequence::{NewSequence, Sequence, SequenceId};
use std::collections::{HashMap, VecDeque};

/// Bounds of one step.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Tokens that one step may compute, prefill and decode together.
    pub batched_tokens_max: usize,
    /// Sequences that may run at once; no more than `batched_tokens_max`, so that every decode fits into every step.
    pub sequences_max: usize,
}

/// Everything that a step reads and changes.
#[derive(Debug)]
pub struct State {
    limits: Limits,
    cache: KvCache,
    /// First come, first served; preempted sequences return to the front.
    waiting: VecDeque<Sequence>,
    /// In order of admission. Only the last may be in the middle of its prefill: a chunk that does not reach the end of its
    /// prompt has used up the budget, so nobody is admitted behind it.
    running: Vec<Sequence>,
    queried_tokens: u64,
    hit_tokens: u64,
    loaded_tokens: u64,
    /// Blocks that were promised to others, by the sequence that computed them.
    pinned: HashMap<SequenceId, Vec<BlockId>>,
}

/// One token, or the end, of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Output {
    /// Whose.
    pub id: SequenceId,
    /// None when a sequence without an answer ends with its prefill.
    pub token: Option<u32>,
    /// The last one of this sequence.
    pub last: bool,
    /// Prompt tokens that the prefix cache supplied when the sequence was first admitted.
    pub cached: usize,
}

/// What one step did.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct StepReport {
    /// Prompt (or recomputed) tokens computed.
    pub prefill_tokens: usize,
    /// Sequences that computed one token after their prefill.
    pub decodes: usize,
    /// Sequences sent back to the queue for want of blocks.
    pub preempted: usize,
    /// What became visible, to be delivered when the step's time has passed.
    pub outputs: Vec<Output>,
}

impl StepReport {
    /// All tokens computed.
    pub fn tokens(&self) -> usize {
        self.prefill_tokens + self.decodes
    }
}

impl State {
    /// An idle engine.
    pub fn new(limits: Limits, cache: KvCache) -> Self {
        assert!(
            limits.sequences_max > 0 && limits.sequences_max <= limits.batched_tokens_max,
            "every decode must fit into a step"
        );
        Self {
            limits,
            cache,
            waiting: VecDeque::new(),
            running: Vec::new(),
            queried_tokens: 0,
            hit_tokens: 0,
            loaded_tokens: 0,
            pinned: HashMap::new(),
        }
    }

    /// Queues a sequence. The caller has checked that prompt and answer fit into the whole pool.
    pub fn add(&mut self, new: NewSequence) {
        debug_assert!(!new.prompt.is_empty());
        debug_assert!(
            new.prompt.len() + new.answer.len() <= self.cache.capacity() * self.cache.block_size()
        );
        self.waiting
            .push_back(Sequence::new(new, self.cache.block_size()));
    }

    /// Removes a sequence and frees its blocks; false when it is not (or no longer) here.
    pub fn abort(&mut self, id: SequenceId) -> bool {
        if let Some(at) = self.waiting.iter().position(|sequence| sequence.id == id) {
            self.waiting.remove(at);
            return true;
        }
        let Some(at) = self.running.iter().position(|sequence| sequence.id == id) else {
            return false;
        };
        let sequence = self.running.remove(at);
        self.cache.release(&sequence.blocks);
        true
    }

    /// Makes the cache that of a new process. What runs at this moment goes on without being announced or found.
    pub fn restart_cache(&mut self) {
        self.cache.forget_all();
        for sequence in &mut self.running {
            sequence.published = usize::MAX;
        }
    }

    /// Sequences in the batch.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Sequences in the queue.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Nothing to do.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Prompt tokens that were looked up in the prefix cache, and those found there, since the start.
    pub fn prefix_counts(&self) -> (u64, u64) {
        (self.queried_tokens, self.hit_tokens)
    }

    /// Prompt tokens that came from elsewhere, since the start.
    pub fn loaded_tokens(&self) -> u64 {
        self.loaded_tokens
    }

    /// The blocks that are kept for others on behalf of a sequence.
    pub fn pinned(&self, id: SequenceId) -> Option<&[BlockId]> {
        self.pinned.get(&id).map(Vec::as_slice)
    }

    /// All blocks that are kept for others.
    pub fn pinned_blocks(&self) -> usize {
        self.pinned.values().map(Vec::len).sum()
    }

    /// Gives back what was kept on behalf of a sequence, if anything.
    pub fn unpin(&mut self, id: SequenceId) {
        if let Some(blocks) = self.pinned.remove(&id) {
            self.cache.release(&blocks);
        }
    }

    /// The pool.
    pub fn cache(&self) -> &KvCache {
        &self.cache
    }

    /// The pool, to clear it or to take its events.
    pub fn cache_mut(&mut self) -> &mut KvCache {
        &mut self.cache
    }
}

/// Schedules and "computes" one step: running sequences first, so decodes never wait for prefills; then, if nothing had to be
/// preempted, the queue in order, as long as tokens, places and blocks last.
pub fn step(state: &mut State) -> StepReport {
    let mut report = StepReport::default();
    let mut budget = state.limits.batched_tokens_max;
    let mut planned = Vec::with_capacity(state.running.len());

    let mut at = 0;
    while at < state.running.len() && budget > 0 {
        let tokens = (state.running[at].tokens.len() - state.running[at].computed).min(budget);
        if !reserve_or_preempt(state, at, tokens, &mut report) {
            break; // the sequence at hand was the youngest and is back in the queue itself
        }
        budget -= tokens;
        planned.push(tokens);
        at += 1;
    }
    if report.preempted == 0 {
        while budget > 0 && state.running.len() < state.limits.sequences_max {
            let Some(tokens) = admit_next(state, budget) else {
                break;
            };
            budget -= tokens;
            planned.push(tokens);
        }
    }
    compute(state, &planned, &mut report);
    report
}

/// Blocks for `tokens` more tokens of the sequence at `at`, taken from the youngest ones if none are free. False when that was
/// the sequence itself.
fn reserve_or_preempt(
    state: &mut State,
    at: usize,
    tokens: usize,
    report: &mut StepReport,
) -> bool {
    loop {
        let sequence = &mut state.running[at];
        let needed = (sequence.computed + tokens)
            .div_ceil(state.cache.block_size())
            .saturating_sub(sequence.blocks.len());
        if let Some(blocks) = state.cache.allocate(needed) {
            sequence.blocks.extend(blocks);
            publish(&mut state.cache, sequence, tokens);
            return true;
        }
        let mut youngest = state.running.pop().expect("`at` is a running sequence");
        state.cache.release(&youngest.blocks);
        youngest.start_over();
        state.waiting.push_front(youngest);
        report.preempted += 1;
        if state.running.len() == at {
            return false;
        }
    }
}

/// Moves the first waiting sequence into the batch with what the cache holds of it and as large a first chunk as the budget
/// allows. None when there is none or its blocks do not fit.
fn admit_next(state: &mut State, budget: usize) -> Option<usize> {
    let sequence = state.waiting.front()?;
    let block_size = state.cache.block_size();
    // The last token is always computed: its logits give the first answer token.
    let reusable = ((sequence.tokens.len() - 1) / block_size).min(sequence.hashes.len());
    let found = state.cache.find(&sequence.hashes[..reusable]);
    let hit = found.len() * block_size;
    let supplied = sequence.supplied(hit);
    let tokens = (sequence.tokens.len() - supplied).min(budget);
    let needed = (supplied + tokens).div_ceil(block_size) - found.len();
    if needed + state.cache.free_among(&found) > state.cache.free() {
        return None;
    }
    let mut sequence = state.waiting.pop_front()?;
    state.cache.share(&found);
    sequence.blocks = found;
    sequence
        .blocks
        .extend(state.cache.allocate(needed).expect("counted above"));
    sequence.published = hit / block_size;
    sequence.computed = supplied;
    if sequence.cached.is_none() {
        sequence.cached = Some(supplied);
        state.loaded_tokens += (supplied - hit) as u64;
        state.queried_tokens += sequence.prompt_len as u64;
        state.hit_tokens += hit as u64;
    }
    publish(&mut state.cache, &mut sequence, tokens);
    state.running.push(sequence);
    Some(tokens)
}

/// Makes the blocks findable that `tokens` more tokens fill: at scheduling time, as vLLM does, so that two equal prompts in one
/// step share.
fn publish(cache: &mut KvCache, sequence: &mut Sequence, tokens: usize) {
    let full = (sequence.computed + tokens) / cache.block_size();
    if full <= sequence.published {
        return;
    }
    let range = sequence.published..full;
    cache.publish(Run {
        ids: &sequence.blocks[range.clone()],
        hashes: &sequence.hashes[range.clone()],
        parent: range
            .start
            .checked_sub(1)
            .map(|before| sequence.hashes[before]),
        tokens: &sequence.tokens[range.start * cache.block_size()..range.end * cache.block_size()],
        salt: sequence.salt.clone(),
    });
    sequence.published = full;
}

/// Advances the scheduled sequences; those that reached the end of their tokens sample the next one or end.
fn compute(state: &mut State, planned: &[usize], report: &mut StepReport) {
    let block_size = state.cache.block_size();
    let mut ended = Vec::new();
    for (at, tokens) in planned.iter().enumerate() {
        let sequence = &mut state.running[at];
        match sequence.generated() > 0 && *tokens == 1 {
            true => report.decodes += 1,
            false => report.prefill_tokens += tokens,
        }
        sequence.computed += tokens;
        if sequence.computed < sequence.tokens.len() {
            continue;
        }
        let token = sequence.answer.get(sequence.generated()).copied();
        sequence.tokens.extend(token);
        sequence.hash_full_blocks(block_size);
        if std::mem::take(&mut sequence.pin) {
            let kept = &sequence.blocks[..sequence.prompt_len.div_ceil(block_size)];
            state.cache.share(kept);
            state.pinned.insert(sequence.id, kept.to_vec());
        }
        let last = sequence.generated() == sequence.answer.len();
        report.outputs.push(Output {
            id: sequence.id,
            token,
            last,
            cached: sequence.cached.unwrap_or(0),
        });
        if last {
            ended.push(at);
        }
    }
    for at in ended.into_iter().rev() {
        let sequence = state.running.remove(at);
        state.cache.release(&sequence.blocks);
    }
}

#[cfg(test)]
#[path = "scheduler_test.rs"]
mod test;
