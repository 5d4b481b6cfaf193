//! Live heap, counted by the allocator: not what the process holds, but what was asked for and not
//! given back.

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use std::alloc::System;

#[global_allocator]
static HEAP: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Bytes that are in use.
pub fn live() -> u64 {
    let stats = HEAP.stats();
    (stats.bytes_allocated as u64).saturating_sub(stats.bytes_deallocated as u64)
}

/// As mebibytes.
pub fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
