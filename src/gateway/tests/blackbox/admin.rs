//! What operators ask the router: who may, what it knows, and why a request would go where it
//! would.

use crate::kv_modes::{
    GUESSING, announcing, completion, conversation, exact_gateway, token_prompt,
};
use crate::support::client::{get, post};
use crate::support::{Client, Gateway, Upstream};
use serde_json::{Value, json};
use std::sync::Arc;

fn engines() -> [Upstream; 2] {
    let engine = || Upstream::start(|_, wire| completion(wire, 0));
    [engine(), engine()]
}

#[test]
fn the_token_opens_admin_and_its_absence_closes_it() {
    let [a, b] = engines();
    let settings = format!("{GUESSING}admin: {{ token: let-me-in }}");
    let gateway = Gateway::start(&[("a", &a), ("b", &b)], &settings);
    let refused = get(&gateway, "/admin/kv-index");
    assert_eq!(refused.status, 401);
    assert_eq!(refused.json()["error"]["type"], "authentication_error");
    assert_eq!(post(&gateway, "/admin/explain", "{}").status, 401);
    for header in ["Authorization: Bearer let-me-in", "x-api-key: let-me-in"] {
        let mut client = Client::connect(&gateway);
        client.send(format!(
            "GET /admin/kv-index HTTP/1.1\r\nHost: t\r\n{header}\r\n\r\n"
        ));
        assert_eq!(client.answer().status, 200, "{header}");
    }
    assert!(!gateway.metrics().contains("let-me-in"));
}

#[test]
fn what_a_proxy_on_this_machine_passes_on_is_not_from_this_machine() {
    let [a, b] = engines();
    let gateway = Gateway::start(&[("a", &a), ("b", &b)], GUESSING);
    assert_eq!(get(&gateway, "/admin/kv-index").status, 200);
    for header in [
        "X-Forwarded-For: 10.0.0.9",
        "Forwarded: for=10.0.0.9",
        "Via: 1.1 proxy",
    ] {
        let mut client = Client::connect(&gateway);
        client.send(format!(
            "GET /admin/kv-index HTTP/1.1\r\nHost: t\r\n{header}\r\n\r\n"
        ));
        assert_eq!(client.answer().status, 403, "{header}");
    }
}

#[test]
fn a_page_of_another_site_cannot_use_the_browser_of_an_operator() {
    let [a, b] = engines();
    let gateway = Gateway::start(&[("a", &a), ("b", &b)], GUESSING);
    let drain = |origin: &str| {
        let headers = format!("origin: {origin}\r\n");
        Client::connect(&gateway).post("/admin/backends/a/drain", &headers, "")
    };
    for origin in ["https://evil.example.com", "null", "http://gateway.evil"] {
        assert_eq!(drain(origin).status, 403, "{origin}");
    }
    assert_eq!(
        drain("http://gateway").status,
        200,
        "the page of the host that is asked"
    );
}

#[test]
fn an_explanation_says_what_happens_next_and_sends_nothing() {
    let [a, b] = engines();
    let gateway = Gateway::start(&[("a", &a), ("b", &b)], GUESSING);
    let body = conversation("anna", 3);
    let home = gateway.chat(&body).backend().to_owned();
    let asked = a.count() + b.count();
    let explained = post(&gateway, "/admin/explain", &body);
    assert_eq!(explained.status, 200, "{explained:?}");
    let told = explained.json();
    assert_eq!(told["plan"]["backend"], *home);
    assert_eq!(told["plan"]["route"], "kv_index");
    assert_eq!(told["lookup"]["prompts"][0]["by"], "text");
    let of = |name: &str| -> Value {
        let candidates = told["candidates"].as_array().unwrap();
        candidates
            .iter()
            .find(|c| c["backend"] == *name)
            .unwrap()
            .clone()
    };
    let other = if home == "a" { "b" } else { "a" };
    assert!(of(&home)["score"].as_f64() > of(other)["score"].as_f64());
    assert_eq!(of(&home)["overlap"]["raw"], 1.0);
    assert_eq!(of(other)["overlap"]["blocks"], 0);
    assert_eq!(told["left_out"], json!([]));
    assert_eq!(a.count() + b.count(), asked, "no engine was asked");
    gateway.assert_idle();
    // a choice by turns is told without taking the turn
    let fresh = r#"{"model":"m","messages":[{"role":"user","content":"hi"}]}"#;
    let turn = post(&gateway, "/admin/explain", fresh).json();
    assert_eq!(turn["plan"]["route"], "strategy");
    assert_eq!(turn, post(&gateway, "/admin/explain", fresh).json());
    assert_eq!(gateway.chat(fresh).backend(), turn["plan"]["backend"]);
}

