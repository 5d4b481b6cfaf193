//! Blocks that are sent ahead, under a request id that names both engines.

use crate::support::start;
use crate::{ALL_BUT_THE_LAST, ask, ask_as, body, cached, engine, failure, time_alone, timed};
use engine_sim::{KvSharing, SimHandle};
use std::time::Duration;

fn p2p(role: &str) -> SimHandle {
    patient(role, KvSharing::default().load_timeout)
}

fn patient(role: &str, load_timeout: Duration) -> SimHandle {
    let sharing = KvSharing {
        port: Some(0),
        load_timeout,
        ..KvSharing::default()
    };
    start(engine("P2pNcclConnector", role, sharing))
}

fn request_id(prefill: &SimHandle, decode: &SimHandle, unique: &str) -> String {
    let address = |sim: &SimHandle| format!("127.0.0.1:{}", sim.kv_port());
    format!(
        "___prefill_addr_{}___decode_addr_{}_{unique}",
        address(prefill),
        address(decode)
    )
}

#[actix_web::test]
async fn blocks_that_were_sent_ahead_are_faster_than_computing() {
    for roles in [("kv_producer", "kv_consumer"), ("kv_both", "kv_both")] {
        let (prefill, decode) = (p2p(roles.0), p2p(roles.1));
        let id = request_id(&prefill, &decode, "93923d63113b");
        assert_eq!(cached(&ask_as(&prefill, &id, body(1, 1)).await), 0);
        let (answer, sent) = timed(ask_as(&decode, &id, body(1, 2))).await;
        assert_eq!(cached(&answer), ALL_BUT_THE_LAST);
        let computed = time_alone(1).await;
        assert!(sent * 2 < computed, "{sent:?} against {computed:?}");
    }
}

#[actix_web::test]
async fn another_id_or_prompt_or_a_second_use_fails() {
    let (prefill, decode) = (p2p("kv_producer"), patient("kv_consumer", Duration::ZERO));
    let id = request_id(&prefill, &decode, "one");
    ask_as(&prefill, &id, body(2, 1)).await;
    let other = request_id(&prefill, &decode, "other");
    let told = failure(&ask_as(&decode, &other, body(2, 2)).await);
    assert!(
        told.contains("_other") && told.contains("never came"),
        "{told}"
    );
    let told = failure(&ask_as(&decode, &id, body(3, 2)).await);
    assert!(told.contains("another prompt"), "{told}");
    let told = failure(&ask_as(&decode, &id, body(2, 2)).await);
    assert!(told.contains("used before"), "{told}");
}

#[actix_web::test]
async fn blocks_that_were_sent_to_another_engine_are_missing_here() {
    let (prefill, decode, other) = (
        p2p("kv_producer"),
        patient("kv_consumer", Duration::ZERO),
        p2p("kv_consumer"),
    );
    let id = request_id(&prefill, &other, "one");
    ask_as(&prefill, &id, body(4, 1)).await;
    assert!(failure(&ask_as(&decode, &id, body(4, 2)).await).contains("never came"));
    assert_eq!(
        cached(&ask_as(&other, &id, body(4, 2)).await),
        ALL_BUT_THE_LAST
    );
}

#[actix_web::test]
async fn a_decode_engine_that_is_gone_is_only_counted_by_the_prefill_engine() {
    let (prefill, decode) = (p2p("kv_producer"), p2p("kv_consumer"));
    let id = request_id(&prefill, &decode, "one");
    decode.stop().await;
    assert_eq!(cached(&ask_as(&prefill, &id, body(5, 1)).await), 0);
    assert_eq!(prefill.stats().kv_save_failures_total, 1);
}

#[actix_web::test]
async fn a_request_without_addresses_is_computed() {
    let answer = ask(&p2p("kv_consumer"), body(6, 2)).await;
    assert_eq!(cached(&answer), 0);
}
