//! A small HTTP client over plain sockets, because these tests are about what is on the wire and about leaving in the middle.
#![allow(dead_code)] // each test binary uses a part
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use engine_sim::{KvSharing, Sim, SimConfig, SimHandle, Speed, StoreAt};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};

/// No wait in these tests is meant to be longer.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// An engine that answers at once.
pub fn fast() -> SimConfig {
    SimConfig {
        time_scale: 0.001,
        ..SimConfig::default()
    }
}

/// An engine that computes for seconds, so that a client can leave in the middle.
pub fn slow() -> SimConfig {
    let speed = Speed {
        prefill_ms_per_token: 0.0,
        itl_ms: 20.0,
        itl_ms_per_sequence: 0.0,
        overhead_ms: 0.0,
    };
    SimConfig {
        time_scale: 1.0,
        speed,
        ..SimConfig::default()
    }
}

/// The same engine as one that copies blocks to a store of this process.
pub fn storing(config: SimConfig) -> SimConfig {
    let transfer = json!({"kv_connector": "VastKVConnector", "kv_role": "kv_producer"});
    SimConfig {
        kv_transfer: Some(serde_json::from_value(transfer).unwrap()),
        kv_sharing: KvSharing {
            store: Some(StoreAt::InProcess),
            ..KvSharing::default()
        },
        ..config
    }
}

/// Starts an engine.
pub fn start(config: SimConfig) -> SimHandle {
    Sim::start(config).unwrap()
}

/// One answer, read to its end.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
    /// The connection broke before the body's end.
    pub cut: bool,
    /// It broke with a reset.
    pub reset: bool,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|fault| panic!("{fault}: {}", self.body))
    }

    /// The `data:` events of a stream, `[DONE]` as a string.
    pub fn events(&self) -> Vec<Value> {
        let data = self
            .body
            .split("\n\n")
            .filter_map(|event| event.strip_prefix("data: "));
        data.map(|data| serde_json::from_str(data).unwrap_or_else(|_| data.into()))
            .collect()
    }
}

pub async fn post(addr: SocketAddr, path: &str, body: Value) -> Answer {
    send(addr, "POST", path, "", &body.to_string()).await
}

pub async fn get(addr: SocketAddr, path: &str) -> Answer {
    send(addr, "GET", path, "", "").await
}

pub async fn send(addr: SocketAddr, method: &str, path: &str, headers: &str, body: &str) -> Answer {
    let mut socket = open(addr, method, path, headers, body).await;
    let mut bytes = Vec::new();
    let read = timeout(PATIENCE, socket.read_to_end(&mut bytes))
        .await
        .expect("the answer takes too long");
    let text = String::from_utf8(bytes).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let status = head
        .split(' ')
        .nth(1)
        .and_then(|status| status.parse().ok())
        .unwrap_or(0);
    let chunked = head
        .to_ascii_lowercase()
        .contains("transfer-encoding: chunked");
    let (body, complete) = if chunked {
        dechunk(body)
    } else {
        (body.to_owned(), true)
    };
    Answer {
        status,
        head: head.to_owned(),
        body,
        reset: read.is_err(),
        cut: read.is_err() || !complete || status == 0,
    }
}

/// Sends a request and leaves the answer unread.
pub async fn open(
    addr: SocketAddr,
    method: &str,
    path: &str,
    headers: &str,
    body: &str,
) -> TcpStream {
    let mut socket = TcpStream::connect(addr).await.unwrap();
    let length = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: sim\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n{headers}\r\n{body}"
    );
    socket.write_all(request.as_bytes()).await.unwrap();
    socket
}

/// Waits until something holds.
pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "in vain: {what}");
        sleep(Duration::from_millis(1)).await;
    }
}

fn dechunk(mut rest: &str) -> (String, bool) {
    let mut body = String::new();
    while let Some((size, after)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        if size == 0 {
            return (body, true);
        }
        let Some(chunk) = after.get(..size) else {
            break;
        };
        body.push_str(chunk);
        rest = after.get(size + 2..).unwrap_or("");
    }
    (body, false)
}

/// A chat of one message.
pub fn chat(text: &str) -> Value {
    json!({"model": "sim-model", "messages": [{"role": "user", "content": text}], "temperature": 0})
}

/// A body with more members.
pub fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    body
}

/// A prompt of several blocks.
pub fn long_text() -> String {
    "The server shares the prompt with the worker. ".repeat(20)
}
