//! Our prefix index beside others', on the same operations in the same run, one thread each.
//!
//! Peers take hashes of blocks, ours takes tokens. So there are two ways to measure: with the
//! hashing of tokens inside the measured time, for all of them; or without, where one token stands
//! for a block of ours, and the peers' hashes are made before.

mod chain_index;
mod radix_tree;

use clap::Parser;
use index_bench::fleet::{Fleet, Op, Shape};
use index_bench::ours::Ours;
use index_bench::replay::{Measured, replay};
use index_bench::trace;
use std::path::PathBuf;

/// Measures prefix indexes beside each other
#[derive(Debug, Parser)]
struct Args {
    /// A trace in Mooncake's format; without it, a synthetic one of the same kind
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
    /// Workers name a block each in their own way, which only ours and ChainIndex take; else alike
    #[arg(long)]
    own_names: bool,
    /// Only ours and ChainIndex
    #[arg(long)]
    quick: bool,
    /// How often all of it is done
    #[arg(long, default_value_t = 3)]
    rounds: u32,
}

fn main() -> std::io::Result<()> {
    let args = Args::parse();
    let requests = match &args.trace {
        Some(path) => trace::read(path)?,
        None => trace::synthetic(12_000),
    };
    for token_per_block in [false, true] {
        let shape = Shape {
            workers: args.workers,
            room: args.blocks,
            block_size: args.block_size,
            token_per_block,
            names_alike: !args.own_names,
        };
        let mut fleet = Fleet::new(shape);
        for request in &requests {
            fleet.serve(request);
        }
        let ops = fleet.into_ops();
        let hashing = if token_per_block { "outside" } else { "inside" };
        println!(
            "{} workers of {} blocks, hashing of tokens {hashing} the measured time",
            args.workers, args.blocks
        );
        for _ in 0..args.rounds {
            round(shape, &ops, args.quick || args.own_names);
        }
    }
    Ok(())
}

fn round(shape: Shape, ops: &[Op], quick: bool) {
    let (ours, index) = replay(ops, || Ours::new(shape.recorded_block_size()));
    let pairs = index.index.entries();
    drop(index);
    println!("{}", ours.row(pairs));
    let chain_index = chain_index::measure(shape, ops);
    beside(&ours, &chain_index, pairs);
    if quick {
        return;
    }
    let radix_tree = radix_tree::measure(shape, ops);
    beside(&ours, &radix_tree, pairs);
}

/// Prints a peer's row and ours as ratios to it; says where best overlaps differ.
fn beside(ours: &Measured, peer: &Measured, pairs: usize) {
    println!("{}", peer.row(pairs));
    println!(
        "    ours to it: {:.2} of the event rate, {:.2} of the mean lookup, {:.2} of its p99, {:.2} of the bytes",
        ours.rate() / peer.rate(),
        ours.lookup_mean_us() / peer.lookup_mean_us(),
        ours.lookup_us(0.99) / peer.lookup_us(0.99),
        ours.bytes as f64 / peer.bytes.max(1) as f64,
    );
    let both = ours.best.iter().zip(&peer.best);
    let differ = both.filter(|(ours, peer)| ours != peer).count();
    if differ > 0 {
        println!(
            "    best overlaps DIFFER in {differ} of {}",
            ours.best.len()
        );
    }
}
