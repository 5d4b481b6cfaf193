//! Server-sent events: writing them, and finding where one ends in a stream of arbitrary chunks.
//!
//! A TCP chunk is not an event. Nothing here decodes text, so a chunk may end in the middle of a
//! character, a line or a line end.

use bytes::{BufMut, Bytes, BytesMut};
use memchr::memchr;
use std::borrow::Cow;

/// The event that ends an OpenAI stream.
pub const DONE: &[u8] = b"data: [DONE]\n\n";

/// Frames one JSON text (without line ends) as an event: `data: {json}\n\n`.
pub fn data_event(json: &[u8]) -> Bytes {
    let mut event = BytesMut::with_capacity(json.len() + 8);
    event.put_slice(b"data: ");
    event.put_slice(json);
    event.put_slice(b"\n\n");
    event.freeze()
}

/// Where the scan stands within a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Line {
    /// Nothing of it yet.
    Empty,
    /// Only a carriage return.
    Return,
    /// Something else.
    Text,
}

/// Finds event ends. Line ends are LF or CRLF; a lone CR, which no known engine sends, is text.
#[derive(Debug)]
pub struct Boundaries {
    line: Line,
    in_event: bool,
}

impl Default for Boundaries {
    fn default() -> Self {
        Boundaries {
            line: Line::Empty,
            in_event: false,
        }
    }
}

impl Boundaries {
    /// Whether nothing of an unfinished event has been seen.
    pub fn between_events(&self) -> bool {
        !self.in_event
    }

    /// Whether the stream stands in the middle of a line.
    pub fn in_line(&self) -> bool {
        self.line != Line::Empty
    }

    /// The offset just behind the blank line of the event that ends first in `bytes`, if one does.
    /// Consumes what it has looked at: call again with the rest.
    pub fn next_end(&mut self, bytes: &[u8]) -> Option<usize> {
        let mut at = 0;
        while at < bytes.len() {
            let Some(newline) = memchr(b'\n', &bytes[at..]) else {
                self.line = match (self.line, &bytes[at..]) {
                    (Line::Empty, [b'\r']) => Line::Return,
                    _ => Line::Text,
                };
                self.in_event = true;
                return None;
            };
            let line = &bytes[at..at + newline];
            let blank = match self.line {
                Line::Empty => matches!(line, [] | [b'\r']),
                Line::Return => line.is_empty(),
                Line::Text => false,
            };
            at += newline + 1;
            self.line = Line::Empty;
            if blank {
                self.in_event = false;
                return Some(at);
            }
            self.in_event = true;
        }
        None
    }
}

/// An event as [`EventScanner`] sees it.
#[derive(Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// Its raw bytes, the blank line included.
    Whole(&'a [u8]),
    /// It was longer than the scanner holds; only its end was noticed.
    TooLong,
}

/// Reads along with a stream that is passed through: reports each event once, whatever the chunks.
/// Holds at most `max_event` bytes.
#[derive(Debug)]
pub struct EventScanner {
    boundaries: Boundaries,
    partial: Vec<u8>,
    max_event: usize,
    too_long: bool,
}

impl EventScanner {
    /// A scanner at the start of a stream.
    pub fn new(max_event: usize) -> Self {
        EventScanner {
            boundaries: Boundaries::default(),
            partial: Vec::new(),
            max_event,
            too_long: false,
        }
    }

    /// Where the stream stands.
    pub fn boundaries(&self) -> &Boundaries {
        &self.boundaries
    }

