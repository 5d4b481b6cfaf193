//! An engine that answers at once: so little work that what is measured is the proxy.

use std::io;
use std::ops::Range;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Chunks of a stream.
pub const CHUNKS: usize = 64;

/// Bytes of text in an answer, unless said otherwise.
const TEXT_BYTES: usize = 265;

/// Serves on these ports until it is killed.
pub fn serve(ports: Range<u16>) -> io::Result<()> {
    serve_answers(ports, TEXT_BYTES)
}

/// The same, with JSON answers whose text is this long.
pub fn serve_answers(ports: Range<u16>, text_bytes: usize) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let mut engines = tokio::task::JoinSet::new();
        for port in ports {
            let listener = TcpListener::bind(("127.0.0.1", port)).await?;
            engines.spawn(accept(listener, text_bytes));
        }
        match engines.join_next().await {
            Some(ended) => ended.map_err(io::Error::other)?,
            None => Ok(()),
        }
    })
}

async fn accept(listener: TcpListener, text_bytes: usize) -> io::Result<()> {
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        tokio::spawn(connection(stream, text_bytes));
    }
}

/// A chat answer whose text is this many bytes long, within some 280 others.
pub fn json_body(text_bytes: usize) -> String {
    let text = "the quick brown fox jumps over the lazy dog and then "
        .chars()
        .cycle();
    let text: String = text.take(text_bytes).collect();
    format!(
        r#"{{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{{"index":0,"message":{{"role":"assistant","content":"{text}"}},"finish_reason":"stop"}}],"usage":{{"prompt_tokens":9,"completion_tokens":64,"total_tokens":73}}}}"#
    )
}

fn json_answer(text_bytes: usize) -> Vec<u8> {
    let body = json_body(text_bytes);
    format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

fn chunk(data: &str) -> Vec<u8> {
    let event = format!("data: {data}\n\n");
    format!("{:x}\r\n{event}\r\n", event.len()).into_bytes()
}

async fn connection(mut stream: TcpStream, text_bytes: usize) -> io::Result<()> {
    let json = json_answer(text_bytes);
    let delta = chunk(
        r#"{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":" token"},"finish_reason":null}]}"#,
    );
    let last = chunk(
        r#"{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}"#,
    );
    let done = [chunk("[DONE]"), b"0\r\n\r\n".to_vec()].concat();
    let head =
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    let mut buffer = Vec::with_capacity(1 << 17);
    loop {
        buffer.clear();
        let Some(streamed) = read_request(&mut stream, &mut buffer).await? else {
            return Ok(());
        };
        if !streamed {
            stream.write_all(&json).await?;
            continue;
        }
        stream.write_all(head).await?;
        for _ in 0..CHUNKS {
            stream.write_all(&delta).await?;
            tokio::task::yield_now().await; // each chunk its own write and its own read
        }
        stream.write_all(&last).await?;
        stream.write_all(&done).await?;
    }
}

/// Reads one request; says whether it asks for a stream. None at the end of the connection.
async fn read_request(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> io::Result<Option<bool>> {
    loop {
        if let Some(head) = find(buffer, b"\r\n\r\n") {
            let text = String::from_utf8_lossy(&buffer[..head]).to_ascii_lowercase();
            let length = text
                .split("content-length:")
                .nth(1)
                .and_then(|rest| rest.split("\r\n").next()?.trim().parse().ok());
            if buffer.len() >= head + 4 + length.unwrap_or(0) {
                return Ok(Some(find(&buffer[head..], b"\"stream\":true").is_some()));
            }
        }
        if stream.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    }
}

pub(crate) fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack
        .windows(needle.len())
        .position(|window| window == needle)
}
