//! An object store that refuses, throttles, tells half, or hangs: what it says is told apart from absence, none of it
//! reaches a client, and requests wait no longer than their budget.

use crate::cache::{engine, numbered, text, zero};
use crate::cache_faults::{BOUND, is_up, lines, process, until_left_alone};
use crate::cache_tiers::{ask, said, teach, until_stored};
use crate::support::fault_proxy::{http, s3_error};
use crate::support::process::Process;
use crate::support::stores::tiered;
use crate::support::{DEADLINE, Fault, FaultProxy, Gateway, ObjectStore, Upstream, wait_until};
use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// An S3 server, something that does harm before it, and settings that lead there by way of an L1 that keeps
/// nothing.
struct Harmed {
    _store: ObjectStore,
    proxy: FaultProxy,
    settings: String,
}

impl Harmed {
    fn start() -> Self {
        let store = ObjectStore::start();
        let proxy = FaultProxy::start(store.address);
        let l2 = ObjectStore::yaml_at(proxy.address);
        Self::with(store, proxy, &l2)
    }

    /// With the default limit of a lookup.
    fn impatient() -> Self {
        let store = ObjectStore::start();
        let proxy = FaultProxy::start(store.address);
        let l2 = ObjectStore::impatient_yaml_at(proxy.address);
        Self::with(store, proxy, &l2)
    }

    fn with(store: ObjectStore, proxy: FaultProxy, l2: &str) -> Self {
        let l1 = "type: memory, max_value_size: 1";
        let settings = tiered(l1, "pool_size: 4", l2, "");
        Harmed {
            _store: store,
            proxy,
            settings,
        }
    }

    fn gateway(&self, engine: &Upstream) -> Gateway {
        Gateway::start(&[("a", engine)], &self.settings)
    }

    fn process(&self, engine: &Upstream) -> Process {
        process(engine, &self.settings)
    }
}

fn count(process: &Process, name: &str, result: &str) -> f64 {
    process.metric(name, &["tier=\"s3\"", &format!("result=\"{result}\"")])
}

const STORES: &str = "tidegate_cache_stores_total";
const LOOKUPS: &str = "tidegate_cache_lookups_total";

/// Says 403 to reads of what was never written, as a store does to those who may not list.
fn hides_what_is_absent() -> Fault {
    let written: Mutex<HashSet<String>> = Mutex::default();
    Fault::Reply(Arc::new(move |head: &str| {
        let mut words = head.split(' ');
        let (method, path) = (words.next()?, words.next()?.to_owned());
        let mut written = written.lock().unwrap();
        if method == "PUT" {
            written.insert(path);
            return None;
        }
        (!written.contains(&path)).then(|| s3_error("403 Forbidden", "AccessDenied"))
    }))
}

#[test]
fn a_403_for_what_is_absent_is_a_miss_as_long_as_writes_succeed_and_is_told_once() {
    let (engine, harmed) = (engine(), Harmed::start());
    harmed.proxy.set(hides_what_is_absent());
    let process = harmed.process(&engine);
    for number in 0..8 {
        let prompt = zero(&format!("prompt {number}"));
        assert_eq!(said(&process.chat(&prompt)), "MISS");
        wait_until("it is kept", DEADLINE, || {
            count(&process, STORES, "stored") == f64::from(number + 1)
        });
        assert_eq!(said(&process.chat(&prompt)), "HIT s3");
    }
    assert_eq!(count(&process, LOOKUPS, "miss"), 8.0);
    assert_eq!(process.metric("tidegate_cache_tier_up", &["s3"]), 1.0);
    let told = lines(&process, "refuses to read a key", "WARN");
    assert_eq!(told.len(), 1, "{}", process.output());
    assert!(lines(&process, "cache tier fails", "").is_empty());
}

