//! Second attempts: on another backend, never after the client has seen a byte, never in step.

use crate::support::sse::{self, DONE, delta, finish, parse, text_of};
use crate::support::{
    Client, Gateway, Request, Signal, Upstream, Wire, chat, chat_stream, ms, user,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

const GOOD: &str = r#"{"id":"1","choices":[]}"#;

/// Two engines; whichever is asked first does `first`, all later requests are answered well.
fn first_one(first: impl Fn(&Request, &mut Wire) + Send + Sync + 'static) -> [Upstream; 2] {
    let (first, turn) = (Arc::new(first), Arc::new(AtomicUsize::new(0)));
    [(); 2].map(|()| {
        let (first, turn) = (first.clone(), turn.clone());
        Upstream::start(move |request, wire| {
            if turn.fetch_add(1, Relaxed) == 0 {
                first(request, wire);
            } else if request.json()["stream"] == true {
                wire.stream(&[sse::stream(&["second"])]);
            } else {
                wire.json("200 OK", GOOD);
            }
        })
    })
}

fn behind(engines: &[Upstream; 2], settings: &str) -> Gateway {
    Gateway::start(&[("a", &engines[0]), ("b", &engines[1])], settings)
}

fn asked(engines: &[Upstream; 2]) -> usize {
    engines.iter().map(Upstream::count).sum()
}

#[test]
fn nothing_is_repeated_once_a_byte_of_a_stream_has_reached_the_client() {
    let go = Signal::new();
    let wait = go.clone();
    let engines = first_one(move |_, wire| {
        wire.stream_head();
        wire.chunk(["1", "2", "3"].map(delta).concat());
        wait.wait();
        wire.reset();
    });
    let gateway = behind(&engines, "retry: { max_attempts: 3 }");
    let mut client = Client::connect(&gateway);
    client.start_chat(chat_stream(&user("hi")));
    let mut answer = client.head();
    assert!(client.read_until(&mut answer, &delta("3")));
    go.raise();
    while client.next_piece(&mut answer) {}
    let events = parse(&answer.body);
    assert_eq!(events.len(), 4, "{answer:?}");
    assert_eq!(text_of(&events), "123");
    assert_eq!(events[3].json()["error"]["code"], "stream_cut");
    gateway.assert_idle();
    assert_eq!(asked(&engines), 1);
}

#[test]
fn a_rate_limit_within_a_stream_reaches_the_client_once_and_nothing_starts_anew() {
    let error = r#"data: {"error":{"message":"slow down","type":"rate_limit_error","code":429}}"#;
    let sent = format!("{}{}{error}\n\n", delta("1"), delta("2"));
    let stream = sent.clone();
    let engines = first_one(move |_, wire| {
        wire.stream(&[&stream]);
        wire.fin();
    });
    let gateway = behind(&engines, "");
    let answer = gateway.chat(&chat_stream(&user("hi")));
    assert_eq!(answer.text(), sent);
    gateway.assert_idle();
    assert_eq!(asked(&engines), 1);
}

#[test]
fn a_retry_leaves_the_backend_that_refused_the_connection() {
    let engines = [Upstream::json(GOOD), Upstream::json(GOOD)];
    let settings = "
health_checks: { interval: 60s }
circuit_breaker: { failure_threshold: 1000 }
upstream: { max_idle_per_backend: 0 }
retry: { max_attempts: 5 }
";
    let gateway = behind(&engines, settings);
    engines[0].stop_listening();
    let started = Instant::now();
    for n in 0..30 {
        let answer = gateway.chat(&chat(&user(&format!("prefix {n}"))));
        assert_eq!((answer.status, answer.backend()), (200, "b"), "{answer:?}");
    }
    assert!(started.elapsed() < Duration::from_secs(10));
    let failed = ["backend=\"a\"", "outcome=\"failure\""];
    let failed = gateway.metric("tidegate_backend_requests_total", &failed);
    assert!((1.0..=30.0).contains(&failed), "{failed} attempts at a");
    let retries = gateway.metric("tidegate_retries_total", &["reason=\"refused\""]);
    assert_eq!(retries, failed);
    gateway.assert_idle();
}

#[test]
fn a_connection_that_breaks_before_an_answer_is_tried_elsewhere() {
    for ending in [Wire::reset, Wire::fin] {
        let engines = first_one(move |_, wire| ending(wire));
        let gateway = behind(&engines, "");
        let answer = gateway.chat(&chat(&user("hi")));
        assert_eq!((answer.status, answer.text()), (200, GOOD), "{answer:?}");
        assert!(engines.iter().all(|engine| engine.count() == 1));
    }
}

#[test]
fn a_rate_limited_backend_is_left_alone_for_a_while_and_others_serve() {
    let limited = Upstream::start(|_, wire| {
        let headers = "content-type: application/json\r\nretry-after: 5\r\n";
        wire.answer(
            "429 Too Many Requests",
            headers,
            r#"{"error":{"code":429}}"#,
        );
    });
    let free = Upstream::json(GOOD);
    let gateway = Gateway::start(&[("a", &limited), ("b", &free)], "");
    for n in 0..20 {
        let answer = gateway.chat(&chat(&user(&format!("prefix {n}"))));
        assert_eq!((answer.status, answer.backend()), (200, "b"), "{answer:?}");
    }
    let asked = limited.count();
    assert!((1..=5).contains(&asked), "asked {asked} times in its rest");
    assert_eq!(gateway.breaker("a"), "closed");
}

#[test]
fn when_all_are_rate_limited_the_client_is_told_so_and_when_to_return() {
    let engines = [(); 2].map(|()| {
        Upstream::start(|_, wire| {
            let headers = "content-type: application/json\r\nretry-after: 3\r\n";
            wire.answer(
                "429 Too Many Requests",
                headers,
                r#"{"error":{"code":429}}"#,
            );
        })
    });
    let gateway = behind(&engines, "");
    for body in [chat(&user("hi")), chat_stream(&user("hi"))] {
        let answer = gateway.chat(&body);
        assert_eq!(answer.status, 429, "{answer:?}");
        assert_eq!(answer.header("retry-after"), Some("3"));
        assert_eq!(answer.text(), r#"{"error":{"code":429}}"#);
    }
}

#[test]
fn retries_of_requests_that_failed_together_come_apart_and_not_late() {
    const CLIENTS: usize = 40;
    let broke = Signal::new();
    let wait = broke.clone();
    let breaks = Upstream::start(move |_, wire| {
        wait.wait();
        wire.reset();
    });
    let serves = Upstream::json(GOOD);
    let settings = "
server: { workers: 2 }
retry: { backoff_max: 600ms }
selection_strategy: RoundRobin
prefix_routing: { enabled: false }
circuit_breaker: { failure_threshold: 1000 }
";
    let gateway = Gateway::start(&[("a", &breaks), ("b", &serves)], settings);
    let ask = |_| {
        let mut client = Client::connect(&gateway);
        client.start_chat(chat(&user("hi")));
        client
    };
    let clients: Vec<Client> = (0..CLIENTS).map(ask).collect();
    let total = || breaks.count() + serves.count();
    crate::support::wait_until("all are sent", crate::support::DEADLINE, || {
        total() == CLIENTS
    });
    let failing = breaks.count();
    assert!(failing >= CLIENTS / 4, "{failing} failed");
    let first_of_retries = serves.count();
    let at = Instant::now();
    broke.raise();
    for mut client in clients {
        assert_eq!(client.answer().status, 200);
    }
    let retried = serves.requests().split_off(first_of_retries);
    let waits: Vec<Duration> = retried.iter().map(|r| r.at - at).collect();
    let (first, last) = (*waits.iter().min().unwrap(), *waits.iter().max().unwrap());
    assert!(last - first > ms(150), "together: {waits:?}");
    assert!(last < ms(600 + 2000), "later than the cap: {waits:?}");
}

#[test]
fn an_error_as_the_first_event_is_tried_elsewhere_and_the_client_sees_one_clean_stream() {
    let errors = [
        r#"{"error":{"message":"lost","code":500}}"#,
        r#"{"object":"error","message":"lost","code":503}"#,
    ];
    for error in errors {
        let engines = first_one(move |_, wire| {
            wire.stream(&[&format!("data: {error}\n\n"), DONE]);
        });
        let gateway = behind(&engines, "");
        let answer = gateway.chat(&chat_stream(&user("hi")));
        assert_eq!(answer.status, 200);
        assert_eq!(answer.text(), sse::stream(&["second"]));
        assert!(engines.iter().all(|engine| engine.count() == 1));
    }
}

#[test]
fn a_stream_that_breaks_before_its_first_event_is_tried_elsewhere() {
    for begin in ["", "data: {\"cho"] {
        let engines = first_one(move |_, wire| {
            wire.stream_head();
            if !begin.is_empty() {
                wire.chunk(begin);
            }
            wire.fin();
        });
        let gateway = behind(&engines, "");
        let answer = gateway.chat(&chat_stream(&user("hi")));
        assert_eq!(answer.text(), sse::stream(&["second"]), "{answer:?}");
    }
}

#[test]
fn a_stream_that_breaks_after_its_opening_event_ends_with_an_error_or_starts_elsewhere() {
    let opening = r#"data: {"choices":[{"index":0,"delta":{"role":"assistant"}}]}"#;
    let engines = first_one(move |_, wire| {
        wire.stream_head();
        wire.chunk(format!("{opening}\n\n"));
        wire.reset();
    });
    let gateway = behind(&engines, "");
    let answer = gateway.chat(&chat_stream(&user("hi")));
    let text = answer.text();
    let elsewhere = text == sse::stream(&["second"]);
    let failed = parse(&answer.body).last().unwrap().data.contains("error");
    assert!(elsewhere || failed && !text.contains("second"), "{text}");
}

#[test]
fn a_clients_fault_as_the_first_event_is_its_answer_and_is_not_repeated() {
    let error = r#"{"error":{"message":"too long","code":400}}"#;
    let engines = first_one(move |_, wire| {
        wire.stream(&[&format!("data: {error}\n\n"), DONE]);
    });
    let gateway = behind(&engines, "");
    let answer = gateway.chat(&chat_stream(&user("hi")));
    assert_eq!((answer.status, answer.text()), (400, error), "{answer:?}");
    assert_eq!(answer.header("content-type"), Some("application/json"));
    assert_eq!(asked(&engines), 1);
}

#[test]
fn a_first_byte_that_never_comes_is_not_asked_for_a_second_time() {
    let engines = first_one(|_, wire| wire.hang());
    let settings = "
upstream: { first_byte_timeout: 200ms, first_byte_timeout_non_streaming: 200ms }
";
    let gateway = behind(&engines, settings);
    let answer = gateway.chat(&chat(&user("hi")));
    assert_eq!(answer.status, 504, "{answer:?}");
    assert_eq!(answer.json()["error"]["code"], "first_byte_timeout");
    assert_eq!(asked(&engines), 1, "the work may be under way");
    gateway.assert_idle();
}

#[test]
fn retries_end_when_their_budget_is_spent() {
    let engines = [(); 2].map(|()| {
        Upstream::start(|request, wire| {
            if request.text().contains("good") {
                wire.stream(&[delta("a") + &finish("stop") + DONE]);
            } else {
                wire.reset();
            }
        })
    });
    let settings = "circuit_breaker: { enabled: false }\nretry: { backoff_max: 0ms }";
    let gateway = behind(&engines, settings);
    for _ in 0..100 {
        assert_eq!(gateway.chat(&chat(&user("bad"))).status, 502);
    }
    let budget = 50 + 100 / 5;
    assert!(asked(&engines) <= 100 + budget, "{}", asked(&engines));
    let spent = gateway.metric("tidegate_retry_budget_exhausted_total", &[]);
    assert!(spent >= 1.0);
    assert_eq!(gateway.chat(&chat_stream(&user("good"))).status, 200);
}
