//! Rooms where the two legs of a request meet.

use crate::support::{open, start, until, with};
use crate::{ALL_BUT_THE_LAST, ask, body, cached, engine, failure, time_alone, timed};
use engine_sim::{KvSharing, SimHandle};
use futures_util::future::join;
use serde_json::{Value, json};
use std::time::Duration;

/// Larger than what a float holds exactly.
const ROOM: u64 = (1 << 62) + 1;

fn prefill_engine(sharing: KvSharing) -> SimHandle {
    let own_port = KvSharing {
        port: Some(0),
        ..sharing
    };
    start(engine("SGLang", "kv_producer", own_port))
}

fn decode_engine(sharing: KvSharing) -> SimHandle {
    start(engine("SGLang", "kv_consumer", sharing))
}

fn impatient() -> KvSharing {
    KvSharing {
        partner_timeout: Duration::ZERO,
        ..KvSharing::default()
    }
}

/// What both legs carry.
fn both_legs(number: u32, prefill: &SimHandle, room: u64) -> Value {
    let meeting = json!({"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.kv_port(), "bootstrap_room": room});
    with(body(number, 2), meeting)
}

#[actix_web::test]
async fn both_legs_meet_and_both_answer() {
    let prefill = prefill_engine(KvSharing::default());
    let decode = decode_engine(KvSharing::default());
    assert_ne!(prefill.kv_port(), prefill.addr().port());
    let body = both_legs(1, &prefill, ROOM);
    let (first, second) = join(ask(&prefill, body.clone()), ask(&decode, body)).await;
    assert_eq!((cached(&first), cached(&second)), (0, ALL_BUT_THE_LAST));
    assert_eq!(
        first.json()["choices"][0]["text"],
        second.json()["choices"][0]["text"]
    );
    until("the blocks are free", || {
        prefill.stats().kv_blocks_used == 0
    })
    .await;
}

#[actix_web::test]
async fn two_legs_take_little_longer_than_one_engine_and_a_cached_prefill_makes_both_fast() {
    let prefill = prefill_engine(KvSharing::default());
    let decode = decode_engine(KvSharing::default());
    ask(&prefill, body(2, 1)).await; // without a room it is an engine like others
    let body = both_legs(2, &prefill, ROOM);
    let legs = join(ask(&prefill, body.clone()), ask(&decode, body));
    let (answer, handed_over) = timed(async { legs.await.1 }).await;
    assert_eq!(cached(&answer), ALL_BUT_THE_LAST);
    let computed = time_alone(2).await;
    assert!(
        handed_over * 2 < computed,
        "{handed_over:?} against {computed:?}"
    );
}

#[actix_web::test]
async fn the_prefill_computes_nothing_before_its_decode_leg_is_there() {
    let prefill = prefill_engine(KvSharing::default());
    let decode = decode_engine(KvSharing::default());
    let body = both_legs(3, &prefill, ROOM);
    let waiting = open(
        prefill.addr(),
        "POST",
        "/v1/completions",
        "",
        &body.to_string(),
    )
    .await;
    until("the prefill leg is there", || {
        prefill.stats().requests_total == 1
    })
    .await;
    assert_eq!(
        (prefill.stats().running, prefill.stats().prompt_tokens),
        (0, 0)
    );
    assert_eq!(cached(&ask(&decode, body).await), ALL_BUT_THE_LAST);
    drop(waiting);
}

#[actix_web::test]
async fn a_leg_whose_partner_never_comes_fails() {
    let prefill = prefill_engine(impatient());
    let decode = decode_engine(impatient());
    let told = failure(&ask(&prefill, both_legs(4, &prefill, 7)).await);
    assert!(
        told.contains("room 7") && told.contains("decode leg never came"),
        "{told}"
    );
    let told = failure(&ask(&decode, both_legs(4, &prefill, 8)).await);
    assert!(
        told.contains("room 8") && told.contains("never came"),
        "{told}"
    );
    let told = failure(&ask(&decode, both_legs(4, &prefill, 7)).await);
    assert!(told.contains("given up"), "too late: {told}");
}

#[actix_web::test]
async fn a_room_is_used_once() {
    let prefill = prefill_engine(KvSharing::default());
    let decode = decode_engine(KvSharing::default());
    let body = both_legs(5, &prefill, ROOM);
    let (first, second) = join(ask(&prefill, body.clone()), ask(&decode, body.clone())).await;
    assert_eq!((first.status, second.status), (200, 200));
    let (first, second) = join(ask(&prefill, body.clone()), ask(&decode, body)).await;
    for answer in [first, second] {
        let told = failure(&answer);
        assert!(told.contains("used before"), "{told}");
    }
}

#[actix_web::test]
async fn legs_with_different_rooms_or_prompts_fail() {
    let prefill = prefill_engine(impatient());
    let decode = decode_engine(impatient());
    let (first, second) = join(
        ask(&prefill, both_legs(6, &prefill, ROOM)),
        ask(&decode, both_legs(6, &prefill, ROOM - 1)),
    )
    .await;
    failure(&first);
    failure(&second);
    let prefill = prefill_engine(KvSharing::default());
    let decode = decode_engine(KvSharing::default());
    let (_, second) = join(
        ask(&prefill, both_legs(6, &prefill, ROOM + 1)),
        ask(&decode, both_legs(7, &prefill, ROOM + 1)),
    )
    .await;
    assert!(failure(&second).contains("another prompt"));
}

#[actix_web::test]
async fn a_wrong_bootstrap_address_fails_the_decode_leg() {
    let decode = decode_engine(impatient());
    let wrong = with(
        body(8, 2),
        json!({"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 1}),
    );
    let told = failure(&ask(&decode, wrong).await);
    assert!(told.contains("127.0.0.1:1"), "{told}");
    let none = with(body(8, 2), json!({"bootstrap_room": 2}));
    assert!(failure(&ask(&decode, none).await).contains("bootstrap_host"));
}

#[actix_web::test]
async fn an_engine_that_shares_nothing_ignores_rooms() {
    let mut config = engine("SGLang", "kv_both", KvSharing::default());
    config.kv_transfer = None;
    let alone = start(config);
    let answer = ask(
        &alone,
        with(
            body(9, 2),
            json!({"bootstrap_host": null, "bootstrap_room": [1, 2]}),
        ),
    )
    .await;
    assert_eq!(cached(&answer), 0);
}
