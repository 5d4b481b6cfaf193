//! The binary: `s3-server --port 9000 --access-key … --secret-key … --bucket …`.

use clap::Parser;
use s3_server::{Config, Server};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

/// An S3 server on this machine that keeps objects as files and checks signatures. For tests and load tests.
///
/// Speaks plain HTTP with path-style addresses: http://HOST:PORT/BUCKET/KEY. Any region is accepted. The first line of its
/// output names the address; it serves until SIGINT or SIGTERM.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "Examples:\n  \
        s3-server --port 9000 --access-key test --secret-key secret --bucket cache\n  \
        s3-server --port 9000 --root /var/tmp/objects --delay-ms 200   # keeps its objects, and is slow"
)]
struct Args {
    /// Address to listen on; 0.0.0.0 is every one of this machine
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// Directory of the buckets, made if it is not there. Default: a temporary one, removed at the end
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
    /// The only access key; a request signed with another gets 403
    #[arg(long, default_value = "test-access-key", value_name = "KEY")]
    access_key: String,
    /// The secret of the access key
    #[arg(long, default_value = "test-secret-key", value_name = "SECRET")]
    secret_key: String,
    /// A bucket that is there from the start
    #[arg(long, default_value = "tidegate", value_name = "NAME")]
    bucket: String,
    /// How long each request waits before it is worked on
    #[arg(long, default_value_t = 0, value_name = "MS")]
    delay_ms: u64,
}

impl Args {
    fn config(self) -> Config {
        Config {
            host: self.host,
            port: self.port,
            root: self.root,
            access_key: self.access_key,
            secret_key: self.secret_key,
            bucket: Some(self.bucket),
            delay: Duration::from_millis(self.delay_ms),
        }
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    match serve(Args::parse().config()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(fault) => {
            eprintln!("s3-server: {fault}");
            ExitCode::FAILURE
        }
    }
}

/// Serves until SIGINT or SIGTERM.
async fn serve(config: Config) -> std::io::Result<()> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let bucket = config.bucket.clone().unwrap_or_default();
    let server = Server::start(config).await?;
    let root = server.root().display();
    println!(
        "s3-server serves bucket {bucket} on {}, objects in {root}",
        server.url()
    );
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    Ok(())
}
