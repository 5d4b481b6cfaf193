//! Storage that engines share, in this process and in another.

use crate::support::{get, post, start, until};
use crate::{PROMPT_TOKENS, ask, body, cached, engine, time_alone, timed};
use engine_sim::kv_store::{NamespaceStore, StoreFault, StoreSettings, server};
use engine_sim::{CacheEvent, KvEventQuirks, KvSharing, SimConfig, SimHandle, StoreAt};
use serde_json::json;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// The last block has the last token, which is computed anyway.
const REUSABLE: u64 = PROMPT_TOKENS as u64 - 16;

fn store(time_scale: f64) -> server::StoreHandle {
    let settings = StoreSettings {
        time_scale,
        ..StoreSettings::default()
    };
    server::start(Arc::new(NamespaceStore::new(settings)), "127.0.0.1", 0).unwrap()
}

fn at(store: &server::StoreHandle) -> KvSharing {
    KvSharing {
        store: Some(StoreAt::Url(store.url())),
        ..KvSharing::default()
    }
}

fn vast(role: &str, sharing: KvSharing) -> SimHandle {
    start(engine("VastKVConnector", role, sharing))
}

#[actix_web::test]
async fn what_one_engine_computed_another_one_loads_faster_than_it_would_compute_it() {
    let store = store(0.1);
    let (producer, consumer) = (
        vast("kv_producer", at(&store)),
        vast("kv_consumer", at(&store)),
    );
    assert_eq!(cached(&ask(&producer, body(1, 1)).await), 0);
    assert_eq!(store.store().stats().written, 250);
    let (answer, loaded) = timed(ask(&consumer, body(1, 2))).await;
    assert_eq!(cached(&answer), REUSABLE);
    assert_eq!(consumer.stats().kv_loaded_tokens, REUSABLE);
    let computed = time_alone(1).await;
    assert!(loaded * 2 < computed, "{loaded:?} against {computed:?}");
}

#[actix_web::test]
async fn with_the_figures_of_a_70b_model_loading_takes_half_the_time_of_computing_or_less() {
    let store = store(0.25);
    let large = |role: &str| {
        let config = SimConfig::from_args(["vllm", "serve", "meta-llama/Llama-3.1-70B-Instruct"]);
        let small = engine("VastKVConnector", role, at(&store));
        start(SimConfig {
            host: small.host,
            port: small.port,
            kv_transfer: small.kv_transfer,
            kv_sharing: small.kv_sharing,
            time_scale: 0.25,
            ..config.unwrap()
        })
    };
    let long: Vec<u32> = (0..16_000).map(|token| token % 500 + 1).collect();
    let long = json!({"prompt": long, "max_tokens": 1});
    let (producer, consumer, other) = (
        large("kv_producer"),
        large("kv_consumer"),
        large("kv_producer"),
    );
    ask(&producer, long.clone()).await;
    let (answer, loaded) = timed(ask(&consumer, long.clone())).await;
    assert_eq!(cached(&answer), 16_000 - 16);
    let (answer, computed) = timed(ask(&other, long)).await;
    assert_eq!(cached(&answer), 0);
    assert!(loaded * 2 < computed, "{loaded:?} against {computed:?}");
}

#[actix_web::test]
async fn engines_of_one_process_share_a_store_by_its_endpoint() {
    let sharing = || KvSharing {
        store: Some(StoreAt::InProcess),
        ..KvSharing::default()
    };
    let (producer, consumer) = (vast("kv_producer", sharing()), vast("kv_both", sharing()));
    ask(&producer, body(2, 1)).await;
    assert_eq!(cached(&ask(&consumer, body(2, 2)).await), REUSABLE);
}

#[actix_web::test]
async fn a_copy_in_storage_is_announced_before_the_answer_ends() {
    let store = store(0.1);
    let producer = vast("kv_producer", at(&store));
    ask(&producer, body(3, 1)).await;
    let events: Vec<CacheEvent> = producer
        .events()
        .into_iter()
        .flat_map(|batch| batch.events)
        .collect();
    let stored = events.iter().find_map(|event| match event {
        CacheEvent::Stored { hashes, .. } => Some(hashes),
        _ => None,
    });
    let copied = events.iter().find_map(|event| match event {
        CacheEvent::Copied { hashes, .. } => Some(hashes),
        _ => None,
    });
    assert_eq!(copied.unwrap().len(), 250);
    assert_eq!(copied, stored);
}

#[actix_web::test]
async fn loaded_blocks_are_announced_like_computed_ones() {
    let store = store(0.1);
    let (producer, consumer) = (
        vast("kv_producer", at(&store)),
        vast("kv_consumer", at(&store)),
    );
    ask(&producer, body(4, 1)).await;
    ask(&consumer, body(4, 1)).await;
    let stored = |sim: &SimHandle| -> Vec<_> {
        let events = sim.events().into_iter().flat_map(|batch| batch.events);
        let stored = events.filter_map(|event| match event {
            CacheEvent::Stored { hashes, .. } => Some(hashes),
            _ => None,
        });
        stored.flatten().collect()
    };
    assert_eq!(stored(&consumer), stored(&producer));
    let copies = |event: &CacheEvent| matches!(event, CacheEvent::Copied { .. });
    assert!(
        !consumer
            .events()
            .iter()
            .any(|batch| batch.events.iter().any(copies))
    );
}

#[actix_web::test]
async fn a_producer_loads_nothing_and_a_consumer_writes_nothing() {
    let store = store(0.1);
    let (one, other) = (
        vast("kv_producer", at(&store)),
        vast("kv_producer", at(&store)),
    );
    let consumer = vast("kv_consumer", at(&store));
    assert_eq!(cached(&ask(&consumer, body(5, 1)).await), 0);
    assert_eq!(store.store().stats().blocks, 0);
    ask(&one, body(5, 1)).await;
    assert_eq!(cached(&ask(&other, body(5, 1)).await), 0);
}

