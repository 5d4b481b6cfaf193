//! HTTP itself: connections that went stale, early and interim answers, odd headers, bodies that
//! are not what they should be.

use crate::support::client::Ended;
use crate::support::sse::{self, delta};
use crate::support::{
    Client, DEADLINE, Gateway, Health, Request, Upstream, Wire, chat, chat_stream, client, ms,
    user, wait_until,
};
use std::time::{Duration, Instant};

const GOOD: &str = r#"{"id":"1","choices":[]}"#;

/// A request that has a connection to reuse, and what the engine does with that connection.
fn second_request_over(close: fn(&Request, &mut Wire)) -> (Upstream, Gateway) {
    let engine = Upstream::start(move |request, wire| match request.number {
        0 => {
            wire.json("200 OK", GOOD);
            close(request, wire);
        }
        _ if request.number == 1 && request.connection == 0 => close(request, wire),
        _ => {
            wire.json("200 OK", GOOD);
        }
    });
    // probes would take connection numbers
    let gateway = Gateway::start(&[("a", &engine)], "health_checks: { enabled: false }");
    for _ in 0..2 {
        let answer = gateway.chat(&chat(&user("hi")));
        assert_eq!((answer.status, answer.text()), (200, GOOD), "{answer:?}");
    }
    assert_eq!(gateway.metric("tidegate_retries_total", &[]), 0.0);
    (engine, gateway)
}

#[test]
fn a_kept_connection_that_the_engine_closed_in_good_order_costs_the_client_nothing() {
    let (engine, _gateway) = second_request_over(|_, wire| wire.fin());
    assert_eq!(engine.count(), 2);
}

#[test]
fn a_kept_connection_that_the_engine_reset_costs_the_client_nothing() {
    let (engine, _gateway) = second_request_over(|_, wire| wire.reset());
    assert_eq!(engine.count(), 2);
}

#[test]
fn a_kept_connection_that_breaks_under_the_next_request_costs_the_client_nothing() {
    for ending in [Wire::reset, Wire::fin] {
        let engine = Upstream::start(move |request, wire| {
            if request.number == 1 {
                ending(wire);
            } else {
                wire.json("200 OK", GOOD);
            }
        });
        let gateway = Gateway::start(&[("a", &engine)], "");
        for _ in 0..2 {
            let answer = gateway.chat(&chat(&user("hi")));
            assert_eq!((answer.status, answer.text()), (200, GOOD), "{answer:?}");
        }
        let requests = engine.requests();
        assert_eq!(requests.len(), 3);
        assert_eq!(requests[0].connection, requests[1].connection);
        assert_ne!(requests[1].connection, requests[2].connection);
        let stale = gateway.metric("tidegate_upstream_connections_total", &["kind=\"stale\""]);
        assert!(stale >= 1.0);
    }
}

#[test]
fn a_kept_connection_that_breaks_within_an_answer_is_not_asked_again() {
    let engine = Upstream::start(|request, wire| {
        if request.number == 0 {
            wire.json("200 OK", GOOD);
        } else {
            wire.write("HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{\"id\"");
            wire.fin();
        }
    });
    let gateway = Gateway::start(&[("a", &engine)], "");
    assert_eq!(gateway.chat(&chat(&user("hi"))).status, 200);
    let answer = gateway.chat(&chat(&user("hi")));
    assert_eq!(answer.status, 502, "{answer:?}");
    assert_eq!(answer.json()["error"]["code"], "stream_cut");
    assert_eq!(engine.count(), 2);
}

#[test]
fn a_stream_after_a_stream_whose_connection_the_engine_closed_silently_succeeds() {
    let stream = sse::stream(&["a"]);
    let sent = stream.clone();
    let engine = Upstream::start(move |_, wire| {
        wire.stream(&[&sent]);
        wire.fin();
    });
    let gateway = Gateway::start(&[("a", &engine)], "");
    for pause in [0, 50, 0, 5] {
        let answer = gateway.chat(&chat_stream(&user("hi")));
        assert_eq!(answer.text(), stream, "{answer:?}");
        std::thread::sleep(ms(pause));
    }
}

