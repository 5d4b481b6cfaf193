//! Log lines on standard error, written by a thread of their own: a slow terminal or pipe must
//! not hold up a request.

use crate::settings::{LogFormat, LoggingSettings};
use std::fmt::Debug;
use std::io::BufWriter;
use std::sync::OnceLock;
use tracing::field::Field;
use tracing_appender::non_blocking::{ErrorCounter, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::{Writer, debug_fn};

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

/// Fields as `name=value`, as the library's own writes them, but that names have no colours of their own: with these it asks
/// four times for each field of a line, also where there are none, and that is most of what an access line costs.
fn plain_fields() -> impl for<'w> FormatFields<'w> {
    let write = |writer: &mut Writer<'_>, field: &Field, value: &dyn Debug| match field.name() {
        "message" => write!(writer, "{value:?}"),
        name => write!(writer, "{name}={value:?}"),
    };
    debug_fn(write).delimited(" ")
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
            let builder = builder.fmt_fields(plain_fields()).with_filter_reloading();
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::sync::{Arc, Mutex};
    use tracing::{error, info, info_span};

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn say_something() {
        let _span = info_span!("leg", backend = "a b", n = 1).entered();
        info!(target: "access", request_id = %"r-1", none = None::<u64>, some = Some(7), text = "with \"quotes\"", ms = 1.5, ok = true, "request");
        error!(error = %"a\nb", also = ?Some(1), "what went wrong");
        info!("only words");
    }

    #[test]
    fn lines_read_as_the_librarys_own() {
        let (ours, theirs) = (Lines::default(), Lines::default());
        let (first, second) = (ours.clone(), theirs.clone());
        let builder = || tracing_subscriber::fmt().with_ansi(false).without_time();
        let plain = builder().fmt_fields(plain_fields());
        let plain = plain.with_writer(move || first.clone()).finish();
        tracing::subscriber::with_default(plain, say_something);
        let own = builder().with_writer(move || second.clone()).finish();
        tracing::subscriber::with_default(own, say_something);
        let text = |lines: &Lines| String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        assert_eq!(text(&ours), text(&theirs));
        assert!(
            text(&ours)
                .contains("request_id=r-1 some=7 text=\"with \\\"quotes\\\"\" ms=1.5 ok=true"),
            "{}",
            text(&ours)
        );
    }
}
