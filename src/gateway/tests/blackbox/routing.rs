//! Where requests go, as far as it takes sockets to see it: load that follows connections, and
//! keys that follow requests. The choice itself is tested in `routing`.

use crate::support::sse::{DONE, delta, finish};
use crate::support::{
    Client, DEADLINE, Gateway, Signal, Upstream, chat, chat_stream, client, user, wait_until,
};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

const GOOD: &str = r#"{"id":"1","choices":[]}"#;
const ROTATE: &str = "
selection_strategy: RoundRobin
prefix_routing: { enabled: false }
";

fn named(engines: &[Upstream]) -> Vec<(&'static str, &Upstream)> {
    ["a", "b", "c", "d", "e"].into_iter().zip(engines).collect()
}

/// Streams that send one token and then wait for the signal; other requests are answered.
fn holds(go: &Signal) -> Upstream {
    let wait = go.clone();
    Upstream::start(move |request, wire| {
        if request.json()["stream"] != true {
            wire.json("200 OK", GOOD);
            return;
        }
        wire.stream_head();
        wire.chunk(delta("one"));
        wait.wait();
        wire.chunk(finish("stop") + DONE);
        wire.end();
    })
}

/// Opens a stream and reads its first token.
fn open_stream(gateway: &Gateway, text: &str) -> (Client, client::Answer) {
    let mut client = Client::connect(gateway);
    client.start_chat(chat_stream(&user(text)));
    let mut answer = client.head();
    assert!(client.read_until(&mut answer, "one"), "{answer:?}");
    (client, answer)
}

fn ends_well((mut client, mut answer): (Client, client::Answer)) {
    while client.next_piece(&mut answer) {}
    assert!(answer.text().ends_with(DONE), "{answer:?}");
    assert_eq!(answer.ended, client::Ended::Clean);
}

/// A text whose prefix goes to this backend.
fn prefix_of(gateway: &Gateway, backend: &str) -> String {
    let texts = (0..200).map(|n| format!("prefix {n}"));
    let mut found = texts.filter(|text| gateway.chat(&chat(&user(text))).backend() == backend);
    found.next().unwrap()
}

#[test]
fn a_prefix_is_served_elsewhere_while_its_backend_is_shut_off() {
    let engines = [(); 2].map(|()| {
        Upstream::start(|request, wire| {
            if request.text().contains("fail") {
                wire.json("500 Internal Server Error", "{}");
            } else {
                wire.json("200 OK", GOOD);
            }
        })
    });
    let settings = "circuit_breaker: { failure_threshold: 2, recovery_timeout: 60s }";
    let gateway = Gateway::start(&named(&engines), settings);
    let prefix = prefix_of(&gateway, "a");
    // the tail is not part of the key
    let failing = format!(
        r#""messages":[{{"role":"user","content":"{prefix}"}},{{"role":"user","content":"fail"}}]"#
    );
    for _ in 0..2 {
        let answer = gateway.chat(&chat(&failing));
        assert_eq!((answer.status, answer.backend()), (500, "a"));
    }
    gateway.wait_for_breaker("a", "open");
    let before = engines[0].count();
    for _ in 0..10 {
        let answer = gateway.chat(&chat(&user(&prefix)));
        assert_eq!((answer.status, answer.backend()), (200, "b"), "{answer:?}");
    }
    assert_eq!(engines[0].count(), before);
}

