//! A Redis that is away, dies, hangs, refuses or is full: requests go on, wait no longer than their budget, and
//! are served from it again once it is well, without a restart.

use crate::cache::{engine, zero};
use crate::cache_tiers::{ask, said, shown, teach};
use crate::support::process::Process;
use crate::support::stores::{PATIENT, redis, redis_only, tiered};
use crate::support::{DEADLINE, Fault, FaultProxy, Gateway, ObjectStore, Upstream, ms, wait_until};
use redis_servers::Single;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// The longest that a request may take here whose tiers hang: their budgets are 200 ms together. Far below the
/// limits of a command, which are 30 s, and far above what a noisy machine adds.
pub const BOUND: Duration = Duration::from_secs(1);
/// Failures after which a tier is left alone.
const FAILURES: usize = 5;
/// A store that hangs would hold up requests for so long, if they waited for it.
pub const HALF_A_MINUTE: &str = "command_timeout_ms: 30000, connect_timeout_ms: 30000";

pub fn is_up(gateway: &Gateway, tier: &str) -> bool {
    shown(gateway, tier)["up"] == true
}

/// Sends new prompts until a tier is left alone; answers the longest time that one took.
pub fn until_left_alone(gateway: &Gateway, tier: &str, mut sent: impl FnMut()) -> Duration {
    let mut longest = Duration::ZERO;
    wait_until("the tier is left alone", DEADLINE, || {
        let prompt = format!("lost {}", fastrand::u64(..));
        let begun = Instant::now();
        assert_eq!(ask(gateway, &prompt), "MISS");
        longest = longest.max(begun.elapsed());
        sent();
        !is_up(gateway, tier)
    });
    longest
}

/// Sends new prompts, twice each, until the second is served by this tier.
pub fn until_served_by(gateway: &Gateway, tier: &str) {
    wait_until("answers come from the tier again", DEADLINE, || {
        let prompt = format!("found {}", fastrand::u64(..));
        ask(gateway, &prompt);
        gateway.assert_idle();
        ask(gateway, &prompt) == format!("HIT {tier}")
    });
}

fn lookups(gateway: &Gateway, tier: &str, result: &str) -> f64 {
    let labels = [format!("tier=\"{tier}\""), format!("result=\"{result}\"")];
    gateway.metric("tidegate_cache_lookups_total", &[&labels[0], &labels[1]])
}

/// A gateway of a process of its own, whose log can be read.
pub fn process(engine: &Upstream, settings: &str) -> Process {
    let backends = engine.yaml("a");
    let process = Process::start(&format!(
        "server: {{ workers: 1 }}\nlogging: {{ access: false }}\nhealth_checks: {{ interval: 50ms }}\n{settings}backends:\n{backends}"
    ));
    wait_until("the engine serves", DEADLINE, || {
        process.get("/ready").status == 200
    });
    process
}

/// Lines of its log that say this of that.
pub fn lines(process: &Process, what: &str, of: &str) -> Vec<String> {
    let output = process.output();
    let lines = output
        .lines()
        .filter(|line| line.contains(what) && line.contains(of));
    lines.map(str::to_owned).collect()
}

#[test]
fn stores_that_are_away_at_the_start_are_used_once_they_are_there() {
    let (engine, mut server, mut s3) = (engine(), Single::start(), ObjectStore::start());
    server.kill();
    s3.kill();
    let l1 = format!("type: redis, {PATIENT}");
    let settings = tiered(&l1, &redis(&server.url()), &s3.yaml(), "");
    let gateway = Gateway::start(&[("a", &engine)], &settings);
    until_left_alone(&gateway, "redis", || {});
    until_left_alone(&gateway, "s3", || {});
    server.start_again();
    s3.start_again();
    until_served_by(&gateway, "redis");
    wait_until("both are up", DEADLINE, || {
        ask(&gateway, &format!("up {}", fastrand::u64(..)));
        is_up(&gateway, "redis") && is_up(&gateway, "s3")
    });
    server.ask(&["FLUSHALL"]);
    wait_until("answers come from the bucket", DEADLINE, || {
        ask(&gateway, "hi") == "HIT s3" || {
            gateway.assert_idle();
            server.ask(&["FLUSHALL"]);
            false
        }
    });
}

