//! A subscriber of the ZeroMQ events, and a decoder of their payloads that shares nothing with the writer.
#![allow(dead_code)] // each test binary uses a part

use super::support::{PATIENCE, fast, long_text, post};
use engine_sim::{BlockHash, CacheEvent, KvEventQuirks, KvEvents, SimConfig, SimHandle};
use rmpv::Value;
use serde_json::json;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;
use tokio::time::timeout;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

const END_SEQ: u64 = u64::MAX;

/// One event of the wire, whatever its encoding. `tail` is what an array has after the fields that every era has.
#[derive(Debug, Clone, PartialEq)]
pub enum WireEvent {
    Stored {
        hashes: Vec<u64>,
        parent: Option<u64>,
        tokens: Vec<u32>,
        block_size: u64,
        medium: Option<String>,
        extra_keys: Option<Value>,
        tail: Vec<Value>,
    },
    Removed {
        hashes: Vec<u64>,
        medium: Option<String>,
    },
    Cleared,
}

/// One message.
#[derive(Debug, Clone)]
pub struct Message {
    pub topic: Option<String>,
    pub seq: u64,
    pub payload: Vec<u8>,
}

impl Message {
    pub fn value(&self) -> Value {
        let mut rest = self.payload.as_slice();
        let value = rmpv::decode::read_value(&mut rest).unwrap();
        assert!(rest.is_empty(), "bytes behind the payload");
        value
    }

    pub fn events(&self) -> Vec<WireEvent> {
        let batch = self.value();
        let batch = batch.as_array().unwrap();
        assert!(batch[0].is_f64());
        batch[1].as_array().unwrap().iter().map(decode).collect()
    }
}

/// Settings of an engine that publishes on free ports.
pub fn publishing(config: SimConfig) -> SimConfig {
    SimConfig {
        kv_events: KvEvents {
            enable_kv_cache_events: true,
            endpoint: "tcp://127.0.0.1:*".to_owned(),
            replay_endpoint: Some("tcp://127.0.0.1:0".to_owned()),
            topic: "kv@sim".to_owned(),
            ..KvEvents::default()
        },
        ..config
    }
}

pub fn quirky(quirks: KvEventQuirks) -> SimConfig {
    SimConfig {
        kv_event_quirks: quirks,
        ..publishing(fast())
    }
}

/// A request whose prompt nobody has sent before; several blocks long.
pub async fn ask(sim: &SimHandle) {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let prompt = format!("{} {}", NEXT.fetch_add(1, Relaxed), long_text());
    let body = json!({"prompt": prompt, "max_tokens": 2, "ignore_eos": true});
    assert_eq!(post(sim.addr(), "/v1/completions", body).await.status, 200);
}

pub async fn ask_times(sim: &SimHandle, times: usize) {
    for _ in 0..times {
        ask(sim).await;
    }
}

/// What the log holds, in the words of the wire. `with_media` false is the oldest encoding.
pub fn expected(events: &[CacheEvent], with_media: bool) -> Vec<WireEvent> {
    let numbers = |hashes: &[BlockHash]| hashes.iter().map(|hash| hash.0).collect::<Vec<_>>();
    let medium = |name: &str| with_media.then(|| name.to_owned());
    let of = |event: &CacheEvent| match event {
        CacheEvent::Stored {
            hashes,
            parent,
            tokens,
            block_size,
            ..
        } => vec![WireEvent::Stored {
            hashes: numbers(hashes),
            parent: parent.map(|hash| hash.0),
            tokens: tokens.clone(),
            block_size: *block_size as u64,
            medium: medium("GPU"),
            extra_keys: None,
            tail: Vec::new(),
        }],
        CacheEvent::Removed { hashes } => vec![WireEvent::Removed {
            hashes: numbers(hashes),
            medium: medium("GPU"),
        }],
        CacheEvent::Copied { .. } if !with_media => Vec::new(),
        CacheEvent::Copied { hashes, block_size } => vec![WireEvent::Stored {
            hashes: numbers(hashes),
            parent: None,
            tokens: Vec::new(),
            block_size: *block_size as u64,
            medium: medium("STORAGE"),
            extra_keys: None,
            tail: Vec::new(),
        }],
        CacheEvent::Offloaded { hashes, block_size } => vec![
            WireEvent::Stored {
                hashes: numbers(hashes),
                parent: None,
                tokens: Vec::new(),
                block_size: *block_size as u64,
                medium: medium("STORAGE"),
                extra_keys: None,
                tail: Vec::new(),
            },
            WireEvent::Removed {
                hashes: numbers(hashes),
                medium: medium("GPU"),
            },
        ],
        CacheEvent::Cleared => vec![WireEvent::Cleared],
    };
    events.iter().flat_map(of).collect()
}

/// Without the tail, which is compared apart.
pub fn bare(mut events: Vec<WireEvent>) -> Vec<WireEvent> {
    for event in &mut events {
        if let WireEvent::Stored { tail, .. } = event {
            tail.clear();
        }
    }
    events
}

pub fn assert_like_the_log(sim: &SimHandle, messages: &[Message], with_media: bool) {
    let log = sim.events();
    let kept: Vec<u64> = log.iter().map(|batch| batch.seq).collect();
    assert_eq!(seqs(messages), kept);
    for (message, batch) in messages.iter().zip(&log) {
        let decoded = message.value();
        assert_eq!(decoded.as_array().unwrap()[0].as_f64(), Some(batch.ts));
        assert_eq!(
            bare(message.events()),
            expected(&batch.events, with_media),
            "batch {}",
            batch.seq
        );
    }
}

