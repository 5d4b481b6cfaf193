//! What a backend is worth for a prompt: how much of it it has, how busy and how sound it is.

use crate::knowledge::Mode;
use crate::prefix_index::{HolderId, Run, Tier};
use crate::view::{BackendView, Load, Memory};

/// `kv_cache_index.scoring` of the settings; all from 0 to 1.
#[derive(Debug, Clone, Copy)]
pub struct Weights {
    /// Of overlap.
    pub overlap: f64,
    /// Of low load.
    pub load: f64,
    /// Of health.
    pub health: f64,
    /// Overlap counts when some candidate covers at least this share of the prompt, unweighted.
    pub min_overlap: f64,
    /// Of a block in GPU memory.
    pub gpu: f64,
    /// Of a block in the host's memory.
    pub cpu: f64,
    /// Of a block in storage.
    pub storage: f64,
}

impl Weights {
    /// Every copy counts alike: of what was guessed, the place is not known.
    fn flat(self) -> Self {
        Weights {
            cpu: self.gpu,
            storage: self.gpu,
            ..self
        }
    }

    fn of(&self, tier: Tier) -> f64 {
        match tier {
            Tier::Gpu | Tier::Speculative => self.gpu,
            Tier::Cpu => self.cpu,
            Tier::Storage | Tier::Assumed => self.storage,
        }
    }
}

/// What a prompt was cut into blocks by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Basis {
    /// Its tokens: what engines announce.
    #[default]
    Tokens,
    /// Its text: what was sent to backends whose cache is guessed.
    Text,
}

/// What is known of a prompt's blocks, cut in one way.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PromptOverlap {
    /// In which.
    pub basis: Basis,
    /// Who has which of them.
    pub runs: Vec<Run>,
    /// Full blocks of the prompt; at least 1.
    pub blocks: u32,
    /// Tokens of the prompt; estimated when cut by text.
    pub tokens: u32,
    /// Tokens per block; estimated when cut by text.
    pub block_size: u32,
}

/// All that is known of one prompt: by the tokens of each block size that its engines have, and by
/// its text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Known(pub Vec<PromptOverlap>);

impl Known {
    /// What counts for a backend in this mode: of tokens, those of its own block size; where there
    /// are none for this prompt, its text.
    pub fn for_backend(&self, load: &Load) -> Option<&PromptOverlap> {
        let by_tokens = || {
            let of_size = |p: &&PromptOverlap| load.block_size.is_none_or(|s| s == p.block_size);
            let mut tokens = self.0.iter().filter(|p| p.basis == Basis::Tokens);
            tokens.find(of_size)
        };
        let by_text = || self.0.iter().find(|p| p.basis == Basis::Text);
        match load.mode {
            Mode::Exact => by_tokens().or_else(by_text),
            Mode::Approximate => by_text(),
            Mode::Blind => None,
        }
    }

    /// Only copies that an event or a finished transfer has confirmed: what was just sent somewhere, or is
    /// assumed to be in storage, may not be there.
    pub fn confirmed(&self, storage: bool) -> Known {
        let of_tokens = self.0.iter().filter(|p| p.basis == Basis::Tokens);
        let confirmed = of_tokens.map(|prompt| PromptOverlap {
            runs: prompt
                .runs
                .iter()
                .filter(|run| match run.tier {
                    Tier::Gpu | Tier::Cpu => true,
                    Tier::Storage => storage,
                    Tier::Speculative | Tier::Assumed => false,
                })
                .copied()
                .collect(),
            ..*prompt
        });
        Known(confirmed.collect())
    }

    /// Tokens of the prompt, as well as is known.
    pub fn tokens(&self) -> u64 {
        self.0.first().map_or(0, |prompt| u64::from(prompt.tokens))
    }
}

/// How much of a prompt one backend can reach, from its beginning on without a hole.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Overlap {
    /// Blocks.
    pub blocks: u32,
    /// Share of the prompt's blocks, each by the weight of its best copy.
    pub weighted: f64,
    /// Share of the prompt's blocks.
    pub raw: f64,
    /// Whether some of them only count because a request for them was just sent there.
    pub speculative: bool,
}