#[test]
fn a_host_name_that_leads_nowhere_keeps_nobody_waiting_and_is_told_once() {
    let engine = engine();
    let settings = redis_only("redis://redis.invalid:6379", "");
    let settings = settings.replace(PATIENT, "type: redis");
    let process = process(&engine, &settings);
    for number in 0..3 * FAILURES {
        let begun = Instant::now();
        let answer = process.chat(&zero(&format!("prompt {number}")));
        assert_eq!(said(&answer), "MISS");
        assert!(begun.elapsed() < BOUND, "{:?}", begun.elapsed());
    }
    let told = lines(&process, "cache tier fails", "calls=\"reads\"");
    assert_eq!(told.len(), 1, "{}", process.output());
    assert!(
        told[0].contains("WARN") && told[0].contains("tier=\"redis\""),
        "{told:?}"
    );
    // a resolver may be slower than the limit of a lookup
    let known = told[0].contains("the host's name cannot be looked up");
    assert!(known || told[0].contains("no answer within"), "{told:?}");
    assert_eq!(process.get("/ready").status, 200);
    let shown = process.get("/admin/cache").json();
    assert_eq!(shown["tiers"][0]["up"], false, "{shown}");
}

#[test]
fn requests_go_on_while_both_stores_die_and_come_back_and_each_change_is_one_line() {
    let (engine, mut server, mut s3) = (engine(), Single::start(), ObjectStore::start());
    let l1 = format!("type: redis, {PATIENT}");
    let settings = tiered(&l1, &redis(&server.url()), &s3.yaml(), "");
    let process = process(&engine, &settings);
    let tiers = ["redis", "s3"];
    let looked = |tier: &str, result: &str| {
        let labels = [format!("\"{tier}\""), format!("\"{result}\"")];
        process.metric("tidegate_cache_lookups_total", &[&labels[0], &labels[1]])
    };
    let up = |expected: f64| {
        wait_until("the tiers are up, or not", DEADLINE, || {
            let up = |tier: &&str| process.metric("tidegate_cache_tier_up", &[tier]);
            tiers.iter().map(up).all(|up| up == expected)
        });
    };
    let stop = AtomicBool::new(false);
    let longest = std::thread::scope(|scope| {
        let trickle = scope.spawn(|| {
            let mut longest = Duration::ZERO;
            for number in 0.. {
                if stop.load(Relaxed) {
                    break;
                }
                let prompt = zero(&format!("prompt {}", number / 2));
                let begun = Instant::now();
                said(&process.chat(&prompt)); // is a 200
                longest = longest.max(begun.elapsed());
                std::thread::sleep(ms(10)); // the pace of the trickle
            }
            longest
        });
        wait_until("it serves", DEADLINE, || looked("redis", "hit") >= 1.0);
        server.kill();
        s3.kill();
        up(0.0);
        let before = tiers.map(|tier| looked(tier, "skipped"));
        wait_until("nobody asks them", DEADLINE, || {
            let mut both = tiers.iter().zip(before);
            both.all(|(tier, before)| looked(tier, "skipped") > before + 5.0)
        });
        server.start_again();
        s3.start_again();
        up(1.0);
        let before = looked("redis", "hit");
        wait_until("it serves again", DEADLINE, || {
            looked("redis", "hit") > before
        });
        stop.store(true, Relaxed);
        trickle.join().unwrap()
    });
    assert!(longest < BOUND, "{longest:?}");
    for (what, level) in [("cache tier fails", "WARN"), ("cache tier is back", "INFO")] {
        for tier in tiers {
            for calls in ["calls=\"reads\"", "calls=\"writes\""] {
                let told = lines(&process, what, calls);
                let told: Vec<_> = told.iter().filter(|line| line.contains(tier)).collect();
                assert_eq!(told.len(), 1, "{what} {calls}: {}", process.output());
                assert!(told[0].contains(level), "{told:?}");
            }
        }
    }
}

