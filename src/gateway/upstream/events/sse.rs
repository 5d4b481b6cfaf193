//! KV events as server-sent events: `GET` the endpoint, one JSON batch per event.

use super::{FRAME_BYTES_MAX, numbered, split};
use crate::upstream::{Client, Outgoing, ReplyBody};
use actors::backend::ConnectionCounts;
use actors::kv_subscriber::{EventConnection, Frame};
use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use hyper::header::{ACCEPT, AUTHORIZATION, HeaderMap, HeaderValue};
use std::collections::VecDeque;
use wire::kv_events::from_json;
use wire::sse::{Event, EventScanner, data_of};

pub struct Sse {
    body: ReplyBody,
    scanner: EventScanner,
    read: VecDeque<Frame>,
}

pub async fn connect(
    endpoint: &str,
    client: Client,
    key: Option<HeaderValue>,
) -> Result<Sse, String> {
    let (url, path) = split(endpoint)?;
    let mut headers = HeaderMap::new();
    headers.insert(ACCEPT, HeaderValue::from_static("text/event-stream"));
    if let Some(key) = key {
        headers.insert(AUTHORIZATION, key);
    }
    let counts = ConnectionCounts::default();
    let sent = client
        .send(&url, &Outgoing::get(path, headers), &counts)
        .await;
    let reply = sent.map_err(|error| format!("{endpoint}: {error}"))?;
    if !reply.status.is_success() {
        return Err(format!("{endpoint} answered {}", reply.status));
    }
    Ok(Sse {
        body: reply.body,
        scanner: EventScanner::new(FRAME_BYTES_MAX),
        read: VecDeque::new(),
    })
}

impl EventConnection for Sse {
    fn next(&mut self) -> LocalBoxFuture<'_, Result<Frame, String>> {
        async move {
            loop {
                if let Some(frame) = self.read.pop_front() {
                    return Ok(frame);
                }
                let chunk = match self.body.chunk().await {
                    Some(Ok(chunk)) => chunk,
                    Some(Err(error)) => return Err(error.to_string()),
                    None => return Err("the engine ended the stream".into()),
                };
                let read = &mut self.read;
                self.scanner.feed(&chunk, |event| match event {
                    Event::Whole(event) => {
                        let data = data_of(event); // comments have none
                        read.extend(data.map(|data| numbered(from_json(&data))));
                    }
                    Event::TooLong => read.push_back(numbered(from_json(b""))),
                });
            }
        }
        .boxed_local()
    }

    fn replay(&mut self, _: u64) -> LocalBoxFuture<'_, Result<(), String>> {
        async { Err("this stream cannot replay".to_owned()) }.boxed_local()
    }
}
