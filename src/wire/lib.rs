//! What clients and engines say on the wire, OpenAI bodies and server-sent events, and what gateways
//! leave for each other.
//! Types and byte-level helpers only; no I/O. Shared by the gateway and the engine simulator.

pub mod answer;
pub mod cache_entry;
pub mod canonical;
pub mod handoff;
pub mod kv_events;
pub mod kv_snapshot;
pub mod media;
pub mod openai;
pub mod request;
pub mod splice;
pub mod sse;