    /// Takes in a chunk and calls `on_event` for every event that it completes.
    pub fn feed(&mut self, mut chunk: &[u8], mut on_event: impl FnMut(Event<'_>)) {
        while !chunk.is_empty() {
            let Some(end) = self.boundaries.next_end(chunk) else {
                self.keep(chunk);
                return;
            };
            let (head, rest) = chunk.split_at(end);
            if self.too_long || self.partial.len() + head.len() > self.max_event {
                on_event(Event::TooLong);
            } else if self.partial.is_empty() {
                on_event(Event::Whole(head));
            } else {
                self.partial.extend_from_slice(head);
                on_event(Event::Whole(&self.partial));
            }
            self.partial.clear();
            self.too_long = false;
            chunk = rest;
        }
    }

    fn keep(&mut self, chunk: &[u8]) {
        if self.too_long || self.partial.len() + chunk.len() > self.max_event {
            self.too_long = true;
            self.partial = Vec::new();
        } else {
            self.partial.extend_from_slice(chunk);
        }
    }
}

/// The data of an event: its `data:` lines joined by line feeds; none for comments and the like.
pub fn data_of(event: &[u8]) -> Option<Cow<'_, [u8]>> {
    let mut lines = event.split(|byte| *byte == b'\n').filter_map(|line| {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let data = line.strip_prefix(b"data:")?;
        Some(data.strip_prefix(b" ").unwrap_or(data))
    });
    let first = lines.next()?;
    let mut joined = Cow::Borrowed(first);
    for line in lines {
        let all = joined.to_mut();
        all.push(b'\n');
        all.extend_from_slice(line);
    }
    Some(joined)
}

/// Rewrites a stream event by event where that is asked for, and holds back only the unfinished
/// one. An event longer than `max_event` passes unchanged, as it comes.
#[derive(Debug)]
pub struct EventEditor {
    boundaries: Boundaries,
    partial: BytesMut,
    max_event: usize,
    passing: bool,
}

/// What an edit makes of one event.
#[derive(Debug, PartialEq, Eq)]
pub enum Edit {
    /// Send it as it came.
    Keep,
    /// Send nothing.
    Drop,
    /// Send this instead, blank line included.
    Replace(Bytes),
}

impl EventEditor {
    /// An editor at the start of a stream.
    pub fn new(max_event: usize) -> Self {
        EventEditor {
            boundaries: Boundaries::default(),
            partial: BytesMut::new(),
            max_event,
            passing: false,
        }
    }

    /// Takes in a chunk; answers the bytes to send now, possibly none.
    pub fn feed(&mut self, mut chunk: &[u8], edit: impl Fn(&[u8]) -> Edit) -> Bytes {
        let mut out = BytesMut::with_capacity(chunk.len());
        while let Some(end) = self.boundaries.next_end(chunk) {
            let (head, rest) = chunk.split_at(end);
            chunk = rest;
            if std::mem::take(&mut self.passing) {
                out.extend_from_slice(head);
                continue;
            }
            self.partial.extend_from_slice(head);
            match edit(&self.partial) {
                Edit::Keep => out.extend_from_slice(&self.partial),
                Edit::Drop => {}
                Edit::Replace(bytes) => out.extend_from_slice(&bytes),
            }
            self.partial.clear();
        }
        if self.passing {
            out.extend_from_slice(chunk);
        } else {
            self.partial.extend_from_slice(chunk);
            if self.partial.len() > self.max_event {
                out.extend_from_slice(&self.partial.split());
                self.passing = true;
            }
        }
        out.freeze()
    }

