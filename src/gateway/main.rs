//! The binary `tidegate`.

use clap::Parser;
use gateway::cli::Cli;

fn main() {
    std::process::exit(Cli::parse().run());
}
