//! The command line: vLLM's flags under vLLM's names, so that a `vllm serve …` command runs unchanged, and the simulator's own
//! under `--sim-`. Flags without a meaning for a simulator are taken and ignored.

use crate::config::{KvTransfer, SimConfig};
use crate::failure::FaultSettings;
use crate::flag_values::{fraction, human_count, not_negative};
use crate::ignored_flags::IgnoredFlags;
use crate::kv_events::{KvEvents, flags::KvEventArgs};
use crate::kv_transfer::flags::KvTransferArgs;
use crate::speed::{Speed, figures_for};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};
use std::ffi::OsString;
use std::time::Duration;

/// vLLM's default share of the GPUs' memory.
const MEMORY_UTILIZATION: f64 = 0.9;

/// A stand-in for a vLLM engine: put `engine-sim` in place of `vllm` in a `vllm serve` command.
///
/// It schedules, caches prefixes, preempts, counts and answers as vLLM does, in simulated time and without a GPU. Answers are
/// made-up text, the same for the same prompt.
#[derive(Debug, Parser)]
#[command(
    name = "engine-sim",
    version,
    after_help = "Example:\n  engine-sim serve meta-llama/Llama-3.1-70B-Instruct --host 0.0.0.0 --port 8000 --max-model-len 32768\n\n\
                  See `engine-sim serve --help` for the flags."
)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve a model over the OpenAI API
    Serve(Box<Serve>),
}

