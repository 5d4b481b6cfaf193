//! What measures prefix indexes: a trace's requests go to workers with LRU caches (`fleet`), whose
//! events are recorded and then replayed on an index against the clock (`replay`). A library, so
//! that other indexes can be measured on the same operations (`load-tests/index-peers`).

pub mod fleet;
pub mod heap;
pub mod ours;
pub mod replay;
pub mod scale;
pub mod trace;
pub mod under_fire;
pub mod waits;
