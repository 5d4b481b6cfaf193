//! A stand-in for a vLLM engine, for tests, demos and load tests without a GPU: it schedules, caches, preempts, counts and answers
//! as vLLM does, in simulated time. The binary takes vLLM's command line; the library starts engines inside a process.
//!
//! ```no_run
//! use engine_sim::{Sim, SimConfig};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! // A small fast engine on a free port, and one from a vLLM command line.
//! let small = Sim::start(SimConfig::default())?;
//! let large = Sim::start(SimConfig::from_args(["vllm", "serve", "meta-llama/Llama-3.1-70B-Instruct", "--port", "0"])?)?;
//! println!("{} and {}", small.url(), large.url());
//!
//! small.faults().refuse_with(Some(503)); // from the next request on
//! assert_eq!(small.stats().running, 0);
//! large.stop().await;
//! # Ok(())
//! # }
//! ```
//!
//! The parts, from the inside out: `kv_cache` (blocks, hashes, eviction) and `scheduler` (one step) are pure; `engine` gives them
//! time and channels; `tokenizer` and `text` make prompts and answers; `kv_events` tells others what the cache holds; `kv_transfer` hands keys and values to other
//! engines, through `kv_store` or directly; `api` speaks HTTP; `sim` starts it all.

mod api;
mod args;
mod config;
mod engine;
mod engine_client;
mod event_log;
mod failure;
mod flag_values;
mod http_client;
mod ignored_flags;
pub mod kv_cache;
mod kv_events;
pub mod kv_store;
mod kv_transfer;
mod listening;
mod metrics;
pub mod scheduler;
pub mod sequence;
mod sim;
pub mod speed;
mod text;
mod tokenizer;
mod tool_call;

pub use config::{KvRole, KvTransfer, SimConfig};
pub use event_log::{CacheEvent, EventBatch};
pub use failure::{FaultSettings, Faults};
pub use kv_cache::BlockHash;
pub use kv_events::{EventEncoding, HashForm, KvEventQuirks, KvEvents, KvPublisher, ReplayFraming};
pub use kv_transfer::{KvSharing, LoadFailurePolicy, StoreAt};
pub use sim::{Sim, SimHandle, SimStats};
pub use speed::Speed;
