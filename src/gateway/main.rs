//! The binary `tidegate`.

use clap::Parser;
use gateway::cli::Cli;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() {
    std::process::exit(Cli::parse().run());
}
