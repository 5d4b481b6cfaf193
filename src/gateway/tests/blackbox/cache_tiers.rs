//! Which tier an answer comes from, what each of them is given, and what gateways have in common.

use crate::cache::{cached, engine, numbered, text, zero};
use crate::support::client::{self, Answer};
use crate::support::process::Process;
use crate::support::stores::{PATIENT, disk, redis, redis_only, tiered};
use crate::support::{DEADLINE, Gateway, ObjectStore, Upstream, chat_stream, user, wait_until};
use redis_servers::Single;
use serde_json::Value;
use std::path::Path;

/// Asks once; `MISS`, or `HIT` and the tier.
pub fn ask(gateway: &Gateway, prompt: &str) -> String {
    said(&gateway.chat(&zero(prompt)))
}

/// What an answer says of the cache.
pub fn said(answer: &Answer) -> String {
    assert_eq!(answer.status, 200, "{answer:?}");
    let (state, tier) = cached(answer);
    [state, tier.unwrap_or_default()]
        .join(" ")
        .trim()
        .to_owned()
}

/// Asks for the first time, and waits until the answer is kept: in L1, and so often in this tier.
pub fn teach(gateway: &Gateway, prompt: &str, (tier, times): (&str, u64)) {
    assert_eq!(ask(gateway, prompt), "MISS");
    gateway.assert_idle();
    until_stored(gateway, (tier, times));
}

/// What a gateway says of a tier, of its own: metrics are those of the process.
pub fn shown(gateway: &Gateway, tier: &str) -> Value {
    let cache = client::get(gateway, "/admin/cache").json();
    let mut tiers = cache["tiers"].as_array().unwrap().iter();
    tiers.find(|of| of["tier"] == tier).unwrap().clone()
}

/// Waits until a tier has kept so many answers.
pub fn until_stored(gateway: &Gateway, (tier, times): (&str, u64)) {
    wait_until("the answer is kept", DEADLINE, || {
        shown(gateway, tier)["stores"]["stored"].as_u64() >= Some(times)
    });
}

fn promotions(gateway: &Gateway) -> u64 {
    let cache = client::get(gateway, "/admin/cache").json();
    cache["promotions"].as_u64().unwrap()
}

fn redis_over_s3(server: &Single, store: &ObjectStore, more: &str) -> String {
    let l1 = format!("type: redis, {PATIENT}");
    tiered(&l1, &redis(&server.url()), &store.yaml(), more)
}

#[test]
fn answers_are_in_redis_for_every_gateway_under_harmless_names_and_for_their_time() {
    let (engine, redis) = (engine(), Single::start());
    let settings = redis_only(&redis.url(), "  ttl: 100s\n");
    let one = Gateway::start(&[("a", &engine)], &settings);
    let two = Gateway::start(&[("a", &engine)], &settings);
    let prompt = "secret prompt\n中";
    teach(&one, prompt, ("redis", 1));
    let first = one.chat(&zero(prompt));
    let second = two.chat(&zero(prompt));
    assert_eq!(
        (&*said(&first), &*said(&second)),
        ("HIT redis", "HIT redis")
    );
    assert_eq!(
        (text(&second), first.body),
        ("answer 0".into(), second.body)
    );
    let stream = two.chat(&chat_stream(&format!(
        "{}, \"temperature\": 0",
        user(prompt)
    )));
    assert_eq!(
        (&*said(&stream), &*text(&stream)),
        ("HIT redis", "answer 0")
    );
    assert_eq!(engine.count(), 1);

    let scanned = redis.ask(&["SCAN", "0", "COUNT", "1000"]);
    let names: Vec<&str> = scanned.lines().skip(1).collect();
    assert_eq!(names.len(), 1, "and the lock was given back: {names:?}");
    assert!(names[0].starts_with("cr:resp:v1/m-"), "{names:?}");
    assert!(names[0].bytes().all(|b| b.is_ascii_graphic()), "{names:?}");
    assert!(!redis.ask(&["GET", names[0]]).contains("secret"));
    let ttl = redis.ask(&["PTTL", names[0]]);
    let ttl: u64 = ttl.trim_start_matches(':').parse().unwrap();
    assert!((50_000..=100_000).contains(&ttl), "{ttl}");
}

