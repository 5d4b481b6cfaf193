//! Streams pass as the engine wrote them, and every way in which one can break is visible.

use crate::support::client::Ended;
use crate::support::sse::{self, DONE, delta, finish, parse, text_of, usage};
use crate::support::{
    Client, DEADLINE, Gateway, Signal, Upstream, chat, chat_stream, client, ms, user, wait_until,
};
use std::time::{Duration, Instant};

const COUNTS_USAGE: &str = "
upstream: { request_stream_usage: true }
model_aliases: { gpt: m }
";
const ASKS_USAGE: &str = r#""stream_options":{"include_usage":true}"#;

/// A stream body for the alias, which makes the gateway rewrite every event.
fn aliased(members: &str) -> String {
    format!(r#"{{"model":"gpt","stream":true,{members}}}"#)
}

/// Sends `stream` in pieces cut at the offsets that the request's `user` names.
fn cutter(stream: String) -> Upstream {
    Upstream::start(move |request, wire| {
        let json = request.json();
        let cuts = json["user"].as_str().unwrap().split(' ');
        wire.stream_head();
        let mut from = 0;
        for cut in cuts.map(|cut| cut.parse::<usize>().unwrap()) {
            if cut > from {
                wire.chunk(&stream.as_bytes()[from..cut]);
                from = cut;
            }
        }
        wire.chunk(&stream.as_bytes()[from..]);
        wire.end();
    })
}

fn cut_at(cuts: &str) -> String {
    format!(r#""user":"{cuts}",{}"#, user("hi"))
}

#[test]
fn a_stream_cut_at_any_byte_reaches_the_client_unchanged_and_is_counted_once() {
    let text = delta("ab\"你🙂");
    let stream = [&text, &finish("stop"), &usage(3, 2), DONE].concat();
    let engine = cutter(stream.clone());
    let gateway = Gateway::start(&[("a", &engine)], COUNTS_USAGE);
    let mut client = Client::connect(&gateway);
    for cut in 0..stream.len() {
        let asked = chat_stream(&format!("{ASKS_USAGE},{}", cut_at(&cut.to_string())));
        let answer = client.chat(asked);
        assert_eq!(answer.text(), stream, "cut at {cut}");
    }
    let n = stream.len() as f64;
    assert_eq!(gateway.metric("tidegate_prompt_tokens_total", &[]), 3.0 * n);
    assert_eq!(
        gateway.metric("tidegate_completion_tokens_total", &[]),
        2.0 * n
    );
    let ttfts = gateway.metric("tidegate_time_to_first_token_seconds_count", &[]);
    assert_eq!(ttfts, n);
    assert_eq!(gateway.metric("tidegate_errors_total", &[]), 0.0);
    gateway.assert_idle();
}

#[test]
fn a_stream_cut_at_any_byte_is_edited_as_if_it_were_not_cut() {
    let text = [delta("ab\"你🙂"), finish("stop")].concat();
    let stream = [&text, &usage(3, 2), DONE].concat();
    let engine = cutter(stream.clone());
    let gateway = Gateway::start(&[("a", &engine)], COUNTS_USAGE);
    let renamed = [&text.replace("\"m\"", "\"gpt\""), DONE].concat();
    let mut client = Client::connect(&gateway);
    for cut in 0..stream.len() {
        let answer = client.chat(aliased(&cut_at(&cut.to_string())));
        assert_eq!(answer.text(), renamed, "cut at {cut}");
    }
    let n = stream.len() as f64;
    assert_eq!(gateway.metric("tidegate_prompt_tokens_total", &[]), 3.0 * n);
}

#[test]
fn a_character_split_over_three_chunks_arrives_whole() {
    let stream = sse::stream(&["你🙂"]);
    let engine = cutter(stream.clone());
    let gateway = Gateway::start(&[("a", &engine)], COUNTS_USAGE);
    let start = stream.find('你').unwrap();
    let mut client = Client::connect(&gateway);
    for first in start..=start + 7 {
        for second in first + 1..=start + 8 {
            let cuts = cut_at(&format!("{first} {second}"));
            let plain = client.chat(chat_stream(&cuts));
            assert_eq!(plain.text(), stream, "cuts at {first} and {second}");
            let edited = client.chat(aliased(&cuts));
            assert_eq!(text_of(&parse(&edited.body)), "你🙂");
        }
    }
}

#[test]
fn the_two_line_ends_between_events_may_come_in_different_chunks() {
    let pieces = [
        &["data: {A}\n", "\ndata: {B}\n", "\n"][..],
        &["data: {A}\r\n\r", "\ndata: {B}\r\n\r\n"],
    ];
    for pieces in pieces {
        let pieces = pieces.iter().map(|piece| {
            let piece = piece.replace("{A}", r#"{"model":"m","choices":[1]}"#);
            piece.replace(
                "{B}",
                r#"{"model":"m","choices":[{"finish_reason":"stop"}]}"#,
            )
        });
        let pieces: Vec<String> = pieces.collect();
        let sent = pieces.concat();
        let engine = Upstream::start(move |_, wire| {
            wire.stream(&pieces);
        });
        let gateway = Gateway::start(&[("a", &engine)], COUNTS_USAGE);
        let plain = gateway.chat(&chat_stream(&format!("{ASKS_USAGE},{}", user("hi"))));
        assert_eq!(plain.text(), sent);
        // an event that was not recognised as one would keep the engine's name
        let edited = parse(&gateway.chat(&aliased(&user("hi"))).body);
        let models: Vec<_> = edited.iter().map(|e| e.json()["model"].clone()).collect();
        assert_eq!(models, ["gpt", "gpt"]);
    }
}

#[test]
fn the_name_and_the_data_of_an_event_stay_together_when_they_come_apart() {
    let go = Signal::new();
    let wait = go.clone();
    let engine = Upstream::start(move |_, wire| {
        wire.stream_head();
        wire.chunk("event: response.in_progress\ndata: {}\n\nevent: response.created\n");
        wait.wait();
        wire.chunk("data: {\"type\":\"response.created\"}\n");
        wire.chunk("\n");
        wire.end();
    });
    let gateway = Gateway::start(&[("a", &engine)], "");
    let mut client = Client::connect(&gateway);
    client.start(
        "/v1/responses",
        r#"{"model":"m","stream":true,"input":"hi"}"#,
    );
    let mut answer = client.head();
    assert!(client.read_until(&mut answer, "event: response.created\n"));
    go.raise();
    while client.next_piece(&mut answer) {}
    assert!(
        answer
            .text()
            .ends_with("event: response.created\ndata: {\"type\":\"response.created\"}\n\n")
    );
    let events = parse(&answer.body);
    assert_eq!(events.len(), 2, "{answer:?}");
    assert_eq!(events[1].name.as_deref(), Some("response.created"));
}

/// Sends `begin`, waits for the signal, and resets the connection.
fn resets_after(begin: String) -> (Upstream, Signal) {
    let go = Signal::new();
    let wait = go.clone();
    let engine = Upstream::start(move |_, wire| {
        wire.stream_head();
        wire.chunk(&begin);
        wait.wait();
        wire.reset();
    });
    (engine, go)
}

#[test]
fn the_error_event_is_not_glued_to_a_line_that_the_engine_left_open() {
    let half = r#"data: {"choices":[{"delta":{"content":"par"#;
    let (engine, go) = resets_after(delta("one") + half);
    let gateway = Gateway::start(&[("a", &engine)], "");
    let mut client = Client::connect(&gateway);
    client.start_chat(chat_stream(&user("hi")));
    let mut answer = client.head();
    assert!(client.read_until(&mut answer, "par"));
    go.raise();
    while client.next_piece(&mut answer) {}
    let events = parse(&answer.body);
    assert_eq!(events.len(), 3, "{answer:?}");
    assert!(
        half.ends_with(&events[1].data),
        "the open line is an event of its own"
    );
    assert_eq!(events[2].json()["error"]["code"], "stream_cut");
    assert!(!answer.text().contains("[DONE]"));
    gateway.assert_idle();
}

#[test]
fn a_reset_within_the_first_event_is_an_error_status_and_not_a_stream() {
    let (engine, go) = resets_after(r#"data: {"choices":[{"delta":{"content":"par"#.into());
    go.raise();
    let gateway = Gateway::start(&[("a", &engine)], "");
    let answer = gateway.chat(&chat_stream(&user("hi")));
    assert_eq!(answer.status, 502, "{answer:?}");
    assert_eq!(answer.json()["error"]["code"], "stream_cut");
}

#[test]
fn an_engine_that_refuses_a_stream_gives_its_own_status_and_words() {
    for status in ["400 Bad Request", "503 Service Unavailable"] {
        let body = r#"{"error":{"message":"maximum context length is 8192","code":400}}"#;
        let engine = Upstream::start(move |_, wire| {
            let kind = "content-type: application/json; charset=utf-8\r\n";
            wire.answer(status, kind, body);
        });
        let gateway = Gateway::start(&[("a", &engine)], "");
        let members = format!(r#""max_tokens":9000,{}"#, user("hi"));
        for asked in [chat_stream(&members), chat(&members)] {
            let answer = gateway.chat(&asked);
            assert_eq!(answer.status.to_string(), status[..3], "{answer:?}");
            assert_eq!(answer.text(), body);
            let kind = answer.header("content-type");
            assert_eq!(kind, Some("application/json; charset=utf-8"));
        }
    }
}

/// The ways in which a client can leave.
const LEAVINGS: [fn(Client); 2] = [Client::leave, Client::reset];

#[test]
fn a_client_that_leaves_ends_a_call_that_is_not_streamed() {
    for leave in LEAVINGS {
        let engines = [(); 2].map(|()| Upstream::start(|_, wire| wire.hang()));
        let gateway = Gateway::start(&[("a", &engines[0]), ("b", &engines[1])], "");
        let asked = || engines.iter().map(Upstream::count).sum::<usize>();
        let mut client = Client::connect(&gateway);
        client.start_chat(chat(&user("hi")));
        wait_until("an engine is asked", DEADLINE, || asked() == 1);
        leave(client);
        let engine = engines.iter().find(|engine| engine.count() == 1).unwrap();
        engine.wait_for_close(0);
        gateway.assert_idle();
        assert_eq!(asked(), 1, "nobody is left to retry for");
    }
}

#[test]
fn a_silent_client_that_leaves_before_the_first_token_is_noticed_at_once() {
    for leave in LEAVINGS {
        for head_first in [false, true] {
            let engine = Upstream::start(move |_, wire| {
                if head_first {
                    wire.stream_head();
                }
                wire.hang();
            });
            let gateway = Gateway::start(&[("a", &engine)], "");
            let mut client = Client::connect(&gateway);
            client.start_chat(chat_stream(&user("hi")));
            engine.wait_for_requests(1);
            leave(client);
            engine.wait_for_close(0);
            gateway.assert_idle();
        }
    }
}

#[test]
fn a_client_that_leaves_a_stream_between_two_tokens_is_noticed_at_once() {
    for leave in LEAVINGS {
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
        leave(client);
        engine.wait_for_close(0);
        gateway.assert_idle();
    }
}

#[test]
fn an_answer_names_the_model_as_the_client_did_streamed_or_not() {
    let whole = r#"{"id":"1","model":"m","choices":[{"message":{"content":"\"model\":\"m\""}}]}"#;
    let stream = sse::stream(&["\"model\":\"m\""]);
    let sent = stream.clone();
    let engine = Upstream::start(move |request, wire| {
        if request.json()["stream"] == true {
            wire.stream(&[&sent]);
        } else {
            wire.json("200 OK", whole);
        }
    });
    let gateway = Gateway::start(&[("a", &engine)], "model_aliases: { gpt: m }");
    let asked = format!(r#"{{"model":"gpt",{}}}"#, user("hi"));
    let answer = gateway.chat(&asked);
    let renamed = whole.replacen(r#""model":"m""#, r#""model":"gpt""#, 1);
    assert_eq!(answer.text(), renamed);
    let answer = gateway.chat(&aliased(&user("hi")));
    assert_eq!(
        answer.text(),
        stream.replace(r#""model":"m","#, r#""model":"gpt","#)
    );
    assert!(engine.requests().iter().all(|r| r.json()["model"] == "m"));
}

#[test]
fn an_engines_error_about_an_alias_reads_the_same_streamed_or_not() {
    let body = r#"{"error":{"message":"The model `m` has no chat template","code":400}}"#;
    let engine = Upstream::start(move |_, wire| {
        wire.json("400 Bad Request", body);
    });
    let gateway = Gateway::start(&[("a", &engine)], "model_aliases: { gpt: m }");
    let whole = gateway.chat(&format!(r#"{{"model":"gpt",{}}}"#, user("hi")));
    let streamed = gateway.chat(&aliased(&user("hi")));
    assert_eq!((whole.status, streamed.status), (400, 400));
    assert_eq!(whole.text(), body);
    assert_eq!(whole.text(), streamed.text());
}

const SHORT_LIMITS: &str = "
upstream: { first_byte_timeout: 1s, first_byte_timeout_non_streaming: 1s, idle_timeout: 1s }
";

#[test]
fn a_stream_that_flows_may_last_longer_than_every_limit() {
    let engine = Upstream::start(|_, wire| {
        wire.stream_head();
        for _ in 0..10 {
            wire.chunk(delta("x"));
            wire.pause(ms(250));
        }
        wire.chunk(finish("stop") + DONE);
        wire.end();
    });
    let gateway = Gateway::start(&[("a", &engine)], SHORT_LIMITS);
    let answer = gateway.chat(&chat_stream(&user("hi")));
    assert_eq!(answer.ended, Ended::Clean);
    assert_eq!(text_of(&parse(&answer.body)), "x".repeat(10), "{answer:?}");
}

#[test]
fn a_whole_answer_that_trickles_may_last_longer_than_every_limit() {
    let body = format!(r#"{{"choices":[],"x":"{}"}}"#, "x".repeat(20));
    let sent = body.clone();
    let engine = Upstream::start(move |_, wire| {
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n";
        wire.write(format!("{head}content-length: {}\r\n\r\n", sent.len()));
        for piece in sent.as_bytes().chunks(4) {
            wire.write(piece);
            wire.pause(ms(250));
        }
    });
    let gateway = Gateway::start(&[("a", &engine)], SHORT_LIMITS);
    for asked in [chat(&user("hi")), chat_stream(&user("hi"))] {
        let answer = gateway.chat(&asked);
        assert_eq!(answer.status, 200, "{answer:?}");
        assert_eq!(answer.text(), body);
    }
}

#[test]
fn a_whole_answer_that_falls_silent_is_a_timeout() {
    let engine = Upstream::start(move |_, wire| {
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n";
        wire.write(format!("{head}content-length: 100\r\n\r\n{{"));
        wire.hang();
    });
    let gateway = Gateway::start(&[("a", &engine)], SHORT_LIMITS);
    let answer = gateway.chat(&chat(&user("hi")));
    assert_eq!(answer.status, 504, "{answer:?}");
    engine.wait_for_close(0);
    let failures = ["backend=\"a\"", "outcome=\"failure\""];
    assert_eq!(
        gateway.metric("tidegate_backend_requests_total", &failures),
        1.0
    );
}

#[test]
fn a_pause_below_the_idle_limit_passes_and_a_longer_one_ends_with_an_error() {
    let engine = Upstream::start(|request, wire| {
        wire.stream_head();
        wire.chunk(delta("one"));
        if request.text().contains("thinks") {
            wire.pause(Duration::from_millis(1200));
            wire.chunk(delta("two") + &finish("stop") + DONE);
            wire.end();
        } else {
            wire.hang();
        }
    });
    let gateway = Gateway::start(&[("a", &engine)], "upstream: { idle_timeout: 2s }");
    let answer = gateway.chat(&chat_stream(&user("thinks")));
    assert_eq!(text_of(&parse(&answer.body)), "onetwo", "{answer:?}");
    let answer = gateway.chat(&chat_stream(&user("sleeps")));
    let events = parse(&answer.body);
    assert_eq!(events.len(), 2, "{answer:?}");
    assert_eq!(events[1].json()["error"]["code"], "idle_timeout");
    engine.wait_for_close(1);
    gateway.assert_idle();
    let timeouts = gateway.metric("tidegate_errors_total", &["kind=\"idle_timeout\""]);
    assert_eq!(timeouts, 1.0);
}

#[test]
fn a_stream_that_ends_before_its_first_event_is_an_error_status() {
    let engine = Upstream::start(|_, wire| {
        wire.stream::<&str>(&[]);
    });
    let gateway = Gateway::start(&[("a", &engine)], "");
    let answer = gateway.chat(&chat_stream(&user("hi")));
    assert_eq!(answer.status, 502, "{answer:?}");
    assert!(answer.json()["error"]["message"].is_string());
}

#[test]
fn a_stream_that_ends_early_never_gets_an_invented_end() {
    let events = ["1", "2", "3"].map(delta).concat();
    for tidy in [true, false] {
        let sent = events.clone();
        let engine = Upstream::start(move |_, wire| {
            wire.stream_head();
            wire.chunk(&sent);
            if tidy {
                wire.end();
            }
            wire.fin();
        });
        let gateway = Gateway::start(&[("a", &engine)], "");
        let failures = ["backend=\"a\"", "outcome=\"failure\""];
        let before = gateway.metric("tidegate_backend_requests_total", &failures);
        let answer = gateway.chat(&chat_stream(&user("hi")));
        let ours = answer.text().strip_prefix(&*events).unwrap();
        let seen = parse(ours.as_bytes());
        assert_eq!(seen.len(), 1, "{answer:?}");
        assert_eq!(seen[0].json()["error"]["code"], "stream_cut");
        gateway.assert_idle();
        let after = gateway.metric("tidegate_backend_requests_total", &failures);
        assert_eq!(after - before, 1.0);
    }
}

#[test]
fn a_stream_ends_with_its_last_chunk_and_the_connection_serves_on() {
    let stream = sse::stream(&["a", "b"]);
    let engine = Upstream::sse(stream.clone());
    let gateway = Gateway::start(&[("a", &engine)], "");
    let mut client = Client::connect(&gateway);
    for _ in 0..3 {
        let answer = client.chat(chat_stream(&user("hi")));
        assert_eq!((answer.ended, answer.text()), (Ended::Clean, &*stream));
    }
}

#[test]
fn a_last_event_with_text_reason_and_counts_passes_as_one() {
    let last = r#"data: {"id":"c1","created":17,"model":"m","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"end"},"finish_reason":"length"}],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}"#;
    let stream = format!("{}{last}\n\n{DONE}", delta("begin"));
    let engine = Upstream::sse(stream.clone());
    let gateway = Gateway::start(&[("a", &engine)], COUNTS_USAGE);
    let answer = gateway.chat(&chat_stream(&user("hi")));
    assert_eq!(answer.text(), stream);
    gateway.assert_idle();
    assert_eq!(gateway.metric("tidegate_prompt_tokens_total", &[]), 3.0);
}

#[test]
fn every_event_keeps_its_id_model_and_creation_time_when_events_are_edited() {
    let stream = [&*delta("a"), &*finish("stop"), &*usage(1, 1), DONE].concat();
    let engine = Upstream::sse(stream);
    let gateway = Gateway::start(&[("a", &engine)], COUNTS_USAGE);
    let answer = gateway.chat(&aliased(&format!("{ASKS_USAGE},{}", user("hi"))));
    let events = parse(&answer.body);
    assert_eq!(events.len(), 4, "{answer:?}");
    for event in &events[..3] {
        let json = event.json();
        assert_eq!(json["id"], "c1");
        assert_eq!(json["model"], "gpt");
        assert_eq!(json["created"], 17);
        assert_eq!(json["object"], "chat.completion.chunk");
    }
    assert_eq!(events[2].json()["usage"]["prompt_tokens"], 1);
}

#[test]
fn only_clients_that_ask_get_the_usage_event_and_all_are_counted() {
    let engine = Upstream::start(|request, wire| {
        let asked = request.json()["stream_options"]["include_usage"] == true;
        let counts = if asked { usage(3, 2) } else { String::new() };
        wire.stream(&[delta("a") + &finish("stop") + &counts + DONE]);
    });
    let gateway = Gateway::start(&[("a", &engine)], COUNTS_USAGE);
    let variants = [
        ("", false),
        (r#""stream_options":null,"#, false),
        (r#""stream_options":{"include_usage":false},"#, false),
        (r#""stream_options":{"x_engine":[1]},"#, false),
        (r#""stream_options":{"include_usage":true},"#, true),
    ];
    for (options, wanted) in variants {
        let answer = gateway.chat(&chat_stream(&format!("{options}{}", user("hi"))));
        let got = answer.text().contains("\"usage\"");
        assert_eq!(got, wanted, "{options}");
        assert!(answer.text().ends_with(DONE));
    }
    gateway.assert_idle();
    assert_eq!(gateway.metric("tidegate_prompt_tokens_total", &[]), 15.0);
    let kept = &engine.requests()[3].json()["stream_options"]["x_engine"];
    assert_eq!(*kept, serde_json::json!([1]));
}

#[test]
fn a_client_that_refuses_usage_is_not_overruled_where_nobody_counts() {
    let engine = Upstream::sse(sse::stream(&["a"]));
    let gateway = Gateway::start(&[("a", &engine)], "");
    let members = format!(
        r#""stream_options":{{"include_usage":false}},{}"#,
        user("hi")
    );
    let body = chat_stream(&members);
    gateway.chat(&body);
    assert_eq!(engine.only_request().text(), body);
}

#[test]
fn a_very_long_event_passes_as_it_comes_and_later_ones_are_still_read() {
    for (length, held) in [(70 << 10, true), (3 << 19, false), (20 << 20, false)] {
        let go = Signal::new();
        let wait = go.clone();
        let engine = Upstream::start(move |_, wire| {
            let long = delta(&"x".repeat(length));
            let (begin, rest) = long.split_at(long.len() / 2);
            wire.stream_head();
            wire.chunk(delta("first"));
            wire.chunk(begin);
            wait.wait();
            wire.chunk(rest);
            wire.chunk(finish("stop") + &usage(3, 2) + DONE);
            wire.end();
        });
        let gateway = Gateway::start(&[("a", &engine)], COUNTS_USAGE);
        let counted = gateway.metric("tidegate_prompt_tokens_total", &[]);
        let mut client = Client::connect(&gateway);
        client.start_chat(chat_stream(&user("hi")));
        let mut answer = client.head();
        if held {
            go.raise(); // short enough to be edited, which needs all of it
        }
        while answer.body.len() < length / 2 {
            assert!(client.next_piece(&mut answer), "{length} bytes");
        }
        go.raise();
        while client.next_piece(&mut answer) {}
        assert_eq!(answer.ended, Ended::Clean);
        let expected = delta("first") + &delta(&"x".repeat(length)) + &finish("stop") + DONE;
        assert!(answer.body == expected.as_bytes(), "{length} bytes");
        gateway.assert_idle();
        let after = gateway.metric("tidegate_prompt_tokens_total", &[]);
        assert_eq!(after - counted, 3.0);
    }
}

#[test]
fn a_very_long_first_event_does_not_hold_the_stream_back() {
    let go = Signal::new();
    let wait = go.clone();
    let long = delta(&"x".repeat(1 << 20));
    let sent = long.clone();
    let engine = Upstream::start(move |_, wire| {
        wire.stream_head();
        wire.chunk(&sent[..sent.len() / 2]);
        wait.wait();
        wire.chunk([&sent[sent.len() / 2..], &finish("stop"), DONE].concat());
        wire.end();
    });
    let gateway = Gateway::start(&[("a", &engine)], "");
    let mut client = Client::connect(&gateway);
    client.start_chat(chat_stream(&user("hi")));
    let mut answer = client.head();
    while answer.body.len() < 256 << 10 {
        assert!(client.next_piece(&mut answer));
    }
    go.raise();
    while client.next_piece(&mut answer) {}
    assert!(answer.body == [&*long, &*finish("stop"), DONE].concat().as_bytes());
}

#[test]
fn clients_that_stop_reading_hold_the_engine_back_and_lose_their_place() {
    const STREAMS: u64 = 10;
    const EACH: usize = 50 << 20;
    let engine = Upstream::start(|_, wire| {
        let piece = delta(&"x".repeat(64 << 10));
        wire.stream_head();
        for _ in 0..EACH / piece.len() {
            if !wire.chunk(&piece) {
                return;
            }
        }
        wire.chunk(finish("stop") + DONE);
        wire.end();
    });
    let settings = "server: { client_write_timeout: 2s }";
    let gateway = Gateway::start(&[("a", &engine)], settings);
    let clients: Vec<Client> = (0..STREAMS)
        .map(|_| {
            let mut client = Client::connect_small(&gateway, 64 << 10);
            client.start_chat(chat_stream(&user("hi")));
            client
        })
        .collect();
    engine.wait_for_requests(STREAMS as usize);
    for n in 0..STREAMS as usize {
        engine.wait_for_close(n);
    }
    gateway.assert_idle();
    // what the kernel holds on both sides of the gateway, and little more
    let per_stream = engine.written() / STREAMS;
    assert!(per_stream < 12 << 20, "{per_stream} bytes per stream");
    drop(clients);
    let failures = ["backend=\"a\"", "outcome=\"failure\""];
    let failed = gateway.metric("tidegate_backend_requests_total", &failures);
    assert_eq!(failed, 0.0, "a slow client is not the engine's fault");
}

#[test]
fn a_slow_reader_gets_all_of_a_stream_that_is_far_ahead_of_it() {
    let text = "x".repeat(64 << 10);
    let stream = sse::stream(&vec![&*text; 100]);
    let engine = Upstream::sse(stream.clone());
    let gateway = Gateway::start(&[("a", &engine)], "");
    let mut client = Client::connect_small(&gateway, 16 << 10);
    client.start_chat(chat_stream(&user("hi")));
    let mut answer = client.head();
    while client.next_piece(&mut answer) {
        std::thread::sleep(ms(1));
    }
    assert!(answer.body == stream.as_bytes());
}

#[test]
fn first_tokens_pass_at_once_whatever_encodings_the_client_accepts() {
    let go = Signal::new();
    let wait = go.clone();
    let engine = Upstream::start(move |_, wire| {
        wire.stream_head();
        wire.chunk(delta("first"));
        wait.wait();
        wire.chunk(finish("stop") + DONE);
        wire.end();
    });
    let gateway = Gateway::start(&[("a", &engine)], "");
    let mut client = Client::connect(&gateway);
    let accepts = "accept-encoding: gzip, br, deflate\r\n";
    let body = chat_stream(&user("hi"));
    client.send(client::request("/v1/chat/completions", accepts, body));
    let mut answer = client.head();
    assert!(client.read_until(&mut answer, "first"));
    go.raise();
    assert_eq!(answer.header("content-encoding"), None);
    assert_eq!(answer.header("x-accel-buffering"), Some("no"));
    let caching = answer.header("cache-control").unwrap();
    assert!(caching.contains("no-transform"), "{caching}");
    let asked = engine.only_request();
    assert_eq!(asked.header("accept-encoding"), None);
}

#[test]
fn a_client_that_stops_reading_and_then_leaves_is_noticed_at_once() {
    for leave in LEAVINGS {
        let engine = Upstream::start(|_, wire| {
            wire.stream_head();
            while wire.chunk(delta(&"x".repeat(64 << 10))) {}
        });
        let gateway = Gateway::start(&[("a", &engine)], "");
        let mut client = Client::connect_small(&gateway, 64 << 10);
        client.start_chat(chat_stream(&user("hi")));
        let (mut written, mut since) = (0, Instant::now());
        wait_until("the engine is held back", DEADLINE, || {
            // window probes may carry a few bytes all the same
            if engine.written() > written + (64 << 10) {
                (written, since) = (engine.written(), Instant::now());
            }
            written > 0 && since.elapsed() > ms(300)
        });
        leave(client);
        engine.wait_for_close(0);
        gateway.assert_idle();
        let timeouts = gateway.metric("tidegate_client_write_timeouts_total", &[]);
        assert_eq!(timeouts, 0.0);
    }
}

#[test]
fn a_last_event_without_its_blank_line_is_passed_on() {
    for end in ["data: [DONE]\n", "data: [DONE]"] {
        let stream = [&delta("a"), &finish("stop"), end].concat();
        let engine = Upstream::sse(stream.clone());
        let gateway = Gateway::start(&[("a", &engine)], COUNTS_USAGE);
        let options = [ASKS_USAGE, r#""x":1"#];
        for options in options {
            let members = format!("{options},{}", user("hi"));
            assert_eq!(gateway.chat(&chat_stream(&members)).text(), stream);
            let renamed = stream.replace("\"m\"", "\"gpt\"");
            assert_eq!(gateway.chat(&aliased(&members)).text(), renamed);
        }
    }
}

#[test]
fn comments_between_events_pass() {
    let engine = Upstream::start(|_, wire| {
        wire.stream_head();
        wire.chunk(": ping\n\n");
        wire.chunk(": ping\n\n");
        wire.chunk(delta("a"));
        wire.chunk(finish("stop") + DONE);
        wire.end();
    });
    let gateway = Gateway::start(&[("a", &engine)], COUNTS_USAGE);
    let wanted = [": ping\n\n: ping\n\n", &*delta("a"), &*finish("stop"), DONE].concat();
    let answer = gateway.chat(&chat_stream(&user("hi")));
    assert_eq!(answer.text(), wanted);
}

#[test]
fn nothing_follows_the_end_of_a_stream_whose_connection_stays_open_or_breaks() {
    let engine = Upstream::start(|request, wire| {
        wire.stream_head();
        wire.chunk(sse::stream(&["hi"]));
        match request.number {
            0 => wire.hang(), // never sends the last chunk
            _ => wire.reset(),
        }
    });
    let gateway = Gateway::start(&[("a", &engine)], "upstream: { idle_timeout: 200ms }");
    for _ in 0..2 {
        let answer = gateway.chat(&chat_stream(&user("hi")));
        assert_eq!(answer.text(), sse::stream(&["hi"]), "{answer:?}");
        assert_eq!(answer.ended, Ended::Clean);
    }
    assert_eq!(gateway.metric("tidegate_errors_total", &[]), 0.0);
    let success = ["outcome=\"success\""];
    assert_eq!(
        gateway.metric("tidegate_backend_requests_total", &success),
        2.0
    );
}

#[test]
fn a_pause_of_the_client_is_not_held_against_the_engine() {
    // so much that the client's pause fills every buffer on the way, and then a silence
    let (text, taken) = ("x".repeat(64 << 10), Signal::new());
    let go = taken.clone();
    let engine = Upstream::start(move |_, wire| {
        wire.stream_head();
        for _ in 0..300 {
            wire.chunk(delta(&text));
        }
        go.wait(); // the client has taken all of it by now
        wire.chunk(finish("stop"));
        wire.chunk(DONE);
        wire.end();
    });
    let gateway = Gateway::start(&[("a", &engine)], "upstream: { idle_timeout: 400ms }");
    let mut client = Client::connect_small(&gateway, 16 << 10);
    client.start_chat(chat_stream(&user("hi")));
    let mut answer = client.head();
    std::thread::sleep(ms(900)); // reads nothing for longer than the engine may be silent
    let all = 300 * delta(&"x".repeat(64 << 10)).len();
    while answer.body.len() < all {
        assert!(client.next_piece(&mut answer), "{answer:.300?}");
    }
    taken.raise();
    assert!(client.read_until(&mut answer, "[DONE]"), "{answer:.300?}");
    assert_eq!(gateway.metric("tidegate_errors_total", &[]), 0.0);
}

#[test]
fn a_reader_that_pauses_for_longer_than_the_idle_limit_still_gets_all() {
    let text = "x".repeat(64 << 10);
    let stream = sse::stream(&vec![&*text; 300]);
    let engine = Upstream::sse(stream.clone());
    let gateway = Gateway::start(&[("a", &engine)], "upstream: { idle_timeout: 300ms }");
    let mut client = Client::connect_small(&gateway, 16 << 10);
    client.start_chat(chat_stream(&user("hi")));
    let mut answer = client.head();
    for _ in 0..3 {
        assert!(client.next_piece(&mut answer));
        std::thread::sleep(ms(500));
    }
    while client.next_piece(&mut answer) {}
    assert!(answer.body == stream.as_bytes(), "{answer:.300?}");
}
