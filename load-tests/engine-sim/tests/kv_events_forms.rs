//! What the ZeroMQ messages of a running engine say, in each encoding.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod support;
#[path = "support/zmq.rs"]
mod zmq;

use engine_sim::{CacheEvent, EventEncoding, HashForm, KvEventQuirks, SimConfig, SimHandle};
use serde_json::{Value, json};
use support::{fast, long_text, post, start, storing, with};
use zmq::{Message, WireEvent, ask_times, assert_like_the_log, publishing, quirky, replay};

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
async fn a_copy_in_storage_is_stored_there_in_all_encodings_but_the_oldest() {
    for encoding in [
        EventEncoding::Oldest,
        EventEncoding::Array,
        EventEncoding::Map,
    ] {
        let with_media = encoding != EventEncoding::Oldest;
        let sim = start(storing(quirky(KvEventQuirks {
            encoding,
            ..KvEventQuirks::default()
        })));
        ask_times(&sim, 2).await;
        let copied = |event: &CacheEvent| matches!(event, CacheEvent::Copied { .. });
        let log = sim.events();
        assert!(log.iter().any(|batch| batch.events.iter().any(copied)));
        assert_like_the_log(&sim, &replay(&sim, 0).await, with_media);
        sim.stop().await;
    }
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