#[test]
fn a_value_too_large_for_l1_is_in_l2_alone() {
    let long = "x".repeat(5000);
    let engine = Upstream::start(move |_, wire| {
        wire.json("200 OK", &numbered(0).replace("answer 0", &long));
    });
    let (redis_server, s3, directory) = (
        Single::start(),
        ObjectStore::start(),
        tempfile::tempdir().unwrap(),
    );
    let redis = redis(&redis_server.url());
    for (l1, l2, tier) in [
        ("redis", s3.yaml(), "s3"),
        ("redis", disk(&directory.path().join("a")), "disk"),
        ("memory", s3.yaml(), "s3"),
        ("memory", disk(&directory.path().join("b")), "disk"),
    ] {
        let settings = format!("type: {l1}, max_value_size: 4096, {PATIENT}");
        let settings = tiered(&settings, &redis, &l2, "");
        let gateway = Gateway::start(&[("a", &engine)], &settings);
        let prompt = format!("{l1} over {tier}");
        teach(&gateway, &prompt, (tier, 1));
        for _ in 0..2 {
            assert_eq!(ask(&gateway, &prompt), format!("HIT {tier}"));
        }
        gateway.assert_idle();
        assert_eq!(promotions(&gateway), 0);
        assert_eq!(shown(&gateway, l1)["stores"]["too_large"], 1);
    }
    assert_eq!(redis_server.ask(&["DBSIZE"]), ":0");
}

#[test]
fn what_l1_has_lost_is_promoted_with_its_first_hit_in_l2() {
    let (engine, redis, s3) = (engine(), Single::start(), ObjectStore::start());
    let settings = redis_over_s3(
        &redis,
        &s3,
        "  ttl: 1h\n  tiered: { promote_on_hit: true, l1_promotion_ttl: 60s }\n",
    );
    let gateway = Gateway::start(&[("a", &engine)], &settings);
    teach(&gateway, "hi", ("s3", 1));
    assert_eq!(ask(&gateway, "hi"), "HIT redis");
    redis.ask(&["FLUSHALL"]);
    assert_eq!(ask(&gateway, "hi"), "HIT s3");
    until_stored(&gateway, ("redis", 2));
    assert_eq!(promotions(&gateway), 1);
    assert_eq!(ask(&gateway, "hi"), "HIT redis");
    let name = redis.ask(&["RANDOMKEY"]);
    let left = redis.ask(&["PTTL", &name]);
    let left: u64 = left.trim_start_matches(':').parse().unwrap();
    assert!(left <= 60_000, "{left}");
    assert_eq!(engine.count(), 1);
}

#[test]
fn a_gateway_with_an_empty_memory_is_served_by_the_bucket_of_another() {
    let (engine, s3) = (engine(), ObjectStore::start());
    let settings = tiered("type: memory", "pool_size: 4", &s3.yaml(), "");
    let one = Gateway::start(&[("a", &engine)], &settings);
    teach(&one, "hi", ("s3", 1));
    assert_eq!(ask(&one, "hi"), "HIT memory");
    let two = Gateway::start(&[("a", &engine)], &settings);
    assert_eq!(ask(&two, "hi"), "HIT s3");
    assert_eq!(promotions(&two), 1);
    until_stored(&two, ("memory", 1));
    assert_eq!(ask(&two, "hi"), "HIT memory");
    assert_eq!(engine.count(), 1);
}

#[test]
fn without_promotion_l2_goes_on_answering() {
    let (engine, redis, s3) = (engine(), Single::start(), ObjectStore::start());
    let settings = redis_over_s3(&redis, &s3, "  tiered: { promote_on_hit: false }\n");
    let gateway = Gateway::start(&[("a", &engine)], &settings);
    teach(&gateway, "hi", ("s3", 1));
    redis.ask(&["FLUSHALL"]);
    for _ in 0..3 {
        assert_eq!(ask(&gateway, "hi"), "HIT s3");
    }
    gateway.assert_idle();
    assert_eq!(redis.ask(&["DBSIZE"]), ":0");
    assert_eq!(promotions(&gateway), 0);
}

#[test]
fn answers_outlive_l1_in_l2_and_the_other_way_round_as_their_times_say() {
    let (engine, redis, s3) = (engine(), Single::start(), ObjectStore::start());
    let settings = |ttl: &str, l2_ttl: &str| {
        let l2 = format!("{}, ttl_override: {l2_ttl}", s3.yaml());
        let more = format!("  ttl: {ttl}\n  tiered: {{ promote_on_hit: false }}\n");
        let l1 = format!("type: redis, {PATIENT}");
        tiered(&l1, &self::redis(&redis.url()), &l2, &more)
    };
    let gateway = Gateway::start(&[("a", &engine)], &settings("500ms", "1h"));
    teach(&gateway, "long in L2", ("s3", 1));
    wait_until("L1 has forgotten it", DEADLINE, || {
        ask(&gateway, "long in L2") == "HIT s3"
    });
    assert_eq!(engine.count(), 1);
    let gateway = Gateway::start(&[("a", &engine)], &settings("1h", "1ms"));
    teach(&gateway, "short in L2", ("s3", 1));
    assert_eq!(ask(&gateway, "short in L2"), "HIT redis");
    redis.ask(&["FLUSHALL"]);
    assert_eq!(ask(&gateway, "short in L2"), "MISS");
    assert_eq!(shown(&gateway, "s3")["evicted"]["expired"], 1);
}

