//! Circuit breakers: open on the backend's own failures only, and close again on every way out.

use crate::support::sse::{self, delta};
use crate::support::{
    Client, DEADLINE, Gateway, Signal, Upstream, Wire, chat, chat_stream, ms, user, wait_until,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

const GOOD: &str = r#"{"id":"1","choices":[]}"#;

/// An engine that fails requests that say `fail`, treats those that say `probe` as told, and
/// serves the rest.
fn engine(probe: fn(&mut Wire)) -> Upstream {
    Upstream::start(move |request, wire| {
        let text = request.text();
        if text.contains("fail") {
            wire.json("500 Internal Server Error", r#"{"error":{"code":500}}"#);
        } else if text.contains("probe") {
            probe(wire);
        } else {
            wire.json("200 OK", GOOD);
        }
    })
}

const QUICK: &str = "
circuit_breaker: { failure_threshold: 1, recovery_timeout: 300ms }
upstream: { first_byte_timeout_non_streaming: 300ms, idle_timeout: 300ms }
";

/// Opens the breaker and waits until one request may try the engine again.
fn half_opened(engine: &Upstream) -> Gateway {
    let gateway = Gateway::start(&[("a", engine)], QUICK);
    assert_eq!(gateway.chat(&chat(&user("fail"))).status, 500);
    gateway.wait_for_breaker("a", "open");
    let refused = gateway.chat(&chat(&user("hi")));
    assert_eq!(refused.status, 503, "{refused:?}");
    assert!(refused.header("retry-after").is_some());
    gateway.wait_for_breaker("a", "half_open");
    gateway
}

fn recovers(gateway: &Gateway) {
    wait_until("a good request is served", DEADLINE, || {
        gateway.chat(&chat(&user("good"))).status == 200
    });
    gateway.wait_for_breaker("a", "closed");
    gateway.assert_idle();
}

#[test]
fn a_probe_whose_client_is_at_fault_closes_the_breaker() {
    let engine = engine(|wire| {
        wire.json("400 Bad Request", r#"{"error":{"code":400}}"#);
    });
    let gateway = half_opened(&engine);
    assert_eq!(gateway.chat(&chat(&user("probe"))).status, 400);
    recovers(&gateway);
}

#[test]
fn a_probe_whose_client_leaves_lets_the_next_request_try() {
    for leave in [Client::leave, Client::reset] {
        let engine = engine(Wire::hang);
        let gateway = half_opened(&engine);
        let mut client = Client::connect(&gateway);
        client.start_chat(chat(&user("probe")));
        engine.wait_for_requests(2);
        leave(client);
        recovers(&gateway);
    }
}

#[test]
fn a_probe_whose_answer_breaks_opens_the_breaker_only_for_its_time() {
    let engine = engine(|wire| {
        wire.write("HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{");
        wire.fin();
    });
    let gateway = half_opened(&engine);
    assert_eq!(gateway.chat(&chat(&user("probe"))).status, 502);
    recovers(&gateway);
}

#[test]
fn a_probe_that_times_out_opens_the_breaker_only_for_its_time() {
    let engine = engine(Wire::hang);
    let gateway = half_opened(&engine);
    let answer = gateway.chat(&chat(&user("probe")));
    assert_eq!(answer.status, 504, "{answer:?}");
    recovers(&gateway);
}

#[test]
fn a_probe_that_is_told_to_wait_lets_the_next_request_try() {
    let engine = engine(|wire| {
        wire.answer("429 Too Many Requests", "retry-after: 1\r\n", "");
    });
    let gateway = half_opened(&engine);
    assert_eq!(gateway.chat(&chat(&user("probe"))).status, 429);
    recovers(&gateway);
}

#[test]
fn a_probe_that_never_ends_lapses() {
    let engine = engine(|wire| {
        wire.stream_head();
        wire.hang();
    });
    let settings = "circuit_breaker: { failure_threshold: 1, recovery_timeout: 300ms }";
    let gateway = Gateway::start(&[("a", &engine)], settings);
    gateway.chat(&chat(&user("fail")));
    gateway.wait_for_breaker("a", "half_open");
    let mut client = Client::connect(&gateway);
    client.start_chat(chat_stream(&user("probe")));
    engine.wait_for_requests(2);
    wait_until("a good request is served", DEADLINE, || {
        gateway.chat(&chat(&user("good"))).status == 200
    });
    gateway.wait_for_breaker("a", "closed");
    client.leave();
    gateway.assert_idle();
}

#[test]
fn only_one_request_tries_a_half_open_backend_though_many_ask_on_two_threads() {
    let go = Signal::new();
    let wait = go.clone();
    let engine = Upstream::start(move |request, wire| {
        if request.text().contains("fail") {
            wire.json("500 Internal Server Error", "{}");
            return;
        }
        wait.wait();
        wire.json("200 OK", GOOD);
    });
    let settings = "
server: { workers: 2 }
circuit_breaker: { failure_threshold: 1, recovery_timeout: 2s }
";
    let gateway = Gateway::start(&[("a", &engine)], settings);
    gateway.chat(&chat(&user("fail")));
    gateway.wait_for_breaker("a", "half_open");
    let ask = |_| {
        let mut client = Client::connect(&gateway);
        client.start_chat(chat(&user("hi")));
        client
    };
    let clients: Vec<Client> = (0..20).map(ask).collect();
    wait_until("all but the probe are refused", DEADLINE, || {
        let refused = gateway.metric("tidegate_requests_total", &["status=\"5xx\""]);
        refused >= 20.0 && engine.count() >= 2
    });
    assert_eq!(engine.count(), 2);
    go.raise();
    let statuses: Vec<u16> = clients
        .into_iter()
        .map(|mut client| client.answer().status)
        .collect();
    assert_eq!(statuses.iter().filter(|s| **s == 200).count(), 1);
    assert_eq!(statuses.iter().filter(|s| **s == 503).count(), 19);
    gateway.wait_for_breaker("a", "closed");
}

#[test]
fn requests_that_the_engine_refuses_for_the_clients_fault_never_open_the_breaker() {
    for status in ["400 Bad Request", "404 Not Found", "422 Unprocessable"] {
        let engine = Upstream::start(move |request, wire| {
            if request.text().contains("bad") {
                wire.json(status, r#"{"error":{"message":"too long"}}"#);
            } else {
                wire.json("200 OK", GOOD);
            }
        });
        let settings = "circuit_breaker: { failure_threshold: 3 }";
        let gateway = Gateway::start(&[("a", &engine)], settings);
        for body in [chat(&user("bad")), chat_stream(&user("bad"))] {
            for _ in 0..5 {
                let answer = gateway.chat(&body);
                assert_eq!(answer.status.to_string(), status[..3]);
            }
        }
        assert_eq!(gateway.chat(&chat(&user("good"))).status, 200);
        assert_eq!(gateway.breaker("a"), "closed");
        assert_eq!(engine.count(), 11, "no retries");
    }
}

#[test]
fn a_full_queue_does_not_shut_the_only_backend_out() {
    let busy = Arc::new(AtomicBool::new(true));
    let is_busy = busy.clone();
    let engine = Upstream::start(move |request, wire| {
        if is_busy.load(Relaxed) {
            let headers = "content-type: application/json\r\nretry-after: 1\r\n";
            wire.answer(
                "503 Service Unavailable",
                headers,
                r#"{"error":"queue full"}"#,
            );
        } else if request.json()["stream"] == true {
            wire.stream(&[sse::stream(&["ok"])]);
        } else {
            wire.json("200 OK", GOOD);
        }
    });
    let settings = "circuit_breaker: { failure_threshold: 3, recovery_timeout: 60s }";
    let gateway = Gateway::start(&[("a", &engine)], settings);
    let asks = [chat(&user("hi")), chat_stream(&user("hi"))];
    for _ in 0..5 {
        for body in &asks {
            let answer = gateway.chat(body);
            assert_eq!(answer.status, 503, "{answer:?}");
            assert_eq!(answer.header("retry-after"), Some("1"));
        }
    }
    busy.store(false, Relaxed);
    for body in &asks {
        assert_eq!(gateway.chat(body).status, 200);
    }
    assert_eq!(gateway.breaker("a"), "closed");
    let busy = ["backend=\"a\"", "outcome=\"backpressure\""];
    assert_eq!(
        gateway.metric("tidegate_backend_requests_total", &busy),
        10.0
    );
}

#[test]
fn clients_that_leave_their_streams_never_open_the_breaker() {
    let engine = Upstream::start(|_, wire| {
        wire.stream_head();
        wire.chunk(delta("one"));
        wire.chunk(delta("two"));
        wire.hang();
    });
    let settings = "circuit_breaker: { failure_threshold: 3 }";
    let gateway = Gateway::start(&[("a", &engine)], settings);
    for n in 0..20 {
        let mut client = Client::connect(&gateway);
        client.start_chat(chat_stream(&user("hi")));
        let mut answer = client.head();
        assert_eq!(answer.status, 200, "{answer:?}");
        assert!(client.read_until(&mut answer, "two"));
        if n % 2 == 0 {
            client.leave();
        } else {
            client.reset();
        }
    }
    gateway.assert_idle();
    assert_eq!(gateway.breaker("a"), "closed");
    let ended = |outcome| {
        let labels = ["backend=\"a\"", outcome];
        gateway.metric("tidegate_backend_requests_total", &labels)
    };
    assert_eq!(ended("outcome=\"cancelled\""), 20.0);
    assert_eq!(ended("outcome=\"failure\""), 0.0);
    let requests = |status| gateway.metric("tidegate_requests_total", &[status]);
    assert_eq!(requests("status=\"cancelled\""), 20.0);
    assert_eq!(requests("status=\"5xx\""), 0.0);
}

#[test]
fn an_impatient_client_says_nothing_about_the_backend() {
    let engine = Upstream::start(|_, wire| {
        wire.pause(ms(200));
        wire.json("200 OK", GOOD);
    });
    let settings = "circuit_breaker: { failure_threshold: 3 }";
    let gateway = Gateway::start(&[("a", &engine)], settings);
    for n in 1..=5 {
        let mut client = Client::connect(&gateway);
        client.start_chat(chat(&user("hi")));
        engine.wait_for_requests(n);
        client.leave();
    }
    let started = Instant::now();
    let ask = |_| {
        let mut client = Client::connect(&gateway);
        client.start_chat(chat(&user("hi")));
        client
    };
    let patient: Vec<Client> = (0..20).map(ask).collect();
    for mut client in patient {
        assert_eq!(client.answer().status, 200);
    }
    assert!(started.elapsed() < Duration::from_secs(10));
    assert_eq!(gateway.breaker("a"), "closed");
    gateway.assert_idle();
}