#[derive(Debug, clap::Args)]
#[command(
    args_override_self = true, // as argparse: the last one counts
    after_help = "Without --sim- flags the model's name decides: 30B and more get the figures of a Llama-3.1-70B on four H100 GPUs, the rest \
                  those of an 8B on one."
)]
struct Serve {
    /// Model name, for example meta-llama/Llama-3.1-70B-Instruct. Nothing is downloaded
    #[arg(required_unless_present = "model_flag")]
    model: Option<String>,
    /// The same as the positional model
    #[arg(
        long = "model",
        id = "model_flag",
        conflicts_with = "model",
        value_name = "MODEL"
    )]
    model_flag: Option<String>,
    #[command(flatten)]
    server: ServerArgs,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    ignored: IgnoredFlags,
    #[command(flatten)]
    simulator: SimulatorArgs,
    #[command(flatten)]
    kv_events: KvEventArgs,
    #[command(flatten)]
    kv_transfer: KvTransferArgs,
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "vLLM: server")]
struct ServerArgs {
    /// Address to listen on
    #[arg(long, default_value = "0.0.0.0")]
    host: String,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// Names that requests use instead of the model's; the first one stands in answers
    #[arg(long, num_args = 1.., value_name = "NAME")]
    served_model_name: Vec<String>,
    /// Keys of which a request under /v1 must carry one as its bearer token
    #[arg(long, num_args = 1.., value_name = "KEY")]
    api_key: Vec<String>,
    /// Report cached tokens in `usage`; on anyway unless --strict-vllm
    #[arg(long)]
    enable_prompt_tokens_details: bool,
    /// Let the model choose tools by itself; on anyway unless --strict-vllm
    #[arg(long)]
    enable_auto_tool_choice: bool,
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "vLLM: engine")]
struct EngineArgs {
    /// Longest prompt plus answer in tokens; 32k and 32K are 32,000 and 32,768
    #[arg(long, value_parser = human_count)]
    max_model_len: Option<usize>,
    /// Reuse the blocks of equal prompt beginnings; the default
    #[arg(long, overrides_with = "no_enable_prefix_caching")]
    enable_prefix_caching: bool,
    /// Never reuse blocks
    #[arg(long)]
    no_enable_prefix_caching: bool,
    /// GPUs that share the model
    #[arg(long, short = 't', visible_alias = "tp", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    tensor_parallel_size: u32,
    /// Share of the GPUs' memory to use; what the weights leave of it becomes KV blocks
    #[arg(long, default_value_t = MEMORY_UTILIZATION, value_parser = fraction)]
    gpu_memory_utilization: f64,
    /// Type of keys and values; fp8 doubles the blocks
    #[arg(long, default_value = "auto", value_name = "TYPE")]
    kv_cache_dtype: String,
    /// Tokens per KV block
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1024))]
    block_size: u16,
    /// KV blocks, instead of counting what fits into the GPUs
    #[arg(long, visible_alias = "sim-num-blocks", value_name = "BLOCKS")]
    num_gpu_blocks_override: Option<u32>,
    /// Tokens that one step may compute, prefill and decode together
    #[arg(long, default_value = "8192", value_parser = human_count)]
    max_num_batched_tokens: usize,
    /// Sequences that may run at once
    #[arg(long, default_value_t = 256)]
    max_num_seqs: usize,
    /// How KV blocks are shared with other engines, as JSON
    #[arg(long, value_name = "JSON")]
    kv_transfer_config: Option<String>,
    /// How KV events are published over ZeroMQ, as JSON, for example {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}.
    /// GET /v1/kv_events serves them without it
    #[arg(long, value_name = "JSON")]
    kv_events_config: Option<String>,
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Simulator")]
struct SimulatorArgs {
    /// Leave out what vLLM leaves out without its own flag: cached tokens in `usage`, tools chosen by the model
    #[arg(long)]
    strict_vllm: bool,
    /// Multiplies every simulated time: 1 is real time, 0.1 ten times faster, 0 no waiting
    #[arg(long, default_value_t = 1.0, value_name = "FACTOR", value_parser = not_negative)]
    sim_time_scale: f64,
    /// Milliseconds to compute one prompt token
    #[arg(long, value_name = "MS", value_parser = not_negative)]
    sim_prefill_ms_per_token: Option<f64>,
    /// Milliseconds between the tokens of a lone answer; no step is shorter
    #[arg(long, value_name = "MS", value_parser = not_negative)]
    sim_itl_ms: Option<f64>,
    /// Milliseconds that each further running answer adds to a step
    #[arg(long, value_name = "MS", value_parser = not_negative)]
    sim_itl_ms_per_sequence: Option<f64>,
    /// Milliseconds from a request's arrival to its first step
    #[arg(long, value_name = "MS", value_parser = not_negative)]
    sim_overhead_ms: Option<f64>,
    /// Seconds before the engine listens, as if it loaded weights; also scaled
    #[arg(long, default_value_t = 0.0, value_name = "SECONDS", value_parser = not_negative)]
    sim_startup_delay: f64,
    /// Tokens of an answer that no limit ends, on average
    #[arg(long, default_value_t = 128, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    sim_answer_tokens: u32,
    /// Seed of answers, block hashes and random failures
    #[arg(long, default_value_t = 0, value_name = "NUMBER")]
    sim_seed: u64,
    /// Share of requests, 0 to 1, that fail at once with --sim-fail-status
    #[arg(long, default_value_t = 0.0, value_name = "SHARE", value_parser = fraction)]
    sim_fail_rate: f64,
    /// Status of injected failures
    #[arg(long, default_value_t = 500, value_name = "STATUS", value_parser = clap::value_parser!(u16).range(400..=599))]
    sim_fail_status: u16,
    /// End every answer with an error after this many tokens, in a stream as an error event
    #[arg(long, value_name = "TOKENS")]
    sim_fail_after_tokens: Option<u32>,
    /// Cut the connection after this many tokens of every answer
    #[arg(long, value_name = "TOKENS")]
    sim_drop_after_tokens: Option<u32>,
    /// Share of requests, 0 to 1, that never get an answer
    #[arg(long, default_value_t = 0.0, value_name = "SHARE", value_parser = fraction)]
    sim_hang_rate: f64,
}

