//! What one proxied request costs in CPU, step by step, beside nginx in the same run.
//!
//! `cost-ladder run` starts an engine that answers at once, then each rung as a process of its
//! own, drives it, and reads the process's CPU time. Ratios within one run are what counts.

mod driver;
mod rungs;

use clap::{Parser, Subcommand};
use cost_ladder::engine;
use rungs::Rung;

/// Measures the cost of each step between a client and an engine
#[derive(Debug, Parser)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Measure all rungs and print a table
    Run {
        /// Seconds per measurement
        #[arg(long, default_value_t = 3)]
        secs: u64,
        /// Rounds; the median is printed
        #[arg(long, default_value_t = 3)]
        rounds: usize,
        /// Only these rungs
        #[arg(long, value_enum, value_delimiter = ',')]
        only: Vec<Rung>,
    },
    /// Serve one rung (used by `run`)
    Serve {
        /// Which
        #[arg(long, value_enum)]
        rung: Rung,
        /// Where to listen
        #[arg(long)]
        port: u16,
        /// The engine's port
        #[arg(long)]
        engine: u16,
    },
    /// Serve the engine that answers at once (used by `run`, and by ../scaling)
    Engine {
        /// Where to listen
        #[arg(long)]
        port: u16,
        /// So many engines, on the ports from there on
        #[arg(long, default_value_t = 1)]
        count: u16,
    },
}

fn main() -> std::io::Result<()> {
    match Args::parse().command {
        Command::Run { secs, rounds, only } => driver::run(secs, rounds, &only),
        Command::Serve { rung, port, engine } => rungs::serve(rung, port, engine),
        Command::Engine { port, count } => engine::serve(port..port.saturating_add(count)),
    }
}
