//! The HTTP form of the KV events, over both transports.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

#[path = "support/listener.rs"]
mod listener;
mod support;

use engine_sim::{BlockHash, CacheEvent, EventBatch, KvEventQuirks, SimConfig, SimHandle};
use listener::{Item, Listener};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use support::{fast, get, long_text, post, send, start, storing, with};

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

/// A batch of the log in the words of the design.
fn expected(batch: &EventBatch) -> Value {
    let numbers = |hashes: &[BlockHash]| hashes.iter().map(|hash| hash.0).collect::<Vec<_>>();
    let events: Vec<Value> = batch
        .events
        .iter()
        .map(|event| match event {
            CacheEvent::Stored { hashes, parent, tokens, block_size, cache_salt } => json!({
                "type": "cache_created", "block_hashes": numbers(hashes), "parent_block_hash": parent.map(|hash| hash.0),
                "token_ids": tokens, "block_size": block_size, "medium": "GPU", "lora_name": null,
                "cache_salt": cache_salt.as_deref(),
            }),
            CacheEvent::Removed { hashes } => {
                json!({"type": "cache_evicted", "block_hashes": numbers(hashes), "medium": "GPU"})
            }
            CacheEvent::Copied { hashes, block_size } => json!({
                "type": "cache_created", "block_hashes": numbers(hashes), "parent_block_hash": null, "token_ids": [],
                "block_size": block_size, "medium": "STORAGE", "lora_name": null, "cache_salt": null,
            }),
            CacheEvent::Offloaded { hashes, .. } => {
                json!({"type": "cache_offloaded", "block_hashes": numbers(hashes), "medium": "STORAGE"})
            }
            CacheEvent::Cleared => json!({"type": "cache_cleared"}),
        })
        .collect();
    let batch = json!({"seq": batch.seq, "ts": batch.ts, "dp_rank": 0, "events": events});
    serde_json::from_str(&batch.to_string()).unwrap() // the parser may round a time by its last bit
}

fn expected_log(sim: &SimHandle) -> Vec<Value> {
    sim.events().iter().map(expected).collect()
}

fn seqs(batches: &[Value]) -> Vec<u64> {
    batches
        .iter()
        .map(|batch| batch["seq"].as_u64().unwrap())
        .collect()
}

/// A listener of either kind.
async fn listen(sim: &SimHandle, websocket: bool, last: Option<u64>) -> Listener {
    match websocket {
        true => Listener::websocket(sim.addr(), last).await,
        false => Listener::sse(sim.addr(), last).await,
    }
}

#[actix_web::test]
async fn both_transports_give_the_log_first_and_then_what_comes() {
    let sim = start(SimConfig {
        num_blocks: 40,
        max_model_len: 640,
        ..fast()
    });
    let salted = with(
        json!({"prompt": long_text(), "max_tokens": 1}),
        json!({"cache_salt": "tenant"}),
    );
    post(sim.addr(), "/v1/completions", salted).await;
    ask_times(&sim, 4).await;
    let mut sse = listen(&sim, false, None).await;
    let mut websocket = listen(&sim, true, None).await;
    ask_times(&sim, 4).await;
    assert_eq!(
        post(sim.addr(), "/reset_prefix_cache", json!({}))
            .await
            .status,
        200
    );
    let log = expected_log(&sim);
    assert_eq!(sse.take_batches(log.len()).await, log);
    assert_eq!(websocket.take_batches(log.len()).await, log);
    let text = serde_json::to_string(&log).unwrap();
    for kind in ["cache_created", "cache_evicted", "cache_cleared", "tenant"] {
        assert!(text.contains(kind), "{kind}");
    }
}

#[actix_web::test]
async fn a_listener_resumes_after_the_last_batch_that_it_has() {
    let sim = start(fast());
    ask_times(&sim, 4).await;
    let last = sim.events().last().unwrap().seq;
    for websocket in [false, true] {
        let mut first = listen(&sim, websocket, None).await;
        first.take_batches(2).await;
        drop(first);
        let mut resumed = listen(&sim, websocket, Some(1)).await;
        let batches = resumed.take_batches(last as usize - 1).await;
        assert_eq!(seqs(&batches), (2..=last).collect::<Vec<_>>());
    }
    let mut up_to_date = listen(&sim, true, Some(last)).await;
    ask(&sim).await;
    assert_eq!(seqs(&up_to_date.take_batches(1).await), [last + 1]);
}

