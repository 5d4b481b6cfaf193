//! A closed loop of keep-alive connections, bounded in time.

use crate::engine::find;
use std::io;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// A short JSON answer to a prompt of this many bytes.
    Json(usize),
    /// A stream of 64 chunks.
    Stream,
}

impl Shape {
    fn request(self) -> Vec<u8> {
        let (bytes, stream) = match self {
            Shape::Json(bytes) => (bytes, "false"),
            Shape::Stream => (64, "true"),
        };
        let prompt: String = "word and ".chars().cycle().take(bytes).collect();
        let body = format!(
            r#"{{"model":"m","messages":[{{"role":"user","content":"{prompt}"}}],"max_tokens":64,"stream":{stream}}}"#
        );
        chat(&body)
    }
}

/// A chat request with this body.
pub fn chat(body: &str) -> Vec<u8> {
    format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

/// Requests answered within the time.
pub async fn drive(port: u16, shape: Shape, connections: usize, time: Duration) -> io::Result<u64> {
    let request = shape.request();
    let driven = drive_with(port, connections, time, move |_, _| request.clone()).await?;
    Ok(driven.latencies.len() as u64)
}

/// What a loop of clients saw.
#[derive(Debug, Default)]
pub struct Driven {
    /// From sending a request to having all of its answer.
    pub latencies: Vec<Duration>,
}

impl Driven {
    /// The latency that this share of requests did not exceed.
    pub fn quantile(&mut self, share: f64) -> Duration {
        self.latencies.sort_unstable();
        let last = self.latencies.len().saturating_sub(1);
        let at = (last as f64 * share) as usize;
        self.latencies.get(at).copied().unwrap_or_default()
    }
}

/// Sends what `request` makes of the connection's number and the request's, one after the other on
/// each connection.
pub async fn drive_with(
    port: u16,
    connections: usize,
    time: Duration,
    request: impl Fn(usize, u64) -> Vec<u8> + Clone + Send + 'static,
) -> io::Result<Driven> {
    let end = Instant::now() + time;
    let tasks: Vec<_> = (0..connections)
        .map(|connection| {
            let request = request.clone();
            tokio::spawn(one(port, end, move |number| request(connection, number)))
        })
        .collect();
    let mut all = Driven::default();
    for task in tasks {
        all.latencies.extend(task.await.map_err(io::Error::other)??);
    }
    Ok(all)
}

async fn one(
    port: u16,
    end: Instant,
    request: impl Fn(u64) -> Vec<u8>,
) -> io::Result<Vec<Duration>> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
    stream.set_nodelay(true)?;
    let mut buffer = Vec::with_capacity(1 << 16);
    let mut latencies = Vec::new();
    while Instant::now() < end {
        let request = request(latencies.len() as u64);
        let sent = Instant::now();
        stream.write_all(&request).await?;
        buffer.clear();
        while !is_whole(&buffer) {
            if stream.read_buf(&mut buffer).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        if !buffer.starts_with(b"HTTP/1.1 200") {
            let text = String::from_utf8_lossy(&buffer).into_owned();
            return Err(io::Error::other(text));
        }
        latencies.push(sent.elapsed());
    }
    Ok(latencies)
}

fn is_whole(buffer: &[u8]) -> bool {
    if buffer.ends_with(b"0\r\n\r\n") {
        return true;
    }
    let Some(head) = find(&buffer[..buffer.len().min(4096)], b"\r\n\r\n") else {
        return false;
    };
    let text = String::from_utf8_lossy(&buffer[..head]).to_ascii_lowercase();
    let length = text.split("content-length: ").nth(1);
    let length: Option<usize> = length.and_then(|rest| rest.split("\r\n").next()?.parse().ok());
    length.is_some_and(|length| buffer.len() >= head + 4 + length)
}
