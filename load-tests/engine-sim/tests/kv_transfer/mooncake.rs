//! Transfers that both legs name, begun at once.

use crate::support::{get, start, until, with};
use crate::{ALL_BUT_THE_LAST, ask, body, cached, engine, failure, time_alone, timed};
use engine_sim::{KvSharing, SimHandle};
use futures_util::future::join;
use serde_json::{Value, json};
use std::time::Duration;

fn mooncake(role: &str) -> SimHandle {
    patient(role, KvSharing::default().partner_timeout)
}

fn patient(role: &str, partner_timeout: Duration) -> SimHandle {
    let sharing = KvSharing {
        port: Some(0),
        partner_timeout,
        lease: Duration::from_secs(300),
        ..KvSharing::default()
    };
    start(engine("MooncakeConnector", role, sharing))
}

async fn engine_id(sim: &SimHandle) -> String {
    let ranks = get(([127, 0, 0, 1], sim.kv_port()).into(), "/query")
        .await
        .json();
    assert_eq!(
        ranks["0"]["worker_addr"]["0"]["0"],
        format!("127.0.0.1:{}", sim.kv_port())
    );
    ranks["0"]["engine_id"].as_str().unwrap().to_owned()
}

fn prefill_leg(number: u32, transfer: &str) -> Value {
    let params =
        json!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": transfer});
    with(body(number, 1), json!({"kv_transfer_params": params}))
}

fn decode_leg(number: u32, transfer: &str, (prefill, engine_id): (&SimHandle, &str)) -> Value {
    let params = json!({
        "do_remote_prefill": true, "do_remote_decode": false, "transfer_id": transfer, "remote_engine_id": engine_id,
        "remote_bootstrap_addr": format!("http://127.0.0.1:{}", prefill.kv_port()),
    });
    with(body(number, 2), json!({"kv_transfer_params": params}))
}

#[actix_web::test]
async fn concurrent_legs_meet_in_their_transfer() {
    let (prefill, decode) = (mooncake("kv_producer"), mooncake("kv_consumer"));
    let id = engine_id(&prefill).await;
    let (first, second) = join(
        ask(&prefill, prefill_leg(1, "a")),
        ask(&decode, decode_leg(1, "a", (&prefill, &id))),
    )
    .await;
    assert_eq!((cached(&first), cached(&second)), (0, ALL_BUT_THE_LAST));
    assert_eq!(first.json()["kv_transfer_params"], Value::Null);
    until("the blocks are free", || {
        prefill.stats().kv_blocks_used == 0
    })
    .await;
}

#[actix_web::test]
async fn a_prefill_that_is_done_is_fetched_faster_than_computed() {
    let (prefill, decode) = (mooncake("kv_producer"), mooncake("kv_consumer"));
    let id = engine_id(&prefill).await;
    ask(&prefill, prefill_leg(2, "b")).await;
    let (answer, fetched) = timed(ask(&decode, decode_leg(2, "b", (&prefill, &id)))).await;
    assert_eq!(cached(&answer), ALL_BUT_THE_LAST);
    let computed = time_alone(2).await;
    assert!(fetched * 2 < computed, "{fetched:?} against {computed:?}");
}

#[actix_web::test]
async fn a_transfer_that_never_comes_or_is_used_twice_or_asks_the_wrong_engine_fails() {
    let (prefill, decode) = (
        mooncake("kv_producer"),
        patient("kv_consumer", Duration::ZERO),
    );
    let id = engine_id(&prefill).await;
    let told = failure(&ask(&decode, decode_leg(3, "c", (&prefill, &id))).await);
    assert!(
        told.contains("mooncake/c") && told.contains("never came"),
        "{told}"
    );
    ask(&prefill, prefill_leg(3, "d")).await;
    let told = failure(&ask(&decode, decode_leg(3, "d", (&prefill, "other"))).await);
    assert!(told.contains("another engine"), "{told}");
    let told = failure(&ask(&prefill, prefill_leg(3, "d")).await);
    assert!(told.contains("in use"), "{told}");
    assert_eq!(
        cached(&ask(&decode, decode_leg(3, "d", (&prefill, &id))).await),
        ALL_BUT_THE_LAST
    );
    let again = ask(
        &mooncake("kv_consumer"),
        decode_leg(3, "d", (&prefill, &id)),
    )
    .await;
    assert!(failure(&again).contains("used before"));
}

#[actix_web::test]
async fn an_engine_that_shares_nothing_has_no_bootstrap_server() {
    let mut config = engine("MooncakeConnector", "kv_both", KvSharing::default());
    config.kv_transfer = None;
    assert_eq!(get(start(config).addr(), "/query").await.status, 404);
}
