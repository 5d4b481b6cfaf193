//! Blocks that are kept for a lease and fetched by what the client passes on.

use crate::support::{PATIENCE, get, open, post, start, until, with};
use crate::{ALL_BUT_THE_LAST, Answer, ask, body, cached, engine, failure, time_alone, timed};
use engine_sim::kv_store::link::LinkSpeed;
use engine_sim::{KvSharing, LoadFailurePolicy, SimConfig, SimHandle};
use serde_json::{Value, json};
use std::time::Duration;
use tokio::time::Instant;

fn nixl(role: &str) -> SimHandle {
    let sharing = KvSharing {
        lease: Duration::from_secs(300),
        ..KvSharing::default()
    };
    start(engine("NixlConnector", role, sharing))
}

/// The prefill leg; answers what the decode leg is to carry.
async fn prefill(sim: &SimHandle, number: u32) -> Value {
    let params = json!({"kv_transfer_params": {
        "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null, "remote_block_ids": null,
        "remote_host": null, "remote_port": null,
    }});
    let answer = ask(sim, with(body(number, 1), params)).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.json()["kv_transfer_params"].clone()
}

async fn decode(sim: &SimHandle, number: u32, params: &Value) -> Answer {
    ask(
        sim,
        with(body(number, 2), json!({"kv_transfer_params": params})),
    )
    .await
}

#[actix_web::test]
async fn the_decode_engine_fetches_faster_than_it_would_compute() {
    let (producer, consumer) = (nixl("kv_producer"), nixl("kv_consumer"));
    let params = prefill(&producer, 1).await;
    let (answer, fetched) = timed(decode(&consumer, 1, &params)).await;
    assert_eq!(cached(&answer), ALL_BUT_THE_LAST);
    assert_eq!(answer.json()["kv_transfer_params"], Value::Null);
    let computed = time_alone(1).await;
    assert!(fetched * 2 < computed, "{fetched:?} against {computed:?}");
}

#[actix_web::test]
async fn the_prefill_engine_tells_where_the_blocks_are_in_64_bits() {
    let producer = nixl("kv_both");
    let params = prefill(&producer, 2).await;
    assert_eq!(
        (&params["do_remote_prefill"], &params["do_remote_decode"]),
        (&json!(true), &json!(false))
    );
    assert_eq!(params["remote_port"], producer.addr().port());
    assert_eq!(params["remote_host"], "127.0.0.1");
    assert_eq!(params["tp_size"], 1);
    let ids = params["remote_block_ids"].as_array().unwrap();
    assert_eq!(ids.len(), 250);
    let ids: Vec<u64> = ids.iter().map(|id| id.as_u64().unwrap()).collect();
    assert!(ids.iter().all(|id| *id > 1 << 53));
    assert!(
        ids.iter().any(|id| *id as f64 as u64 != *id),
        "no float holds all of them"
    );
}

#[actix_web::test]
async fn kept_blocks_take_room_until_they_are_fetched() {
    let (producer, consumer) = (nixl("kv_producer"), nixl("kv_consumer"));
    let params = prefill(&producer, 3).await;
    until("the blocks are kept", || {
        producer.stats().kv_blocks_pinned == 250
    })
    .await;
    assert_eq!(producer.stats().kv_blocks_used, 250);
    let told = get(producer.addr(), "/metrics").await.body;
    assert!(
        told.contains("vllm:sim_kv_pinned_blocks{engine=\"0\",model_name=\"sim-model\"} 250.0"),
        "{told}"
    );
    decode(&consumer, 3, &params).await;
    until("the blocks are free", || {
        producer.stats().kv_blocks_used == 0
    })
    .await;
    assert_eq!(producer.stats().kv_expired_leases_total, 0);
}

#[actix_web::test]
async fn blocks_that_nobody_fetches_are_free_after_the_lease_and_then_missing() {
    let short = KvSharing {
        lease: Duration::from_millis(100),
        ..KvSharing::default()
    };
    let (producer, consumer) = (
        start(engine("NixlConnector", "kv_producer", short)),
        nixl("kv_consumer"),
    );
    let params = prefill(&producer, 4).await;
    until("the lease ends", || {
        producer.stats().kv_expired_leases_total == 1
    })
    .await;
    until("the blocks are free", || {
        producer.stats().kv_blocks_used == 0
    })
    .await;
    let told = failure(&decode(&consumer, 4, &params).await);
    assert!(
        told.contains("has expired") && told.contains("remote blocks"),
        "{told}"
    );
    let metrics = get(producer.addr(), "/metrics").await.body;
    assert!(
        metrics
            .contains("nixl_num_kv_expired_reqs_total{engine=\"0\",model_name=\"sim-model\"} 1.0"),
        "{metrics}"
    );
    assert_eq!(consumer.stats().kv_load_failures_total, 1);
}

#[actix_web::test]
async fn what_is_wrong_with_the_parameters_is_named() {
    let (producer, consumer) = (nixl("kv_producer"), nixl("kv_consumer"));
    let params = prefill(&producer, 5).await;
    let changed = |name: &str, value: Value| with(params.clone(), json!({name: value}));
    let mut rounded = params.clone();
    for id in rounded["remote_block_ids"].as_array_mut().unwrap() {
        *id = json!(id.as_u64().unwrap() as f64 as u64);
    }
    let wrong = [
        (
            changed("remote_engine_id", json!("sim-0")),
            "another engine",
        ),
        (changed("remote_request_id", json!("other")), "unknown"),
        (
            changed("remote_block_ids", json!([1, 2])),
            "block ids are wrong",
        ),
        (rounded, "block ids are wrong"),
        (changed("remote_block_ids", Value::Null), "remote_block_ids"),
        (changed("remote_host", Value::Null), "remote_host"),
        (changed("remote_port", json!(1)), "127.0.0.1:1"),
    ];
    for (params, expected) in wrong {
        let told = failure(&decode(&consumer, 5, &params).await);
        assert!(told.contains(expected), "{told}");
    }
    assert_eq!(
        cached(&decode(&consumer, 5, &params).await),
        ALL_BUT_THE_LAST,
        "still there for the right one"
    );
}

