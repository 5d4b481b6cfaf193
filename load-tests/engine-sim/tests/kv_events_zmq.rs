//! The ZeroMQ events of a running engine, as a subscriber gets them.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod support;
#[path = "support/zmq.rs"]
mod zmq;

use engine_sim::{
    BlockHash, CacheEvent, EventEncoding, HashForm, KvEventQuirks, KvEvents, ReplayFraming,
    SimConfig, SimHandle,
};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use support::{PATIENCE, fast, long_text, post, start, until, with};
use tokio::time::timeout;
use zeromq::{Socket, SocketRecv, SubSocket};
use zmq::{Message, WireEvent, next, publishing, replay, seqs, subscribe};

fn quirky(quirks: KvEventQuirks) -> SimConfig {
    SimConfig {
        kv_event_quirks: quirks,
        ..publishing(fast())
    }
}

/// A request whose prompt nobody has sent before; several blocks long.
async fn ask(sim: &SimHandle) {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let prompt = format!("{} {}", NEXT.fetch_add(1, Relaxed), long_text());
    let body = json!({"prompt": prompt, "max_tokens": 2, "ignore_eos": true});
    assert_eq!(post(sim.addr(), "/v1/completions", body).await.status, 200);
}

async fn ask_times(sim: &SimHandle, times: usize) {
    for _ in 0..times {
        ask(sim).await;
    }
}