    /// What is left when the stream has ended without a last blank line.
    pub fn finish(&mut self) -> Bytes {
        self.partial.split().freeze()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn events(chunks: &[&[u8]]) -> Vec<Vec<u8>> {
        let mut scanner = EventScanner::new(1 << 20);
        let mut seen = vec![];
        for chunk in chunks {
            scanner.feed(chunk, |event| match event {
                Event::Whole(bytes) => seen.push(bytes.to_vec()),
                Event::TooLong => panic!("nothing here is long"),
            });
        }
        assert!(scanner.boundaries().between_events());
        seen
    }

    const STREAM: &str = "data: {\"a\":\"你🙂\"}\n\nevent: x\ndata: 1\ndata: 2\n\n: ping\r\n\r\ndata: {A}\r\n\r\ndata: [DONE]\n\n";

    #[test]
    fn an_event_cut_at_any_byte_is_seen_once_and_whole() {
        let whole = events(&[STREAM.as_bytes()]);
        assert_eq!(whole.len(), 5);
        for cut in 0..STREAM.len() {
            let (head, tail) = STREAM.as_bytes().split_at(cut);
            assert_eq!(events(&[head, tail]), whole, "cut at {cut}");
        }
    }

    #[test]
    fn the_two_line_ends_of_a_blank_line_may_come_apart() {
        assert_eq!(events(&[b"data: {A}\n", b"\ndata: {B}\n", b"\n"]).len(), 2);
        assert_eq!(
            events(&[b"data: {A}\r\n\r", b"\ndata: {B}\r\n\r\n"]).len(),
            2
        );
    }

    #[test]
    fn lines_of_one_event_that_come_apart_stay_one_event() {
        let seen = events(&[b"event: response.created\n", b"data: {}\n", b"\n"]);
        assert_eq!(seen, [b"event: response.created\ndata: {}\n\n".to_vec()]);
    }

    #[test]
    fn data_lines_are_joined_and_comments_have_none() {
        assert_eq!(
            data_of(b"data: 1\r\ndata:2\r\n\r\n").unwrap().as_ref(),
            b"1\n2"
        );
        assert_eq!(data_of(b": ping\n\n"), None);
    }

    #[test]
    fn an_event_beyond_the_cap_is_skipped_and_later_ones_are_still_seen() {
        let mut scanner = EventScanner::new(64);
        let long = format!("data: {}\n\n", "x".repeat(500));
        let mut seen = vec![];
        for chunk in [long.as_bytes(), b"data: usage\n\n"].concat().chunks(7) {
            scanner.feed(chunk, |event| seen.push(event == Event::TooLong));
            assert!(scanner.partial.capacity() <= 128);
        }
        assert_eq!(seen, [true, false]);
    }

    #[test]
    fn an_editor_passes_long_events_whole_and_goes_on_editing_after_them() {
        let mut editor = EventEditor::new(64);
        let long = format!("data: {}\n\n", "x".repeat(500));
        let stream = [long.as_bytes(), b"data: drop\n\ndata: keep\n\n"].concat();
        let mut out = vec![];
        for chunk in stream.chunks(13) {
            out.extend_from_slice(&editor.feed(chunk, |event| match event {
                b"data: drop\n\n" => Edit::Drop,
                _ => Edit::Keep,
            }));
        }
        assert_eq!(out, [long.as_bytes(), b"data: keep\n\n"].concat());
    }

    proptest! {
        #[test]
        fn chunking_never_changes_what_is_seen_or_sent(
            text in "(data: [a-z你]{0,9}(\n|\r\n)|\n|\r\n|: c\n){0,30}",
            cuts in proptest::collection::vec(1usize..9, 1..50),
        ) {
            let whole = {
                let mut scanner = EventScanner::new(1 << 20);
                let mut seen = vec![];
                scanner.feed(text.as_bytes(), |e| if let Event::Whole(b) = e { seen.push(b.to_vec()) });
                seen
            };
            let (mut scanner, mut editor) = (EventScanner::new(1 << 20), EventEditor::new(1 << 20));
            let (mut seen, mut sent, mut rest) = (vec![], vec![], text.as_bytes());
            for cut in cuts.iter().cycle() {
                if rest.is_empty() { break }
                let (chunk, tail) = rest.split_at((*cut).min(rest.len()));
                scanner.feed(chunk, |e| if let Event::Whole(b) = e { seen.push(b.to_vec()) });
                sent.extend_from_slice(&editor.feed(chunk, |_| Edit::Keep));
                rest = tail;
            }
            sent.extend_from_slice(&editor.finish());
            prop_assert_eq!(seen, whole);
            prop_assert_eq!(sent, text.as_bytes());
        }
    }
}