#[actix_web::test]
async fn a_first_number_later_than_asked_tells_of_lost_history() {
    let mut config = fast();
    config.kv_events.buffer_steps = 2;
    let sim = start(config);
    ask_times(&sim, 4).await;
    let last = sim.events().last().unwrap().seq;
    for websocket in [false, true] {
        let mut resumed = listen(&sim, websocket, Some(0)).await;
        assert_eq!(seqs(&resumed.take_batches(2).await), [last - 1, last]);
    }
}

#[actix_web::test]
async fn a_restart_is_seen_as_numbers_from_zero() {
    let sim = start(fast());
    ask_times(&sim, 3).await;
    let last = sim.events().last().unwrap().seq;
    let mut connected = listen(&sim, true, Some(last)).await;
    sim.restart_events().await;
    ask(&sim).await;
    assert_eq!(seqs(&connected.take_batches(1).await), [0]);
    let mut returned = listen(&sim, false, Some(last)).await;
    assert_eq!(
        seqs(&returned.take_batches(1).await),
        [0],
        "what it has seen is of another life"
    );
}

#[actix_web::test]
async fn offload_and_forced_gaps_show_here_too() {
    let sim = start(SimConfig {
        num_blocks: 40,
        max_model_len: 640,
        kv_event_quirks: KvEventQuirks {
            offload: true,
            drop_every: Some(2),
            ..KvEventQuirks::default()
        },
        ..fast()
    });
    let mut live = listen(&sim, true, None).await;
    ask_times(&sim, 6).await;
    assert_eq!(seqs(&live.take_batches(3).await), [0, 2, 4]);
    let log = expected_log(&sim);
    let text = serde_json::to_string(&log).unwrap();
    assert!(text.contains("cache_offloaded") && !text.contains("cache_evicted"));
    let mut again = listen(&sim, false, None).await;
    assert_eq!(again.take_batches(log.len()).await, log);
}

#[actix_web::test]
async fn silence_is_broken_by_a_heartbeat() {
    let sim = start(fast());
    let mut sse = listen(&sim, false, None).await;
    let mut websocket = listen(&sim, true, None).await;
    assert_eq!(sse.next_item().await, Some(Item::Heartbeat));
    assert_eq!(websocket.next_item().await, Some(Item::Heartbeat));
    ask(&sim).await;
    assert_eq!(seqs(&sse.take_batches(1).await), [0]);
    assert_eq!(seqs(&websocket.take_batches(1).await), [0]);
}

#[actix_web::test]
async fn a_websocket_answers_pings_and_goodbyes() {
    let sim = start(fast());
    let mut websocket = listen(&sim, true, None).await;
    websocket.ping(b"here?").await;
    let pong = websocket.next_item().await;
    assert_eq!(pong, Some(Item::Pong(b"here?".to_vec())));
    websocket.close().await;
}

#[actix_web::test]
async fn requests_that_cannot_be_served_are_told_why() {
    let sim = start(SimConfig {
        api_keys: vec!["secret".to_owned()],
        ..fast()
    });
    assert_eq!(get(sim.addr(), "/v1/kv_events").await.status, 401);
    let key = "authorization: Bearer secret\r\n";
    let addr = sim.addr();
    let refused = |path: &'static str, headers: &'static str| {
        let headers = format!("{key}{headers}");
        async move { send(addr, "GET", path, &headers, "").await }
    };
    assert_eq!(refused("/v1/kv_events?since=x", "").await.status, 400);
    let resume = refused("/v1/kv_events", "last-event-id: -1\r\n").await;
    assert_eq!(resume.status, 400);
    let handshake = refused("/v1/kv_events", "upgrade: websocket\r\n").await;
    assert_eq!(handshake.status, 400);
    let sim = start(fast());
    let posted = post(sim.addr(), "/v1/kv_events", json!({})).await;
    assert_eq!(posted.status, 405);
}

#[actix_web::test]
async fn a_copy_in_storage_is_a_created_block_of_that_medium() {
    let sim = start(storing(fast()));
    ask_times(&sim, 2).await;
    let log = expected_log(&sim);
    let text = serde_json::to_string(&log).unwrap();
    assert!(text.contains("\"medium\":\"STORAGE\""), "{text}");
    let mut listener = listen(&sim, false, None).await;
    assert_eq!(listener.take_batches(log.len()).await, log);
}