/// What the log holds, in the words of the wire. `with_media` false is the oldest encoding.
fn expected(events: &[CacheEvent], with_media: bool) -> Vec<WireEvent> {
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
fn bare(mut events: Vec<WireEvent>) -> Vec<WireEvent> {
    for event in &mut events {
        if let WireEvent::Stored { tail, .. } = event {
            tail.clear();
        }
    }
    events
}

fn assert_like_the_log(sim: &SimHandle, messages: &[Message], with_media: bool) {
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

#[actix_web::test]
async fn a_subscriber_sees_a_contiguous_sequence_and_a_replay_the_same_from_anywhere() {
    let sim = start(publishing(fast()));
    let (mut socket, first) = subscribe(&sim, || ask(&sim)).await;
    ask_times(&sim, 5).await;
    let last = sim.events().last().unwrap().seq;
    let mut live = vec![first];
    while live.last().unwrap().seq < last {
        live.push(next(&mut socket).await);
    }
    let first = live[0].seq;
    assert_eq!(seqs(&live), (first..=last).collect::<Vec<_>>());
    assert!(
        live.iter()
            .all(|message| message.topic.as_deref() == Some("kv@sim"))
    );

    let all = replay(&sim, 0).await;
    assert_like_the_log(&sim, &all, true);
    for (live, again) in live.iter().zip(&all[first as usize..]) {
        assert_eq!(live.payload, again.payload);
    }
    assert_eq!(
        seqs(&replay(&sim, last - 2).await),
        [last - 2, last - 1, last]
    );
    assert!(replay(&sim, last + 1).await.is_empty());
    sim.stop().await;
}

#[actix_web::test]
async fn stored_tokens_are_those_of_the_prompt_block_by_block() {
    let sim = start(publishing(fast()));
    let prompt = long_text();
    let tokenized = post(sim.addr(), "/tokenize", json!({"prompt": prompt})).await;
    let tokens: Vec<u32> = serde_json::from_value(tokenized.json()["tokens"].clone()).unwrap();
    let body = json!({"prompt": prompt, "max_tokens": 1});
    assert_eq!(post(sim.addr(), "/v1/completions", body).await.status, 200);
    let mut announced = Vec::new();
    let mut before = None;
    for event in replay(&sim, 0).await.iter().flat_map(Message::events) {
        let WireEvent::Stored {
            hashes,
            parent,
            tokens,
            block_size: 16,
            ..
        } = event
        else {
            panic!("{event:?}");
        };
        assert_eq!(parent, before);
        assert_eq!(tokens.len(), hashes.len() * 16);
        before = hashes.last().copied();
        announced.extend(tokens);
    }
    let full = tokens.len() / 16 * 16;
    assert!(full >= 3 * 16);
    assert_eq!(announced[..full], tokens[..full]);
}

/// A small pool, so that blocks leave it too.
async fn busy(quirks: KvEventQuirks) -> SimHandle {
    let sim = start(SimConfig {
        num_blocks: 40,
        max_model_len: 640,
        ..quirky(quirks)
    });
    ask_times(&sim, 8).await;
    let cleared = post(sim.addr(), "/reset_prefix_cache", json!({})).await;
    assert_eq!(cleared.status, 200);
    let events: Vec<_> = sim
        .events()
        .into_iter()
        .flat_map(|batch| batch.events)
        .collect();
    assert!(events.iter().any(|event| matches!(
        event,
        CacheEvent::Removed { .. } | CacheEvent::Offloaded { .. }
    )));
    assert!(events.contains(&CacheEvent::Cleared));
    sim
}

#[actix_web::test]
async fn each_encoding_says_what_the_log_says() {
    for encoding in [
        EventEncoding::Oldest,
        EventEncoding::Array,
        EventEncoding::Map,
    ] {
        for hashes in [HashForm::Int, HashForm::Bytes] {
            let sim = busy(KvEventQuirks {
                encoding,
                hashes,
                ..KvEventQuirks::default()
            })
            .await;
            let messages = replay(&sim, 0).await;
            assert_like_the_log(&sim, &messages, encoding != EventEncoding::Oldest);
            let batch = messages[0].value();
            let batch = batch.as_array().unwrap();
            let width = batch.len();
            assert_eq!(
                width,
                if encoding == EventEncoding::Oldest {
                    2
                } else {
                    3
                }
            );
            assert!(batch.get(2).is_none_or(|rank| rank.as_u64() == Some(0)));
            let first = &batch[1].as_array().unwrap()[0];
            assert_eq!(first.is_map(), encoding == EventEncoding::Map);
            let WireEvent::Stored { tail, .. } = &messages[0].events()[0] else {
                panic!();
            };
            let tail = serde_json::to_value(tail.iter().map(plain).collect::<Vec<_>>()).unwrap();
            match encoding {
                EventEncoding::Oldest => assert_eq!(tail, json!([null])),
                EventEncoding::Array => assert_eq!(
                    tail,
                    json!([null, "GPU", null, null, 0, "full_attention", null])
                ),
                EventEncoding::Map => {}
            }
            sim.stop().await;
        }
    }
}

fn plain(value: &rmpv::Value) -> Value {
    match value {
        rmpv::Value::Nil => Value::Null,
        rmpv::Value::Integer(number) => number.as_u64().into(),
        rmpv::Value::String(text) => text.as_str().into(),
        other => panic!("{other}"),
    }
}

#[actix_web::test]
async fn replay_answers_have_the_topic_or_not() {
    for (replay_framing, topic) in [
        (ReplayFraming::Old, None),
        (ReplayFraming::New, Some("kv@sim")),
    ] {
        let sim = start(quirky(KvEventQuirks {
            replay_framing,
            ..KvEventQuirks::default()
        }));
        ask(&sim).await;
        let messages = replay(&sim, 0).await;
        assert!(!messages.is_empty());
        assert!(
            messages
                .iter()
                .all(|message| message.topic.as_deref() == topic)
        );
    }
}

#[actix_web::test]
async fn forced_gaps_are_in_the_live_sequence_and_a_replay_fills_them() {
    let sim = start(quirky(KvEventQuirks {
        drop_every: Some(3),
        ..KvEventQuirks::default()
    }));
    let (mut socket, first) = subscribe(&sim, || ask(&sim)).await;
    ask_times(&sim, 6).await;
    let first = first.seq;
    let last = sim.events().last().unwrap().seq;
    let due: Vec<u64> = (first..=last).filter(|seq| (seq + 1) % 3 != 0).collect();
    let mut live = vec![first];
    while live.len() < due.len() {
        live.push(next(&mut socket).await.seq);
    }
    assert_eq!(live, due);
    assert_eq!(seqs(&replay(&sim, 0).await), (0..=last).collect::<Vec<_>>());
}

#[actix_web::test]
async fn a_lost_batch_is_nowhere() {
    let sim = start(quirky(KvEventQuirks {
        lose_seq: Some(1),
        ..KvEventQuirks::default()
    }));
    ask_times(&sim, 4).await;
    assert_eq!(seqs(&replay(&sim, 0).await)[..3], [0, 2, 3]);
    assert_eq!(seqs(&replay(&sim, 1).await)[0], 2, "later than asked");
}

#[actix_web::test]
async fn the_ring_forgets_the_oldest_batches() {
    let mut config = publishing(fast());
    config.kv_events.buffer_steps = 3;
    let sim = start(config);
    ask_times(&sim, 6).await;
    let last = sim.events().last().unwrap().seq;
    assert_eq!(
        seqs(&replay(&sim, 0).await),
        [last - 2, last - 1, last],
        "later than asked"
    );
}

#[actix_web::test]
async fn a_reordered_batch_arrives_after_its_successor() {
    let sim = start(quirky(KvEventQuirks {
        reorder_every: Some(4),
        ..KvEventQuirks::default()
    }));
    let (mut socket, first) = subscribe(&sim, || ask(&sim)).await;
    ask_times(&sim, 10).await;
    let mut live = vec![first.seq];
    while live.len() < 9 {
        live.push(next(&mut socket).await.seq);
    }
    let swapped: Vec<&[u64]> = live
        .windows(2)
        .filter(|pair| pair[1] + 1 == pair[0])
        .collect();
    assert!(!swapped.is_empty(), "{live:?}");
    assert!(swapped.iter().all(|pair| (pair[1] + 1) % 4 == 0));
}

#[actix_web::test]
async fn a_restart_counts_from_zero_over_the_same_connection_and_nothing_is_cached() {
    let sim = start(publishing(fast()));
    let (mut socket, _) = subscribe(&sim, || ask(&sim)).await;
    let body = json!({"prompt": long_text(), "max_tokens": 1});
    post(sim.addr(), "/v1/completions", body.clone()).await;
    sim.restart_events().await;
    assert!(sim.events().is_empty() && replay(&sim, 0).await.is_empty());
    let again = post(sim.addr(), "/v1/completions", body).await;
    let cached = &again.json()["usage"]["prompt_tokens_details"]["cached_tokens"];
    assert_eq!(*cached, 0);
    let restarted = timeout(PATIENCE, async {
        loop {
            let message = next(&mut socket).await;
            if message.seq == 0 {
                return message;
            }
        }
    });
    let restarted = restarted.await.expect("no batch has number 0");
    assert_eq!(restarted.payload, replay(&sim, 0).await[0].payload);
}

#[actix_web::test]
async fn a_restart_comes_after_as_many_batches_as_told() {
    let sim = start(quirky(KvEventQuirks {
        restart_after: Some(5),
        ..KvEventQuirks::default()
    }));
    ask_times(&sim, 12).await;
    let kept = seqs(&replay(&sim, 0).await);
    assert_eq!(kept[0], 0);
    let all = sim.events();
    assert!(kept.len() >= 7, "it happens once: {kept:?}");
    assert_eq!(all.len(), kept.len());
}

#[actix_web::test]
async fn offloaded_blocks_are_stored_in_storage_and_then_gone_from_the_gpu() {
    for encoding in [EventEncoding::Array, EventEncoding::Map] {
        let sim = busy(KvEventQuirks {
            encoding,
            offload: true,
            ..KvEventQuirks::default()
        })
        .await;
        let messages = replay(&sim, 0).await;
        assert_like_the_log(&sim, &messages, true);
        let events: Vec<_> = messages.iter().flat_map(Message::events).collect();
        let at = events
            .iter()
            .position(|event| matches!(event, WireEvent::Stored { medium: Some(medium), .. } if medium == "STORAGE"))
            .unwrap();
        let WireEvent::Stored { hashes: stored, .. } = &events[at] else {
            panic!();
        };
        let WireEvent::Removed {
            hashes,
            medium: Some(medium),
        } = &events[at + 1]
        else {
            panic!("{:?}", events[at + 1]);
        };
        assert_eq!((hashes, medium.as_str()), (stored, "GPU"));
        sim.stop().await;
    }
    let oldest = busy(KvEventQuirks {
        encoding: EventEncoding::Oldest,
        offload: true,
        ..KvEventQuirks::default()
    })
    .await;
    let messages = replay(&oldest, 0).await;
    let mut events = messages.iter().flat_map(Message::events);
    assert!(
        events.all(|event| !matches!(event, WireEvent::Stored { tokens, .. } if tokens.is_empty())),
        "the oldest encoding cannot say where a block is"
    );
}

#[actix_web::test]
async fn copies_are_stored_twice_and_removed_twice() {
    let sim = busy(KvEventQuirks {
        duplicate: true,
        ..KvEventQuirks::default()
    })
    .await;
    let messages = replay(&sim, 0).await;
    assert_like_the_log(&sim, &messages, true);
    for message in messages {
        let events: Vec<_> = message
            .events()
            .into_iter()
            .filter(|event| *event != WireEvent::Cleared)
            .collect();
        assert!(events.len().is_multiple_of(2));
        assert!(events.chunks_exact(2).all(|pair| pair[0] == pair[1]));
    }
}

#[actix_web::test]
async fn a_salt_stands_in_the_extra_keys_of_the_first_block() {
    for encoding in [EventEncoding::Array, EventEncoding::Map] {
        let sim = start(quirky(KvEventQuirks {
            encoding,
            ..KvEventQuirks::default()
        }));
        let body = json!({"prompt": long_text(), "max_tokens": 1});
        let salted = with(body, json!({"cache_salt": "tenant"}));
        assert_eq!(
            post(sim.addr(), "/v1/completions", salted).await.status,
            200
        );
        let events = replay(&sim, 0).await[0].events();
        let WireEvent::Stored {
            hashes,
            extra_keys: Some(keys),
            ..
        } = &events[0]
        else {
            panic!("{events:?}");
        };
        let keys = keys.as_array().unwrap();
        assert_eq!(keys.len(), hashes.len());
        assert_eq!(keys[0].as_array().unwrap()[0].as_str(), Some("tenant"));
        assert!(keys[1..].iter().all(rmpv::Value::is_nil));
    }
}

#[actix_web::test]
async fn a_plain_address_is_connected_to_and_again_after_the_subscriber_left() {
    let probe = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("tcp://{}", probe.local_addr().unwrap());
    drop(probe);
    let mut config = publishing(fast());
    config.kv_events.endpoint.clone_from(&endpoint);
    let sim = start(config);
    assert_eq!(sim.kv_endpoint(), Some(endpoint.clone()));
    for _ in 0..2 {
        let mut socket = SubSocket::new();
        socket.bind(&endpoint).await.unwrap();
        socket.subscribe("").await.unwrap();
        let arrived = timeout(PATIENCE, async {
            loop {
                ask(&sim).await;
                let brief = std::time::Duration::from_millis(20);
                if let Ok(message) = timeout(brief, socket.recv()).await {
                    return message.unwrap();
                }
            }
        });
        assert_eq!(arrived.await.expect("no event arrives").len(), 3);
        assert!(socket.close().await.is_empty());
    }
}

#[actix_web::test]
async fn without_the_switch_there_is_no_socket_and_with_it_a_taken_port_is_told() {
    let sim = start(fast());
    assert_eq!((sim.kv_endpoint(), sim.replay_endpoint()), (None, None));
    let taken = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
    let with_endpoint = |endpoint: String| SimConfig {
        kv_events: KvEvents {
            enable_kv_cache_events: true,
            endpoint,
            ..KvEvents::default()
        },
        ..fast()
    };
    let port = taken.local_addr().unwrap().port();
    let config = with_endpoint(format!("tcp://*:{port}"));
    let fault = engine_sim::Sim::start(config).unwrap_err();
    assert_eq!(fault.kind(), std::io::ErrorKind::AddrInUse);
    let fault = engine_sim::Sim::start(with_endpoint("ipc:///tmp/x".into())).unwrap_err();
    assert_eq!(fault.kind(), std::io::ErrorKind::InvalidInput);
}

#[actix_web::test]
async fn a_stopped_engine_leaves_its_ports() {
    let sim = start(publishing(fast()));
    let ports: Vec<String> = [sim.kv_endpoint(), sim.replay_endpoint()]
        .into_iter()
        .map(|endpoint| endpoint.unwrap().replace("tcp://", ""))
        .collect();
    sim.stop().await;
    for port in &ports {
        std::net::TcpListener::bind(port).unwrap();
    }

    let dropped = start(publishing(fast()));
    let port = dropped.kv_endpoint().unwrap().replace("tcp://", "");
    drop(dropped);
    until("the port is free", || {
        std::net::TcpListener::bind(&port).is_ok()
    })
    .await;
}
