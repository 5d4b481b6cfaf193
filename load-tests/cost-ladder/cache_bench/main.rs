//! What the response cache costs and saves, beside what bounds it on the same machine in the same run:
//! a server that answers with a constant, the raw clients of Redis and S3, and the router without a
//! cache.
//!
//! `cache-bench run` starts every program by itself, on loopback, and ends them.

mod measure;
mod programs;

use clap::{Parser, Subcommand};

/// Measures the response cache
#[derive(Debug, Parser)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Measure and print tables
    Run {
        /// Seconds per measurement
        #[arg(long, default_value_t = 3)]
        secs: u64,
        /// Rounds; the median is printed
        #[arg(long, default_value_t = 3)]
        rounds: usize,
    },
    /// Serve a constant answer (used by `run`)
    Constant {
        /// Where to listen
        #[arg(long)]
        port: u16,
    },
    /// Serve the engine that answers at once (used by `run`)
    Engine {
        /// Where to listen
        #[arg(long)]
        port: u16,
    },
    /// Serve the router (used by `run`)
    Router {
        /// Its settings, YAML
        #[arg(long)]
        settings: String,
    },
}

fn main() -> std::io::Result<()> {
    match Args::parse().command {
        Command::Run { secs, rounds } => measure::run(secs, rounds),
        Command::Constant { port } => programs::constant(port),
        Command::Engine { port } => {
            cost_ladder::engine::serve_answers(port..port + 1, programs::TEXT_BYTES)
        }
        Command::Router { settings } => programs::router(settings),
    }
}
