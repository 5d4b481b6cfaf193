//! Which answers come out of the cache, for whom, and in which shape.

use crate::support::client::{Answer, request};
use crate::support::sse::{self, DONE, delta, finish, parse, text_of, usage};
use crate::support::{
    Client, DEADLINE, Gateway, MODEL, Upstream, Wire, chat, chat_stream, user, wait_until,
};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

pub const ON: &str = "response_cache: { enabled: true }";

/// A good answer that says how many were given before it.
pub fn numbered(number: usize) -> String {
    json!({
        "id": format!("c{number}"), "object": "chat.completion", "created": 1, "model": MODEL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": format!("answer {number}")}, "logprobs": null, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14},
    })
    .to_string()
}

/// Answers each call anew, in the form that was asked for.
pub fn engine() -> Upstream {
    Upstream::start(|request, wire| {
        let body = request.json();
        if body["stream"] == true {
            let text = format!("answer {}", request.number);
            let mut stream = [delta(&text[..3]), delta(&text[3..]), finish("stop")].concat();
            if body["stream_options"]["include_usage"] == true {
                stream += &usage(11, 3);
            }
            wire.stream(&[stream + DONE]);
        } else {
            wire.json("200 OK", &numbered(request.number));
        }
    })
}

pub fn text(answer: &Answer) -> String {
    if answer
        .header("content-type")
        .unwrap_or_default()
        .starts_with("text/event-stream")
    {
        return text_of(&parse(&answer.body));
    }
    answer.json()["choices"][0]["message"]["content"]
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

pub fn cached(answer: &Answer) -> (&str, Option<&str>) {
    (
        answer.header("x-cache").unwrap_or("none"),
        answer.header("x-cache-tier"),
    )
}

/// A deterministic chat.
pub fn zero(text: &str) -> String {
    chat(&format!("{}, \"temperature\": 0", user(text)))
}

fn zero_stream(text: &str, more: &str) -> String {
    chat_stream(&format!("{}, \"temperature\": 0{more}", user(text)))
}

#[test]
fn the_second_of_two_equal_requests_is_answered_without_an_engine() {
    let engine = engine();
    let gateway = Gateway::start(&[("a", &engine)], ON);
    let first = gateway.chat(&zero("hi"));
    assert_eq!(cached(&first), ("MISS", None));
    assert_eq!(first.backend(), "a");
    gateway.assert_idle();
    // other order, other spacing
    let body = format!(
        "{{ \"temperature\":0, \"messages\": [ {{\"content\":\"hi\",\"role\":\"user\"}} ],\"model\":\"{MODEL}\"}}"
    );
    let second = gateway.chat(&body);
    assert_eq!(second.status, 200);
    assert_eq!(cached(&second), ("HIT", Some("memory")));
    assert_eq!(second.header("x-tidegate-route"), Some("cache_hit"));
    assert!(second.header("age").unwrap().parse::<u64>().unwrap() < 60);
    assert_eq!(second.body, first.body, "byte for byte");
    assert_eq!(engine.count(), 1);
    let saved = |kind: &str| {
        gateway.metric(
            "tidegate_cache_saved_tokens_total",
            &[&format!("kind=\"{kind}\"")],
        )
    };
    assert_eq!((saved("prompt"), saved("completion")), (11.0, 3.0));
    assert_eq!(
        gateway.metric("tidegate_prompt_tokens_total", &[]),
        11.0,
        "the engine's own, once"
    );
    assert_eq!(
        gateway.metric("tidegate_cache_requests_total", &["result=\"hit\""]),
        1.0
    );
    gateway.assert_idle();
}

#[test]
fn whatever_can_change_an_answer_makes_it_another_one() {
    let engine = engine();
    let gateway = Gateway::start(&[("a", &engine)], ON);
    let base =
        json!({"model": MODEL, "temperature": 0, "messages": [{"role": "user", "content": "hi"}]});
    let mut bodies = vec![base.clone()];
    for (key, value) in [
        ("response_format", json!({"type": "json_object"})),
        ("stop", json!(["x"])),
        ("presence_penalty", json!(0.5)),
        ("frequency_penalty", json!(0.5)),
        ("logit_bias", json!({"1": 5})),
        ("seed", json!(7)),
        ("logprobs", json!(true)),
        ("top_logprobs", json!(2)),
        (
            "tools",
            json!([{"type": "function", "function": {"name": "f"}}]),
        ),
        ("tool_choice", json!("none")),
        ("parallel_tool_calls", json!(false)),
        ("reasoning_effort", json!("low")),
        ("chat_template_kwargs", json!({"enable_thinking": false})),
        ("max_tokens", json!(5)),
        ("max_tokens", json!(500)),
        ("top_p", json!(0.5)),
        ("service_tier", json!("flex")),
        ("user", json!("u")),
        ("metadata", json!({"a": "b"})),
        ("x_vendor_flag", json!(1)),
        ("x_vendor_flag", json!("1")),
    ] {
        let mut body = base.clone();
        body[key] = value;
        bodies.push(body);
    }
    for (asked, body) in bodies.iter().enumerate() {
        let answer = gateway.chat(&body.to_string());
        assert_eq!(cached(&answer).0, "MISS", "{body}");
        assert_eq!(engine.count(), asked + 1, "{body}");
    }
    gateway.assert_idle();
    for body in &bodies {
        assert_eq!(cached(&gateway.chat(&body.to_string())).0, "HIT", "{body}");
    }
    assert_eq!(engine.count(), bodies.len());
}

#[test]
fn only_deterministic_requests_are_cached_unless_the_client_insists_and_may() {
    let engine = engine();
    let gateway = Gateway::start(&[("a", &engine)], ON);
    let forbidden = Gateway::start(
        &[("a", &engine)],
        "response_cache: { enabled: true, allow_force: false }",
    );
    for members in [
        "",
        ", \"temperature\": 0.9",
        ", \"temperature\": 1, \"seed\": 5",
        ", \"top_p\": 0.5",
        ", \"temperature\": null",
    ] {
        let body = chat(&(user("hi") + members));
        for _ in 0..2 {
            let answer = gateway.chat(&body);
            assert_eq!(cached(&answer), ("BYPASS", None), "{members}");
        }
    }
    let forced = |gateway: &Gateway| {
        let body = chat(&(user("force") + ", \"temperature\": 0.7"));
        let mut client = Client::connect(gateway);
        let mut ask = || {
            let answer = client.post("/v1/chat/completions", "x-tidegate-cache: force\r\n", &body);
            gateway.assert_idle();
            cached(&answer).0.to_owned()
        };
        [ask(), ask()]
    };
    assert_eq!(forced(&gateway), ["MISS", "HIT"]);
    assert_eq!(forced(&forbidden), ["BYPASS", "BYPASS"]);
    let two = chat(&(user("two") + ", \"temperature\": 0, \"n\": 2"));
    gateway.chat(&two);
    gateway.assert_idle();
    assert_eq!(
        cached(&gateway.chat(&two)).0,
        "MISS",
        "one of two choices is no whole answer"
    );
    assert!(
        gateway.metric(
            "tidegate_cache_bypass_total",
            &["why=\"not_deterministic\""]
        ) >= 10.0
    );
    assert!(
        engine
            .requests()
            .iter()
            .all(|request| request.header("x-tidegate-cache").is_none())
    );
}

#[test]
fn embeddings_are_cached_and_other_paths_are_not() {
    let engine = Upstream::json(
        r#"{"object":"list","data":[{"index":0,"embedding":[0.1]}],"model":"m","usage":{"prompt_tokens":2,"total_tokens":2}}"#,
    );
    let gateway = Gateway::start(&[("a", &engine)], ON);
    let body = format!(r#"{{"model":"{MODEL}","input":"x","store":null}}"#);
    let post = |path: &str| Client::connect(&gateway).post(path, "", &body);
    assert_eq!(cached(&post("/v1/embeddings")).0, "MISS");
    gateway.assert_idle();
    let again = post("/v1/embeddings");
    assert_eq!(cached(&again), ("HIT", Some("memory")));
    assert_eq!(again.json()["usage"]["prompt_tokens"], 2);
    for path in ["/v1/rerank", "/tokenize", "/v1/responses"] {
        assert_eq!(cached(&post(path)).0, "BYPASS", "{path}");
        assert_eq!(cached(&post(path)).0, "BYPASS", "{path}");
    }
}

#[test]
fn cache_control_is_heeded_when_reading_and_when_keeping() {
    let engine = engine();
    let gateway = Gateway::start(&[("a", &engine)], ON);
    let ask = |header: &str| {
        let answer = Client::connect(&gateway).post("/v1/chat/completions", header, zero("hi"));
        gateway.assert_idle();
        (cached(&answer).0.to_owned(), text(&answer))
    };
    let said = |cache: &str, text: &str| (cache.to_owned(), text.to_owned());
    assert_eq!(
        ask("Cache-Control: no-store\r\n"),
        said("BYPASS", "answer 0")
    );
    assert_eq!(ask(""), said("MISS", "answer 1"), "nothing was kept");
    assert_eq!(
        ask("Cache-Control: no-store\r\n"),
        said("BYPASS", "answer 2"),
        "nor read"
    );
    assert_eq!(ask(""), said("HIT", "answer 1"));
    assert_eq!(
        ask("Cache-Control: max-age=0\r\nCache-Control: no-cache\r\n"),
        said("MISS", "answer 3")
    );
    assert_eq!(
        ask(""),
        said("HIT", "answer 3"),
        "the fresh one took its place"
    );
}

#[test]
fn tenants_never_see_each_others_answers() {
    let engine = engine();
    let gateway = Gateway::start(&[("a", &engine)], ON);
    let ask = |header: &str| {
        let answer = Client::connect(&gateway).post("/v1/chat/completions", header, zero("hi"));
        gateway.assert_idle();
        (cached(&answer).0.to_owned(), text(&answer))
    };
    let mut seen = Vec::new();
    for header in [
        "",
        "Authorization: Bearer one\r\n",
        "Authorization: Bearer two\r\n",
        "x-api-key: one\r\n",
    ] {
        let (state, text) = ask(header);
        assert_eq!(state, "MISS", "{header}");
        assert!(!seen.contains(&text));
        assert_eq!(ask(header), ("HIT".to_owned(), text.clone()), "{header}");
        seen.push(text);
    }
    assert!(!gateway.metrics().contains("Bearer"));
}

#[test]
fn callers_of_both_shapes_share_an_answer_and_each_gets_its_own() {
    for stream_first in [false, true] {
        let engine = engine();
        let gateway = Gateway::start(&[("a", &engine)], ON);
        let (json, stream) = (
            zero("hi"),
            zero_stream("hi", ", \"stream_options\": {\"include_usage\": true}"),
        );
        let bare = zero_stream("hi", "");
        let first = gateway.chat(if stream_first { &stream } else { &json });
        assert_eq!(text(&first), "answer 0");
        gateway.assert_idle();
        let as_json = gateway.chat(&json);
        assert_eq!(cached(&as_json), ("HIT", Some("memory")));
        assert_eq!(as_json.header("content-type"), Some("application/json"));
        assert_eq!(text(&as_json), "answer 0");
        assert_eq!(as_json.json()["object"], "chat.completion");
        assert_eq!(as_json.json()["choices"][0]["finish_reason"], "stop");
        assert_eq!(as_json.json()["usage"]["total_tokens"], 14);
        let as_stream = gateway.chat(&stream);
        assert_eq!(cached(&as_stream), ("HIT", Some("memory")));
        assert!(
            as_stream
                .header("content-type")
                .unwrap()
                .starts_with("text/event-stream")
        );
        let events = parse(&as_stream.body);
        assert_eq!(text_of(&events), "answer 0");
        assert!(as_stream.text().ends_with(DONE));
        assert!(as_stream.text().contains("\"finish_reason\":\"stop\""));
        assert!(
            events
                .iter()
                .any(|e| e.data != "[DONE]" && e.json()["usage"]["total_tokens"] == 14)
        );
        let without = gateway.chat(&bare);
        assert_eq!(text(&without), "answer 0");
        assert!(
            !without.text().contains("total_tokens"),
            "it did not ask: {}",
            without.text()
        );
        assert_eq!(engine.count(), 1);
    }
}

#[test]
fn who_wants_token_counts_is_not_given_an_answer_without_them() {
    let engine = engine();
    let gateway = Gateway::start(&[("a", &engine)], ON);
    gateway.chat(&zero_stream("hi", ""));
    gateway.assert_idle();
    assert_eq!(cached(&gateway.chat(&zero_stream("hi", ""))).0, "HIT");
    let json = gateway.chat(&zero("hi"));
    assert_eq!(cached(&json).0, "MISS", "that stream had no usage");
    gateway.assert_idle();
    assert_eq!(cached(&gateway.chat(&zero_stream("hi", ""))).0, "HIT");
    assert_eq!(engine.count(), 2);
}

#[test]
fn a_client_that_uses_another_name_for_the_model_shares_the_answer_under_its_name() {
    let engine = engine();
    let settings = format!("model_aliases: {{ nick: \"{MODEL}\" }}\n{ON}");
    let gateway = Gateway::start(&[("a", &engine)], &settings);
    let aliased = |body: String| body.replace("\"m\"", "\"nick\"");
    let first = gateway.chat(&aliased(zero("hi")));
    assert_eq!(first.json()["model"], "nick", "{first:?}");
    gateway.assert_idle();
    let own = gateway.chat(&zero("hi"));
    assert_eq!(own.json()["model"], MODEL);
    let stream = gateway.chat(&aliased(zero_stream("hi", "")));
    let events = parse(&stream.body);
    assert!(
        events
            .iter()
            .filter(|e| e.data != "[DONE]")
            .all(|e| e.json()["model"] == "nick")
    );
    assert_eq!(
        (cached(&own).0, cached(&stream).0, engine.count()),
        ("HIT", "HIT", 1)
    );
}

#[test]
fn broken_failed_and_unfinished_answers_are_passed_on_and_not_kept() {
    let good = numbered(9);
    let aborted = good.replace("\"stop\"", "\"abort\"");
    let failed = good.replace("\"stop\"", "\"error\"");
    let cut = delta("a") + &delta("b");
    let undone = cut.clone() + DONE;
    let half = [
        r#"data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}"#,
        "\n\n",
        r#"data: {"choices":[{"index":1,"delta":{"content":"b"},"finish_reason":null}]}"#,
        "\n\n",
        DONE,
    ]
    .concat();
    type Bad = Box<dyn Fn(&mut Wire) -> bool + Send + Sync>;
    let answer: Vec<Bad> = vec![
        Box::new(|w| w.json("400 Bad Request", r#"{"error":{"message":"x"}}"#)),
        Box::new(|w| w.json("500 Internal Server Error", r#"{"error":{"message":"x"}}"#)),
        Box::new(|w| w.answer("503 Service Unavailable", "retry-after: 1\r\n", "busy")),
        Box::new(|w| w.json("200 OK", r#"{"error":{"message":"x","code":400}}"#)),
        Box::new(move |w| w.json("200 OK", &aborted)),
        Box::new(move |w| w.json("200 OK", &failed)),
        Box::new(|w| {
            w.write("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n{\"choices\":");
            w.fin();
            true
        }),
        Box::new(|w| {
            w.write("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n");
            w.fin();
            true
        }),
        Box::new(move |w| w.stream(&[&undone])),
        Box::new(move |w| w.stream(&[&half])),
        Box::new(move |w| {
            w.stream_head();
            w.chunk(&cut);
            w.fin();
            true
        }),
    ];
    for (at, bad) in answer.into_iter().enumerate() {
        let turn = AtomicUsize::new(0);
        let engine = Upstream::start(move |request, wire| {
            if turn.fetch_add(1, Relaxed) == 0 {
                bad(wire);
            } else if request.json()["stream"] == true {
                wire.stream(&[sse::stream(&["good"])]);
            } else {
                wire.json("200 OK", &numbered(1));
            }
        });
        let gateway = Gateway::start(&[("a", &engine)], ON);
        let body = if at >= 8 {
            zero_stream("hi", ", \"n\": 2")
                .replace(", \"n\": 2", if at == 9 { ", \"n\": 2" } else { "" })
        } else {
            zero("hi")
        };
        let failures =
            || gateway.metric("tidegate_backend_requests_total", &["outcome=\"failure\""]);
        let before = failures();
        let mut client = Client::connect(&gateway);
        client.start_chat(&body);
        let first = client.answer();
        gateway.assert_idle();
        let second = gateway.chat(&body);
        assert_eq!(cached(&second).0, "MISS", "case {at}: {first:?}");
        assert_eq!((second.status, engine.count()), (200, 2), "case {at}");
        let unkept = gateway.metric("tidegate_cache_unkept_answers_total", &[]);
        assert!(unkept >= 1.0, "case {at}");
        if at == 4 || at == 5 {
            assert_eq!(
                (first.status, failures() - before),
                (200, 1.0),
                "passed on, and no success"
            );
        }
    }
}

#[test]
fn answers_over_the_limits_pass_through_and_are_not_kept() {
    let long = "x".repeat(30_000);
    let engine = Upstream::start(move |request, wire| {
        if request.json()["stream"] == true {
            wire.stream(&[delta(&long), delta(&long), finish("stop"), DONE.to_owned()]);
        } else {
            wire.json("200 OK", &numbered(0).replace("answer 0", &long));
        }
    });
    let small = "response_cache: { enabled: true, max_response_size: 20000, max_stream_buffer_size: 40000 }";
    let gateway = Gateway::start(&[("a", &engine)], small);
    for (body, length) in [(zero("hi"), 30_000), (zero_stream("hi", ""), 60_000)] {
        for _ in 0..2 {
            let answer = gateway.chat(&body);
            assert_eq!(cached(&answer).0, "MISS");
            assert_eq!(text(&answer).len(), length);
            gateway.assert_idle();
        }
    }
    assert_eq!(engine.count(), 4);
    assert_eq!(
        gateway.metric("tidegate_cache_unkept_answers_total", &["too_large"]),
        4.0
    );
    // too large for L1, which is all there is
    let engine = crate::cache::engine();
    let gateway = Gateway::start(
        &[("a", &engine)],
        "response_cache: { enabled: true, l1: { max_value_size: 50 } }",
    );
    gateway.chat(&zero("hi"));
    gateway.assert_idle();
    assert_eq!(cached(&gateway.chat(&zero("hi"))).0, "MISS");
    assert!(gateway.metric("tidegate_cache_stores_total", &["too_large"]) >= 1.0);
}

#[test]
fn entries_end_with_their_time_and_with_the_room_in_memory() {
    let engine = engine();
    let gateway = Gateway::start(
        &[("a", &engine)],
        "response_cache: { enabled: true, ttl: 300ms }",
    );
    gateway.chat(&zero("hi"));
    gateway.assert_idle();
    assert_eq!(cached(&gateway.chat(&zero("hi"))).0, "HIT");
    wait_until("the entry is too old", DEADLINE, || {
        cached(&gateway.chat(&zero("hi"))).0 == "MISS"
    });
    let bounded = Gateway::start(
        &[("a", &engine)],
        "response_cache: { enabled: true, l1: { max_bytes: 20000 } }",
    );
    for number in 0..200 {
        bounded.chat(&zero(&format!("prompt {number}")));
    }
    wait_until("sizes are told", DEADLINE, || {
        let bytes = bounded.metric("tidegate_cache_bytes", &["tier=\"memory\""]);
        bytes > 0.0
            && bytes <= 20_000.0
            && bounded.metric(
                "tidegate_cache_evictions_total",
                &["tier=\"memory\"", "why=\"size\""],
            ) >= 100.0
    });
}

#[test]
fn media_and_memory_of_servers_pass_the_cache_by() {
    let engine = engine();
    let gateway = Gateway::start(&[("a", &engine)], ON);
    let image = format!(
        r#"{{"model":"{MODEL}","temperature":0,"messages":[{{"role":"user","content":[{{"type":"image_url","image_url":{{"url":"https://example.org/a.png"}}}}]}}]}}"#
    );
    let store = chat(&(user("hi") + ", \"temperature\": 0, \"store\": true"));
    for body in [&image, &store] {
        assert_eq!(cached(&gateway.chat(body)).0, "BYPASS");
        assert_eq!(cached(&gateway.chat(body)).0, "BYPASS");
    }
    let inline = image.replace("https://example.org/a.png", "data:image/png;base64,AA");
    gateway.chat(&inline);
    gateway.assert_idle();
    assert_eq!(cached(&gateway.chat(&inline)).0, "HIT");
    let twice = format!(r#"{{"model":"{MODEL}","temperature":0,"messages":[],"x":1,"x":2}}"#);
    assert_eq!(
        cached(&gateway.chat(&twice)).0,
        "BYPASS",
        "engines may read either"
    );
}

#[test]
fn reasoning_tools_and_log_probabilities_come_back_for_both_shapes() {
    let chunk = |choice: Value| {
        format!(
            "data: {}\n\n",
            json!({"id": "c", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice]})
        )
    };
    let stream = [
        chunk(json!({"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null})),
        chunk(json!({"index": 0, "delta": {"reasoning_content": "thinking"}, "finish_reason": null})),
        chunk(json!({"index": 0, "delta": {"content": "So"}, "logprobs": {"content": [{"token": "So", "logprob": -0.5, "bytes": null, "top_logprobs": []}]}, "finish_reason": null})),
        chunk(json!({"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "t", "type": "function", "function": {"name": "f", "arguments": "{\"a\""}}]}, "finish_reason": null})),
        chunk(json!({"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]}, "finish_reason": null})),
        chunk(json!({"index": 0, "delta": {}, "finish_reason": "tool_calls"})),
        usage(1, 1),
        DONE.to_owned(),
    ]
    .concat();
    let engine = Upstream::sse(stream.clone());
    let gateway = Gateway::start(&[("a", &engine)], ON);
    let wanted = ", \"stream_options\": {\"include_usage\": true}";
    assert_eq!(gateway.chat(&zero_stream("hi", wanted)).text(), stream);
    gateway.assert_idle();
    let again = gateway.chat(&zero_stream("hi", wanted));
    assert_eq!(
        (cached(&again).0, again.text()),
        ("HIT", &*stream),
        "byte for byte"
    );
    let json = gateway.chat(&zero("hi")).json();
    let choice = &json["choices"][0];
    assert_eq!(choice["message"]["reasoning_content"], "thinking");
    assert_eq!(choice["message"]["content"], "So");
    assert_eq!(
        choice["message"]["tool_calls"][0]["function"]["arguments"],
        "{\"a\":1}"
    );
    assert_eq!(choice["logprobs"]["content"][0]["logprob"], -0.5);
    assert_eq!(engine.count(), 1);
}

#[test]
fn prompts_leave_no_trace_in_keys_metrics_or_headers() {
    let engine = engine();
    let gateway = Gateway::start(&[("a", &engine)], ON);
    let odd = "secret prompt \\n \\u0000 / .. \\u4e2d";
    for _ in 0..2 {
        let raw = request("/v1/chat/completions", "", zero(odd));
        let mut client = Client::connect(&gateway);
        client.send(raw);
        let answer = client.answer();
        let headers = format!("{:?}", answer.headers);
        assert!(!headers.contains("secret"), "{headers}");
        gateway.assert_idle();
    }
    assert!(!gateway.metrics().contains("secret"));
    assert_eq!(engine.count(), 1);
}

#[test]
fn an_operator_sees_what_is_kept_and_removes_it_by_model_tenant_or_key() {
    let engine = engine();
    let gateway = Gateway::with(&engine.yaml_for("a", &["m", "other"]), ON);
    let as_one = "Authorization: Bearer one\r\n";
    let ask = |model: &str, header: &str| {
        let body = zero("hi").replace("\"m\"", &format!("\"{model}\""));
        let answer = Client::connect(&gateway).post("/v1/chat/completions", header, body);
        gateway.assert_idle();
        cached(&answer).0.to_owned()
    };
    let all = |expected: [&str; 3]| {
        assert_eq!([ask("m", ""), ask("m", as_one), ask("other", "")], expected);
    };
    let delete = |query: &str| {
        let raw = format!("DELETE /admin/cache{query} HTTP/1.1\r\nhost: x\r\n\r\n");
        let mut client = Client::connect(&gateway);
        client.send(raw);
        client.answer()
    };
    let key = |header: &str, body: &str| {
        Client::connect(&gateway)
            .post("/admin/cache/key", header, body)
            .json()
    };
    all(["MISS", "MISS", "MISS"]);
    all(["HIT", "HIT", "HIT"]);
    let one = key(as_one, &zero("hi"));
    assert_eq!(
        (&one["cacheable"], &one["in_memory"]["form"]),
        (&json!(true), &json!("json"))
    );
    assert_eq!(one["key"].as_str().unwrap().len(), 64);
    assert_eq!(delete("?model=other").json()["tiers"][0]["removed"], 1);
    all(["HIT", "HIT", "MISS"]);
    let tenant = one["folders"]["tenant"].as_str().unwrap();
    assert_eq!(
        delete(&format!("?tenant={tenant}")).json()["tiers"][0]["removed"],
        1
    );
    all(["HIT", "MISS", "HIT"]);
    let path = key("", &zero("hi"))["path"].as_str().unwrap().to_owned();
    assert_eq!(
        delete(&format!("?key={path}")).json()["tiers"][0]["removed"],
        1
    );
    all(["MISS", "HIT", "HIT"]);
    wait_until("sizes are told", DEADLINE, || {
        let shown = crate::support::client::get(&gateway, "/admin/cache").json();
        shown["tiers"][0]["entries"] == 3 && shown["tiers"][0]["tier"] == "memory"
    });
    assert_eq!(delete("?modle=m").status, 400);
    assert_eq!(delete("").json()["complete"], true);
    all(["MISS", "MISS", "MISS"]);
    let not = key("", &chat(&user("hi")));
    assert_eq!(
        (&not["cacheable"], &not["why"]),
        (&json!(false), &json!("not_deterministic"))
    );
    assert!(not["because"].as_str().unwrap().contains("temperature"));
}

#[test]
fn an_answer_that_was_being_made_when_all_was_removed_is_not_kept() {
    let go = crate::support::Signal::new();
    let wait = go.clone();
    let engine = Upstream::start(move |request, wire| {
        if request.number == 0 {
            wait.wait();
        }
        wire.json("200 OK", &numbered(request.number));
    });
    let gateway = Gateway::start(&[("a", &engine)], ON);
    let mut client = Client::connect(&gateway);
    client.start_chat(zero("hi"));
    engine.wait_for_requests(1);
    let mut admin = Client::connect(&gateway);
    admin.send("DELETE /admin/cache HTTP/1.1\r\nhost: x\r\n\r\n");
    assert_eq!(admin.answer().status, 200);
    let newcomer = gateway.chat(&zero("hi"));
    assert_eq!(
        (cached(&newcomer).0, text(&newcomer)),
        ("MISS", "answer 1".to_owned())
    );
    go.raise();
    assert_eq!(text(&client.answer()), "answer 0");
    gateway.assert_idle();
    assert_eq!(text(&gateway.chat(&zero("hi"))), "answer 1");
    assert_eq!(
        gateway.metric("tidegate_cache_unkept_answers_total", &["purged"]),
        1.0
    );
}

#[test]
fn who_asks_for_a_stream_where_there_is_none_gets_what_the_engine_gives() {
    let engine = Upstream::json(
        r#"{"object":"list","data":[{"index":0,"embedding":[0.1]}],"model":"m","usage":{"prompt_tokens":2,"total_tokens":2}}"#,
    );
    let gateway = Gateway::start(&[("a", &engine)], ON);
    let body = format!(r#"{{"model":"{MODEL}","input":"x","stream":true}}"#);
    for state in ["MISS", "HIT"] {
        let answer = Client::connect(&gateway).post("/v1/embeddings", "", &body);
        assert_eq!((answer.status, cached(&answer).0), (200, state));
        assert_eq!(answer.json()["usage"]["prompt_tokens"], 2);
        gateway.assert_idle();
    }
    // a whole message for who asked for a stream of them
    let whole = Upstream::json(
        r#"{"type":"message","role":"assistant","content":[],"stop_reason":"end_turn"}"#,
    );
    let gateway = Gateway::start(&[("a", &whole)], ON);
    let body = chat_stream(&(user("hi") + ", \"temperature\": 0"));
    for _ in 0..2 {
        let answer = Client::connect(&gateway).post("/v1/messages", "", &body);
        assert_eq!(
            (answer.status, cached(&answer).0),
            (200, "MISS"),
            "passed on, not kept"
        );
        assert_eq!(answer.json()["stop_reason"], "end_turn");
        gateway.assert_idle();
    }
}

#[test]
fn a_stream_that_is_asked_for_in_an_odd_way_passes_the_cache_by() {
    let engine = engine();
    let gateway = Gateway::start(&[("a", &engine)], ON);
    for odd in ["\"yes\"", "1.0", "\"True\"", "{}"] {
        let body = chat(&format!(
            "{}, \"temperature\": 0, \"stream\": {odd}",
            user("hi")
        ));
        assert_eq!(cached(&gateway.chat(&body)).0, "BYPASS", "{odd}");
    }
    for plain in ["false", "null", "0"] {
        let body = chat(&format!(
            "{}, \"temperature\": 0, \"stream\": {plain}",
            user("hi")
        ));
        assert_ne!(cached(&gateway.chat(&body)).0, "BYPASS", "{plain}");
        gateway.assert_idle();
    }
    assert_eq!(engine.count(), 5, "the plain ones share an answer");
}

#[test]
fn streams_of_messages_and_responses_are_kept_each_in_their_own_form() {
    let messages = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{}}\n\nevent: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"type\":\"text_delta\",\"text\":\"a\"}}\n\nevent: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"}}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";
    let responses = "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"a\"}\n\nevent: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"status\":\"completed\",\"error\":null}}\n\n";
    for (path, stream) in [("/v1/messages", messages), ("/v1/responses", responses)] {
        let engine = Upstream::sse(stream.to_owned());
        let gateway = Gateway::start(&[("a", &engine)], ON);
        let body = chat_stream(&(user("hi") + ", \"temperature\": 0, \"store\": false"));
        for state in ["MISS", "HIT"] {
            let answer = Client::connect(&gateway).post(path, "", &body);
            assert_eq!(
                (cached(&answer).0, answer.text()),
                (state, stream),
                "{path}"
            );
            gateway.assert_idle();
        }
    }
}

#[test]
fn a_stream_of_which_no_answer_can_be_made_is_not_kept_for_who_wants_one() {
    let odd =
        r#"data: {"choices":[{"index":0,"delta":{"content":"\ud83d"},"finish_reason":null}]}"#;
    let stream = [odd, "\n\n", &finish("stop"), DONE].concat();
    let engine = Upstream::start(move |request, wire| {
        if request.json()["stream"] == true {
            wire.stream(&[&stream]);
        } else {
            wire.json("200 OK", &numbered(1));
        }
    });
    let settings = format!("upstream: {{ request_stream_usage: true }}\n{ON}");
    let gateway = Gateway::start(&[("a", &engine)], &settings);
    gateway.chat(&zero_stream("hi", ""));
    gateway.assert_idle();
    assert_eq!(text(&gateway.chat(&zero("hi"))), "answer 1");
}

#[test]
fn cookies_of_an_engine_reach_nobody() {
    let engine = Upstream::start(|_, wire| {
        wire.answer(
            "200 OK",
            "content-type: application/json\r\nset-cookie: who=a\r\n",
            numbered(1),
        );
    });
    let gateway = Gateway::start(&[("a", &engine)], ON);
    for _ in 0..2 {
        assert_eq!(gateway.chat(&zero("hi")).header("set-cookie"), None);
        gateway.assert_idle();
    }
    let other = gateway.chat(&chat(&user("not cached")));
    assert_eq!(other.header("set-cookie"), None, "nor anywhere else");
}