#[test]
fn a_403_for_everything_makes_the_tier_fail_until_it_is_taken_back() {
    let (engine, harmed) = (engine(), Harmed::start());
    let refuses = s3_error("403 Forbidden", "AccessDenied");
    harmed.proxy.set(Fault::reply(refuses));
    let process = harmed.process(&engine);
    let mut number = 0;
    let mut ask = || {
        number += 1;
        said(&process.chat(&zero(&format!("prompt {number}"))))
    };
    wait_until("reads and writes are left alone", DEADLINE, || {
        assert_eq!(ask(), "MISS");
        count(&process, LOOKUPS, "skipped") > 0.0 && count(&process, STORES, "skipped") > 0.0
    });
    for calls in ["calls=\"reads\"", "calls=\"writes\""] {
        let told = lines(&process, "cache tier fails", calls);
        assert_eq!(told.len(), 1, "{}", process.output());
        assert!(told[0].contains("AccessDenied"), "{told:?}");
    }
    // the right to list stays with others
    harmed.proxy.set(hides_what_is_absent());
    wait_until("it is up again", DEADLINE, || {
        assert_eq!(ask(), "MISS");
        process.metric("tidegate_cache_tier_up", &["s3"]) == 1.0
    });
    let prompt = zero("hi");
    assert_eq!(said(&process.chat(&prompt)), "MISS");
    wait_until("it serves", DEADLINE, || {
        said(&process.chat(&prompt)) == "HIT s3"
    });
}

#[test]
fn a_clock_that_is_wrong_is_named_with_both_times_and_serving_goes_on() {
    let (engine, harmed) = (engine(), Harmed::start());
    let skewed = s3_error("403 Forbidden", "RequestTimeTooSkewed");
    let skewed = skewed.replacen("\r\n", "\r\ndate: Mon, 30 Nov 2020 12:20:00 GMT\r\n", 1);
    harmed.proxy.set(Fault::reply(skewed));
    let process = harmed.process(&engine);
    for number in 0..12 {
        assert_eq!(
            said(&process.chat(&zero(&format!("prompt {number}")))),
            "MISS"
        );
    }
    for calls in ["calls=\"reads\"", "calls=\"writes\""] {
        wait_until("it is told", DEADLINE, || {
            !lines(&process, "cache tier fails", calls).is_empty()
        });
        let told = lines(&process, "cache tier fails", calls);
        assert_eq!(told.len(), 1, "{}", process.output());
        assert!(told[0].contains("clock skew"), "{told:?}");
        assert!(told[0].contains("2020-11-30T12:20:00"), "{told:?}");
        assert!(told[0].contains("ours 2"), "{told:?}");
    }
    assert_eq!(count(&process, LOOKUPS, "miss"), 0.0, "no absence");
    assert_eq!(process.metric("tidegate_cache_tier_up", &["s3"]), 0.0);
}

#[test]
fn a_store_that_throttles_is_told_from_one_that_has_nothing_and_recovers() {
    let (engine, harmed) = (engine(), Harmed::start());
    let gateway = throttled_by(s3_error("503 Slow Down", "SlowDown"), &engine, &harmed);
    harmed.proxy.set(Fault::Pass);
    until_served_by_the_bucket(&gateway);
    assert_eq!(ask(&gateway, "hi"), "HIT s3", "it lost nothing");
}

#[test]
fn an_error_within_a_200_is_an_error_and_reaches_no_client() {
    let (engine, harmed) = (engine(), Harmed::start());
    throttled_by(s3_error("200 OK", "SlowDown"), &engine, &harmed);
}

#[test]
fn a_server_that_fails_is_told_from_one_that_has_nothing() {
    let (engine, harmed) = (engine(), Harmed::start());
    let error = s3_error("500 Internal Server Error", "InternalError");
    throttled_by(error, &engine, &harmed);
}

/// A gateway that leaves the bucket alone, since it always says this.
fn throttled_by(error: String, engine: &Upstream, harmed: &Harmed) -> Gateway {
    let gateway = harmed.gateway(engine);
    teach(&gateway, "hi", ("s3", 1));
    let misses = || gateway.metric(LOOKUPS, &["tier=\"s3\"", "result=\"miss\""]);
    let before = misses();
    harmed.proxy.set(Fault::reply(error));
    until_left_alone(&gateway, "s3", || {});
    assert_eq!(misses(), before, "errors are no misses");
    let errors = gateway.metric(LOOKUPS, &["tier=\"s3\"", "result=\"error\""]);
    assert!(errors >= 5.0, "{errors}");
    assert_eq!(ask(&gateway, "hi"), "MISS");
    gateway
}

/// Waits until what is kept in the bucket is served from there.
fn until_served_by_the_bucket(gateway: &Gateway) {
    wait_until("reads and writes are up again", DEADLINE, || {
        ask(gateway, &format!("up {}", fastrand::u64(..)));
        is_up(gateway, "s3")
    });
    let prompt = format!("found {}", fastrand::u64(..));
    ask(gateway, &prompt);
    wait_until("answers come from the bucket", DEADLINE, || {
        ask(gateway, &prompt) == "HIT s3"
    });
}