/// What a prompt finds at one backend.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Reach {
    /// At the rank that has the most of it.
    pub overlap: Overlap,
    /// Blocks of the prompt; 0 when nothing is known of it here.
    pub of_blocks: u32,
    /// How these were cut.
    pub basis: Basis,
    /// Tokens of the prompt; estimated when cut by text.
    pub tokens: u64,
    /// Those of them that still have to be computed.
    pub uncached: u64,
    /// The memory that has the most of it; the one of unknown rank when none has any.
    pub memory: Option<Memory>,
}

/// What a prompt finds at a backend: its best data-parallel rank, joined with the storage that it
/// reads.
pub fn reach(known: &Known, backend: &BackendView, load: &Load, weights: &Weights) -> Reach {
    let nothing = Reach {
        tokens: known.tokens(),
        uncached: known.tokens(),
        memory: backend.memories.first().copied(),
        ..Reach::default()
    };
    let Some(prompt) = known.for_backend(load) else {
        return nothing;
    };
    let weights = match prompt.basis {
        Basis::Tokens => *weights,
        Basis::Text => weights.flat(),
    };
    let best = backend.memories.iter().map(|memory| {
        let holders = [memory.holder];
        let holders = || holders.iter().chain(backend.reads.iter());
        (overlap(prompt, holders, &weights), *memory)
    });
    let Some((overlap, memory)) = best.reduce(better) else {
        return nothing;
    };
    Reach {
        overlap,
        of_blocks: prompt.blocks,
        basis: prompt.basis,
        tokens: u64::from(prompt.tokens),
        uncached: prompt.uncached(&overlap),
        memory: Some(memory),
    }
}

/// Of two memories of one backend, the one to go by. What was announced of a known rank counts before
/// what is only hoped for from an unknown one, as long as it is half of that: the hope is mostly that
/// very rank's.
fn better(a: (Overlap, Memory), b: (Overlap, Memory)) -> (Overlap, Memory) {
    let known = |of: &(Overlap, Memory)| of.1.rank.is_some() && !of.0.speculative;
    let hope = |of: &(Overlap, Memory)| of.1.rank.is_none() && of.0.speculative;
    let half = |of: &(Overlap, Memory), other: &(Overlap, Memory)| {
        of.0.blocks > 0 && of.0.blocks * 2 >= other.0.blocks
    };
    if hope(&a) && known(&b) && half(&b, &a) {
        return b;
    }
    if hope(&b) && known(&a) && half(&a, &b) {
        return a;
    }
    // the first of equals
    if b.0.weighted > a.0.weighted { b } else { a }
}

/// Joins what a backend's own memory and the storage that it reads have of a prompt.
pub fn overlap<'a, I: Iterator<Item = &'a HolderId>>(
    prompt: &PromptOverlap,
    holders: impl Fn() -> I,
    weights: &Weights,
) -> Overlap {
    let mine = |run: &&Run| holders().any(|holder| *holder == run.holder);
    let (mut at, mut sum, mut speculative) = (0u32, 0.0, false);
    loop {
        let here = |run: &&Run| run.from <= at && at < run.to;
        let best = prompt.runs.iter().filter(mine).filter(here).max_by(|a, b| {
            let by_weight = weights.of(a.tier).total_cmp(&weights.of(b.tier));
            by_weight.then(a.tier.cmp(&b.tier))
        });
        let Some(best) = best else { break };
        let weight = weights.of(best.tier);
        // up to its end, or to where something better begins
        let better = prompt.runs.iter().filter(mine);
        let better = better.filter(|run| run.from > at && weights.of(run.tier) > weight);
        let end = better
            .map(|run| run.from)
            .min()
            .unwrap_or(best.to)
            .min(best.to);
        sum += weight * f64::from(end - at);
        speculative |= best.tier == Tier::Speculative;
        at = end;
    }
    let all = f64::from(prompt.blocks.max(1));
    Overlap {
        blocks: at,
        weighted: sum / all,
        raw: f64::from(at) / all,
        speculative,
    }
}

impl PromptOverlap {
    /// Tokens that a backend with this overlap still has to compute.
    pub fn uncached(&self, overlap: &Overlap) -> u64 {
        let cached = u64::from(overlap.blocks) * u64::from(self.block_size);
        u64::from(self.tokens).saturating_sub(cached)
    }
}