#[test]
fn a_redis_that_hangs_costs_its_budget_five_times_and_then_nothing() {
    let (engine, server, s3) = (engine(), Single::start(), ObjectStore::start());
    let to_redis = FaultProxy::to_port(server.port());
    let to_s3 = FaultProxy::start(s3.address);
    let redis = format!(
        "url: 'redis://{}', pool_size: 4, {HALF_A_MINUTE}",
        to_redis.address
    );
    let l2 = ObjectStore::impatient_yaml_at(to_s3.address);
    let settings = tiered("type: redis", &redis, &l2, "");
    let gateway = Gateway::start(&[("a", &engine)], &settings);
    until_served_by(&gateway, "redis");
    to_redis.set(Fault::Hang);
    to_s3.set(Fault::Hang);
    let mut sent = 0;
    let longest = until_left_alone(&gateway, "redis", || sent += 1);
    let other = until_left_alone(&gateway, "s3", || sent += 1);
    assert!(longest.max(other) < BOUND, "{longest:?} {other:?}");
    // successes from before the fault and slow lookups of a noisy machine may add a few
    assert!((FAILURES..4 * FAILURES).contains(&sent), "{sent}");
    let before = [
        lookups(&gateway, "redis", "slow"),
        lookups(&gateway, "s3", "slow"),
    ];
    for number in 0..20 {
        let begun = Instant::now();
        assert_eq!(ask(&gateway, &format!("left alone {number}")), "MISS");
        assert!(begun.elapsed() < BOUND);
    }
    assert_eq!(
        before,
        [
            lookups(&gateway, "redis", "slow"),
            lookups(&gateway, "s3", "slow")
        ]
    );
    assert!(lookups(&gateway, "redis", "skipped") >= 20.0);
    assert!(lookups(&gateway, "s3", "skipped") >= 20.0);
    to_redis.set(Fault::Pass);
    to_s3.set(Fault::Pass);
    until_served_by(&gateway, "redis");
    wait_until("both are up", DEADLINE, || is_up(&gateway, "s3"));
}

#[test]
fn connections_that_a_firewall_has_forgotten_are_replaced() {
    let (engine, server) = (engine(), Single::start());
    let proxy = FaultProxy::to_port(server.port());
    let settings = redis_only(&format!("redis://{}", proxy.address), "");
    let gateway = Gateway::start(&[("a", &engine)], &settings.replace(PATIENT, "type: redis"));
    proxy.set(Fault::Delay(ms(20))); // so that calls overlap, and more than one connection is made
    std::thread::scope(|scope| {
        for number in 0..16 {
            let gateway = &gateway;
            scope.spawn(move || ask(gateway, &format!("crowd {number}")));
        }
    });
    gateway.assert_idle();
    proxy.set(Fault::Pass);
    until_served_by(&gateway, "redis");
    let connections = proxy.accepted();
    assert!(connections > 1, "{connections}");
    proxy.strand();
    wait_until("answers come from the tier again", DEADLINE, || {
        let prompt = format!("found {}", fastrand::u64(..));
        let begun = Instant::now();
        assert_eq!(ask(&gateway, &prompt), "MISS");
        assert!(begun.elapsed() < BOUND, "{:?}", begun.elapsed());
        gateway.assert_idle();
        ask(&gateway, &prompt) == "HIT redis"
    });
    assert!(proxy.accepted() > connections);
}

#[test]
fn connections_that_are_cut_or_refused_cost_no_request() {
    let (engine, server) = (engine(), Single::start());
    let proxy = FaultProxy::to_port(server.port());
    let url = format!("redis://{}", proxy.address);
    let gateway = Gateway::start(&[("a", &engine)], &redis_only(&url, ""));
    teach(&gateway, "hi", ("redis", 1));
    // cut once: made again in silence
    proxy.set(Fault::Cut);
    proxy.set(Fault::Pass);
    assert_eq!(ask(&gateway, "hi"), "HIT redis");
    assert_eq!(lookups(&gateway, "redis", "error"), 0.0);
    // nobody new is let in, and who is in stays
    proxy.set(Fault::RefuseNew);
    assert_eq!(ask(&gateway, "hi"), "HIT redis");
    assert!(is_up(&gateway, "redis"));
    proxy.set(Fault::Cut);
    until_left_alone(&gateway, "redis", || {});
}

#[test]
fn a_redis_that_cuts_every_connection_is_left_alone_until_it_no_longer_does() {
    let (engine, server) = (engine(), Single::start());
    let proxy = FaultProxy::to_port(server.port());
    let url = format!("redis://{}", proxy.address);
    let gateway = Gateway::start(&[("a", &engine)], &redis_only(&url, ""));
    teach(&gateway, "hi", ("redis", 1));
    proxy.set(Fault::CutAfterBytes(3));
    until_left_alone(&gateway, "redis", || {});
    assert!(lookups(&gateway, "redis", "error") >= FAILURES as f64);
    proxy.set(Fault::Pass);
    until_served_by(&gateway, "redis");
    wait_until("it is up", DEADLINE, || is_up(&gateway, "redis"));
    assert_eq!(ask(&gateway, "hi"), "HIT redis", "it lost nothing");
}

