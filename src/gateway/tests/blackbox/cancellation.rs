//! A client that leaves is noticed at every stage, however it leaves: the engine's connection is
//! closed and nothing of the request is left.

use crate::support::sse::delta;
use crate::support::{Client, Gateway, Upstream, chat, chat_stream, ms, user, wait_until};
use std::net::TcpListener;
use std::time::{Duration, Instant};

/// Any single try: far below the first moment at which a write would notice.
const NOTICED_WITHIN: Duration = Duration::from_secs(2);
/// The best try of a stage: the promise. Measured are fractions of a millisecond
/// (load-tests/budgets.md); a busy machine may spoil a try, not all of them.
const PROMISED_WITHIN: Duration = Duration::from_millis(100);

#[derive(Debug, Clone, Copy)]
enum Leave {
    Fin,
    Reset,
    HalfClose,
}

const WAYS: [Leave; 3] = [Leave::Fin, Leave::Reset, Leave::HalfClose];

/// Leaves; the half-closed connection must stay open on this side until the end of the stage.
fn assert_promise(took: &[Duration]) {
    let best = took.iter().min().unwrap();
    assert!(*best < PROMISED_WITHIN, "{took:?}");
}

fn leave(mut client: Client, how: Leave) -> Option<Client> {
    match how {
        Leave::Fin => client.leave(),
        Leave::Reset => client.reset(),
        Leave::HalfClose => {
            client.half_close();
            return Some(client);
        }
    }
    None
}

/// Waits for both, and prints how long they took: `cargo nextest run cancellation --no-capture`.
fn measure(stage: &str, how: Leave, engine: Option<&Upstream>, gateway: &Gateway) -> Duration {
    let left = Instant::now();
    let mut closed = Duration::ZERO;
    if let Some(engine) = engine {
        let connection = engine.requests().last().unwrap().connection;
        wait_until("the engine's connection is closed", NOTICED_WITHIN, || {
            engine.closed_at(connection).is_some()
        });
        closed = engine
            .closed_at(connection)
            .unwrap()
            .saturating_duration_since(left);
    }
    gateway.assert_idle();
    let zero = left.elapsed();
    assert!(
        zero < NOTICED_WITHIN,
        "{stage}, {how:?}: counters at zero after {zero:?}"
    );
    println!(
        "{stage}, {how:?}: engine's connection closed after {closed:?}, counters at zero after {zero:?}"
    );
    zero.max(closed)
}

#[test]
fn a_client_that_leaves_within_its_body_leaves_nothing() {
    let engine = Upstream::json("{}");
    let gateway = Gateway::start(&[("a", &engine)], "");
    let mut took = vec![];
    for how in WAYS {
        let mut client = Client::connect(&gateway);
        client.send("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n{\"model\":\"m\",");
        wait_until("the body is being read", NOTICED_WITHIN, || {
            gateway.inner.buffered.bytes() > 0
        });
        let _half = leave(client, how);
        took.push(measure("body upload", how, None, &gateway));
    }
    assert_promise(&took);
    assert_eq!(engine.requests().len(), 0);
}

#[test]
fn a_client_that_leaves_while_the_engine_does_not_accept_leaves_nothing() {
    // a full backlog: further connections are neither accepted nor refused
    let listener =
        socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    let any: std::net::SocketAddr = "127.0.0.1:0".parse().unwrap();
    listener.bind(&any.into()).unwrap();
    listener.listen(0).unwrap();
    let listener = TcpListener::from(listener);
    let address = listener.local_addr().unwrap();
    let mut fillers = vec![];
    while let Ok(stream) = std::net::TcpStream::connect_timeout(&address, ms(200)) {
        fillers.push(stream);
        assert!(fillers.len() < 100, "the backlog does not fill up");
    }
    let backends = format!("  - {{ name: a, url: 'http://{address}', models: [m] }}\n");
    let settings = "health_checks: {enabled: false}\nupstream: {connect_timeout: 60s}";
    let gateway = Gateway::with(&backends, settings);
    let mut took = vec![];
    for how in WAYS {
        let mut client = Client::connect(&gateway);
        client.start_chat(chat(&user("hi")));
        wait_until("connecting", NOTICED_WITHIN, || gateway.in_flight("a") == 1);
        let _half = leave(client, how);
        took.push(measure("connect", how, None, &gateway));
    }
    assert_promise(&took);
}