/// Tokens of prompt that weigh as much as one running request.
pub const TOKENS_PER_REQUEST: f64 = 1024.0;
/// The load, in requests per unit of weight, at which half of the load term is gone.
pub const LOAD_HALF_POINT: f64 = 8.0;
/// The load term: 0 when idle, towards 1 with requests and queued tokens.
pub fn load(in_flight: u32, queued_tokens: u64, weight: u32) -> f64 {
    let requests = f64::from(in_flight) + queued_tokens as f64 / TOKENS_PER_REQUEST;
    requests / (requests + f64::from(weight) * LOAD_HALF_POINT)
}

/// overlap_weight·overlap + load_weight·(1−load) + health_weight·health.
pub fn composite(weights: &Weights, overlap: f64, load: f64, health: f64) -> f64 {
    weights.overlap * overlap + weights.load * (1.0 - load) + weights.health * health
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const WEIGHTS: Weights = Weights {
        overlap: 0.6,
        load: 0.3,
        health: 0.1,
        min_overlap: 0.3,
        gpu: 1.0,
        cpu: 0.8,
        storage: 0.6,
    };

    fn run(holder: u32, tier: Tier, from: u32, to: u32) -> Run {
        Run {
            holder: HolderId(holder),
            tier,
            from,
            to,
        }
    }

    fn prompt(runs: Vec<Run>) -> PromptOverlap {
        PromptOverlap {
            basis: Basis::Tokens,
            runs,
            blocks: 10,
            tokens: 165,
            block_size: 16,
        }
    }

    #[test]
    fn memory_and_storage_join_without_a_hole_and_each_block_counts_once() {
        let runs = prompt(vec![
            run(1, Tier::Gpu, 0, 4),
            run(1, Tier::Cpu, 4, 5),
            run(100, Tier::Storage, 2, 8),
            run(1, Tier::Gpu, 7, 8),
            run(2, Tier::Gpu, 8, 10),
        ]);
        let both = overlap(&runs, || [HolderId(1), HolderId(100)].iter(), &WEIGHTS);
        assert_eq!(both.blocks, 8);
        assert!(
            (both.weighted - (4.0 + 0.8 + 2.0 * 0.6 + 1.0) / 10.0).abs() < 1e-9,
            "{both:?}"
        );
        assert!((both.raw - 0.8).abs() < 1e-9);
        let alone = overlap(&runs, || [HolderId(1)].iter(), &WEIGHTS);
        assert_eq!(alone.blocks, 5, "the hole ends it");
        assert_eq!(
            overlap(&runs, || [HolderId(2)].iter(), &WEIGHTS).blocks,
            0,
            "the beginning is missing"
        );
        assert_eq!(runs.uncached(&both), 165 - 8 * 16);
    }

    #[test]
    fn load_grows_with_requests_and_tokens_and_shrinks_with_weight() {
        assert_eq!(load(0, 0, 1), 0.0);
        assert!((load(8, 0, 1) - 0.5).abs() < 1e-9);
        assert!((load(0, 8192, 1) - 0.5).abs() < 1e-9);
        assert!(load(8, 0, 2) < load(8, 0, 1));
    }

    proptest! {
        #[test]
        fn joining_agrees_with_looking_at_every_block(
            runs in proptest::collection::vec((0u32..3, 0usize..5, 0u32..10, 1u32..6), 0..12),
        ) {
            let runs: Vec<Run> = runs.into_iter().map(|(h, t, from, len)| run(h, Tier::ALL[t], from, (from + len).min(10))).collect();
            let prompt = prompt(runs.clone());
            let holders = [HolderId(0), HolderId(1)];
            let mut expected = 0.0;
            let mut blocks = 0;
            for at in 0..10 {
                let here = runs.iter().filter(|r| holders.contains(&r.holder) && r.from <= at && at < r.to);
                let best = here.map(|r| WEIGHTS.of(r.tier)).max_by(f64::total_cmp);
                let Some(best) = best else { break };
                expected += best / 10.0;
                blocks += 1;
            }
            let found = overlap(&prompt, || holders.iter(), &WEIGHTS);
            prop_assert_eq!(found.blocks, blocks);
            prop_assert!((found.weighted - expected).abs() < 1e-9);
        }
    }
}