#[test]
fn a_password_that_is_missing_makes_the_tier_fail_and_says_so() {
    let (engine, server) = (engine(), Single::start_with(&["--requirepass", "secret"]));
    let without = process(&engine, &redis_only(&server.url(), ""));
    for number in 0..2 * FAILURES {
        assert_eq!(
            said(&without.chat(&zero(&format!("prompt {number}")))),
            "MISS"
        );
    }
    wait_until("it is told", DEADLINE, || {
        let told = lines(&without, "cache tier fails", "calls=\"reads\"");
        told.len() == 1 && told[0].contains("NOAUTH") && told[0].contains("refused")
    });
    let url = server.url().replace("redis://", "redis://:secret@");
    let with = Gateway::start(&[("a", &engine)], &redis_only(&url, ""));
    teach(&with, "hi", ("redis", 1));
    assert_eq!(ask(&with, "hi"), "HIT redis");
}

#[test]
fn a_full_redis_and_a_replica_take_nothing_and_go_on_giving() {
    let no_redis_here = Single::start();
    let port = no_redis_here.port().to_string();
    drop(no_redis_here);
    for (commands, code) in [
        (vec![vec!["CONFIG", "SET", "maxmemory", "1"]], "OOM"),
        (
            vec![
                vec!["CONFIG", "SET", "replica-priority", "0"],
                vec!["REPLICAOF", "127.0.0.1", &*port],
            ],
            "READONLY",
        ),
    ] {
        let (engine, server) = (engine(), Single::start());
        let process = process(&engine, &redis_only(&server.url(), ""));
        assert_eq!(said(&process.chat(&zero("hi"))), "MISS");
        let stores =
            |result: &str| process.metric("tidegate_cache_stores_total", &["redis", result]);
        wait_until("it is kept", DEADLINE, || stores("\"stored\"") == 1.0);
        for command in &commands {
            assert_eq!(server.ask(command), "+OK");
        }
        for number in 0..3 * FAILURES {
            let answer = process.chat(&zero(&format!("refused {number}")));
            assert_eq!(said(&answer), "MISS", "{code}");
        }
        wait_until("writes are left alone", DEADLINE, || {
            stores("\"skipped\"") > 0.0
        });
        assert!(stores("\"error\"") >= FAILURES as f64);
        assert_eq!(said(&process.chat(&zero("hi"))), "HIT redis", "{code}");
        let told = lines(&process, "cache tier fails", "calls=\"writes\"");
        assert_eq!(told.len(), 1, "{}", process.output());
        assert!(told[0].contains(code), "{told:?}");
        assert!(lines(&process, "cache tier fails", "calls=\"reads\"").is_empty());
        // what it does not take, memory keeps
        assert_eq!(said(&process.chat(&zero("refused 14"))), "HIT memory");
    }
}

/// A gateway whose Redis has died, after an answer was kept there and another was asked for.
fn with_a_dead_redis(engine: &Upstream, stands_in: bool) -> (Gateway, Single) {
    let mut server = Single::start();
    let settings = redis_only(&server.url(), "").replace(
        "fallback_to_memory: true",
        &format!("fallback_to_memory: {stands_in}"),
    );
    let gateway = Gateway::start(&[("a", engine)], &settings);
    teach(&gateway, "before", ("redis", 1));
    server.kill();
    until_left_alone(&gateway, "redis", || {});
    assert_eq!(ask(&gateway, "hi"), "MISS");
    gateway.assert_idle();
    (gateway, server)
}

#[test]
fn memory_stands_in_for_a_dead_redis_until_it_is_back_though_nothing_new_is_asked_for() {
    let engine = engine();
    let (gateway, mut server) = with_a_dead_redis(&engine, true);
    // often enough for writes to be left alone too
    until_writes_are_left_alone(&gateway);
    assert_eq!(ask(&gateway, "hi"), "HIT memory");
    server.start_again();
    wait_until("it is up", DEADLINE, || is_up(&gateway, "redis"));
    assert_eq!(server.ask(&["DBSIZE"]), ":0", "the trial left nothing");
    // one that others may have removed from Redis does not come back
    assert_eq!(ask(&gateway, "hi"), "MISS");
    gateway.assert_idle();
    assert_eq!(ask(&gateway, "hi"), "HIT redis");
}

fn until_writes_are_left_alone(gateway: &Gateway) {
    wait_until("writes are left alone", DEADLINE, || {
        ask(gateway, &format!("lost {}", fastrand::u64(..)));
        gateway.assert_idle();
        shown(gateway, "redis")["stores"]["skipped"].as_u64() > Some(0)
    });
}

#[test]
fn memory_does_not_stand_in_for_a_dead_redis_if_it_is_told_not_to() {
    let engine = engine();
    let (gateway, _server) = with_a_dead_redis(&engine, false);
    for _ in 0..3 {
        assert_eq!(ask(&gateway, "hi"), "MISS");
        gateway.assert_idle();
    }
}
