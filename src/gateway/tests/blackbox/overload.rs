//! More than fits: bodies, streams, connections. What is too much is refused; the rest is served.

use crate::support::sse::{DONE, delta, finish};
use crate::support::{
    Client, DEADLINE, Gateway, Signal, Upstream, chat, chat_stream, client, user, wait_until,
};
use std::time::{Duration, Instant};

const GOOD: &str = r#"{"id":"1","choices":[]}"#;

#[test]
fn bodies_beyond_the_limit_over_all_are_refused_and_the_others_are_served() {
    const LIMIT: usize = 16 << 20;
    let go = Signal::new();
    let wait = go.clone();
    let engine = Upstream::start(move |_, wire| {
        wait.wait();
        wire.json("200 OK", GOOD);
    });
    let settings = format!("server: {{ workers: 2, max_buffered_request_bytes: {LIMIT} }}");
    let gateway = Gateway::start(&[("a", &engine)], &settings);
    let body = chat(&user(&"x".repeat(5 << 20)));
    let clients: Vec<_> = (0..12)
        .map(|_| {
            let mut client = Client::connect(&gateway);
            let body = body.clone();
            std::thread::spawn(move || {
                client.start_chat(body);
                client.answer()
            })
        })
        .collect();
    let refused = || gateway.metric("tidegate_requests_total", &["status=\"5xx\""]);
    wait_until("all are refused or sent", DEADLINE, || {
        refused() as usize + engine.count() == 12
    });
    assert!(gateway.inner.buffered.bytes() <= LIMIT);
    go.raise();
    let answers: Vec<_> = clients.into_iter().map(|c| c.join().unwrap()).collect();
    let served = answers.iter().filter(|a| a.status == 200).count();
    assert!(
        (1..=3).contains(&served),
        "{served} bodies of 5 MiB fit in 16"
    );
    for answer in answers.iter().filter(|a| a.status != 200) {
        assert_eq!(answer.status, 503, "{answer:?}");
        assert_eq!(answer.json()["error"]["code"], "overloaded");
        assert!(answer.header("retry-after").is_some());
    }
    gateway.assert_idle();
    assert_eq!(gateway.chat(&body).status, 200, "their place is free again");
}

/// The most memory that this process ever had resident, in bytes.
fn peak_memory() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    let kib = line.unwrap().split_whitespace().nth(1).unwrap();
    kib.parse::<usize>().unwrap() * 1024
}

#[test]
fn a_large_body_takes_a_small_multiple_of_its_size() {
    const BODY: usize = 24 << 20;
    const BODIES: usize = 6;
    let go = Signal::new();
    let wait = go.clone();
    // the engine is in this process too: it leaves the body in the kernel
    let engine = Upstream::before_body(move |_, wire| {
        wait.wait();
        wire.json("200 OK", GOOD);
        wire.fin();
    });
    let settings = "
model_aliases: { gpt: m }
upstream: { request_stream_usage: true }
";
    let gateway = Gateway::start(&[("a", &engine)], settings);
    let filler = "x".repeat(1 << 20);
    let before = peak_memory();
    let clients: Vec<_> = (0..BODIES)
        .map(|_| {
            let mut client = Client::connect(&gateway);
            let filler = filler.clone();
            std::thread::spawn(move || {
                let begin = r#"{"model":"gpt","stream":true,"messages":[{"role":"user","content":""#;
                let end = r#""}]}"#;
                let length = begin.len() + end.len() + BODY;
                client.send(format!("POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: {length}\r\n\r\n{begin}"));
                for _ in 0..BODY / filler.len() {
                    client.send(&filler);
                }
                client.send(end);
                client.answer().status
            })
        })
        .collect();
    engine.wait_for_requests(BODIES);
    let grown = (peak_memory() - before) as f64;
    let factor = grown / (BODY * BODIES) as f64;
    go.raise();
    for client in clients {
        client.join().unwrap();
    }
    assert!(factor < 3.0, "{factor} bytes in memory per byte of body");
    gateway.assert_idle();
}

#[test]
fn the_gateway_answers_about_itself_at_once_under_many_streams() {
    const STREAMS: usize = 300;
    let go = Signal::new();
    let wait = go.clone();
    let engine = Upstream::start(move |_, wire| {
        wire.stream_head();
        wire.chunk(delta("one"));
        wait.wait();
        wire.chunk(finish("stop") + DONE);
        wire.end();
    });
    let gateway = Gateway::start(&[("a", &engine)], "server: { workers: 2 }");
    let mut clients: Vec<Client> = (0..STREAMS)
        .map(|_| {
            let mut client = Client::connect(&gateway);
            client.start_chat(chat_stream(&user("hi")));
            client
        })
        .collect();
    engine.wait_for_requests(STREAMS);
    assert_eq!(gateway.in_flight("a") as usize, STREAMS);
    for _ in 0..10 {
        for path in ["/health", "/metrics", "/ready", "/v1/models"] {
            let asked = Instant::now();
            assert_eq!(client::get(&gateway, path).status, 200);
            let took = asked.elapsed();
            assert!(took < Duration::from_secs(1), "{path} took {took:?}");
        }
    }
    go.raise();
    for client in &mut clients {
        let answer = client.answer();
        assert_eq!(answer.text(), delta("one") + &finish("stop") + DONE);
    }
    gateway.assert_idle();
}

#[test]
fn a_burst_of_short_requests_is_served_whole_on_two_threads() {
    let engine = Upstream::json(GOOD);
    let gateway = Gateway::start(&[("a", &engine)], "server: { workers: 2 }");
    let mut clients: Vec<Client> = (0..200).map(|_| Client::connect(&gateway)).collect();
    for _ in 0..3 {
        for client in &mut clients {
            client.start_chat(chat(&user("hi")));
        }
        for client in &mut clients {
            assert_eq!(client.answer().status, 200);
        }
    }
    assert_eq!(engine.count(), 600);
    gateway.assert_idle();
}