/// A connected subscriber. A subscription takes a moment to arrive, and PUB drops what comes before; so `wake` makes one batch
/// after another until one is seen.
pub async fn subscribe<F: Future<Output = ()>>(
    sim: &SimHandle,
    mut wake: impl FnMut() -> F,
) -> (SubSocket, Message) {
    let mut socket = SubSocket::new();
    socket.connect(&sim.kv_endpoint().unwrap()).await.unwrap();
    socket.subscribe("kv@").await.unwrap();
    let first = timeout(PATIENCE, async {
        loop {
            wake().await;
            if let Ok(message) = timeout(Duration::from_millis(20), socket.recv()).await {
                return live(message.unwrap());
            }
        }
    });
    let first = first.await.expect("no event arrives");
    (socket, first)
}

pub async fn next(socket: &mut SubSocket) -> Message {
    let message = timeout(PATIENCE, socket.recv()).await;
    live(message.expect("no event arrives").unwrap())
}

fn live(message: ZmqMessage) -> Message {
    let frames = message.into_vec();
    let [topic, seq, payload] = frames.as_slice() else {
        panic!("{} frames", frames.len());
    };
    Message {
        topic: Some(String::from_utf8(topic.to_vec()).unwrap()),
        seq: number(seq),
        payload: payload.to_vec(),
    }
}

/// Everything from `start` on, up to the end marker.
pub async fn replay(sim: &SimHandle, start: u64) -> Vec<Message> {
    let mut socket = DealerSocket::new();
    socket
        .connect(&sim.replay_endpoint().unwrap())
        .await
        .unwrap();
    let request = vec![bytes::Bytes::new(), start.to_be_bytes().to_vec().into()];
    socket.send(request.try_into().unwrap()).await.unwrap();
    let mut messages = Vec::new();
    loop {
        let answer = timeout(PATIENCE, socket.recv()).await;
        let mut frames = answer.expect("the replay has no end").unwrap().into_vec();
        assert!(frames.remove(0).is_empty(), "the delimiter comes first");
        let payload = frames.pop().unwrap().to_vec();
        let seq = number(&frames.pop().unwrap());
        let topic = frames
            .pop()
            .map(|topic| String::from_utf8(topic.to_vec()).unwrap());
        assert!(frames.is_empty());
        let message = Message {
            topic,
            seq,
            payload,
        };
        if seq == END_SEQ {
            assert!(message.payload.is_empty());
            return messages;
        }
        messages.push(message);
    }
}

pub fn seqs(messages: &[Message]) -> Vec<u64> {
    messages.iter().map(|message| message.seq).collect()
}

fn number(frame: &[u8]) -> u64 {
    u64::from_be_bytes(frame.try_into().expect("eight bytes"))
}

fn decode(event: &Value) -> WireEvent {
    match event {
        Value::Array(items) => {
            let items = items.clone();
            match items[0].as_str().unwrap() {
                "BlockStored" => WireEvent::Stored {
                    hashes: hashes(&items[1]),
                    parent: parent(&items[2]),
                    tokens: tokens(&items[3]),
                    block_size: items[4].as_u64().unwrap(),
                    medium: items.get(6).and_then(text),
                    extra_keys: items.get(8).filter(|keys| !keys.is_nil()).cloned(),
                    tail: items[5..].to_vec(),
                },
                "BlockRemoved" => WireEvent::Removed {
                    hashes: hashes(&items[1]),
                    medium: items.get(2).and_then(text),
                },
                "AllBlocksCleared" => WireEvent::Cleared,
                other => panic!("{other}"),
            }
        }
        Value::Map(_) => {
            let field = |name: &str| {
                let fields = event.as_map().unwrap();
                let found = fields.iter().find(|(key, _)| key.as_str() == Some(name));
                found.map_or(Value::Nil, |(_, value)| value.clone())
            };
            match text(&field("type")).unwrap().as_str() {
                "BlockStored" => WireEvent::Stored {
                    hashes: hashes(&field("block_hashes")),
                    parent: parent(&field("parent_block_hash")),
                    tokens: tokens(&field("token_ids")),
                    block_size: field("block_size").as_u64().unwrap(),
                    medium: text(&field("medium")),
                    extra_keys: Some(field("extra_keys")).filter(|keys| !keys.is_nil()),
                    tail: Vec::new(),
                },
                "BlockRemoved" => WireEvent::Removed {
                    hashes: hashes(&field("block_hashes")),
                    medium: text(&field("medium")),
                },
                "AllBlocksCleared" => WireEvent::Cleared,
                other => panic!("{other}"),
            }
        }
        other => panic!("{other}"),
    }
}

fn text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

fn hashes(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(hash).collect()
}

fn parent(value: &Value) -> Option<u64> {
    (!value.is_nil()).then(|| hash(value))
}

/// As the router is to read them: integers, or the last eight of 32 bytes.
fn hash(value: &Value) -> u64 {
    match value {
        Value::Binary(digest) => {
            assert_eq!(digest.len(), 32);
            number(&digest[24..])
        }
        value => value.as_u64().unwrap(),
    }
}

fn tokens(value: &Value) -> Vec<u32> {
    let tokens = value.as_array().unwrap().iter();
    tokens.map(|token| token.as_u64().unwrap() as u32).collect()
}
