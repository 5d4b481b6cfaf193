//! Reads along with a stream of events: whether it is finished, what the engine counted, which
//! events are changed on their way, and how an error of our own is put behind them.

use super::answer::CachedElsewhere;
use super::{Call, verdict};
use crate::http::error::Refusal;
use crate::telemetry::report::Report;
use bytes::{Bytes, BytesMut};
use hyper::StatusCode;
use memchr::memmem;
use verdict::Said;
use wire::splice::AnswerEdit;
use wire::sse::{self, Event, EventEditor, EventScanner};

/// Events up to this are read along with; longer ones pass unread.
const SCANNED_EVENT_MAX: usize = 256 << 10;

/// What an edited count stands behind.
const COUNT: &[u8] = b"\"cached_tokens\"";

/// See the module.
pub struct Events {
    scanner: EventScanner,
    editor: Option<EventEditor>,
    edit: AnswerEdit,
    cached: Option<CachedElsewhere>,
    /// Whether the last chunk ended between events, so that nothing is held back.
    between: bool,
    /// Whether a finish reason and `[DONE]` must come.
    needs_end: bool,
    /// Whether clients tell events by their `event:` line.
    has_names: bool,
    finished: bool,
    done: bool,
    error: Option<Option<StatusCode>>,
}

/// What the events of a stream came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// All that had to be said was said.
    Finished,
    /// The engine sent an error, with this status of its own.
    Error(Option<StatusCode>),
    /// It ended before the answer did.
    Unfinished,
}

impl Events {
    /// At the start of a stream.
    pub fn new(call: &Call, cached: Option<CachedElsewhere>) -> Self {
        let edits = !call.edit.is_none() || cached.is_some();
        Events {
            scanner: EventScanner::new(SCANNED_EVENT_MAX),
            editor: edits.then(|| EventEditor::new(SCANNED_EVENT_MAX)),
            edit: call.edit.clone(),
            cached,
            between: true,
            needs_end: call.route.is_openai_stream(),
            has_names: call.route.has_named_events(),
            finished: false,
            done: false,
            error: None,
        }
    }

    /// Reads a chunk; answers the bytes to send.
    pub fn pass(&mut self, chunk: Bytes, report: &mut Report) -> Bytes {
        if let Some(cached) = &self.cached {
            self.edit.cached = Some(cached.get());
            report.cached_elsewhere(cached.get());
        }
        let (finished, done, error) = (&mut self.finished, &mut self.done, &mut self.error);
        self.scanner.feed(&chunk, |event| {
            let Event::Whole(event) = event else { return };
            match verdict::of_event(event) {
                Said::Done => (*finished, *done) = (true, true),
                Said::Finished(usage) => {
                    *finished = true;
                    usage.into_iter().for_each(|usage| report.usage(usage));
                }
                Said::GaveUp => {
                    // passed on as it is, and no success
                    *finished = true;
                    error.get_or_insert(None);
                }
                Said::Counted(usage) => report.usage(usage),
                Said::Error(code) => *error = Some(code),
                Said::Nothing => {}
            }
        });
        // mostly one event has a count, and all others pass as they are
        let counts_only = self.edit.model.is_none() && !self.edit.strip_usage_chunk;
        let begins = std::mem::replace(
            &mut self.between,
            self.scanner.boundaries().between_events(),
        );
        if counts_only && begins && self.between && memmem::find(&chunk, COUNT).is_none() {
            return chunk;
        }
        match &mut self.editor {
            Some(editor) => editor.feed(&chunk, |event| self.edit.event(event)),
            None => chunk,
        }
    }

    /// What is still held back at the end.
    pub fn rest(&mut self) -> Option<Bytes> {
        let rest = self.editor.as_mut()?.finish();
        (!rest.is_empty()).then_some(rest)
    }

    /// Whether nothing more has to come, so that whatever happens now is no loss.
    pub fn is_done(&self) -> bool {
        self.needs_end && self.done && self.error.is_none()
    }

    /// What it came to, now that it has ended.
    pub fn ending(&self) -> Ending {
        match self.error {
            Some(code) => Ending::Error(code),
            None if self.needs_end && !self.finished => Ending::Unfinished,
            None => Ending::Finished,
        }
    }

    /// An error of ours as an event of its own: an open line is closed first.
    pub fn error_event(&self, refusal: &Refusal) -> Bytes {
        let boundaries = self.scanner.boundaries();
        let mut out = BytesMut::new();
        out.extend_from_slice(match (boundaries.between_events(), boundaries.in_line()) {
            (true, _) => b"",
            (false, false) => b"\n",
            (false, true) => b"\n\n",
        });
        if self.has_names {
            out.extend_from_slice(b"event: error\n");
        }
        let json = serde_json::to_vec(&refusal.body()).unwrap_or_default();
        out.extend_from_slice(&sse::data_event(&json));
        out.freeze()
    }
}