#[test]
fn a_client_that_leaves_before_the_head_ends_the_engines_work() {
    let engine = Upstream::start(|_, wire| wire.hang());
    let gateway = Gateway::start(&[("a", &engine)], "");
    let mut took = vec![];
    for (n, how) in WAYS.into_iter().cycle().take(6).enumerate() {
        let mut client = Client::connect(&gateway);
        let body = if n < 3 {
            chat(&user("hi"))
        } else {
            chat_stream(&user("hi"))
        };
        client.start_chat(body);
        engine.wait_for_requests(n + 1);
        let _half = leave(client, how);
        let stage = if n < 3 {
            "waiting for the head, whole"
        } else {
            "waiting for the head, streamed"
        };
        took.push(measure(stage, how, Some(&engine), &gateway));
    }
    assert_promise(&took);
    // and nobody retried for the dead
    assert_eq!(engine.requests().len(), 6);
    assert_eq!(gateway.metric("tidegate_retries_total", &[]), 0.0);
    let cancelled = ["outcome=\"cancelled\""];
    assert_eq!(
        gateway.metric("tidegate_backend_requests_total", &cancelled),
        6.0
    );
    let cancelled = ["status=\"cancelled\""];
    assert_eq!(gateway.metric("tidegate_requests_total", &cancelled), 6.0);
}

#[test]
fn a_client_that_leaves_an_idle_stream_is_noticed_though_nothing_is_written() {
    let engine = Upstream::start(|_, wire| {
        wire.stream_head();
        wire.hang(); // in prefill
    });
    let gateway = Gateway::start(&[("a", &engine)], "");
    let mut took = vec![];
    for (n, how) in WAYS.into_iter().enumerate() {
        let mut client = Client::connect(&gateway);
        client.start_chat(chat_stream(&user("hi")));
        engine.wait_for_requests(n + 1);
        let _half = leave(client, how);
        took.push(measure(
            "idle stream before its first event",
            how,
            Some(&engine),
            &gateway,
        ));
    }
    assert_promise(&took);
}

#[test]
fn a_client_that_leaves_between_or_within_chunks_is_noticed() {
    let engine = Upstream::start(|request, wire| {
        wire.stream_head();
        wire.chunk(delta("first"));
        if request.number % 2 == 1 {
            wire.write("100\r\ndata: {\"choices\":[{\"del"); // 0x100 bytes are announced
        }
        wire.hang();
    });
    let gateway = Gateway::start(&[("a", &engine)], "");
    let mut took = vec![];
    for (n, how) in WAYS.into_iter().flat_map(|how| [how, how]).enumerate() {
        let mut client = Client::connect(&gateway);
        client.start_chat(chat_stream(&user("hi")));
        let mut answer = client.head();
        assert!(client.read_until(&mut answer, "first"));
        let _half = leave(client, how);
        let stage = if n % 2 == 1 {
            "mid-chunk"
        } else {
            "idle stream after an event"
        };
        took.push(measure(stage, how, Some(&engine), &gateway));
    }
    assert_promise(&took);
}

#[test]
fn a_client_that_leaves_while_a_second_attempt_waits_gets_none() {
    let dead = Upstream::nobody();
    let engine = Upstream::json("{\"choices\":[]}");
    let settings = "selection_strategy: RoundRobin\nprefix_routing: {enabled: false}\nretry: {backoff_max: 60s}\nhealth_checks: {enabled: false}";
    let gateway = Gateway::start(&[("a", &dead), ("b", &engine)], settings);
    let mut client = Client::connect(&gateway);
    client.start_chat(chat(&user("hi")));
    // round robin begins with the dead one, and then waits up to a minute
    wait_until("the second attempt waits", NOTICED_WITHIN, || {
        gateway.metric("tidegate_backend_requests_total", &["backend=\"a\""]) > 0.0
    });
    let _half = leave(client, Leave::Fin);
    let took = measure("back-off", Leave::Fin, None, &gateway);
    assert_promise(&[took]);
    assert_eq!(engine.requests().len(), 0);
}

#[test]
fn a_client_that_leaves_while_its_prompt_is_tokenised_or_looked_up_leaves_nothing() {
    // an engine whose events come, and whose tokenizer never answers
    let engine = Upstream::start(|request, wire| match request.path() {
        "/v1/kv_events" => {
            wire.stream_head();
            let event = r#"{"seq":0,"ts":1.0,"events":[{"type":"cache_created","block_hashes":[1],"token_ids":[1,2,3,4],"block_size":4}]}"#;
            wire.chunk(format!("id: 0\ndata: {event}\n\n"));
            wire.hang();
        }
        _ => wire.hang(),
    });
    let settings = format!(
        "kv_cache_index: {{enabled: true, event_sources: [{{backend_name: a, endpoint: 'http://{}/v1/kv_events'}}]}}",
        engine.address
    );
    let gateway = Gateway::start(&[("a", &engine)], &settings);
    wait_until("the block size is known", NOTICED_WITHIN, || {
        let kv = gateway.inner.kv.as_ref().unwrap();
        kv.sources.load()[0].state.load().block_size == Some(4)
    });
    let long = "word ".repeat(400);
    let mut took = vec![];
    for how in WAYS {
        let asked = engine.count();
        let mut client = Client::connect(&gateway);
        client.start_chat(chat(&user(&long)));
        // the question goes out first; the prompt itself after 20 ms without an answer
        engine.wait_for_requests(asked + 1);
        let _half = leave(client, how);
        took.push(measure("tokenize", how, None, &gateway));
    }
    assert_promise(&took);
}
