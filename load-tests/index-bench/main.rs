//! How fast the prefix index takes events in and answers lookups, and how much memory it takes:
//! a trace's requests go to workers with LRU caches, whose events are recorded and then replayed
//! on the index against the clock.

mod fleet;
mod trace;

use clap::Parser;
use fleet::{Fleet, Op};
use routing::block::Realm;
use routing::prefix_index::{HolderId, Limits, PrefixIndex, StoredRun, Tier};
use std::path::PathBuf;
use std::time::Instant;

/// Measures the prefix index: block operations per second, lookup latency, memory
#[derive(Debug, Parser)]
struct Args {
    /// A trace in Mooncake's format (one JSON object a line, with `hash_ids` of 512-token blocks);
    /// without it, a synthetic one of the same kind
    #[arg(long)]
    trace: Option<PathBuf>,
    /// Workers
    #[arg(long, default_value_t = 8)]
    workers: u32,
    /// Blocks that a worker's cache holds
    #[arg(long, default_value_t = 16_384)]
    blocks: usize,
    /// Tokens per block
    #[arg(long, default_value_t = 64)]
    block_size: u32,
    /// Removals in the churn test, in millions
    #[arg(long, default_value_t = 5)]
    churn: u64,
}

fn main() -> std::io::Result<()> {
    let args = Args::parse();
    let requests = match &args.trace {
        Some(path) => trace::read(path)?,
        None => trace::synthetic(12_000),
    };
    println!(
        "{} requests, {} workers of {} blocks of {} tokens",
        requests.len(),
        args.workers,
        args.blocks,
        args.block_size
    );
    let mut fleet = Fleet::new(args.workers, args.blocks, args.block_size);
    for request in &requests {
        fleet.serve(request);
    }
    let ops = fleet.into_ops();
    replay(&args, &ops);
    churn(&args);
    Ok(())
}

fn limits() -> Limits {
    Limits {
        max_entries: 50_000_000,
        ttl: u32::MAX,
    }
}

/// Resident memory in bytes.
fn resident() -> u64 {
    const PAGE: u64 = 4096;
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    statm
        .split(' ')
        .nth(1)
        .and_then(|n| n.parse::<u64>().ok())
        .unwrap_or(0)
        * PAGE
}

fn store(
    index: &mut PrefixIndex,
    block_size: u32,
    (worker, hashes, parent, tokens): (u32, &[u64], Option<u64>, &[u32]),
) {
    let realm = Realm {
        model: "m",
        cache_salt: None,
        block_size,
    };
    let run = StoredRun {
        realm,
        hashes,
        parent,
        tokens,
        tier: Tier::Gpu,
    };
    index.store(HolderId(worker), &run, 0);
}

fn replay(args: &Args, ops: &[Op]) {
    let before = resident();
    let mut index = PrefixIndex::new(limits());
    let (mut block_ops, mut event_ns, mut lookups) = (0u64, 0u128, Vec::new());
    let mut hit_blocks = 0u64;
    for op in ops {
        let start = Instant::now();
        match op {
            Op::Store {
                worker,
                hashes,
                parent,
                tokens,
            } => {
                store(
                    &mut index,
                    args.block_size,
                    (*worker, hashes, *parent, tokens),
                );
                block_ops += hashes.len() as u64;
                event_ns += start.elapsed().as_nanos();
            }
            Op::Remove { worker, hashes } => {
                index.remove(HolderId(*worker), hashes, Tier::Gpu);
                block_ops += hashes.len() as u64;
                event_ns += start.elapsed().as_nanos();
            }
            Op::Look { chain } => {
                let runs = index.find_overlap(chain);
                lookups.push(start.elapsed().as_nanos() as u64);
                let best = runs
                    .iter()
                    .filter(|run| run.from == 0)
                    .map(|run| run.to)
                    .max();
                hit_blocks += u64::from(best.unwrap_or(0));
            }
        }
    }
    lookups.sort_unstable();
    let at = |share: f64| lookups[((lookups.len() - 1) as f64 * share) as usize] as f64 / 1000.0;
    let mean = lookups.iter().sum::<u64>() as f64 / lookups.len() as f64 / 1000.0;
    let bytes = resident().saturating_sub(before);
    println!(
        "events: {:.2} M block-ops/s ({block_ops} in {:.2} s)",
        block_ops as f64 * 1e3 / event_ns as f64,
        event_ns as f64 / 1e9
    );
    println!(
        "lookups: mean {mean:.2} us, p50 {:.2}, p99 {:.2}, max {:.2}; {hit_blocks} blocks found",
        at(0.5),
        at(0.99),
        at(1.0)
    );
    println!(
        "memory: {} pairs, {:.1} MiB, {:.0} bytes per pair",
        index.entries(),
        bytes as f64 / f64::from(1 << 20),
        bytes as f64 / index.entries().max(1) as f64
    );
}

/// Stores and removes in turn, at a constant number of entries.
fn churn(args: &Args) {
    const LIVE: u64 = 100_000;
    let mut index = PrefixIndex::new(limits());
    let tokens = |n: u64| -> Vec<u32> {
        (0..args.block_size)
            .map(|i| (n as u32).wrapping_mul(31).wrapping_add(i))
            .collect()
    };
    let mut marks = Vec::new();
    let total = args.churn * 1_000_000;
    for n in 0..total + LIVE {
        store(&mut index, args.block_size, (0, &[n], None, &tokens(n)));
        if n >= LIVE {
            index.remove(HolderId(0), &[n - LIVE], Tier::Gpu);
        }
        if n % (total / 4).max(1) == LIVE {
            marks.push(format!("{:.1}", resident() as f64 / f64::from(1 << 20)));
        }
    }
    println!(
        "churn: {total} removals at {LIVE} live; resident MiB on the way: {}",
        marks.join(", ")
    );
}
