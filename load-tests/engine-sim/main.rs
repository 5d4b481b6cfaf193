//! The binary: `engine-sim serve MODEL …`, with vLLM's flags.

use engine_sim::{Sim, SimConfig};
use std::process::ExitCode;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let config = SimConfig::from_args(std::env::args_os()).unwrap_or_else(|told| told.exit());
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_env_filter(filter)
        .init();
    match actix_rt::System::new().block_on(serve(config)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(fault) => {
            eprintln!("engine-sim: {fault}");
            ExitCode::FAILURE
        }
    }
}

/// Serves until SIGINT or SIGTERM.
async fn serve(config: SimConfig) -> std::io::Result<()> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let line = config.to_string();
    let mut engine = Sim::start(config)?;
    let events = match engine.kv_endpoint() {
        Some(endpoint) => format!(", KV events on {endpoint}"),
        None => String::new(),
    };
    println!("engine-sim serves {line} on {}{events}", engine.url());
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
        () = engine.ended() => return Err(std::io::Error::other("the server ended")),
    }
    engine.stop().await;
    Ok(())
}
