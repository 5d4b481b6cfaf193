//! How fast the prefix index takes events in and answers lookups, and how much memory it takes; and
//! what a lookup waits while an actor takes in a fleet's events (`--under-fire`); what it all costs against
//! how much the index holds (`--scale`).

use clap::Parser;
use index_bench::fleet::{Fleet, Op, Shape};
use index_bench::ours::Ours;
use index_bench::replay::replay;
use index_bench::{heap, scale, trace, under_fire};
use std::path::PathBuf;

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
    /// One token stands for a block: measures without the hashing of tokens
    #[arg(long)]
    token_per_block: bool,
    /// All workers name a block alike
    #[arg(long)]
    names_alike: bool,
    /// Measures lookups while actors take in events, instead
    #[arg(long)]
    under_fire: bool,
    /// Removals in the churn test, in millions
    #[arg(long, default_value_t = 5)]
    churn: u64,
    /// Measures indexes of so many pairs of block and holder each, instead: JSON lines
    #[arg(long, value_delimiter = ',', value_name = "PAIRS")]
    scale: Vec<usize>,
    /// Rounds of --scale
    #[arg(long, default_value_t = 3)]
    rounds: u32,
}

fn main() -> std::io::Result<()> {
    let args = Args::parse();
    if !args.scale.is_empty() {
        scale::run(&args.scale, args.rounds);
        return Ok(());
    }
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
    let shape = Shape {
        workers: args.workers,
        room: args.blocks,
        block_size: args.block_size,
        token_per_block: args.token_per_block,
        names_alike: args.names_alike,
    };
    let mut fleet = Fleet::new(shape);
    for request in &requests {
        fleet.serve(request);
    }
    if args.under_fire {
        under_fire::run(args.workers, shape.recorded_block_size(), fleet.into_ops());
        return Ok(());
    }
    measure(shape, &fleet.into_ops());
    churn(&args);
    Ok(())
}

fn measure(shape: Shape, ops: &[Op]) {
    let (measured, ours) = replay(ops, || Ours::new(shape.recorded_block_size()));
    let (pairs, blocks) = (ours.index.entries(), ours.index.blocks());
    println!("{}", measured.row(pairs));
    let found: u64 = measured.best.iter().map(|best| u64::from(*best)).sum();
    let block_ops = measured.block_ops;
    println!(
        "{pairs} pairs of {blocks} blocks; {block_ops} block operations; {found} blocks found"
    );
}

/// Stores and removes in turn, at a constant number of entries.
fn churn(args: &Args) {
    const LIVE: u64 = 100_000;
    let before = heap::live();
    let mut ours = Ours::new(args.block_size);
    let mut tokens = vec![0u32; args.block_size as usize];
    let mut marks = Vec::new();
    let total = args.churn * 1_000_000;
    for n in 0..total + LIVE {
        tokens[0] = n as u32;
        tokens[1] = (n >> 32) as u32;
        ours.store(0, &[n], None, &tokens);
        if n >= LIVE {
            ours.remove(0, &[n - LIVE]);
        }
        if n % (total / 5).max(1) == LIVE {
            let bytes = heap::live().saturating_sub(before);
            marks.push(format!("{:.2}", heap::mib(bytes)));
        }
    }
    println!(
        "churn: {total} removals at {LIVE} live; live heap in MiB on the way: {}",
        marks.join(", ")
    );
}
