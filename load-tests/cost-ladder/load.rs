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
        format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
    }
}

/// Requests answered within the time.
pub async fn drive(port: u16, shape: Shape, connections: usize, time: Duration) -> io::Result<u64> {
    let end = Instant::now() + time;
    let tasks: Vec<_> = (0..connections)
        .map(|_| tokio::spawn(one(port, shape, end)))
        .collect();
    let mut all = 0;
    for task in tasks {
        all += task.await.map_err(io::Error::other)??;
    }
    Ok(all)
}

async fn one(port: u16, shape: Shape, end: Instant) -> io::Result<u64> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
    stream.set_nodelay(true)?;
    let request = shape.request();
    let mut buffer = Vec::with_capacity(1 << 16);
    let mut answered = 0;
    while Instant::now() < end {
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
        answered += 1;
    }
    Ok(answered)
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
