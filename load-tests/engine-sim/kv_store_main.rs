//! The binary `kv-store`: storage that simulated engines of several processes share.

use clap::Parser;
use engine_sim::kv_store::link::LinkSpeed;
use engine_sim::kv_store::{NamespaceStore, StoreSettings, server};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

/// A stand-in for storage that engines share KV blocks through, such as VAST: it remembers which blocks were written to which
/// namespace, and takes the time to move them. Engines use it with --sim-kv-store URL.
///
/// POST /admin/fault with {"slow_ms": 500}, {"refuse": 503}, {"hang": true} or {} disturbs or mends it; POST /admin/clear empties
/// it; GET /stats counts.
#[derive(Debug, Parser)]
#[command(name = "kv-store", version)]
struct Args {
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 8080)]
    port: u16,
    /// Bytes per second, for all engines together [default: 20e9]
    #[arg(long, value_name = "BYTES/S")]
    bandwidth: Option<f64>,
    /// Milliseconds that are added to each transfer [default: 2]
    #[arg(long, value_name = "MS")]
    latency_ms: Option<f64>,
    /// Blocks of all namespaces together; the least recently used ones leave [default: 1000000]
    #[arg(long, value_name = "BLOCKS")]
    blocks_max: Option<usize>,
    /// Multiplies every simulated time, as the engines' flag of this name
    #[arg(long, default_value_t = 1.0, value_name = "FACTOR")]
    sim_time_scale: f64,
}

impl Args {
    fn settings(&self) -> Result<StoreSettings, &'static str> {
        let defaults = StoreSettings::default();
        let bytes_per_second = self.bandwidth.unwrap_or(defaults.link.bytes_per_second);
        if !(bytes_per_second.is_finite() && bytes_per_second > 0.0) {
            return Err("--bandwidth must be more than 0");
        }
        if !(self.sim_time_scale.is_finite() && self.sim_time_scale >= 0.0) {
            return Err("--sim-time-scale must be 0 or more");
        }
        let latency = match self.latency_ms {
            None => defaults.link.latency,
            Some(ms) => Duration::try_from_secs_f64(ms / 1000.0)
                .map_err(|_| "--latency-ms must be 0 or more")?,
        };
        Ok(StoreSettings {
            link: LinkSpeed {
                bytes_per_second,
                latency,
            },
            blocks_max: self.blocks_max.unwrap_or(defaults.blocks_max),
            time_scale: self.sim_time_scale,
        })
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    let served = args.settings().map_err(str::to_owned).and_then(|settings| {
        let system = actix_rt::System::new();
        let served = system.block_on(serve(&args, settings));
        served.map_err(|fault| fault.to_string())
    });
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(fault) => {
            eprintln!("kv-store: {fault}");
            ExitCode::FAILURE
        }
    }
}

/// Serves until SIGINT or SIGTERM.
async fn serve(args: &Args, settings: StoreSettings) -> std::io::Result<()> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let store = Arc::new(NamespaceStore::new(settings));
    let mut running = server::start(store, &args.host, args.port)?;
    println!("kv-store serves on {}", running.url());
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
        () = running.ended() => return Err(std::io::Error::other("the server ended")),
    }
    running.stop().await;
    Ok(())
}