#[test]
fn an_engines_early_refusal_reaches_a_client_that_is_still_uploading() {
    let body = r#"{"error":{"message":"too long","code":400}}"#;
    let engine = Upstream::before_body(move |_, wire| {
        wire.read_body(1000);
        let headers = "content-type: application/json\r\nconnection: close\r\n";
        wire.answer("400 Bad Request", headers, body);
        wire.fin();
    });
    let gateway = Gateway::start(&[("a", &engine)], "");
    let answer = gateway.chat(&chat(&user(&"x".repeat(10 << 20))));
    assert_eq!((answer.status, answer.text()), (400, body), "{answer:?}");
    gateway.assert_idle();
}

#[test]
fn our_own_refusal_of_a_large_body_can_be_read_by_a_client_that_sends_it_all() {
    let engine = Upstream::json(GOOD);
    let gateway = Gateway::start(&[("a", &engine)], "server: { max_request_body: 1MiB }");
    let large = chat(&user(&"x".repeat(10 << 20)));
    let announced = gateway.chat(&large);
    assert_eq!(announced.status, 413, "{announced:?}");
    assert_eq!(announced.json()["error"]["code"], "too_large");
    let mut client = Client::connect(&gateway);
    client.send(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\n\r\n",
    );
    for piece in large.as_bytes().chunks(1 << 16) {
        client.send(format!("{:x}\r\n", piece.len()));
        client.send(piece);
        client.send("\r\n");
    }
    client.send("0\r\n\r\n");
    let chunked = client.answer();
    assert_eq!(chunked.status, 413, "{chunked:?}");
    assert_eq!(engine.count(), 0);
    gateway.assert_idle();
}

#[test]
fn a_refusal_can_be_read_whatever_it_is_for_by_a_client_that_sends_a_large_body_first() {
    let engine = Upstream::json(GOOD);
    let gateway = Gateway::start(&[("a", &engine)], "drain: { timeout: 20s }");
    let large = chat(&user(&"x".repeat(10 << 20)));
    let refused = |line: &str| {
        let mut client = Client::connect(&gateway);
        let length = large.len();
        let head = format!("{line} HTTP/1.1\r\nhost: g\r\ncontent-length: {length}\r\n\r\n");
        assert!(client.send(head) && client.send(&large), "{line}");
        client.answer().status
    };
    for _ in 0..5 {
        assert_eq!(refused("POST /v1/nothing"), 404);
        assert_eq!(refused("PUT /v1/chat/completions"), 405);
    }
    let hold = gateway.inner.requests.enter(); // keeps the drain from ending
    gateway.drain();
    wait_until("new requests are refused", DEADLINE, || {
        gateway.chat(&chat(&user("hi"))).status == 503
    });
    for _ in 0..5 {
        assert_eq!(refused("POST /v1/chat/completions"), 503);
    }
    drop(hold);
}

#[test]
fn a_body_that_does_not_come_is_a_timeout_and_keeps_no_memory() {
    let engine = Upstream::json(GOOD);
    let settings = "server: { request_body_timeout: 200ms }";
    let gateway = Gateway::start(&[("a", &engine)], settings);
    let mut client = Client::connect(&gateway);
    let whole = client::request("/v1/chat/completions", "", chat(&user("hi")));
    client.send(&whole[..whole.len() - 1]);
    let answer = client.answer();
    assert_eq!(answer.status, 408, "{answer:?}");
    assert_eq!(engine.count(), 0);
    gateway.assert_idle();
}

#[test]
fn a_body_may_come_byte_by_byte() {
    let engine = Upstream::json(GOOD);
    let gateway = Gateway::start(&[("a", &engine)], "");
    let mut client = Client::connect(&gateway);
    for byte in client::request("/v1/chat/completions", "", chat(&user("hi"))) {
        client.send([byte]);
    }
    assert_eq!(client.answer().status, 200);
    assert_eq!(engine.only_request().text(), chat(&user("hi")));
}

#[test]
fn interim_answers_of_an_engine_are_not_its_answer() {
    let engine = Upstream::start(|_, wire| {
        wire.write("HTTP/1.1 100 Continue\r\n\r\n");
        wire.write("HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n");
        wire.json("200 OK", GOOD);
    });
    let gateway = Gateway::start(&[("a", &engine)], "");
    let mut client = Client::connect(&gateway);
    for _ in 0..2 {
        let answer = client.chat(chat(&user("hi")));
        assert_eq!((answer.status, answer.text()), (200, GOOD), "{answer:?}");
    }
}

