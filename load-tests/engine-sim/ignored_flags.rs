//! vLLM's flags without a meaning for a simulator, taken so that a real command runs. A table, because they need neither help
//! nor a field; a flag that is not here is a mistake and is refused with a suggestion.

use clap::{Arg, ArgAction, ArgMatches, Command, FromArgMatches};

/// Flags that stand alone.
const SWITCHES: [&str; 16] = [
    "async-scheduling",
    "disable-custom-all-reduce",
    "disable-log-requests",
    "disable-log-stats",
    "disable-uvicorn-access-log",
    "enable-chunked-prefill",
    "enable-expert-parallel",
    "enable-log-requests",
    "enable-server-load-tracking",
    "enable-sleep-mode",
    "enforce-eager",
    "no-async-scheduling",
    "no-enable-chunked-prefill",
    "no-enable-log-requests",
    "skip-tokenizer-init",
    "trust-remote-code",
];

/// Flags with one value. `--seed` is that of the weights; the simulator's own is `--sim-seed`.
const WITH_VALUE: [&str; 28] = [
    "api-server-count",
    "chat-template",
    "chat-template-content-format",
    "compilation-config",
    "cpu-offload-gb",
    "distributed-executor-backend",
    "download-dir",
    "dtype",
    "generation-config",
    "hf-overrides",
    "limit-mm-per-prompt",
    "load-format",
    "max-log-len",
    "override-generation-config",
    "pipeline-parallel-size",
    "prefix-caching-hash-algo",
    "quantization",
    "reasoning-parser",
    "revision",
    "runner",
    "scheduling-policy",
    "seed",
    "speculative-config",
    "swap-space",
    "task",
    "tokenizer",
    "tokenizer-mode",
    "tool-call-parser",
];

/// Nothing: what was given is forgotten.
#[derive(Debug)]
pub struct IgnoredFlags;

impl clap::Args for IgnoredFlags {
    fn augment_args(command: Command) -> Command {
        let switch = |flag| {
            Arg::new(flag)
                .long(flag)
                .hide(true)
                .action(ArgAction::Count)
        };
        let with_value = |flag| {
            Arg::new(flag)
                .long(flag)
                .hide(true)
                .action(ArgAction::Append)
        };
        command
            .args(SWITCHES.map(switch))
            .args(WITH_VALUE.map(with_value))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for IgnoredFlags {
    fn from_arg_matches(_: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self)
    }

    fn update_from_arg_matches(&mut self, _: &ArgMatches) -> Result<(), clap::Error> {
        Ok(())
    }
}
