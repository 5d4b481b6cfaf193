//! Log lines on standard error, written by a thread of their own: a slow terminal or pipe must
//! not hold up a request.

use crate::settings::{LogFormat, LoggingSettings};
use std::io::BufWriter;
use std::sync::OnceLock;
use tracing_appender::non_blocking::{ErrorCounter, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::EnvFilter;

/// Lines that wait to be written; beyond, lines are dropped and counted.
const QUEUE_LINES_MAX: usize = 16_384;

/// Lines that wait together are written with one call of up to so many bytes; whenever none waits, all are written.
const BATCH_BYTES: usize = 64 << 10;

/// The HTTP server's own lines about its threads help nobody who does not work on it; naming it
/// in `logging.level` brings them back.
const QUIET: &str = "actix_server=warn";

static DROPPED: OnceLock<ErrorCounter> = OnceLock::new();

/// Lines dropped so far.
pub fn dropped_lines() -> u64 {
    DROPPED
        .get()
        .map_or(0, |counter| counter.dropped_lines() as u64)
}

/// Replaces the filter of the process.
type SetFilter = Box<dyn Fn(EnvFilter) + Send + Sync>;

static SET_FILTER: OnceLock<SetFilter> = OnceLock::new();

fn filter(level: &str) -> Result<EnvFilter, String> {
    EnvFilter::try_new(format!("{QUIET},{level}"))
        .map_err(|error| format!("logging.level: {error}"))
}

/// From now on lines of this level are written. Nothing, where logging was not started by us.
pub fn set_level(level: &str) {
    if let (Some(set), Ok(filter)) = (SET_FILTER.get(), filter(level)) {
        set(filter);
    }
}

/// Starts logging for the process; lines are written while the guard lives.
///
/// # Errors
/// When the level is no valid filter.
pub fn start(settings: &LoggingSettings) -> Result<WorkerGuard, String> {
    let filter = filter(&settings.level)?;
    let (writer, guard) = NonBlockingBuilder::default()
        .buffered_lines_limit(QUEUE_LINES_MAX)
        .lossy(true)
        .finish(BufWriter::with_capacity(BATCH_BYTES, std::io::stderr()));
    let _ = DROPPED.set(writer.error_counter());
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(writer)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()));
    // a second start in one process (tests, the demo) keeps the first
    let started = match settings.format {
        LogFormat::Text => {
            let builder = builder.with_filter_reloading();
            let handle = builder.reload_handle();
            builder
                .try_init()
                .map(|()| -> SetFilter { Box::new(move |filter| drop(handle.reload(filter))) })
        }
        LogFormat::Json => {
            let builder = builder.json().flatten_event(true).with_filter_reloading();
            let handle = builder.reload_handle();
            builder
                .try_init()
                .map(|()| -> SetFilter { Box::new(move |filter| drop(handle.reload(filter))) })
        }
    };
    if let Ok(set) = started {
        let _ = SET_FILTER.set(set);
    }
    Ok(guard)
}
