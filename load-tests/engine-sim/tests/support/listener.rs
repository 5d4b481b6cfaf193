//! Listeners of `/v1/kv_events` over plain sockets: server-sent events and WebSocket frames, read by hand.

use super::support::PATIENCE;
use serde_json::Value;
use std::net::SocketAddr;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// RFC 6455's own example of a handshake.
const WS_KEY: &str = "dGhlIHNhbXBsZSBub25jZQ==";
const WS_ACCEPT: &str = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=";

/// One open stream of either kind.
pub struct Listener {
    socket: TcpStream,
    /// Read and not yet used; for server-sent events without the chunks' sizes.
    buffer: Vec<u8>,
    websocket: bool,
}

/// What a stream brings.
#[derive(Debug, PartialEq)]
pub enum Item {
    Batch(Value),
    /// A comment line or a ping.
    Heartbeat,
    Pong(Vec<u8>),
}

impl Listener {
    /// Server-sent events, after `last` if there is one.
    pub async fn sse(addr: SocketAddr, last: Option<u64>) -> Self {
        let resume = last.map_or(String::new(), |seq| format!("last-event-id: {seq}\r\n"));
        let head = format!("GET /v1/kv_events HTTP/1.1\r\nhost: sim\r\n{resume}\r\n");
        let (listener, head) = Self::open(addr, &head, false).await;
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        assert!(head.contains("content-type: text/event-stream"), "{head}");
        listener
    }

    /// A WebSocket, after `last` if there is one.
    pub async fn websocket(addr: SocketAddr, last: Option<u64>) -> Self {
        let query = last.map_or(String::new(), |seq| format!("?since={seq}"));
        let head = format!(
            "GET /v1/kv_events{query} HTTP/1.1\r\nhost: sim\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\
             sec-websocket-version: 13\r\nsec-websocket-key: {WS_KEY}\r\n\r\n"
        );
        let (listener, head) = Self::open(addr, &head, true).await;
        assert!(head.starts_with("HTTP/1.1 101"), "{head}");
        assert!(head.contains(WS_ACCEPT), "{head}");
        listener
    }

    async fn open(addr: SocketAddr, request: &str, websocket: bool) -> (Self, String) {
        let mut socket = TcpStream::connect(addr).await.unwrap();
        socket.write_all(request.as_bytes()).await.unwrap();
        let mut listener = Self {
            socket,
            buffer: Vec::new(),
            websocket,
        };
        let head = loop {
            match find(&listener.buffer, b"\r\n\r\n") {
                Some(at) => break listener.take(at + 4),
                None => assert!(listener.read().await, "no head"),
            }
        };
        (listener, String::from_utf8(head).unwrap())
    }

    /// The next batch; none at the stream's end.
    pub async fn next(&mut self) -> Option<Value> {
        loop {
            if let Item::Batch(batch) = self.next_item().await? {
                return Some(batch);
            }
        }
    }

    /// Whatever comes next; none at the stream's end.
    pub async fn next_item(&mut self) -> Option<Item> {
        timeout(PATIENCE, async {
            match self.websocket {
                true => self.next_frame().await,
                false => self.next_event().await,
            }
        })
        .await
        .expect("nothing arrives")
    }

    pub async fn take_batches(&mut self, count: usize) -> Vec<Value> {
        let mut batches = Vec::new();
        while batches.len() < count {
            batches.push(self.next().await.expect("the stream ended"));
        }
        batches
    }

    /// Says goodbye as a WebSocket client does, and waits for the answer and the end.
    pub async fn close(mut self) {
        self.send_frame(8, &[]).await;
        assert_eq!(self.next().await, None);
    }

    pub async fn ping(&mut self, data: &[u8]) {
        self.send_frame(9, data).await;
    }

    /// One chunk is one event here, as the engine writes each event whole.
    async fn next_event(&mut self) -> Option<Item> {
        let line = self.until_crlf().await?;
        let size = usize::from_str_radix(&String::from_utf8(line).unwrap(), 16).unwrap();
        let chunk = self.exactly(size + 2).await?;
        if size == 0 {
            return None;
        }
        let text = std::str::from_utf8(&chunk[..size]).unwrap();
        assert!(text.ends_with("\n\n"), "{text:?}");
        if text.starts_with(':') {
            return Some(Item::Heartbeat);
        }
        let (id, data) = text.trim_end().split_once('\n').unwrap();
        let batch: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(id, format!("id: {}", batch["seq"]));
        Some(Item::Batch(batch))
    }

    async fn next_frame(&mut self) -> Option<Item> {
        let head = self.exactly(2).await?;
        let (last, kind, masked) = (head[0] & 0x80, head[0] & 0x0f, head[1] & 0x80);
        assert!(last != 0 && masked == 0);
        let len = match head[1] {
            126 => u16::from_be_bytes(self.exactly(2).await?.try_into().unwrap()).into(),
            127 => u64::from_be_bytes(self.exactly(8).await?.try_into().unwrap()),
            len => u64::from(len),
        };
        let body = self.exactly(len as usize).await?;
        match kind {
            1 => Some(Item::Batch(serde_json::from_slice(&body).unwrap())),
            8 => None,
            9 => Some(Item::Heartbeat),
            10 => Some(Item::Pong(body)),
            other => panic!("frame of kind {other}"),
        }
    }

    /// Masked with zeros, which changes nothing.
    async fn send_frame(&mut self, kind: u8, body: &[u8]) {
        let mut frame = vec![0x80 | kind, 0x80 | body.len() as u8, 0, 0, 0, 0];
        frame.extend(body);
        self.socket.write_all(&frame).await.unwrap();
    }

    async fn until_crlf(&mut self) -> Option<Vec<u8>> {
        loop {
            if let Some(at) = find(&self.buffer, b"\r\n") {
                let mut line = self.take(at + 2);
                line.truncate(at);
                return Some(line);
            }
            if !self.read().await {
                return None;
            }
        }
    }

    async fn exactly(&mut self, count: usize) -> Option<Vec<u8>> {
        while self.buffer.len() < count {
            if !self.read().await {
                return None;
            }
        }
        Some(self.take(count))
    }

    fn take(&mut self, count: usize) -> Vec<u8> {
        self.buffer.drain(..count).collect()
    }

    async fn read(&mut self) -> bool {
        timeout(PATIENCE, self.socket.read_buf(&mut self.buffer))
            .await
            .expect("nothing arrives")
            .is_ok_and(|count| count > 0)
    }
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|part| part == what)
}