#[test]
fn a_promoted_answer_does_not_outlive_what_it_was_promoted_from() {
    let (engine, redis, s3) = (engine(), Single::start(), ObjectStore::start());
    let l2 = format!("{}, ttl_override: 60s", s3.yaml());
    let l1 = format!("type: redis, {PATIENT}");
    let more = "  tiered: { l1_promotion_ttl: 1h }\n";
    let settings = tiered(&l1, &self::redis(&redis.url()), &l2, more);
    let gateway = Gateway::start(&[("a", &engine)], &settings);
    teach(&gateway, "hi", ("s3", 1));
    redis.ask(&["FLUSHALL"]);
    assert_eq!(ask(&gateway, "hi"), "HIT s3");
    until_stored(&gateway, ("redis", 2));
    let left = redis.ask(&["PTTL", &redis.ask(&["RANDOMKEY"])]);
    let left: u64 = left.trim_start_matches(':').parse().unwrap();
    assert!(left <= 60_000, "{left}");
}

/// A gateway of a process of its own, with memory before this directory.
fn over_disk(engine: &Upstream, directory: &Path) -> Process {
    let settings = tiered("type: memory", "pool_size: 4", &disk(directory), "");
    let backends = engine.yaml("a");
    let process = Process::start(&format!(
        "server: {{ workers: 1 }}\nhealth_checks: {{ interval: 50ms }}\n{settings}backends:\n{backends}"
    ));
    wait_until("the engine serves", DEADLINE, || {
        process.get("/ready").status == 200
    });
    process
}

#[test]
fn a_disk_is_still_there_after_the_gateway_has_ended_or_was_killed() {
    let engine = engine();
    let directory = tempfile::tempdir().unwrap();
    let mut process = over_disk(&engine, directory.path());
    assert_eq!(said(&process.chat(&zero("hi"))), "MISS");
    let stored = ["tier=\"disk\"", "result=\"stored\""];
    wait_until("it is on the disk", DEADLINE, || {
        process.metric("tidegate_cache_stores_total", &stored) == 1.0
    });
    process.signal("TERM");
    assert_eq!(process.exit_code(), Some(0));
    let mut process = over_disk(&engine, directory.path());
    assert_eq!(said(&process.chat(&zero("hi"))), "HIT disk");
    process.signal("KILL");
    process.exit_code();
    let process = over_disk(&engine, directory.path());
    assert_eq!(said(&process.chat(&zero("hi"))), "HIT disk");
    assert_eq!(engine.count(), 1);
}

#[test]
fn entries_of_another_format_are_misses_and_replaced() {
    let (engine, redis, s3) = (engine(), Single::start(), ObjectStore::start());
    let settings = redis_over_s3(&redis, &s3, "");
    let gateway = Gateway::start(&[("a", &engine)], &settings);
    teach(&gateway, "hi", ("s3", 1));
    let (name, objects) = (redis.ask(&["RANDOMKEY"]), s3.objects());
    let whole = std::fs::read(&objects[0]).unwrap();
    let mut newer = whole.clone();
    newer[3] += 1; // the version of the format
    let half = &whole[..whole.len() / 2];
    for (stored, strange) in [b"TGS9 of a later version".as_slice(), &newer, half]
        .into_iter()
        .enumerate()
    {
        redis.ask(&[
            "SET",
            &name,
            "{\"response\": \"of a version without envelopes\"}",
        ]);
        std::fs::write(&objects[0], strange).unwrap();
        let answer = gateway.chat(&zero("hi"));
        assert_eq!(said(&answer), "MISS");
        assert_eq!(
            text(&answer),
            format!("answer {}", stored + 1),
            "whole, and of the engine"
        );
        gateway.assert_idle();
        until_stored(&gateway, ("s3", stored as u64 + 2));
        assert_eq!(ask(&gateway, "hi"), "HIT redis");
    }
    // a type that a string command does not take
    redis.ask(&["DEL", &name]);
    redis.ask(&["LPUSH", &name, "x"]);
    assert_eq!(ask(&gateway, "hi"), "HIT s3");
}

#[test]
fn gateways_of_two_key_versions_share_a_redis_and_no_answer() {
    let (engine, redis) = (engine(), Single::start());
    let of_version = |version: u32| {
        let more = format!("  key_version: {version}\n");
        Gateway::start(&[("a", &engine)], &redis_only(&redis.url(), &more))
    };
    let (old, new) = (of_version(1), of_version(2));
    teach(&old, "hi", ("redis", 1));
    teach(&new, "hi", ("redis", 1));
    assert_eq!(
        [ask(&old, "hi"), ask(&new, "hi")],
        ["HIT redis", "HIT redis"]
    );
    assert_eq!(engine.count(), 2);
}