#[test]
fn a_plain_404_is_a_miss_and_no_failure() {
    let (engine, harmed) = (engine(), Harmed::start());
    let gateway = harmed.gateway(&engine);
    harmed.proxy.set(Fault::Reply(Arc::new(|head: &str| {
        let plain = http("404 Not Found", "content-type: text/plain\r\n", "NoSuchKey");
        head.starts_with("GET ").then_some(plain)
    })));
    for number in 0..8 {
        assert_eq!(ask(&gateway, &format!("prompt {number}")), "MISS");
    }
    until_stored(&gateway, ("s3", 8));
    assert!(is_up(&gateway, "s3"));
    assert_eq!(
        gateway.metric(LOOKUPS, &["tier=\"s3\"", "result=\"miss\""]),
        8.0
    );
}

#[test]
fn half_an_object_never_reaches_a_client() {
    let (engine, harmed) = (engine(), Harmed::start());
    let gateway = harmed.gateway(&engine);
    let half = |framing: &str, body: &str| {
        let reply = format!("HTTP/1.1 200 OK\r\n{framing}\r\n\r\n{body}");
        Fault::Reply(Arc::new(move |head: &str| {
            head.starts_with("GET ").then(|| reply.clone())
        }))
    };
    let sixty = "x".repeat(6000);
    let faults = [
        half("content-length: 10000", &sixty),
        half("content-length: 10000", "{\"choices\":["),
        half("transfer-encoding: chunked", "1770\r\n"),
        half("content-length: 2", "{}"),
        Fault::CutAfterBytes(300), // within the object: its head is about as long
        Fault::CutAfterBytes(3),
    ];
    for (number, fault) in faults.into_iter().enumerate() {
        let prompt = format!("prompt {number}");
        teach(&gateway, &prompt, ("s3", 1));
        wait_until("it is in the bucket", DEADLINE, || {
            ask(&gateway, &prompt) == "HIT s3"
        });
        let made = engine.count();
        harmed.proxy.set(fault);
        let answer = gateway.chat(&zero(&prompt));
        assert_eq!(said(&answer), "MISS", "case {number}");
        assert_eq!(text(&answer), format!("answer {made}"), "case {number}");
        let errors = gateway.metric(LOOKUPS, &["tier=\"s3\"", "result=\"error\""]);
        assert_eq!(errors, (number + 1) as f64, "case {number}");
        harmed.proxy.set(Fault::Pass);
    }
}

#[test]
fn a_store_that_takes_half_a_minute_costs_its_budget_five_times_and_then_nothing() {
    let (engine, harmed) = (engine(), Harmed::impatient());
    let gateway = harmed.gateway(&engine);
    until_served_by_the_bucket(&gateway);
    harmed.proxy.set(Fault::Delay(Duration::from_secs(30)));
    let longest = until_left_alone(&gateway, "s3", || {});
    assert!(longest < BOUND, "{longest:?}");
    let slow = || gateway.metric(LOOKUPS, &["tier=\"s3\"", "result=\"slow\""]);
    let before = slow();
    assert!(before >= 5.0, "{before}");
    for number in 0..20 {
        assert_eq!(ask(&gateway, &format!("left alone {number}")), "MISS");
    }
    assert_eq!(slow(), before);
}

#[test]
fn answers_on_their_way_into_the_store_get_there_before_the_process_ends() {
    let store = ObjectStore::start();
    let proxy = Arc::new(FaultProxy::start(store.address));
    let hangs = proxy.clone();
    let engine = Upstream::start(move |_, wire| {
        hangs.set(Fault::Hang); // the lookup is over
        wire.json("200 OK", &numbered(1));
    });
    let l2 = ObjectStore::yaml_at(proxy.address);
    // kept in memory at once, and in the store a while later
    let settings = tiered("type: memory", "pool_size: 4", &l2, "");
    let mut process = process(&engine, &settings);
    let prompt = zero("hi");
    assert_eq!(said(&process.chat(&prompt)), "MISS");
    process.signal("TERM");
    wait_until("it drains", DEADLINE, || {
        process.output().contains("draining")
    });
    assert!(process.is_running(), "{}", process.output());
    proxy.set(Fault::Pass);
    assert_eq!(process.exit_code(), Some(0), "{}", process.output());
    let next = self::process(&engine, &settings);
    assert_eq!(said(&next.chat(&prompt)), "HIT s3");
    assert_eq!(engine.count(), 1);
}
