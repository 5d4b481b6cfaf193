//! How long an engine takes and how much it remembers: the figures by model size, and the time of one step.
//! Sources of the figures are public measurements of vLLM on H100 GPUs with 80 GB; see each field.

use crate::scheduler::StepReport;
use std::time::Duration;

const GIB: f64 = (1u64 << 30) as f64;
/// Memory of one GPU.
const GPU_BYTES: f64 = 80.0 * GIB;
/// What activations, CUDA graphs and the allocator keep of each GPU; makes a 70B model on four GPUs at 0.90 hold 28,836 blocks.
const RESERVE_BYTES_PER_GPU: f64 = 4.238e9;
/// Models from this many billion parameters on get the figures of the 70B.
const LARGE_MODEL_BILLIONS: f64 = 30.0;

/// Keys and values of one token of a Llama-3.1-70B in fp16: 80 layers × 8 KV heads (grouped queries) × 128 dimensions × (K and V) ×
/// 2 bytes = 320 KiB. Source: the model's config.json.
pub const KV_BYTES_PER_TOKEN_70B: u64 = 80 * 8 * 128 * 2 * 2;
/// The same for a Llama-3.1-8B: 32 layers instead of 80, 128 KiB.
pub const KV_BYTES_PER_TOKEN_8B: u64 = 32 * 8 * 128 * 2 * 2;

/// The times of one engine. All in milliseconds before the time scale.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Speed {
    /// Computing one prompt token.
    pub prefill_ms_per_token: f64,
    /// One decode step of a single sequence: reading the weights. No step is shorter.
    pub itl_ms: f64,
    /// What each further decoding sequence adds to a step.
    pub itl_ms_per_sequence: f64,
    /// HTTP, tokenizing, queueing and sampling between a request's arrival and its first step. A constant of each request, not of
    /// a step: the engine goes on computing for others meanwhile.
    pub overhead_ms: f64,
}

/// What is known about a model by its name.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Figures {
    /// Times.
    pub speed: Speed,
    /// fp16 weights.
    weight_bytes: f64,
    /// fp16 keys and values of one token over all layers.
    kv_bytes_per_token: u64,
    /// The fewest 80 GB GPUs that hold it with a useful cache; fewer on the command line count as this many.
    gpus_min: u32,
    /// Longest prompt plus answer that the model was trained for.
    pub context: usize,
}

/// Llama-3.1-70B, tensor parallel over four GPUs.
const LARGE: Figures = Figures {
    speed: Speed {
        prefill_ms_per_token: 0.1,
        itl_ms: 15.0,
        itl_ms_per_sequence: 0.04,
        overhead_ms: 90.0,
    },
    weight_bytes: 141.1e9,
    kv_bytes_per_token: KV_BYTES_PER_TOKEN_70B,
    gpus_min: 4,
    context: 131_072,
};

/// Llama-3.1-8B on one GPU.
const SMALL: Figures = Figures {
    speed: Speed {
        prefill_ms_per_token: 0.15,
        itl_ms: 10.0,
        itl_ms_per_sequence: 0.02,
        overhead_ms: 40.0,
    },
    weight_bytes: 16.1e9,
    kv_bytes_per_token: KV_BYTES_PER_TOKEN_8B,
    gpus_min: 1,
    context: 131_072,
};

/// The figures for a model name such as `meta-llama/Llama-3.1-70B-Instruct`: by the number before its `B`, else the small ones.
pub fn figures_for(model: &str) -> Figures {
    match billions(model) {
        Some(size) if size >= LARGE_MODEL_BILLIONS => LARGE,
        _ => SMALL,
    }
}

impl Figures {
    /// Blocks that fit beside the weights, as vLLM finds by profiling. `kv_dtype_bytes` is 2 for fp16 and 1 for fp8.
    pub fn blocks(
        &self,
        gpus: u32,
        memory_utilization: f64,
        kv_dtype_bytes: f64,
        block_size: usize,
    ) -> usize {
        let gpus = f64::from(gpus.max(self.gpus_min));
        let left =
            gpus * (GPU_BYTES * memory_utilization - RESERVE_BYTES_PER_GPU) - self.weight_bytes;
        let block_bytes = self.kv_bytes_per_token as f64 * kv_dtype_bytes / 2.0 * block_size as f64;
        (left / block_bytes).max(0.0) as usize
    }

    /// Keys and values of one token over all layers. `kv_dtype_bytes` is 2 for fp16 and 1 for fp8.
    pub fn kv_bytes_per_token(&self, kv_dtype_bytes: f64) -> u64 {
        (self.kv_bytes_per_token as f64 * kv_dtype_bytes / 2.0) as u64
    }
}

impl Speed {
    /// The time of one step. Prefill is bound by arithmetic and decode by memory; in a mixed step the slower one hides the other.
    pub fn step(&self, report: &StepReport) -> Duration {
        let prefill = self.prefill_ms_per_token * report.prefill_tokens as f64;
        let decode =
            self.itl_ms + self.itl_ms_per_sequence * report.decodes.saturating_sub(1) as f64;
        millis(prefill.max(decode))
    }

    /// The time before a request's first step.
    pub fn overhead(&self) -> Duration {
        millis(self.overhead_ms)
    }
}

fn millis(ms: f64) -> Duration {
    Duration::from_secs_f64(ms.max(0.0) / 1000.0)
}

/// The first number that a `B` follows at the end of a word: 70 in `Llama-3.1-70B-Instruct`.
fn billions(model: &str) -> Option<f64> {
    model
        .split(['-', '_', '/', ':'])
        .find_map(|word| {
            word.strip_suffix(['B', 'b'])?
                .trim_start_matches(['x', 'E'])
                .parse()
                .ok()
        })
        .filter(|size: &f64| size.is_finite() && *size > 0.0)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_name_tells_the_size() {
        assert_eq!(billions("meta-llama/Llama-3.1-70B-Instruct"), Some(70.0));
        assert_eq!(billions("Qwen/Qwen2.5-0.5b"), Some(0.5));
        assert_eq!(billions("sim-model"), None);
    }

    #[test]
    fn a_70b_on_four_gpus_holds_the_published_number_of_blocks() {
        let blocks = figures_for("Llama-3.1-70B").blocks(4, 0.9, 2.0, 16);
        assert_eq!(blocks, 28_836);
        assert!(figures_for("Llama-3.1-70B").blocks(4, 0.85, 2.0, 16) < blocks);
        assert_eq!(
            figures_for("Llama-3.1-70B").blocks(4, 0.9, 1.0, 16) / blocks,
            2
        );
    }

    #[test]
    fn a_step_is_never_shorter_than_reading_the_weights() {
        let speed = LARGE.speed;
        let prefill = |tokens| {
            speed.step(&StepReport {
                prefill_tokens: tokens,
                ..Default::default()
            })
        };
        assert_eq!(prefill(10), Duration::from_millis(15));
        assert_eq!(prefill(8192), Duration::from_secs_f64(0.8192));
        let decodes = speed.step(&StepReport {
            decodes: 101,
            ..Default::default()
        });
        assert_eq!(decodes, Duration::from_millis(19));
    }
}
