//! Equal requests at two gateways that share a Redis: one of them makes the call, the other waits a little.

use crate::cache::{numbered, text, zero};
use crate::cache_faults::process;
use crate::cache_tiers::{ask, said};
use crate::support::stores::redis_only;
use crate::support::{Client, DEADLINE, Gateway, Signal, Upstream, wait_until};
use redis_servers::Single;
use std::time::Instant;

/// Answers each call anew once `go` is raised; what warms a gateway up at once.
fn engine_that_waits(go: &Signal) -> Upstream {
    let go = go.clone();
    Upstream::start(move |request, wire| {
        if !request.text().contains("warm") {
            go.wait();
        }
        wire.json("200 OK", &numbered(request.number));
    })
}

/// Makes its connections, since taking the lock has little time.
fn warm(gateway: &Gateway, name: &str) {
    assert_eq!(ask(gateway, &format!("warm {name}")), "MISS");
    gateway.assert_idle();
}

fn waits(gateway: &Gateway, result: &str) -> f64 {
    let label = format!("result=\"{result}\"");
    gateway.metric("tidegate_cache_lock_waits_total", &[&label])
}

#[test]
fn two_gateways_make_an_equal_call_once() {
    let (go, redis) = (Signal::new(), Single::start());
    let engine = engine_that_waits(&go);
    let settings = redis_only(&redis.url(), "  other_gateway_wait_ms: 20000\n");
    let one = Gateway::start(&[("a", &engine)], &settings);
    let two = Gateway::start(&[("a", &engine)], &settings);
    warm(&one, "one");
    warm(&two, "two");
    let mut first = Client::connect(&one);
    first.start_chat(zero("hi"));
    engine.wait_for_requests(3);
    let mut second = Client::connect(&two);
    second.start_chat(zero("hi"));
    wait_until("the other has come in", DEADLINE, || {
        two.inner.flights() == 1
    });
    go.raise();
    let (first, second) = (first.answer(), second.answer());
    assert_eq!((&*said(&first), &*said(&second)), ("MISS", "HIT redis"));
    assert_eq!(
        (text(&first), text(&second)),
        ("answer 2".into(), "answer 2".into())
    );
    one.assert_idle();
    two.assert_idle();
    assert_eq!(engine.count(), 3);
    assert_eq!((waits(&one, "found"), waits(&two, "found")), (0.0, 1.0));
    wait_until("the lock is given back", DEADLINE, || {
        redis.ask(&["DBSIZE"]) == ":3"
    });
}

#[test]
fn gateways_that_are_told_not_to_wait_call_each_for_itself() {
    let (go, redis) = (Signal::new(), Single::start());
    let engine = engine_that_waits(&go);
    let settings = redis_only(&redis.url(), "  other_gateway_wait_ms: 0\n");
    let one = Gateway::start(&[("a", &engine)], &settings);
    let two = Gateway::start(&[("a", &engine)], &settings);
    let mut clients: Vec<Client> = [&one, &two].into_iter().map(Client::connect).collect();
    clients
        .iter_mut()
        .for_each(|client| client.start_chat(zero("hi")));
    engine.wait_for_requests(2);
    go.raise();
    for client in &mut clients {
        assert_eq!(said(&client.answer()), "MISS");
    }
    assert_eq!(engine.count(), 2);
}

#[test]
fn who_waits_for_a_gateway_that_is_killed_goes_on_by_itself_after_the_wait() {
    let (go, redis) = (Signal::new(), Single::start());
    let engine = engine_that_waits(&go);
    let settings = redis_only(&redis.url(), "  other_gateway_wait_ms: 1000\n");
    let holder = process(&engine, &settings);
    let two = Gateway::start(&[("a", &engine)], &settings);
    assert_eq!(said(&holder.chat(&zero("warm one"))), "MISS");
    warm(&two, "two");
    let mut first = Client::connect_to_port(holder.port);
    first.start_chat(zero("hi"));
    engine.wait_for_requests(3);
    let begun = Instant::now();
    let mut second = Client::connect(&two);
    second.start_chat(zero("hi"));
    wait_until("the other has come in", DEADLINE, || {
        two.inner.flights() == 1
    });
    holder.signal("KILL");
    engine.wait_for_requests(4);
    // at most what is left of the holder's lock, or its own wait; not the engine's time
    assert!(begun.elapsed() < DEADLINE / 2, "{:?}", begun.elapsed());
    go.raise();
    let answer = second.answer();
    assert_eq!((&*said(&answer), &*text(&answer)), ("MISS", "answer 3"));
    two.assert_idle();
    assert_eq!(ask(&two, "hi"), "HIT redis");
    assert_eq!(waits(&two, "lapsed"), 1.0);
}

#[test]
fn who_waits_for_a_call_that_fails_goes_on_at_once() {
    let (go, redis) = (Signal::new(), Single::start());
    let wait = go.clone();
    let engine = Upstream::start(move |request, wire| match request.number {
        0 | 1 => {
            wire.json("200 OK", &numbered(request.number));
        }
        2 => {
            wait.wait();
            wire.json("400 Bad Request", r#"{"error":{"message":"x"}}"#);
        }
        number => {
            wire.json("200 OK", &numbered(number));
        }
    });
    let settings = redis_only(&redis.url(), "  other_gateway_wait_ms: 20000\n");
    let one = Gateway::start(&[("a", &engine)], &settings);
    let two = Gateway::start(&[("a", &engine)], &settings);
    warm(&one, "one");
    warm(&two, "two");
    let mut first = Client::connect(&one);
    first.start_chat(zero("hi"));
    engine.wait_for_requests(3);
    let mut second = Client::connect(&two);
    second.start_chat(zero("hi"));
    wait_until("the other has come in", DEADLINE, || {
        two.inner.flights() == 1
    });
    let begun = Instant::now();
    go.raise();
    assert_eq!(first.answer().status, 400);
    let second = second.answer();
    assert!(begun.elapsed() < DEADLINE / 2, "{:?}", begun.elapsed());
    assert_eq!((&*said(&second), &*text(&second)), ("MISS", "answer 3"));
}
