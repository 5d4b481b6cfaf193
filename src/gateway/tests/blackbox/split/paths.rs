//! Which path a request takes.

use super::*;
use crate::support::{DEADLINE, wait_until};

const ALL: [(&str, Script); 3] = [("p", prefills), ("d", answers), ("u", answers)];

#[test]
fn a_short_prompt_goes_to_the_decode_worker_and_a_long_one_through_prefill() {
    let fleet = Fleet::new(&ALL);
    let gateway = fleet.gateway("");
    let short = format!(r#"{{"model":"{MODEL}","messages":[{{"role":"user","content":"hi"}}]}}"#);
    let answer = chat(&gateway, &short);
    assert_eq!((path(&answer), answer.backend()), ("fast_decode", "d"));
    assert_eq!(answer.header("x-tidegate-prefill-backend"), None);
    assert_eq!(
        answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"],
        100,
        "its own"
    );
    assert_eq!(path(&chat(&gateway, &ask_stream())), "prefill_then_decode");
    assert_eq!(fleet.counts(), [("p", 1), ("d", 2)]);
    for path in ["fast_decode", "prefill_then_decode"] {
        let labels = [&*format!("path=\"{path}\"")];
        assert_eq!(
            gateway.metric("tidegate_split_requests_total", &labels),
            1.0
        );
    }
    let never = fleet.gateway("min_prefill_tokens: 100000");
    assert_eq!(path(&chat(&never, &ask_stream())), "fast_decode");
}

#[test]
fn both_legs_are_told_as_spans_of_one_trace() {
    let fleet = Fleet::new(&ALL);
    let collector = Upstream::json("{}");
    let tracing = format!(
        "tracing: {{ otlp_endpoint: 'http://{}' }}\n",
        collector.address
    );
    let gateway = fleet.gateway_with("", &tracing);
    let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
    let headers = format!("traceparent: 00-{trace}-00f067aa0ba902b7-01\r\n");
    let mut client = Client::connect(&gateway);
    let answer = client.post("/v1/chat/completions", &headers, ask_stream());
    assert_eq!(path(&answer), "prefill_then_decode");
    let exported = || -> String {
        let documents = collector.requests();
        documents.iter().map(|r| r.text().to_owned()).collect()
    };
    for name in ["prefill_leg", "decode_leg", "route", "request"] {
        let span = format!("\"name\":\"{name}\"");
        wait_until(name, DEADLINE, || exported().contains(&span));
    }
    for engine in ["p", "d"] {
        let asked = fleet.engine(engine).only_request();
        let parent = String::from_utf8_lossy(asked.header("traceparent").unwrap()).into_owned();
        let (of, span) = (&parent[3..35], &parent[36..52]);
        assert_eq!(of, trace);
        assert!(
            exported().contains(&format!("\"spanId\":\"{span}\"")),
            "{engine}"
        );
    }
}

#[test]
fn what_cannot_be_split_is_served_whole_by_a_unified_worker() {
    let fleet = Fleet::new(&ALL);
    let gateway = fleet.gateway("");
    let long = long();
    let prompts = json!({"model": MODEL, "prompt": [long, long]}).to_string();
    let input = json!({"model": MODEL, "input": long}).to_string();
    for (route, body) in [
        ("/v1/chat/completions", ask(json!({"n": 2}))),
        ("/v1/chat/completions", ask(json!({"prompt_logprobs": 1}))),
        ("/v1/completions", prompts),
        ("/v1/embeddings", input.clone()),
        ("/v1/responses", input),
    ] {
        let answer = Client::connect(&gateway).post(route, "", body);
        assert_eq!(
            (answer.status, path(&answer), answer.backend()),
            (200, "unified", "u"),
            "{route}"
        );
    }
    let strict = Fleet::new(&ALL[..2]);
    let gateway = strict.gateway("");
    let answer = chat(&gateway, &ask(json!({"n": 2})));
    assert_eq!((answer.status, &*code(&answer)), (503, "no_unified_worker"));
    let tokens = json!({"model": MODEL, "prompt": "x"}).to_string();
    let answer = Client::connect(&gateway).post("/tokenize", "", tokens);
    assert_eq!(answer.status, 200, "any worker can do that");
}

#[test]
fn a_model_without_a_pair_is_served_by_whoever_serves_it() {
    let fleet = Fleet::new(&ALL);
    let other = Upstream::start(answers);
    let backends = fleet.engines.iter().map(|(name, role, engine)| {
        format!(
            "  - {{ name: {name}, role: {role}, url: 'http://{}', models: [{MODEL}] }}\n",
            engine.address
        )
    });
    let backends = backends.collect::<String>() + &other.yaml_for("o", &["other"]);
    let gateway = Gateway::with(&backends, "disaggregated_serving: { enabled: true }");
    let body = ask(json!({"model": "other"}));
    let answer = chat(&gateway, &body);
    assert_eq!((path(&answer), answer.backend()), ("unified", "o"));
    let unknown = chat(&gateway, &ask(json!({"model": "nobody"})));
    assert_eq!(unknown.status, 404);
}

#[test]
fn without_a_prefill_worker_a_unified_one_stands_in_and_never_in_silence() {
    // last of all, or another one may be given its port
    let fleet = Fleet::of(vec![
        ("d", Upstream::start(answers)),
        ("u", Upstream::start(answers)),
        ("p", Upstream::nobody()),
    ]);
    let gateway = fleet.gateway("fallback_to_unified: true");
    let answer = chat(&gateway, &ask_stream());
    assert_eq!(
        (answer.status, path(&answer), answer.backend()),
        (200, "fallback", "u")
    );
    let labels = ["step=\"prefill\"", "reason=\"no_worker\""];
    assert_eq!(
        gateway.metric("tidegate_split_fallbacks_total", &labels),
        1.0
    );
    let strict = fleet.gateway("fallback_to_unified: false");
    let answer = chat(&strict, &ask_stream());
    assert_eq!((answer.status, &*code(&answer)), (503, "no_prefill_worker"));
    assert!(answer.header("retry-after").is_some());
    assert_eq!(fleet.engine("d").count(), 0, "decode is untouched");
    assert_eq!(
        gateway.metric("tidegate_split_failures_total", &["step=\"prefill\""]),
        1.0
    );
}

#[test]
fn without_a_decode_worker_the_error_says_so() {
    let fleet = Fleet::of(vec![
        ("p", Upstream::start(prefills)),
        ("d", Upstream::nobody()),
    ]);
    let gateway = fleet.gateway("");
    let answer = chat(&gateway, &ask_stream());
    assert_eq!((answer.status, &*code(&answer)), (503, "no_decode_worker"));
    assert_eq!(
        fleet.engine("p").count(),
        0,
        "nothing is computed for nobody"
    );
}

#[test]
fn requests_of_one_session_meet_at_one_prefill_worker() {
    let fleet = Fleet::new(&[
        ("p1", prefills),
        ("p2", prefills),
        ("p3", prefills),
        ("d1", answers),
        ("d2", answers),
    ]);
    let gateway = fleet.gateway_with(
        "",
        "selection_strategy: ConsistentHash\nprefix_routing: { enabled: false }\n",
    );
    for _ in 0..20 {
        let session = "x-session-id: s-1\r\n";
        let answer = Client::connect(&gateway).post("/v1/chat/completions", session, ask_stream());
        assert_eq!(answer.status, 200);
    }
    let prefills: Vec<_> = fleet
        .counts()
        .into_iter()
        .filter(|(name, _)| name.starts_with('p'))
        .collect();
    assert_eq!(prefills.len(), 1, "{prefills:?}");
}

#[test]
fn decode_workers_share_what_they_hold_by_their_weights() {
    fn endless(_: &Request, wire: &mut Wire) {
        wire.stream_head();
        wire.chunk(sse::delta("x"));
        wire.hang();
    }
    let fleet = Fleet::new(&[("p", prefills), ("d1", endless), ("d2", endless)]);
    let backends = fleet.engines.iter().map(|(name, role, engine)| {
        let weight = if *name == "d2" { 2 } else { 1 };
        format!("  - {{ name: {name}, role: {role}, weight: {weight}, url: 'http://{}', models: [{MODEL}] }}\n", engine.address)
    });
    let gateway = Gateway::with(
        &backends.collect::<String>(),
        "disaggregated_serving: { enabled: true }",
    );
    let mut clients = Vec::new();
    for _ in 0..30 {
        let mut client = Client::connect(&gateway);
        client.start_chat(ask_stream());
        client.head();
        clients.push(client);
    }
    assert_eq!((gateway.in_flight("d1"), gateway.in_flight("d2")), (10, 20));
    drop(clients);
    gateway.assert_idle();
}

#[test]
fn operators_see_which_pairs_are_at_work_and_how_a_request_would_be_split() {
    fn endless(_: &Request, wire: &mut Wire) {
        wire.stream_head();
        wire.chunk(sse::delta("x"));
        wire.hang();
    }
    let fleet = Fleet::new(&[("p", prefills), ("d", endless), ("u", answers)]);
    let gateway = fleet.gateway("");
    let explain = |body: String| {
        Client::connect(&gateway)
            .post("/admin/explain", "", body)
            .json()["split"]
            .clone()
    };
    let split = explain(ask_stream());
    assert_eq!(
        (&split["path"], &split["prefill"], &split["worker"]),
        (&json!("prefill_then_decode"), &json!("p"), &json!("d"))
    );
    assert_eq!(explain(ask(json!({"n": 2})))["path"], "unified");
    assert_eq!(fleet.counts(), [], "nothing is sent");
    let mut client = Client::connect(&gateway);
    client.start_chat(ask_stream());
    client.head();
    let shown = crate::support::client::get(&gateway, "/admin/split").json();
    assert_eq!(
        (&shown["in_prefill"], &shown["in_decode"]),
        (&json!(0), &json!(1))
    );
    let pair = &shown["pairs"][0];
    assert_eq!(
        (&pair["prefill"], &pair["worker"]),
        (&json!("p"), &json!("d"))
    );
    drop(client);
    gateway.assert_idle();
    let shown = crate::support::client::get(&gateway, "/admin/split").json();
    assert_eq!(shown["pairs"], json!([]));
}

#[test]
fn decode_workers_that_wait_for_the_other_leg_are_never_asked_alone() {
    let short = format!(r#"{{"model":"{MODEL}","messages":[{{"role":"user","content":"hi"}}]}}"#);
    for (connector, expected) in [
        ("sglang", "prefill_then_decode"),
        ("p2p_nccl", "prefill_then_decode"),
        ("nixl", "fast_decode"),
        ("mooncake", "fast_decode"),
    ] {
        let fleet = Fleet::new(&ALL);
        let gateway = fleet.gateway(&format!("connector: {connector}"));
        assert_eq!(path(&chat(&gateway, &short)), expected, "{connector}");
    }
}

#[test]
fn a_running_answer_is_a_pair_at_work_on_every_path() {
    fn endless(_: &Request, wire: &mut Wire) {
        wire.stream_head();
        wire.chunk(sse::delta("x"));
        wire.hang();
    }
    let fleet = Fleet::new(&[("p", prefills), ("d", endless), ("u", endless)]);
    let gateway = fleet.gateway("min_prefill_tokens: 100000");
    let mut client = Client::connect(&gateway);
    client.start_chat(ask_stream());
    assert_eq!(path(&client.head()), "fast_decode");
    assert_eq!(
        gateway.metric("tidegate_split_pairs", &["step=\"decode\""]),
        1.0
    );
    drop(client);
    gateway.assert_idle();
    assert_eq!(gateway.metric("tidegate_split_pairs", &[]), 0.0);
}

#[test]
fn what_workers_have_not_said_yet_is_no_reason_to_serve_whole_in_silence() {
    let fleet = Fleet::new(&ALL[1..]);
    let silent = Upstream::start(|_, wire| {
        wire.json("503 Service Unavailable", "{}"); // also when it is asked for its models
    });
    let backends = fleet.engines.iter().map(|(name, role, engine)| {
        format!(
            "  - {{ name: {name}, role: {role}, url: 'http://{}', models: [{MODEL}] }}\n",
            engine.address
        )
    });
    let silent = format!(
        "  - {{ name: p, role: prefill, url: 'http://{}' }}\n",
        silent.address
    );
    let backends = backends.collect::<String>() + &silent;
    let keys = "disaggregated_serving: { enabled: true, fallback_to_unified: false }";
    let gateway = Gateway::not_ready(&backends, keys);
    gateway.wait_for_state("d", "healthy");
    gateway.wait_for_state("u", "healthy");
    let answer = chat(&gateway, &ask_stream());
    assert_eq!((answer.status, &*code(&answer)), (503, "no_prefill_worker"));
    assert_eq!(fleet.counts(), []);
}

#[test]
fn clients_do_not_say_where_engines_fetch_from() {
    let fleet = Fleet::new(&ALL);
    for connector in ["shared_storage", "sglang", "p2p_nccl"] {
        let gateway = fleet.gateway(&format!("connector: {connector}"));
        for members in [json!({}), json!({"n": 2})] {
            let mut body: Value = serde_json::from_str(&ask(members)).unwrap();
            for (name, value) in [
                ("bootstrap_host", json!("evil")),
                ("bootstrap_port", json!(1)),
                ("bootstrap_room", json!(2)),
                ("kv_transfer_params", json!({"remote_host": "evil"})),
                ("disaggregated_params", json!({})),
            ] {
                body[name] = value;
            }
            let id = "x-request-id: ___prefill_addr_evil:1___decode_addr_evil:2_x\r\n";
            let answer =
                Client::connect(&gateway).post("/v1/chat/completions", id, body.to_string());
            assert_eq!(answer.status, 200);
        }
    }
    let requests = fleet
        .engines
        .iter()
        .flat_map(|(.., engine)| engine.requests());
    for request in requests {
        assert!(!request.text().contains("evil"), "{}", request.text());
        let id = String::from_utf8_lossy(request.header("x-request-id").unwrap()).into_owned();
        assert!(!id.contains("evil"), "{id}");
    }
}