#[test]
fn what_could_not_be_served_is_explained_or_refused_as_there() {
    let [a, b] = engines();
    let gateway = Gateway::start(&[("a", &a), ("b", &b)], GUESSING);
    gateway.set_draining("a", true);
    let told = post(&gateway, "/admin/explain", conversation("anna", 3)).json();
    assert_eq!(
        told["left_out"],
        json!([{"backend": "a", "why": "draining"}])
    );
    let unknown = post(&gateway, "/admin/explain", r#"{"model":"x","prompt":"p"}"#).json();
    assert_eq!(unknown["plan"]["status"], 404);
    assert_eq!(post(&gateway, "/admin/explain", "{}").status, 400);
    let wrong = post(
        &gateway,
        "/admin/explain?route=/v1/nothing",
        r#"{"model":"m"}"#,
    );
    assert_eq!(wrong.status, 400);
    assert_eq!(wrong.json()["error"]["param"], "route");
}

#[test]
fn the_index_shows_modes_streams_and_sizes() {
    let (a, b) = (
        announcing(1, Arc::default()),
        Upstream::start(|_, wire| completion(wire, 0)),
    );
    let gateway = exact_gateway(&a, &b, 2);
    let shown = get(&gateway, "/admin/kv-index").json();
    let (first, second) = (&shown["backends"][0], &shown["backends"][1]);
    assert_eq!(
        (&first["mode"], &first["block_size"]),
        (&json!("exact"), &json!(16))
    );
    assert_eq!(first["streams"][0]["connected"], true);
    assert_eq!(first["streams"][0]["last_seq"], 0);
    assert_eq!(first["streams"][0]["ranks_seen"], json!([1]));
    assert_eq!(second["mode"], "approximate");
    assert_eq!(second["why"], "no event source is configured");
    assert_eq!(shown["index"]["blocks_applied"], 8);
    let told = post(&gateway, "/admin/explain", token_prompt()).json();
    assert_eq!(told["plan"]["backend"], "a");
    assert_eq!(told["candidates"][0]["overlap"]["rank"], 1);
    let off = Gateway::start(&[("a", &a)], "");
    assert_eq!(
        get(&off, "/admin/kv-index").json(),
        json!({"enabled": false})
    );
}

#[test]
fn a_backend_is_drained_and_taken_back_in_by_its_name() {
    use crate::support::{Client, DEADLINE, chat, chat_stream, sse, user, wait_until};
    let endless = |_: &crate::support::Request, wire: &mut crate::support::Wire| {
        wire.stream_head();
        wire.chunk(sse::delta("x"));
        wire.hang();
    };
    let (a, b) = (
        Upstream::start(endless),
        Upstream::json(r#"{"choices":[]}"#),
    );
    let gateway = Gateway::start(
        &[("a", &a), ("b", &b)],
        "selection_strategy: RoundRobin\nprefix_routing: { enabled: false }\n",
    );
    let post = |path: &str| Client::connect(&gateway).post(path, "", "");
    let answer = post("/admin/backends/b/drain");
    assert_eq!(
        (answer.status, &answer.json()["draining"]),
        (200, &true.into())
    );
    let mut running = Client::connect(&gateway);
    running.start_chat(chat_stream(&user("hi")));
    assert_eq!(running.head().backend(), "a");
    assert_eq!(post("/admin/backends/b/undrain").json()["draining"], false);
    let answer = post("/admin/backends/a/drain");
    assert_eq!(answer.json()["in_flight"], 1, "what runs goes on");
    for _ in 0..4 {
        let answer = gateway.chat(&chat(&user("hi")));
        assert_eq!((answer.status, answer.backend()), (200, "b"));
    }
    let shown = crate::support::client::get(&gateway, "/admin/backends").json();
    let states = shown["backends"].as_array().unwrap().iter();
    let states: Vec<_> = states
        .map(|of| {
            (
                of["name"].as_str().unwrap(),
                of["draining"].as_bool().unwrap(),
            )
        })
        .collect();
    assert_eq!(states, [("a", true), ("b", false)]);
    assert_eq!(post("/admin/backends/nobody/drain").status, 404);
    drop(running);
    wait_until("it has ended", DEADLINE, || gateway.in_flight("a") == 0);
}
