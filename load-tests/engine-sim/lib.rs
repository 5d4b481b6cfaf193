//! Placeholder.
mod args;
mod config;
mod event_log;
mod failure;
mod kv_cache;
mod scheduler;
mod speed;
mod text;
mod tokenizer;
pub use config::{KvRole, KvTransfer, SimConfig};