#[test]
fn a_client_that_expects_a_continue_gets_one_and_the_engine_is_not_asked_for_it() {
    let engine = Upstream::json(GOOD);
    let gateway = Gateway::start(&[("a", &engine)], "");
    let mut client = Client::connect(&gateway);
    let body = chat(&user("hi"));
    let expects = "expect: 100-continue\r\n";
    client.send(client::request("/v1/chat/completions", expects, &body));
    assert_eq!(client.answer().status, 200);
    assert_eq!(engine.only_request().header("expect"), None);
}

#[test]
fn models_are_listed_from_what_is_known_though_backends_are_dead_or_hang() {
    let lists = Upstream::start(|request, wire| match request.path() {
        "/v1/models" => {
            wire.json("200 OK", r#"{"object":"list","data":[{"id":"m","object":"model"},{"id":"x","object":"model"}]}"#);
        }
        _ => {
            wire.json("200 OK", GOOD);
        }
    });
    let dead = Upstream::nobody();
    let hangs = Upstream::start(|_, wire| wire.hang());
    hangs.health(|_| Health::Hang);
    let backends = [
        format!("  - {{ name: lists, url: \"http://{}\" }}\n", lists.address),
        dead.yaml_for("dead", &["m", "y"]),
        hangs.yaml_for("hangs", &["m", "z"]),
    ];
    let aliases = "model_aliases: { gpt: m, nothing: not-served }";
    let gateway = Gateway::not_ready(&backends.concat(), aliases);
    let known = |wanted: &[&str]| {
        let answer = client::get(&gateway, "/v1/models");
        assert_eq!(answer.status, 200, "{answer:?}");
        let json = answer.json();
        let cards = json["data"].as_array().unwrap();
        let ids: Vec<&str> = cards.iter().map(|c| c["id"].as_str().unwrap()).collect();
        ids == wanted
    };
    wait_until("all models are known", DEADLINE, || {
        known(&["gpt", "m", "x", "y", "z"])
    });
    let started = Instant::now();
    for (path, status) in [("gpt", 200), ("x", 200), ("y", 200), ("not-served", 404)] {
        let answer = client::get(&gateway, &format!("/v1/models/{path}"));
        assert_eq!(answer.status, status, "{path}");
        assert!(!answer.text().contains("127.0.0.1"), "{answer:?}");
    }
    let mut client = Client::connect(&gateway);
    client.send("HEAD /v1/models HTTP/1.1\r\nhost: gateway\r\n\r\n");
    assert_eq!(client.head().status, 200);
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[test]
fn odd_bytes_in_headers_hurt_nobody() {
    let engine = Upstream::json(GOOD);
    let gateway = Gateway::start(&[("a", &engine)], "selection_strategy: ConsistentHash");
    let long = vec![b'x'; 64 << 10];
    let values: [&[u8]; 7] = [
        b"caf\xc3\xa9",
        b"\x80\xff",
        b"",
        &long,
        b"a b",
        b"\t",
        b"one",
    ];
    for name in ["x-request-id", "x-session-id", "user-agent", "x-other"] {
        for value in values {
            let header = [name.as_bytes(), b": ", value, b"\r\n"].concat();
            let body = chat(&user("hi"));
            let head = format!("content-length: {}\r\n\r\n", body.len());
            let begin = b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\n";
            let mut client = Client::connect(&gateway);
            // twice: duplicates are legal too
            let request: [&[u8]; 5] = [begin, &header, &header, head.as_bytes(), body.as_bytes()];
            client.send(request.concat());
            let answer = client.answer();
            assert!(
                [200, 400, 431].contains(&answer.status),
                "{name}: {answer:?}"
            );
            if answer.status != 200 {
                continue;
            }
            let id = answer.header("x-request-id").unwrap();
            assert!(
                id.bytes().all(|b| b.is_ascii_graphic()) && id.len() <= 128,
                "{id}"
            );
            let got = engine.requests().pop().unwrap();
            assert_eq!(got.header("x-request-id"), Some(id.as_bytes()));
            if value == b"one" && name == "x-request-id" {
                assert_eq!(id, "one");
            }
        }
    }
    assert_eq!(gateway.chat(&chat(&user("hi"))).status, 200);
    gateway.assert_idle();
}

#[test]
fn a_control_byte_in_a_header_is_refused_and_others_are_served_on() {
    let engine = Upstream::json(GOOD);
    let gateway = Gateway::start(&[("a", &engine)], "");
    let mut other = Client::connect(&gateway);
    assert_eq!(other.chat(chat(&user("hi"))).status, 200);
    for byte in [0u8, 1, 0x7f] {
        let mut client = Client::connect(&gateway);
        client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\nx-request-id: a");
        client.send([byte]);
        client.send("b\r\ncontent-length: 2\r\n\r\n{}");
        assert_eq!(client.answer().status, 400, "{byte}");
    }
    assert_eq!(other.chat(chat(&user("hi"))).status, 200);
}

#[test]
fn a_session_is_told_by_the_bytes_of_its_header() {
    let engines = [(); 4].map(|()| Upstream::json(GOOD));
    let names = ["a", "b", "c", "d"];
    let backends: Vec<_> = names.into_iter().zip(&engines).collect();
    let settings = "
selection_strategy: ConsistentHash
prefix_routing: { enabled: false }
";
    let gateway = Gateway::start(&backends, settings);
    let mut used = std::collections::BTreeSet::new();
    for session in 0x80..=0xbfu8 {
        let ask = || {
            let body = chat(&user("hi"));
            let mut request =
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\nx-session-id: \xe9".to_vec();
            request.push(session);
            request.extend(format!("\r\ncontent-length: {}\r\n\r\n{body}", body.len()).bytes());
            let mut client = Client::connect(&gateway);
            client.send(request);
            let answer = client.answer();
            assert_eq!(answer.status, 200, "{answer:?}");
            answer.backend().to_owned()
        };
        let first = ask();
        assert_eq!(first, ask());
        used.insert(first);
    }
    assert!(used.len() >= 3, "{used:?}");
}

#[test]
fn engines_are_spoken_to_in_http_1_1_and_nothing_newer_is_offered() {
    let engine = Upstream::json(GOOD);
    let gateway = Gateway::start(&[("a", &engine)], "");
    let clients: Vec<Client> = (0..50)
        .map(|_| {
            let mut client = Client::connect(&gateway);
            client.start_chat(chat(&user("hi")));
            client
        })
        .collect();
    for mut client in clients {
        assert_eq!(client.answer().status, 200);
    }
    for request in engine.requests() {
        assert_eq!(request.line, "POST /v1/chat/completions HTTP/1.1");
        assert_eq!(request.header("upgrade"), None);
        assert_eq!(request.header("http2-settings"), None);
        assert_eq!(request.header("connection"), None);
        let host = engine.address.to_string();
        assert_eq!(request.header("host"), Some(host.as_bytes()));
    }
}

#[test]
fn a_connection_is_not_used_beyond_its_age_so_that_names_are_resolved_anew() {
    let engine = Upstream::json(GOOD);
    let url = format!("http://localhost:{}", engine.address.port());
    let backend = format!("  - {{ name: a, url: \"{url}\", models: [m] }}\n");
    let settings = "
upstream: { connection_max_age: 500ms, pool_idle_timeout: 60s }
health_checks: { enabled: false }
";
    let gateway = Gateway::with(&backend, settings);
    let mut client = Client::connect(&gateway);
    let started = Instant::now();
    while started.elapsed() < ms(1800) {
        assert_eq!(client.chat(chat(&user("hi"))).status, 200);
        std::thread::sleep(ms(5));
    }
    let requests = engine.requests();
    let connections = requests.last().unwrap().connection + 1;
    assert!((2..=5).contains(&connections), "{connections} connections");
    let busiest = requests.iter().filter(|r| r.connection == 0).count();
    assert!(busiest > 1, "young connections are reused");
}

#[test]
fn a_success_whose_body_is_not_an_answer_is_the_engines_failure() {
    let bodies = ["<html>hello</html>", "{", "", "[1]", "null"];
    for body in bodies {
        let engine = Upstream::start(move |_, wire| {
            wire.answer("200 OK", "content-type: text/html\r\n", body);
        });
        let gateway = Gateway::start(&[("a", &engine)], "");
        let failures = ["backend=\"a\"", "outcome=\"failure\""];
        let count = || gateway.metric("tidegate_backend_requests_total", &failures);
        let before = count();
        let answer = gateway.chat(&chat(&user("hi")));
        assert_eq!(answer.status, 502, "{body}: {answer:?}");
        assert_eq!(answer.json()["error"]["code"], "bad_body");
        assert_eq!(answer.header("content-type"), Some("application/json"));
        assert_eq!(count() - before, 1.0);
    }
}

#[test]
fn an_error_within_a_success_is_passed_on_as_an_error() {
    let engine = Upstream::json(r#"{"error":{"code":502,"message":"worker lost"}}"#);
    let gateway = Gateway::start(&[("a", &engine)], "");
    let answer = gateway.chat(&chat(&user("hi")));
    assert_eq!(answer.status, 502, "{answer:?}");
    assert_eq!(answer.json()["error"]["message"], "worker lost");
}

#[test]
fn a_long_error_of_an_engine_is_cut_to_size_and_the_gateway_serves_on() {
    let long = format!(r#"{{"error":"{}"}}"#, "x".repeat(5 << 20));
    for status in ["429 Too Many Requests", "500 Internal Server Error"] {
        let long = long.clone();
        let engine = Upstream::start(move |request, wire| match request.number {
            0 => {
                wire.json(status, r#"{"error":{"message":"short"}}"#);
            }
            1 | 2 => {
                wire.json(status, &long);
            }
            _ => {
                wire.stream(&[sse::stream(&["ok"])]);
            }
        });
        let gateway = Gateway::start(&[("a", &engine)], "retry: { max_attempts: 1 }");
        let mut client = Client::connect(&gateway);
        let short = client.chat(chat(&user("hi")));
        assert_eq!(short.status.to_string(), status[..3], "{short:?}");
        assert_eq!(short.json()["error"]["message"], "short");
        for body in [chat(&user("hi")), chat_stream(&user("hi"))] {
            let answer = client.chat(body);
            assert_eq!(answer.status.to_string(), status[..3]);
            assert!(!answer.body.is_empty() && answer.body.len() < 1 << 20);
        }
        let answer = client.chat(chat_stream(&user("hi")));
        assert!(answer.text().contains("ok"), "{answer:?}");
        gateway.assert_idle();
    }
}

#[test]
fn an_error_that_is_not_json_is_wrapped_in_json() {
    for status in ["502 Bad Gateway", "503 Service Unavailable"] {
        let engine = Upstream::start(move |_, wire| {
            wire.answer(
                status,
                "content-type: text/plain\r\n",
                "upstream connect error",
            );
        });
        let gateway = Gateway::start(&[("a", &engine)], "");
        for body in [chat(&user("hi")), chat_stream(&user("hi"))] {
            let answer = gateway.chat(&body);
            assert_eq!(answer.status.to_string(), status[..3], "{answer:?}");
            let message = answer.json()["error"]["message"].to_string();
            assert!(message.contains("upstream connect error"), "{message}");
            assert_eq!(answer.header("content-type"), Some("application/json"));
        }
    }
}

#[test]
fn a_body_that_ends_with_the_connection_is_whole() {
    let stream = sse::stream(&["a"]);
    let sent = stream.clone();
    let engine = Upstream::start(move |request, wire| {
        if request.json()["stream"] == true {
            wire.write("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n");
            wire.write(&sent);
        } else {
            wire.write("HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n");
            wire.write(GOOD);
        }
        wire.fin();
    });
    let gateway = Gateway::start(&[("a", &engine)], "");
    assert_eq!(gateway.chat(&chat(&user("hi"))).text(), GOOD);
    assert_eq!(gateway.chat(&chat_stream(&user("hi"))).text(), stream);
}

#[test]
fn what_is_not_http_is_a_bad_gateway() {
    for garbage in ["SSH-2.0-OpenSSH\r\n", "HTTP/9.9 what\r\n\r\n"] {
        let engine = Upstream::start(move |_, wire| {
            wire.write(garbage);
            wire.fin();
        });
        let gateway = Gateway::start(&[("a", &engine)], "");
        let answer = gateway.chat(&chat(&user("hi")));
        assert_eq!(answer.status, 502, "{answer:?}");
        assert!(answer.json()["error"]["message"].is_string());
    }
}

#[test]
fn a_half_closed_client_counts_as_gone() {
    let engine = Upstream::start(|_, wire| {
        wire.stream_head();
        wire.chunk(delta("one"));
        wire.hang();
    });
    let gateway = Gateway::start(&[("a", &engine)], "");
    let mut client = Client::connect(&gateway);
    client.start_chat(chat_stream(&user("hi")));
    let mut answer = client.head();
    assert!(client.read_until(&mut answer, "one"));
    client.half_close();
    engine.wait_for_close(0);
    gateway.assert_idle();
}

#[test]
fn other_paths_and_methods_are_refused_and_not_forwarded() {
    let engine = Upstream::json(GOOD);
    let gateway = Gateway::start(&[("a", &engine)], "");
    for (line, status) in [
        ("GET /v1/chat/completions", 405),
        ("POST /v1/models", 405),
        ("GET /v1/files", 404),
        ("POST /admin/shutdown", 404),
        ("POST //v1/chat/completions", 404),
    ] {
        let mut client = Client::connect(&gateway);
        client.send(format!(
            "{line} HTTP/1.1\r\nhost: g\r\ncontent-length: 0\r\n\r\n"
        ));
        let answer = client.answer();
        assert_eq!(answer.status, status, "{line}");
        assert!(answer.json()["error"]["message"].is_string());
    }
    assert_eq!(engine.count(), 0);
}

#[test]
fn requests_sent_ahead_on_one_connection_are_answered_in_order() {
    let engine = Upstream::start(|request, wire| {
        let text = request.json()["user"].as_str().unwrap().to_owned();
        wire.stream(&[sse::stream(&[&text])]);
    });
    let gateway = Gateway::start(&[("a", &engine)], "");
    let mut client = Client::connect(&gateway);
    let body = |n: usize| chat_stream(&format!(r#""user":"{n}",{}"#, user("hi")));
    let ahead: Vec<u8> = (0..5)
        .flat_map(|n| client::request("/v1/chat/completions", "", body(n)))
        .collect();
    client.send(ahead);
    for n in 0..5 {
        assert_eq!(client.answer().text(), sse::stream(&[&n.to_string()]));
    }
}

#[test]
fn a_very_long_whole_answer_passes_with_its_length_and_a_cut_one_is_seen_to_be_cut() {
    for whole in [true, false] {
        let body = format!(r#"{{"data":["{}"]}}"#, "x".repeat(5 << 20));
        let sent = body.clone();
        let engine = Upstream::start(move |_, wire| {
            let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n";
            wire.write(format!("{head}content-length: {}\r\n\r\n", sent.len()));
            if whole {
                wire.write(&sent);
            } else {
                wire.write(&sent[..sent.len() - 1]);
                wire.fin();
            }
        });
        let gateway = Gateway::start(&[("a", &engine)], "");
        let asked = r#"{"model":"m","input":"hi"}"#;
        let answer = client::post(&gateway, "/v1/embeddings", asked);
        assert_eq!(answer.status, 200);
        let length = body.len().to_string();
        assert_eq!(answer.header("content-length"), Some(&*length));
        let ended = if whole { Ended::Clean } else { Ended::Cut };
        assert_eq!(answer.ended, ended);
        assert!(answer.body == body.as_bytes() || !whole);
        gateway.assert_idle();
    }
}

#[test]
fn a_very_long_whole_answer_names_the_model_as_the_client_did() {
    let filler = "x".repeat(3 << 20);
    let body = format!(
        r#"{{"object":"list","data0":["\"model\":\"m\"",{{"model":"m"}}], "model": "m","data":["{filler}"]}}"#
    );
    let sent = body.clone();
    let engine = Upstream::start(move |_, wire| {
        wire.json("200 OK", &sent);
    });
    let gateway = Gateway::start(&[("a", &engine)], "model_aliases: { gpt: m }");
    let asked = r#"{"model":"gpt","input":"hi"}"#;
    let answer = client::post(&gateway, "/v1/embeddings", asked);
    let renamed = body.replace(r#""model": "m""#, r#""model": "gpt""#);
    assert!(answer.body == renamed.as_bytes(), "{answer:.300?}");
}

#[test]
fn a_request_whose_length_is_ambiguous_is_refused_and_not_forwarded() {
    let engine = Upstream::json(GOOD);
    let gateway = Gateway::start(&[("a", &engine)], "");
    for framing in [
        "content-length: 2\r\ncontent-length: 30\r\n",
        "content-length: 2\r\ntransfer-encoding: chunked\r\n",
        "transfer-encoding: chunked, gzip\r\n",
        "content-length: -1\r\n",
        "content-length: +2\r\n",
    ] {
        let mut client = Client::connect(&gateway);
        let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\n";
        client.send(format!("{head}{framing}\r\n{{}}"));
        assert_eq!(client.answer().status, 400, "{framing}");
    }
    assert_eq!(engine.count(), 0);
}

#[test]
fn statuses_that_are_no_answer_to_a_request_are_a_bad_gateway() {
    for status in [
        "204 No Content",
        "301 Moved",
        "307 Temporary Redirect",
        "304 Not Modified",
        "101 Switching Protocols",
        "999 Odd",
    ] {
        let engine = Upstream::start(move |_, wire| {
            let head = "location: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n";
            wire.write(format!("HTTP/1.1 {status}\r\n{head}"));
        });
        let gateway = Gateway::start(&[("a", &engine)], "");
        let answer = gateway.chat(&chat(&user("hi")));
        assert_eq!(answer.status, 502, "{status}: {answer:?}");
        assert_eq!(answer.header("location"), None);
        assert!(answer.json()["error"]["message"].is_string());
        gateway.assert_idle();
    }
}

#[test]
fn a_redirect_of_an_engine_is_a_bad_gateway_though_it_speaks_json() {
    let engine = Upstream::start(|_, wire| {
        let headers = "location: http://10.0.0.1/\r\ncontent-type: application/json\r\n";
        wire.answer("301 Moved", headers, r#"{"detail":"moved"}"#);
    });
    let gateway = Gateway::start(&[("a", &engine)], "");
    let answer = gateway.chat(&chat(&user("hi")));
    assert_eq!(answer.status, 502, "{answer:?}");
    assert_eq!(answer.header("location"), None);
}

#[test]
fn a_body_that_is_not_framed_as_announced_is_refused_and_reaches_no_engine() {
    let engine = Upstream::json("{}");
    let gateway = Gateway::start(&[("a", &engine)], "");
    let mut client = Client::connect(&gateway);
    client.send("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{\"mod");
    client.send("el\r\nnot a chunk size\r\n");
    let answer = client.answer();
    assert_eq!(answer.status, 400, "{answer:?}");
    assert_eq!(engine.count(), 0);
    gateway.assert_idle();
}

#[test]
fn readiness_waits_for_a_backend_that_says_what_it_serves() {
    let engine = Upstream::start(|_, wire| {
        wire.json("404 Not Found", "{}");
    });
    let backends = format!("  - {{ name: a, url: 'http://{}' }}\n", engine.address);
    let gateway = Gateway::with(&backends, "");
    engine.wait_for_requests(2); // it was asked for its models, twice
    assert_eq!(client::get(&gateway, "/ready").status, 503);
    assert_eq!(gateway.chat(&chat(&user("hi"))).status, 503);
}

#[test]
fn bytes_behind_an_answer_are_never_taken_for_the_next_one() {
    let engine = Upstream::start(|_, wire| {
        let behind = "HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n{\"other\":\"\"}";
        wire.write(format!(
            "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{{}}{behind}"
        ));
    });
    let gateway = Gateway::start(&[("a", &engine)], "");
    for _ in 0..5 {
        assert_eq!(gateway.chat(&chat(&user("hi"))).text(), "{}");
    }
}
