//! What `/metrics` says, and that it stays as small as it is.

use crate::support::sse::{DONE, delta, finish, stream};
use crate::support::{Client, DEADLINE, Gateway, Upstream, chat, chat_stream, user, wait_until};

fn series(text: &str) -> usize {
    text.lines().filter(|line| !line.starts_with('#')).count()
}

#[test]
fn names_of_models_that_clients_make_up_are_one_series() {
    let engine = Upstream::json(r#"{"choices":[]}"#);
    let gateway = Gateway::start(&[("a", &engine)], "");
    let mut client = Client::connect(&gateway);
    let mut ask = |model: &str| {
        let body = format!(r#"{{"model":"{model}","messages":[]}}"#);
        client.chat(body).status
    };
    assert_eq!(ask("made-up"), 404);
    assert_eq!(ask("m"), 200);
    let before = series(&gateway.metrics());
    for n in 0..2000 {
        assert_eq!(ask(&format!("made-up-{n}")), 404);
    }
    let text = gateway.metrics();
    assert_eq!(series(&text), before);
    assert!(!text.contains("made-up"));
    let counted =
        |model: &str| gateway.metric("tidegate_requests_total", &[&format!("model=\"{model}\"")]);
    assert_eq!((counted("unknown"), counted("m")), (2001.0, 1.0));
}

#[test]
fn durations_of_minutes_fall_into_buckets_of_their_own() {
    let engine = Upstream::json(r#"{"choices":[]}"#);
    let gateway = Gateway::start(&[("a", &engine)], "");
    assert_eq!(gateway.chat(&chat(&user("hi"))).status, 200);
    let text = gateway.metrics();
    let bounds: Vec<f64> = text
        .lines()
        .filter(|line| line.starts_with("tidegate_request_duration_seconds_bucket"))
        .filter_map(|line| line.split("le=\"").nth(1)?.split('"').next()?.parse().ok())
        .filter(|bound: &f64| bound.is_finite())
        .collect();
    let bucket = |seconds: f64| bounds.iter().find(|bound| seconds <= **bound).copied();
    let of = [15.0, 90.0, 400.0, 1000.0].map(bucket);
    assert!(of.iter().all(Option::is_some), "{bounds:?}");
    assert!(of.windows(2).all(|two| two[0] < two[1]), "{of:?}");
}

#[test]
fn the_buckets_of_latencies_are_the_operators() {
    let engine = Upstream::json(r#"{"choices":[]}"#);
    let gateway = Gateway::start(&[("a", &engine)], "metrics: {latency_buckets: [0.5, 7200]}");
    assert_eq!(gateway.chat(&chat(&user("hi"))).status, 200);
    let buckets = gateway.metrics();
    let buckets: Vec<&str> = buckets
        .lines()
        .filter(|line| line.starts_with("tidegate_request_duration_seconds_bucket"))
        .filter_map(|line| line.split("le=\"").nth(1)?.split('"').next())
        .collect();
    assert_eq!(buckets, ["0.5", "7200", "+Inf"]);
}

#[test]
fn nothing_is_left_of_requests_however_they_end() {
    let engine = Upstream::start(|request, wire| match request.text() {
        text if text.contains("error") => {
            wire.json("400 Bad Request", r#"{"error":{"message":"no"}}"#);
        }
        text if text.contains("cut") => {
            wire.stream_head();
            wire.chunk(delta("a"));
            wire.reset();
        }
        text if text.contains("hang") => wire.hang(),
        text if text.contains("slow") => {
            wire.stream_head();
            wire.chunk(delta("a"));
            wire.hang();
        }
        _ => {
            wire.stream_head();
            for chunk in [delta("a"), finish("stop"), DONE.to_owned()] {
                wire.chunk(chunk);
            }
            wire.end();
        }
    });
    let settings = "response_cache: {enabled: true}\nquotas: {concurrent: 100, address: {concurrent: 100, tokens_per_minute: 1000000000}}\ncircuit_breaker: {enabled: false}\n";
    let backends =
        engine.yaml("a") + "  - {name: gone, url: 'http://127.0.0.1:1', models: [gone]}\n";
    let gateway = Gateway::with(&backends, settings);
    for round in 0..100 {
        let mut asked = Vec::new();
        for kind in ["fine", "error", "cut", "hang", "slow", "fine"] {
            let mut client = Client::connect(&gateway);
            let members = user(&format!("{kind} {round}")) + r#", "temperature": 0"#;
            client.start_chat(chat_stream(&members));
            asked.push((kind, client));
        }
        let mut client = Client::connect(&gateway);
        client.start_chat(r#"{"model":"gone","messages":[]}"#);
        asked.push(("gone", client));
        for (kind, mut client) in asked {
            match kind {
                "hang" => client.leave(),
                "slow" => {
                    let mut answer = client.head();
                    assert!(client.read_until(&mut answer, "a"));
                    client.leave();
                }
                _ => {
                    client.answer();
                }
            }
        }
    }
    gateway.assert_idle();
    wait_until("no permit is taken", DEADLINE, || {
        gateway.inner.quotas.permits.counts() == (0, 0)
    });
    assert_eq!(gateway.metric("tidegate_http_in_flight_requests", &[]), 0.0);
    assert_eq!(gateway.metric("tidegate_in_flight_requests", &[]), 0.0);
    assert_eq!(gateway.metric("tidegate_cache_flights", &[]), 0.0);
    assert_eq!(gateway.metric("tidegate_cache_flight_bytes", &[]), 0.0);
}

#[test]
fn hits_of_streams_are_counted_as_others_and_not_among_the_engines_times() {
    let engine = Upstream::start(|request, wire| {
        if request.json()["stream"] == true {
            wire.stream_head();
            wire.chunk(stream(&["a"]));
            wire.end();
        } else {
            wire.json("200 OK", r#"{"object":"chat.completion","choices":[{"index":0,"finish_reason":"stop","message":{"role":"assistant","content":"a"}}],"usage":{"prompt_tokens":1,"completion_tokens":1}}"#);
        }
    });
    let gateway = Gateway::start(&[("a", &engine)], "response_cache: {enabled: true}\n");
    let counted = |result: &str| {
        gateway.metric(
            "tidegate_cache_requests_total",
            &[&format!("result=\"{result}\"")],
        )
    };
    let times = || gateway.metric("tidegate_time_to_first_token_seconds_count", &[]);
    let zero = |text: &str| user(text) + r#", "temperature": 0"#;
    for (made, body) in [chat_stream(&zero("streamed")), chat(&zero("whole"))]
        .iter()
        .enumerate()
    {
        let n = made as f64;
        assert_eq!(gateway.chat(body).header("x-cache"), Some("MISS"));
        let measured = times();
        assert_eq!(gateway.chat(body).header("x-cache"), Some("HIT"));
        wait_until("both are counted", DEADLINE, || {
            (counted("miss"), counted("hit")) == (n + 1.0, n + 1.0)
        });
        assert_eq!(times(), measured, "a hit says nothing of an engine");
    }
}