#[test]
fn a_backend_that_hangs_does_not_slow_requests_to_others() {
    let hangs = Upstream::start(|_, wire| wire.hang());
    let serves = Upstream::json(GOOD);
    let settings = format!(
        "{ROTATE}
upstream: {{ first_byte_timeout_non_streaming: 3s, max_idle_per_backend: 1 }}
circuit_breaker: {{ enabled: false }}"
    );
    let gateway = Gateway::start(&[("a", &hangs), ("b", &serves)], &settings);
    let started = Instant::now();
    let clients: Vec<_> = (0..30)
        .map(|_| {
            let mut client = Client::connect(&gateway);
            client.start_chat(chat(&user("hi")));
            std::thread::spawn(move || (client.answer(), started.elapsed()))
        })
        .collect();
    let answers: Vec<_> = clients.into_iter().map(|c| c.join().unwrap()).collect();
    for (answer, took) in &answers {
        match answer.status {
            200 => assert!(*took < Duration::from_secs(2), "{took:?}"),
            _ => assert_eq!(answer.status, 504, "{answer:?}"),
        }
    }
    let served = answers.iter().filter(|(a, _)| a.status == 200).count();
    assert_eq!((served, hangs.count()), (15, 15));
    gateway.assert_idle();
}

#[test]
fn load_returns_to_zero_wherever_clients_leave_and_later_requests_spread_evenly() {
    let engines = [(); 2].map(|()| {
        Upstream::start(|request, wire| match request.json()["user"].as_str() {
            Some("before head") => wire.hang(),
            Some("before token") => {
                wire.stream_head();
                wire.hang();
            }
            Some("mid-stream") => {
                wire.stream_head();
                wire.chunk(delta("one"));
                wire.hang();
            }
            _ => {
                wire.json("200 OK", GOOD);
            }
        })
    });
    let gateway = Gateway::start(&named(&engines), "server: { workers: 2 }");
    let asked = || engines.iter().map(Upstream::count).sum::<usize>();
    for round in 0..80 {
        for place in ["before head", "before token", "mid-stream", "at once"] {
            let mut client = Client::connect(&gateway);
            let members = format!(r#""user":"{place}",{}"#, user(&format!("{round}")));
            let before = asked();
            client.start_chat(chat_stream(&members));
            if place == "mid-stream" {
                let mut answer = client.head();
                assert!(client.read_until(&mut answer, "one"));
            } else if place != "at once" {
                wait_until("the engine is asked", DEADLINE, || asked() > before);
            }
            if round % 2 == 0 {
                client.leave();
            } else {
                client.reset();
            }
        }
    }
    gateway.assert_idle();
    let mut shares = BTreeMap::<String, usize>::new();
    for n in 0..200 {
        let answer = gateway.chat(&chat(&user(&format!("new prefix {n}"))));
        *shares.entry(answer.backend().to_owned()).or_default() += 1;
    }
    assert!(
        shares.len() == 2 && shares.values().all(|n| *n >= 50),
        "{shares:?}"
    );
}

#[test]
fn load_returns_to_zero_when_clients_leave_while_the_backend_is_being_connected_to() {
    // a full backlog: connections are neither accepted nor refused
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    let any: std::net::SocketAddr = "127.0.0.1:0".parse().unwrap();
    socket.bind(&any.into()).unwrap();
    socket.listen(0).unwrap();
    let address = socket.local_addr().unwrap().as_socket().unwrap();
    let fillers: Vec<_> = (0..8)
        .map(|_| {
            let filler =
                socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
            filler.set_nonblocking(true).unwrap();
            let _ = filler.connect(&address.into());
            filler
        })
        .collect();
    let backend = format!("  - {{ name: a, url: \"http://{address}\", models: [m] }}\n");
    let settings = "
health_checks: { enabled: false }
upstream: { connect_timeout: 1s }
";
    let gateway = Gateway::with(&backend, settings);
    for leave in [Client::leave, Client::reset] {
        let mut client = Client::connect(&gateway);
        client.start_chat(chat(&user("hi")));
        wait_until("the request is on its way", DEADLINE, || {
            gateway.in_flight("a") == 1
        });
        leave(client);
        gateway.assert_idle();
    }
    let answer = gateway.chat(&chat(&user("hi")));
    assert_eq!(answer.status, 502, "{answer:?}");
    assert_eq!(answer.json()["error"]["code"], "connect");
    gateway.assert_idle();
    drop(fillers);
}

#[test]
fn probes_leave_the_load_alone_and_new_requests_go_round_the_busy_backend() {
    let go = Signal::new();
    let engines = [holds(&go), holds(&go)];
    let gateway = Gateway::start(&named(&engines), "");
    let prefix = prefix_of(&gateway, "a");
    gateway.set_draining("b", true);
    gateway.wait_for_state("b", "draining");
    let streams: Vec<_> = (0..20).map(|_| open_stream(&gateway, &prefix)).collect();
    gateway.set_draining("b", false);
    gateway.wait_for_state("b", "healthy");
    let probes = engines[0].probes();
    wait_until("five more probes", DEADLINE, || {
        engines[0].probes() > probes + 5
    });
    assert_eq!(gateway.in_flight("a"), 20);
    for _ in 0..5 {
        let answer = gateway.chat(&chat(&user(&prefix)));
        assert_eq!(answer.backend(), "b", "the prefix spills over");
    }
    assert!(gateway.metric("tidegate_prefix_spills_total", &[]) >= 5.0);
    go.raise();
    streams.into_iter().for_each(ends_well);
    gateway.assert_idle();
    assert_eq!(gateway.chat(&chat(&user(&prefix))).backend(), "a");
}

#[test]
fn a_stream_counts_as_load_until_its_last_byte() {
    let go = Signal::new();
    let engine = holds(&go);
    let gateway = Gateway::start(&[("a", &engine)], "");
    let stream = open_stream(&gateway, "hi");
    assert_eq!(gateway.in_flight("a"), 1);
    let shown = || gateway.metric("tidegate_in_flight_requests", &["backend=\"a\""]);
    assert_eq!(shown(), 1.0);
    go.raise();
    ends_well(stream);
    gateway.assert_idle();
    assert_eq!(shown(), 0.0);
}

#[test]
fn sessions_that_come_one_after_the_other_use_all_backends_and_each_stays_on_its_own() {
    let engines = [Upstream::json(GOOD), Upstream::json(GOOD)];
    let gateway = Gateway::start(&named(&engines), "server: { workers: 2 }");
    let mut shares = BTreeMap::<String, usize>::new();
    for session in 0..50 {
        let turn = |turn: usize| {
            let later = r#",{"role":"user","content":"go on"}"#.repeat(turn);
            let messages = format!(
                r#""messages":[{{"role":"system","content":"s"}},{{"role":"user","content":"session {session}"}}{later}]"#
            );
            gateway.chat(&chat(&messages)).backend().to_owned()
        };
        let used: BTreeSet<String> = (0..4).map(turn).collect();
        assert_eq!(used.len(), 1, "session {session} moved: {used:?}");
        *shares.entry(used.into_iter().next().unwrap()).or_default() += 1;
    }
    assert!(
        shares.len() == 2 && shares.values().all(|n| *n >= 8),
        "{shares:?}"
    );
}

#[test]
fn requests_on_every_path_count_as_load_and_are_avoided() {
    let go = Signal::new();
    let engines = [(); 2].map(|()| {
        let wait = go.clone();
        Upstream::start(move |request, wire| {
            if !request.text().contains("quick") {
                wait.wait();
            }
            wire.json("200 OK", GOOD);
        })
    });
    let settings = "
selection_strategy: LeastConnections
prefix_routing: { enabled: false }
";
    let gateway = Gateway::start(&named(&engines), settings);
    gateway.set_draining("b", true);
    gateway.wait_for_state("b", "draining");
    let paths = [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/messages",
        "/v1/rerank",
        "/tokenize",
        "/detokenize",
    ];
    let mut clients = Vec::new();
    for (n, path) in paths.into_iter().enumerate() {
        let mut client = Client::connect(&gateway);
        client.start(path, r#"{"model":"m","input":"x","stream":true}"#);
        engines[0].wait_for_requests(n + 1);
        assert_eq!(gateway.in_flight("a") as usize, n + 1, "{path}");
        clients.push(client);
    }
    gateway.set_draining("b", false);
    gateway.wait_for_state("b", "healthy");
    for _ in 0..5 {
        assert_eq!(gateway.chat(&chat(&user("quick"))).backend(), "b");
    }
    go.raise();
    for mut client in clients {
        assert_eq!(client.answer().status, 200);
    }
    gateway.assert_idle();
}

#[test]
fn requests_without_a_session_are_spread_and_those_with_one_stay() {
    let engines = [(); 3].map(|()| Upstream::json(GOOD));
    let settings = "
selection_strategy: ConsistentHash
prefix_routing: { enabled: false }
";
    let gateway = Gateway::start(&named(&engines), settings);
    let served_by = |header: &str, text: &str| {
        let mut client = Client::connect(&gateway);
        let answer = client.post("/v1/chat/completions", header, chat(&user(text)));
        answer.backend().to_owned()
    };
    for header in ["", "x-session-id:\r\n", "x-session-id:  \r\n"] {
        let mut shares = BTreeMap::<String, usize>::new();
        for n in 0..150 {
            *shares.entry(served_by(header, &n.to_string())).or_default() += 1;
        }
        let even = shares.len() == 3 && shares.values().all(|n| (20..=80).contains(n));
        assert!(even, "{header:?}: {shares:?}");
    }
    let of_session: BTreeSet<_> = (0..30)
        .map(|n| served_by("x-session-id: one\r\n", &n.to_string()))
        .collect();
    assert_eq!(of_session.len(), 1);
}

#[test]
fn two_gateways_agree_on_every_prefix_and_a_failed_backend_moves_only_its_own() {
    let engines = [(); 5].map(|()| Upstream::json(GOOD));
    let settings = "
health_checks: { unhealthy_threshold: 1, healthy_threshold: 1 }
retry: { max_attempts: 1 }
upstream: { max_idle_per_backend: 0 }
";
    let forwards = named(&engines);
    let backwards: Vec<_> = forwards.iter().copied().rev().collect();
    let gateways = [
        Gateway::start(&forwards, settings),
        Gateway::start(&backwards, settings),
    ];
    let map = |gateway: &Gateway| -> Vec<String> {
        let mut client = Client::connect(gateway);
        let texts = (0..200).map(|n| chat(&user(&format!("prefix {n}"))));
        texts
            .map(|body| {
                let answer = client.chat(body);
                assert_eq!(answer.status, 200, "{answer:?}");
                answer.backend().to_owned()
            })
            .collect()
    };
    let before = map(&gateways[0]);
    assert_eq!(before, map(&gateways[1]));
    assert_eq!(before.iter().collect::<BTreeSet<_>>().len(), 5);
    engines[2].stop_listening();
    for gateway in &gateways {
        gateway.wait_for_state("c", "unhealthy");
    }
    let without = map(&gateways[0]);
    assert_eq!(without, map(&gateways[1]));
    let moved: Vec<_> = before
        .iter()
        .zip(&without)
        .filter(|(b, w)| b != w)
        .collect();
    assert!(moved.iter().all(|(home, _)| *home == "c"), "{moved:?}");
    let c = before.iter().filter(|backend| *backend == "c").count();
    assert_eq!(moved.len(), c);
    engines[2].listen_again();
    for gateway in &gateways {
        gateway.wait_for_state("c", "healthy");
        assert_eq!(map(gateway), before);
    }
}

#[test]
fn a_request_that_reached_no_backend_leaves_no_trace_in_later_choices() {
    let engines = [Upstream::json(GOOD), Upstream::json(GOOD)];
    let settings = "
health_checks: { interval: 60s }
upstream: { max_idle_per_backend: 0 }
circuit_breaker: { enabled: false }
";
    let gateway = Gateway::start(&named(&engines), settings);
    let (of_a, of_b) = (prefix_of(&gateway, "a"), prefix_of(&gateway, "b"));
    engines[0].stop_listening();
    assert_eq!(gateway.chat(&chat(&user(&of_a))).backend(), "b");
    engines[0].listen_again();
    assert_eq!(gateway.chat(&chat(&user(&of_a))).backend(), "a");
    assert_eq!(gateway.chat(&chat(&user(&of_b))).backend(), "b");
}

#[test]
fn a_popular_prefix_is_spread_over_more_backends_as_its_load_grows() {
    const STREAMS: usize = 60;
    let go = Signal::new();
    let engines = [(); 4].map(|()| holds(&go));
    let settings = "prefix_routing: { load_factor_epsilon: 0.25 }";
    let gateway = Gateway::start(&named(&engines), settings);
    let first = open_stream(&gateway, "shared");
    let home = first.1.backend().to_owned();
    let mut streams = vec![first];
    while streams.len() < STREAMS {
        streams.push(open_stream(&gateway, "shared"));
    }
    let loads: Vec<u32> = named(&engines)
        .iter()
        .map(|(name, _)| gateway.in_flight(name))
        .collect();
    let bound = (STREAMS as f64 / 4.0 * 1.25).ceil() as u32;
    assert!(loads.iter().all(|load| *load <= bound), "{loads:?}");
    let at_home = streams.iter().filter(|(_, a)| a.backend() == home).count();
    assert!(at_home > STREAMS / 4, "its home keeps more than its share");
    go.raise();
    streams.into_iter().for_each(ends_well);
    gateway.assert_idle();
}

#[test]
fn a_backend_that_drains_finishes_its_streams_and_gets_no_new_request() {
    let go = Signal::new();
    let engines = [holds(&go), holds(&go)];
    let gateway = Gateway::start(&named(&engines), ROTATE);
    let mut streams: Vec<_> = (0..20).map(|_| open_stream(&gateway, "hi")).collect();
    assert_eq!(gateway.in_flight("a"), 10);
    gateway.set_draining("a", true);
    gateway.wait_for_state("a", "draining");
    for n in 0..100 {
        assert_eq!(gateway.chat(&chat(&user(&n.to_string()))).backend(), "b");
    }
    assert_eq!((engines[0].count(), gateway.in_flight("a")), (10, 10));
    go.raise();
    streams.drain(..).for_each(ends_well);
    gateway.assert_idle();
    gateway.set_draining("a", false);
    gateway.wait_for_state("a", "healthy");
    let back = (0..4).map(|_| gateway.chat(&chat(&user("hi"))));
    assert!(back.into_iter().any(|answer| answer.backend() == "a"));
}

#[test]
fn a_gateway_that_drains_finishes_its_streams_and_refuses_new_requests() {
    let go = Signal::new();
    let engine = holds(&go);
    let gateway = Gateway::start(&[("a", &engine)], "");
    let mut waiting = Client::connect(&gateway);
    let streams: Vec<_> = (0..5).map(|_| open_stream(&gateway, "hi")).collect();
    gateway.drain();
    wait_until("not ready", DEADLINE, || {
        client::get(&gateway, "/ready").status == 503
    });
    wait_until("new requests are refused", DEADLINE, || {
        let answer = gateway.chat(&chat(&user("hi")));
        answer.status == 503 && answer.header("connection") == Some("close")
    });
    let refused = waiting.chat(chat(&user("hi")));
    assert_eq!(refused.status, 503, "{refused:?}");
    go.raise();
    streams.into_iter().for_each(ends_well);
    gateway.assert_idle();
}

#[test]
fn streams_that_outlast_the_drain_end_with_an_error_event() {
    let engine = Upstream::start(|_, wire| {
        wire.stream_head();
        wire.chunk(delta("one"));
        wire.hang();
    });
    let gateway = Gateway::start(&[("a", &engine)], "drain: { timeout: 200ms }");
    let (mut client, mut answer) = open_stream(&gateway, "hi");
    gateway.drain();
    while client.next_piece(&mut answer) {}
    let events = crate::support::sse::parse(&answer.body);
    assert_eq!(events.len(), 2, "{answer:?}");
    assert!(events[1].json()["error"]["message"].is_string());
    engine.wait_for_close(0);
    gateway.assert_idle();
}
