//! The simulator's own flags about KV events. The section's defaults are those of [`KvEventQuirks`].

use super::{EventEncoding, HashForm, KvEventQuirks, ReplayFraming};
use clap::value_parser;

/// What the command line says.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Simulator")]
pub struct KvEventArgs {
    /// Form of the KV events in ZeroMQ messages: arrays of the oldest vLLM, arrays with all fields, or maps
    #[arg(long, value_enum, default_value_t, value_name = "ERA")]
    sim_kv_events_encoding: EventEncoding,
    /// Form of the block hashes in ZeroMQ messages: 64-bit integers or 32 bytes
    #[arg(long, value_enum, default_value_t, value_name = "FORM")]
    sim_kv_events_hash: HashForm,
    /// Form of the replay socket's answers: without or with the topic
    #[arg(long, value_enum, default_value_t, value_name = "FORM")]
    sim_kv_events_replay_framing: ReplayFraming,
    /// Do not send every Nth batch of KV events live; a replay still has it
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..))]
    sim_kv_events_drop_every: Option<u64>,
    /// Lose the batch of KV events with this sequence number: neither live nor in a replay
    #[arg(long, value_name = "SEQ")]
    sim_kv_events_lose_seq: Option<u64>,
    /// Send every Nth batch of KV events after the one that follows it
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..))]
    sim_kv_events_reorder_every: Option<u64>,
    /// After N batches of KV events, once: forget the cache and count from 0 again, as a new process does
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..))]
    sim_kv_events_restart_after: Option<u64>,
    /// Send each stored and each removed KV event twice, as of two physical copies
    #[arg(long)]
    sim_kv_events_duplicate: bool,
    /// Announce evicted blocks as moved to shared storage, and move them there if there is a --sim-kv-store
    #[arg(long)]
    sim_kv_offload: bool,
}

impl From<KvEventArgs> for KvEventQuirks {
    fn from(args: KvEventArgs) -> Self {
        Self {
            encoding: args.sim_kv_events_encoding,
            hashes: args.sim_kv_events_hash,
            replay_framing: args.sim_kv_events_replay_framing,
            drop_every: args.sim_kv_events_drop_every,
            lose_seq: args.sim_kv_events_lose_seq,
            reorder_every: args.sim_kv_events_reorder_every,
            restart_after: args.sim_kv_events_restart_after,
            offload: args.sim_kv_offload,
            duplicate: args.sim_kv_events_duplicate,
        }
    }
}