#[actix_web::test]
async fn blocks_of_another_prompt_and_blocks_that_were_fetched_fail() {
    let (producer, consumer) = (nixl("kv_producer"), nixl("kv_consumer"));
    let params = prefill(&producer, 6).await;
    let told = failure(&decode(&consumer, 7, &params).await);
    assert!(told.contains("another prompt"), "{told}");
    let told = failure(&decode(&consumer, 6, &params).await);
    assert!(told.contains("used before"), "{told}");
}

#[actix_web::test]
async fn a_stream_ends_with_the_failure() {
    let consumer = nixl("kv_consumer");
    let params = json!({"stream": true, "kv_transfer_params": {
        "do_remote_prefill": true, "remote_block_ids": [1], "remote_engine_id": "gone", "remote_request_id": "gone",
        "remote_host": "127.0.0.1", "remote_port": consumer.addr().port(),
    }});
    let answer = ask(&consumer, with(body(8, 2), params)).await;
    let events = answer.events();
    assert_eq!((answer.status, events.len()), (200, 2));
    assert_eq!(events[0]["error"]["code"], 500);
    assert_eq!(events[1], "[DONE]");
}

#[actix_web::test]
async fn an_engine_that_recomputes_survives_missing_blocks() {
    let sharing = KvSharing {
        load_failure: LoadFailurePolicy::Recompute,
        ..KvSharing::default()
    };
    let (producer, consumer) = (
        nixl("kv_producer"),
        start(engine("NixlConnector", "kv_consumer", sharing)),
    );
    let params = with(
        prefill(&producer, 9).await,
        json!({"remote_request_id": "other"}),
    );
    assert_eq!(cached(&decode(&consumer, 9, &params).await), 0);
    assert_eq!(consumer.stats().kv_load_failures_total, 1);
}

#[actix_web::test]
async fn a_pool_full_of_kept_blocks_serves_again_when_the_lease_ends() {
    let sharing = KvSharing {
        lease: Duration::from_secs(2),
        ..KvSharing::default()
    };
    let config = SimConfig {
        num_blocks: 300,
        max_model_len: 4800,
        ..engine("NixlConnector", "kv_producer", sharing)
    };
    let producer = start(config);
    prefill(&producer, 10).await;
    assert_eq!(ask(&producer, body(11, 2)).await.status, 200);
    assert_eq!(producer.stats().kv_expired_leases_total, 1);
}

#[actix_web::test]
async fn a_decode_leg_that_is_given_up_in_the_middle_frees_the_blocks() {
    let slow = KvSharing {
        link: LinkSpeed {
            latency: Duration::from_secs(600),
            ..KvSharing::default().link
        },
        lease: Duration::from_secs(600),
        ..KvSharing::default()
    };
    let producer = start(engine("NixlConnector", "kv_producer", slow));
    let patient = KvSharing {
        load_timeout: Duration::from_secs(600),
        ..KvSharing::default()
    };
    let consumer = start(engine("NixlConnector", "kv_consumer", patient));
    let params = prefill(&producer, 13).await;
    let leg = with(body(13, 2), json!({"kv_transfer_params": params}));
    let leg = open(
        consumer.addr(),
        "POST",
        "/v1/completions",
        "",
        &leg.to_string(),
    )
    .await;
    let key = format!("nixl/{}", params["remote_request_id"].as_str().unwrap());
    let deadline = Instant::now() + PATIENCE;
    // Wrong block ids take nothing, but tell whether the right ones have been taken.
    while post(
        producer.addr(),
        "/sim/kv/take",
        json!({"key": key, "block_ids": []}),
    )
    .await
    .status
        != 410
    {
        assert!(Instant::now() < deadline, "the blocks are never asked for");
    }
    assert_eq!(
        (consumer.stats().waiting, producer.stats().kv_blocks_pinned),
        (1, 250)
    );
    drop(leg);
    until("the blocks are free", || {
        producer.stats().kv_blocks_pinned == 0
    })
    .await;
    until("the decode leg is gone", || consumer.stats().waiting == 0).await;
    assert_eq!(consumer.stats().aborted_total, 1);
}

#[actix_web::test]
async fn the_policy_of_the_transfer_settings_counts_too() {
    let mut config = engine("NixlConnector", "kv_consumer", KvSharing::default());
    let other = &mut config.kv_transfer.as_mut().unwrap().other;
    other.insert("kv_load_failure_policy".into(), "recompute".into());
    let answer = decode(&start(config), 14, &json!({"do_remote_prefill": true})).await;
    assert_eq!(cached(&answer), 0);
}

#[actix_web::test]
async fn both_roles_serve_plain_requests() {
    for role in ["kv_producer", "kv_consumer"] {
        let answer = ask(&nixl(role), body(12, 50)).await;
        assert_eq!(answer.json()["usage"]["completion_tokens"], 50);
        assert_eq!(answer.json()["kv_transfer_params"], Value::Null);
    }
}
