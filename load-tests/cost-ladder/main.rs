//! What one proxied request costs in CPU, step by step, beside nginx in the same run.
//!
//! `cost-ladder run` starts an engine that answers at once, then each rung as a process of its
//! own, drives it, and reads the process's CPU time. Ratios within one run are what counts.

mod driver;
mod rungs;

use clap::{Parser, Subcommand};
use cost_ladder::engine;
use cost_ladder::load::{self, Shape};
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
    /// Drive what listens on a port and print what came of it as JSON (used by ../peers)
    Drive {
        /// Where it listens
        #[arg(long)]
        port: u16,
        /// What is asked: bytes of a prompt, or `stream`
        #[arg(long, value_parser = shape)]
        shape: Shape,
        /// Clients at one time
        #[arg(long, default_value_t = 64)]
        connections: usize,
        /// For so long
        #[arg(long, default_value_t = 3.0)]
        secs: f64,
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

fn shape(word: &str) -> Result<Shape, String> {
    match (word, word.parse()) {
        ("stream", _) => Ok(Shape::Stream),
        (_, Ok(bytes)) => Ok(Shape::Json(bytes)),
        _ => Err("a number of bytes or `stream` is expected".into()),
    }
}

fn drive(port: u16, shape: Shape, connections: usize, secs: f64) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let began = std::time::Instant::now();
    let time = std::time::Duration::from_secs_f64(secs);
    let answered = runtime.block_on(load::drive(port, shape, connections, time))?;
    let took = began.elapsed().as_secs_f64();
    println!("{{\"answered\": {answered}, \"seconds\": {took:.3}}}");
    Ok(())
}

fn main() -> std::io::Result<()> {
    match Args::parse().command {
        Command::Run { secs, rounds, only } => driver::run(secs, rounds, &only),
        Command::Serve { rung, port, engine } => rungs::serve(rung, port, engine),
        Command::Drive {
            port,
            shape,
            connections,
            secs,
        } => drive(port, shape, connections, secs),
        Command::Engine { port, count } => engine::serve(port..port.saturating_add(count)),
    }
}