impl Args {
    /// Checks what clap cannot check and resolves defaults that depend on each other.
    pub fn into_config(self) -> Result<SimConfig, clap::Error> {
        let Command::Serve(serve) = self.command;
        let (engine, sim, server) = (serve.engine, serve.simulator, serve.server);
        let model = serve.model.or(serve.model_flag).unwrap_or_default();
        let figures = figures_for(&model);
        let block_size = usize::from(engine.block_size);
        let kv_dtype_bytes = if engine.kv_cache_dtype.contains("fp8") {
            1.0
        } else {
            2.0
        };
        let num_blocks = match engine.num_gpu_blocks_override {
            Some(blocks) => blocks as usize,
            None => figures.blocks(
                engine.tensor_parallel_size,
                engine.gpu_memory_utilization,
                kv_dtype_bytes,
                block_size,
            ),
        };
        let kv_transfer: Option<KvTransfer> =
            json_flag("--kv-transfer-config", engine.kv_transfer_config)?;
        let kv_events: Option<KvEvents> = json_flag("--kv-events-config", engine.kv_events_config)?;
        let config = SimConfig {
            models: if server.served_model_name.is_empty() {
                vec![model]
            } else {
                server.served_model_name
            },
            host: server.host,
            port: server.port,
            max_model_len: engine
                .max_model_len
                .unwrap_or_else(|| figures.context.min(num_blocks * block_size)),
            block_size,
            num_blocks,
            prefix_caching: !engine.no_enable_prefix_caching,
            max_num_batched_tokens: engine.max_num_batched_tokens,
            max_num_seqs: engine.max_num_seqs,
            api_keys: server.api_key,
            prompt_tokens_details: server.enable_prompt_tokens_details || !sim.strict_vllm,
            auto_tool_choice: server.enable_auto_tool_choice || !sim.strict_vllm,
            kv_transfer,
            tensor_parallel_size: engine.tensor_parallel_size,
            kv_sharing: serve.kv_transfer.into(),
            kv_cache_dtype: engine.kv_cache_dtype,
            kv_bytes_per_token: figures.kv_bytes_per_token(kv_dtype_bytes),
            kv_events: kv_events.unwrap_or_default(),
            kv_event_quirks: serve.kv_events.into(),
            speed: Speed {
                prefill_ms_per_token: sim
                    .sim_prefill_ms_per_token
                    .unwrap_or(figures.speed.prefill_ms_per_token),
                itl_ms: sim.sim_itl_ms.unwrap_or(figures.speed.itl_ms),
                itl_ms_per_sequence: sim
                    .sim_itl_ms_per_sequence
                    .unwrap_or(figures.speed.itl_ms_per_sequence),
                overhead_ms: sim.sim_overhead_ms.unwrap_or(figures.speed.overhead_ms),
            },
            time_scale: sim.sim_time_scale,
            startup_delay: Duration::from_secs_f64(sim.sim_startup_delay),
            answer_tokens: sim.sim_answer_tokens as usize,
            seed: sim.sim_seed,
            faults: FaultSettings {
                fail_rate: sim.sim_fail_rate,
                fail_status: sim.sim_fail_status,
                fail_after_tokens: sim.sim_fail_after_tokens,
                drop_after_tokens: sim.sim_drop_after_tokens,
                hang_rate: sim.sim_hang_rate,
            },
        };
        config.validate().map_err(|fault| usage_error(&fault))?;
        Ok(config)
    }
}

/// vLLM takes `--max_model_len` for `--max-model-len`: underscores of a long flag's name become dashes.
pub fn with_dashes(word: OsString) -> OsString {
    let Some(text) = word.to_str().filter(|text| text.starts_with("--")) else {
        return word;
    };
    let (name, value) = text.split_at(text.find('=').unwrap_or(text.len()));
    format!("{}{value}", name.replace('_', "-")).into()
}

fn json_flag<T: serde::de::DeserializeOwned>(
    flag: &str,
    value: Option<String>,
) -> Result<Option<T>, clap::Error> {
    value
        .map(|text| {
            serde_json::from_str(&text).map_err(|fault| {
                usage_error(&format!("{flag} is not the JSON that it takes: {fault}"))
            })
        })
        .transpose()
}

fn usage_error(message: &str) -> clap::Error {
    Args::command().error(ErrorKind::ValueValidation, message)
}

#[cfg(test)]
#[path = "args_test.rs"]
mod test;
