//! From SIGTERM to the exit, and workers that go away while they are still listed.

use crate::support::process::Process;
use crate::support::sse::{DONE, delta, finish, parse};
use crate::support::{
    Client, DEADLINE, Gateway, Signal, Upstream, chat, chat_stream, client, ms, user, wait_until,
};
use std::time::Instant;

/// Streams one event and goes on when the signal is raised.
fn paused_engine(go: Signal) -> Upstream {
    Upstream::start(move |request, wire| {
        if request.text().contains("late") {
            wire.json("200 OK", r#"{"choices":[]}"#);
            return;
        }
        wire.stream_head();
        wire.chunk(delta("first"));
        go.wait();
        for text in ["second", "third"] {
            wire.chunk(delta(text));
        }
        wire.chunk(finish("stop"));
        wire.chunk(DONE);
        wire.end();
    })
}

fn started(engine: &Upstream, drain: &str) -> Process {
    let yaml = format!(
        "drain: {drain}\nhealth_checks: {{interval: 50ms}}\nbackends:\n{}",
        engine.yaml("a")
    );
    let process = Process::start(&yaml);
    wait_until("the engine is healthy", DEADLINE, || {
        process.output().contains("backend is healthy")
    });
    process
}

#[test]
fn a_stream_that_ends_within_the_limit_reaches_its_client_whole() {
    let go = Signal::new();
    let engine = paused_engine(go.clone());
    let mut process = started(&engine, "{timeout: 60s}");
    let mut clients: Vec<Client> = (0..5)
        .map(|_| {
            let mut client = Client::connect_to_port(process.port);
            client.start_chat(chat_stream(&user("hi")));
            client
        })
        .collect();
    let mut answers: Vec<_> = clients
        .iter_mut()
        .map(|client| {
            let mut answer = client.head();
            assert!(client.read_until(&mut answer, "first"));
            answer
        })
        .collect();
    process.signal("TERM");
    wait_until("draining", DEADLINE, || {
        process.output().contains("draining")
    });
    wait_until("new requests are refused", DEADLINE, || {
        let mut late = Client::connect_to_port(process.port);
        late.post("/v1/chat/completions", "", chat(&user("late")))
            .status
            == 503
    });
    assert!(process.is_running());
    go.raise();
    for (client, answer) in clients.iter_mut().zip(&mut answers) {
        assert!(client.read_until(answer, "[DONE]"), "{answer:?}");
        assert!(answer.text().contains("third"));
    }
    assert_eq!(process.exit_code(), Some(0));
}

#[test]
fn a_stream_that_outlives_the_limit_ends_with_a_visible_error() {
    let go = Signal::new();
    let engine = paused_engine(go.clone());
    let mut process = started(&engine, "{timeout: 300ms}");
    let mut client = Client::connect_to_port(process.port);
    client.start_chat(chat_stream(&user("hi")));
    let mut answer = client.head();
    assert!(client.read_until(&mut answer, "first"));
    // one that has no head yet gets a status
    let mut waiting = Client::connect_to_port(process.port);
    let silent = engine.count();
    waiting.start_chat(chat(&user("whole")));
    engine.wait_for_requests(silent + 1);
    process.signal("TERM");
    assert!(
        client.read_until(&mut answer, "shutting down"),
        "{answer:?}"
    );
    let events = parse(&answer.body);
    let last = events.last().unwrap();
    assert_eq!(last.json()["error"]["code"], "overloaded", "{answer:?}");
    assert!(!answer.text().contains("[DONE]"));
    assert_eq!(process.exit_code(), Some(0));
    go.raise();
}

#[test]
fn readiness_falls_first_while_requests_are_still_taken() {
    let engine = Upstream::json(r#"{"choices":[]}"#);
    let mut process = started(&engine, "{delay: 2s}");
    let get = |path: &str| {
        let mut client = Client::connect_to_port(process.port);
        client.send(format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n"));
        client.answer().status
    };
    assert_eq!(get("/ready"), 200);
    process.signal("TERM");
    wait_until("not ready", DEADLINE, || get("/ready") == 503);
    assert_eq!(get("/health"), 200, "alive is not the same as ready");
    let mut client = Client::connect_to_port(process.port);
    assert_eq!(
        client
            .post("/v1/chat/completions", "", chat(&user("hi")))
            .status,
        200
    );
    assert_eq!(process.exit_code(), Some(0));
}

#[test]
fn a_signal_during_the_start_ends_it_cleanly_and_a_second_one_ends_a_drain_at_once() {
    let engine = Upstream::json("{}");
    let yaml = format!("backends:\n{}", engine.yaml("a"));
    let mut starting = Process::launch(&yaml);
    // earlier, the program has not begun to run, and nothing could be heard
    wait_until("it has begun", DEADLINE, || !starting.output().is_empty());
    starting.signal("TERM");
    assert_eq!(starting.exit_code(), Some(0));

    let go = Signal::new();
    let engine = paused_engine(go.clone());
    let mut process = started(&engine, "{timeout: 600s}");
    let mut client = Client::connect_to_port(process.port);
    client.start_chat(chat_stream(&user("hi")));
    let mut answer = client.head();
    assert!(client.read_until(&mut answer, "first"));
    process.signal("TERM");
    wait_until("draining", DEADLINE, || {
        process.output().contains("draining")
    });
    let second = Instant::now();
    process.signal("TERM");
    assert_eq!(process.exit_code(), Some(130));
    assert!(second.elapsed() < DEADLINE / 2);
    go.raise();
}

#[test]
fn a_worker_that_goes_away_while_it_is_listed_costs_no_request() {
    let a = Upstream::start(|_, wire| {
        // as a worker that is being stopped: no connection outlives its answer
        let closing = "content-type: application/json\r\nconnection: close\r\n";
        wire.answer("200 OK", closing, r#"{"choices":[],"id":"a"}"#);
        wire.fin();
    });
    let b = Upstream::json(r#"{"choices":[],"id":"b"}"#);
    // probes notice nothing for a long time
    let settings = "selection_strategy: RoundRobin\nprefix_routing: {enabled: false}\nhealth_checks: {interval: 600s}";
    let gateway = Gateway::start(&[("a", &a), ("b", &b)], settings);
    for n in 0..100 {
        if n == 20 {
            a.stop_listening();
        }
        let answer = client::post(&gateway, "/v1/chat/completions", chat(&user("hi")));
        assert_eq!(answer.status, 200, "request {n}: {answer:?}");
        std::thread::sleep(ms(2));
    }
    assert!(b.count() > 60);
    assert_eq!(gateway.breaker("b"), "closed");
    assert_eq!(
        gateway.breaker("a"),
        "open",
        "failures that nobody saw still count"
    );
    gateway.assert_idle();
}
