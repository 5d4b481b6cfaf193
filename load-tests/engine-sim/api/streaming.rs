//! A generation as an answer: as server-sent events, or waited for as a whole.

use super::error::ApiError;
use super::generation::{Event, Generation};
use crate::failure::Break;
use crate::text::Finish;
use actix_web::HttpResponse;
use bytes::Bytes;
use futures_util::stream;
use std::collections::VecDeque;
use std::io;
use wire::openai::Usage;

/// How a route writes the events of a stream.
pub trait Writer: 'static {
    /// Chunks for one token; none for a token without text.
    fn token(
        &mut self,
        generation: &Generation,
        choice: usize,
        at: usize,
        finish: Option<Finish>,
        out: &mut VecDeque<Bytes>,
    );
    /// The chunk that tells the usage.
    fn usage(&self, usage: Usage) -> Bytes;
    /// Whether the client asked for it.
    fn includes_usage(&self) -> bool;
}

struct Streaming<W> {
    generation: Generation,
    writer: W,
    ready: VecDeque<Bytes>,
    ended: bool,
    cut: bool,
}

/// The answer as server-sent events. The head goes out at once, the body as tokens come.
pub fn stream_response<W: Writer>(generation: Generation, writer: W) -> HttpResponse {
    let streaming = Streaming {
        generation,
        writer,
        ready: VecDeque::new(),
        ended: false,
        cut: false,
    };
    let body = stream::unfold(streaming, |mut streaming| async move {
        let bytes = streaming.next().await?;
        Some((bytes, streaming))
    });
    HttpResponse::Ok()
        .content_type("text/event-stream; charset=utf-8")
        .streaming(body)
}

impl<W: Writer> Streaming<W> {
    async fn next(&mut self) -> Option<Result<Bytes, io::Error>> {
        loop {
            if let Some(bytes) = self.ready.pop_front() {
                return Some(Ok(bytes));
            }
            if std::mem::take(&mut self.cut) {
                self.generation.reset_connection().await;
                return Some(Err(io::Error::new(
                    io::ErrorKind::ConnectionReset,
                    "injected cut",
                )));
            }
            if self.ended {
                return None;
            }
            match self.generation.next().await {
                Event::Token { choice, at, finish } => {
                    self.writer
                        .token(&self.generation, choice, at, finish, &mut self.ready)
                }
                Event::End => {
                    if self.writer.includes_usage() {
                        self.ready
                            .push_back(self.writer.usage(self.generation.usage()));
                    }
                    self.end_with_done();
                }
                Event::Broken(Break::Error) => {
                    self.ready.push_back(broken().to_event());
                    self.end_with_done();
                }
                Event::Failed(fault) => {
                    self.ready.push_back(fault.to_event());
                    self.end_with_done();
                }
                Event::Broken(Break::Drop) => (self.ended, self.cut) = (true, true),
            }
        }
    }

    fn end_with_done(&mut self) {
        self.ready.push_back(Bytes::from_static(wire::sse::DONE));
        self.ended = true;
    }
}

/// Waits for all choices. The error is the answer to give instead.
pub async fn finished(generation: &mut Generation) -> Result<(), HttpResponse> {
    loop {
        match generation.next().await {
            Event::Token { .. } => {}
            Event::End => return Ok(()),
            Event::Failed(fault) => {
                return Err(actix_web::ResponseError::error_response(&fault));
            }
            Event::Broken(Break::Error) => {
                return Err(actix_web::ResponseError::error_response(&broken()));
            }
            Event::Broken(Break::Drop) => {
                generation.reset_connection().await;
                return Err(cut_response());
            }
        }
    }
}

fn broken() -> ApiError {
    ApiError::internal(
        "EngineCore encountered an issue. See stack trace (above) for the root cause.",
    )
}

/// An answer that breaks off after its head.
fn cut_response() -> HttpResponse {
    let cut = io::Error::new(io::ErrorKind::ConnectionReset, "injected cut");
    HttpResponse::Ok()
        .content_type("application/json")
        .streaming(stream::iter([Err::<Bytes, _>(cut)]))
}