#[actix_web::test]
async fn another_namespace_model_block_size_or_dtype_shares_nothing() {
    let store = store(0.1);
    ask(&vast("kv_producer", at(&store)), body(6, 1)).await;
    let like = || engine("VastKVConnector", "kv_consumer", at(&store));
    let mut other_namespace = like();
    let extra = &mut other_namespace
        .kv_transfer
        .as_mut()
        .unwrap()
        .kv_connector_extra_config;
    extra.insert("kv_namespace".into(), "other".into());
    let others = [
        other_namespace,
        SimConfig {
            models: vec!["other".into()],
            ..like()
        },
        SimConfig {
            block_size: 32,
            ..like()
        },
        SimConfig {
            kv_cache_dtype: "fp8".into(),
            ..like()
        },
    ];
    for config in others {
        assert_eq!(cached(&ask(&start(config), body(6, 1)).await), 0);
    }
}

#[actix_web::test]
async fn what_storage_lacks_is_computed() {
    let store = store(0.1);
    let (producer, consumer) = (
        vast("kv_producer", at(&store)),
        vast("kv_consumer", at(&store)),
    );
    let mut half = body(7, 1);
    half["prompt"].as_array_mut().unwrap().truncate(2000);
    ask(&producer, half).await;
    assert_eq!(cached(&ask(&consumer, body(7, 1)).await), 2000);
}

#[actix_web::test]
async fn a_store_that_is_gone_or_refuses_or_hangs_costs_a_bounded_wait_and_then_computing() {
    let store = store(0.1);
    let sharing = KvSharing {
        load_timeout: Duration::ZERO,
        ..at(&store)
    };
    let both = vast("kv_both", sharing);
    store.store().set_fault(StoreFault {
        refuse: Some(503),
        ..StoreFault::default()
    });
    assert_eq!(cached(&ask(&both, body(8, 1)).await), 0);
    store.store().set_fault(StoreFault {
        hang: true,
        ..StoreFault::default()
    });
    assert_eq!(cached(&ask(&both, body(9, 1)).await), 0);
    store.stop().await;
    assert_eq!(cached(&ask(&both, body(10, 1)).await), 0);
    let stats = both.stats();
    assert_eq!(
        (stats.kv_load_failures_total, stats.kv_save_failures_total),
        (3, 3)
    );
}

#[actix_web::test]
async fn without_a_store_an_engine_is_as_one_alone() {
    let consumer = vast("kv_consumer", KvSharing::default());
    assert_eq!(cached(&ask(&consumer, body(11, 1)).await), 0);
    assert_eq!(consumer.stats().kv_load_failures_total, 0);
}

#[actix_web::test]
async fn evicted_blocks_are_offloaded_and_come_back() {
    let store = store(0.001);
    let config = SimConfig {
        num_blocks: 260,
        max_model_len: 4160,
        time_scale: 0.001,
        kv_event_quirks: KvEventQuirks {
            offload: true,
            ..KvEventQuirks::default()
        },
        ..engine("VastKVConnector", "kv_both", at(&store))
    };
    let both = start(config);
    ask(&both, body(12, 40)).await; // the answer fills blocks that no prompt has written
    ask(&both, body(13, 40)).await;
    let offloaded = both
        .events()
        .iter()
        .flat_map(|batch| &batch.events)
        .any(|event| matches!(event, CacheEvent::Offloaded { .. }));
    assert!(offloaded);
    until("the evicted answer is in storage", || {
        store.store().stats().written > 500
    })
    .await;
    assert_eq!(cached(&ask(&both, body(12, 1)).await), REUSABLE);
}

/// The binary, killed when this is dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[actix_web::test]
async fn a_store_that_is_a_process_serves_and_can_be_disturbed() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_kv-store"))
        .args([
            "--port",
            "0",
            "--sim-time-scale",
            "0.1",
            "--bandwidth",
            "20e9",
            "--latency-ms",
            "1",
        ])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    let _process = Process(child);
    let url = line.trim().rsplit(' ').next().unwrap().to_owned();
    let addr: SocketAddr = url.strip_prefix("http://").unwrap().parse().unwrap();
    let sharing = || KvSharing {
        store: Some(StoreAt::Url(url.clone())),
        ..KvSharing::default()
    };
    let (producer, consumer) = (
        vast("kv_producer", sharing()),
        vast("kv_consumer", sharing()),
    );
    ask(&producer, body(20, 1)).await;
    assert_eq!(
        post(addr, "/admin/fault", json!({"refuse": 503}))
            .await
            .status,
        204
    );
    assert_eq!(cached(&ask(&consumer, body(20, 1)).await), 0);
    assert_eq!(post(addr, "/admin/fault", json!({})).await.status, 204);
    let other = vast("kv_consumer", sharing());
    assert_eq!(cached(&ask(&other, body(20, 1)).await), REUSABLE);
    assert_eq!(
        post(addr, "/admin/fault", json!({"refuze": 503}))
            .await
            .status,
        400
    );
    let stats = get(addr, "/stats").await.json();
    assert_eq!(
        (&stats["blocks"], &stats["read"]),
        (&json!(250), &json!(249))
    );
    let there = json!({"namespace": "inference/kv-cache|sim-model|16|auto", "hashes": [1]});
    assert_eq!(
        post(addr, "/v1/blocks/contains", there).await.json(),
        json!({"leading": 0})
    );
    assert_eq!(post(addr, "/admin/clear", json!({})).await.status, 204);
    assert_eq!(get(addr, "/stats").await.json()["blocks"], 0);
}
