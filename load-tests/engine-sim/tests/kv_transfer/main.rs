//! Engines that hand keys and values to each other: right hand-offs are faster than computing, wrong ones fail visibly.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod mooncake;
mod nixl;
mod p2p_nccl;
mod sglang;
mod shared_storage;
#[path = "../support/mod.rs"]
mod support;

use engine_sim::{KvSharing, SimConfig, SimHandle, Speed};
use serde_json::{Value, json};
use std::time::Duration;
use support::{Answer, post, send, start};
use tokio::time::Instant;

/// Tokens of the prompts here: 250 blocks, 400 ms of prefill.
const PROMPT_TOKENS: u32 = 4000;

/// An engine with a connector and a role, whose prefill takes long enough to be told from a transfer.
fn engine(connector: &str, role: &str, sharing: KvSharing) -> SimConfig {
    let transfer = json!({"kv_connector": connector, "kv_role": role, "kv_connector_extra_config": {
        "vast_endpoint": "http://vast-cluster:8080", "kv_namespace": "inference/kv-cache",
    }});
    SimConfig {
        kv_transfer: Some(serde_json::from_value(transfer).unwrap()),
        kv_sharing: sharing,
        time_scale: 0.1,
        speed: Speed {
            prefill_ms_per_token: 1.0,
            itl_ms: 1.0,
            itl_ms_per_sequence: 0.0,
            overhead_ms: 0.0,
        },
        ..SimConfig::default()
    }
}

/// A prompt of its own for each number.
fn prompt(number: u32) -> Vec<u32> {
    (0..PROMPT_TOKENS)
        .map(|token| (number * 7919 + token) % 500 + 1)
        .collect()
}

fn body(number: u32, max_tokens: u32) -> Value {
    json!({"prompt": prompt(number), "max_tokens": max_tokens, "ignore_eos": true})
}

fn cached(answer: &Answer) -> u64 {
    assert_eq!(answer.status, 200, "{}", answer.body);
    let usage = &answer.json()["usage"];
    usage["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .unwrap()
}

/// The message of an error, which has to be one.
fn failure(answer: &Answer) -> String {
    assert_eq!(answer.status, 500, "{}", answer.body);
    answer.json()["error"]["message"]
        .as_str()
        .unwrap()
        .to_owned()
}

async fn ask(sim: &SimHandle, body: Value) -> Answer {
    post(sim.addr(), "/v1/completions", body).await
}

async fn ask_as(sim: &SimHandle, request_id: &str, body: Value) -> Answer {
    let header = format!("x-request-id: {request_id}\r\n");
    send(
        sim.addr(),
        "POST",
        "/v1/completions",
        &header,
        &body.to_string(),
    )
    .await
}

async fn timed(request: impl Future<Output = Answer>) -> (Answer, Duration) {
    let begin = Instant::now();
    let answer = request.await;
    (answer, begin.elapsed())
}

/// What the prompt takes without any help.
async fn time_alone(number: u32) -> Duration {
    let alone = start(SimConfig {
        kv_transfer: None,
        ..engine("none", "kv_both", KvSharing::default())
    });
    let (answer, took) = timed(ask(&alone, body(number, 2))).await;
    assert_eq!(cached(&answer), 0);
    took
}

/// Blocks that hold the whole prompt but for its last token.
const ALL_BUT_THE_LAST: u64 = PROMPT_TOKENS as u64 - 1;
