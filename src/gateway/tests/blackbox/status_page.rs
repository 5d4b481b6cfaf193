//! The status page, and the decisions that it shows.

use crate::support::client::get;
use crate::support::{
    Client, DEADLINE, Gateway, Upstream, chat, chat_stream, sse, user, wait_until,
};
use serde_json::Value;

fn decisions(gateway: &Gateway) -> Vec<Value> {
    let shown = get(gateway, "/admin/decisions").json();
    shown["decisions"].as_array().unwrap().clone()
}

#[test]
fn the_last_requests_are_told_with_their_reasons_and_without_their_words() {
    let engine = Upstream::start(|request, wire| {
        if request.text().contains("\"stream\":true") {
            wire.stream_head();
            wire.chunk(sse::delta("words of the engine"));
            wire.hang();
        } else {
            wire.json("200 OK", r#"{"choices":[]}"#);
        }
    });
    let keys = "api_keys: { keys: [{ name: k, key: 'a-secret-of-the-client' }] }\n";
    let settings = format!("{keys}admin: {{ token: 'a-secret-of-operators' }}\n");
    let gateway = Gateway::start(&[("a", &engine)], &settings);
    let key = "authorization: Bearer a-secret-of-the-client\r\nx-request-id: first\r\n";
    let body = chat(&user("words of the client"));
    let path = "/v1/chat/completions";
    assert_eq!(Client::connect(&gateway).post(path, key, &body).status, 200);
    let mut leaving = Client::connect(&gateway);
    let key = key.replace("first", "second");
    let streamed = chat_stream(&user("words of the client"));
    leaving.send(crate::support::client::request(path, &key, streamed));
    let mut answer = leaving.head();
    leaving.read_until(&mut answer, "words");
    leaving.leave();
    let refused = Client::connect(&gateway).post(path, "x-request-id: third\r\n", &body);
    assert_eq!(refused.status, 401);
    let admin = "authorization: Bearer a-secret-of-operators\r\n";
    let shown = || Client::connect(&gateway).get("/admin/decisions", admin);
    wait_until("all three have ended", DEADLINE, || {
        shown().json()["decisions"].as_array().unwrap().len() == 3
    });
    let answer = shown();
    let of = |id: &str| -> Value {
        let all = answer.json()["decisions"].as_array().unwrap().clone();
        all.into_iter().find(|d| d["request_id"] == id).unwrap()
    };
    let first = of("first");
    for (field, value) in [
        ("model", "m"),
        ("backend", "a"),
        ("reason", "prefix"),
        ("outcome", "ok"),
        ("route", "chat"),
        ("cache", "off"),
    ] {
        assert_eq!(first[field], value, "{first}");
    }
    assert_eq!(first["status"], 200);
    assert_eq!(of("second")["outcome"], "client_cancelled");
    assert_eq!(of("third")["outcome"], "unauthorized");
    assert_eq!(of("third")["reason"], "none");
    for secret in ["words", "secret"] {
        assert!(!answer.text().contains(secret), "{}", answer.text());
    }
    for path in ["/admin/decisions", "/admin/info"] {
        assert_eq!(get(&gateway, path).status, 401);
    }
    let info = Client::connect(&gateway).get("/admin/info", admin).json();
    assert_eq!(
        (&info["draining"], &info["in_flight"]),
        (&Value::Bool(false), &0.into())
    );
}

#[test]
fn so_many_requests_are_remembered_and_no_more() {
    let engine = Upstream::json(r#"{"choices":[]}"#);
    let gateway = Gateway::start(&[("a", &engine)], "");
    let mut client = Client::connect(&gateway);
    for n in 0..103 {
        let headers = format!("x-request-id: r{n}\r\n");
        client.post("/v1/chat/completions", &headers, chat(&user("hi")));
    }
    wait_until("the last one has ended", DEADLINE, || {
        decisions(&gateway)[0]["request_id"] == "r102"
    });
    let all = decisions(&gateway);
    assert_eq!((all.len(), &all[99]["request_id"]), (100, &"r3".into()));
}

#[test]
fn the_page_stands_alone_and_holds_no_data() {
    let engine = Upstream::json("{}");
    let settings = "admin: { listen: '127.0.0.1:0', token: let-me-in }\n";
    let gateway = Gateway::start(&[("backend-of-this-test", &engine)], settings);
    let mut operator = Client::connect_to(gateway.admin_address.unwrap());
    let mut nonces = Vec::new();
    for path in ["/", "/admin", "/admin/"] {
        let page = operator.get(path, "");
        assert_eq!(page.status, 200, "{path}");
        assert_eq!(
            page.header("content-type"),
            Some("text/html; charset=utf-8")
        );
        let policy = page.header("content-security-policy").unwrap();
        assert!(
            policy.starts_with("default-src 'none'; script-src 'nonce-"),
            "{policy}"
        );
        let nonce = policy.split("'nonce-").nth(1).unwrap()[..32].to_owned();
        assert!(page.text().contains(&format!("<script nonce=\"{nonce}\">")));
        nonces.push(nonce);
        for absent in [
            "backend-of-this-test",
            "http://",
            "https://",
            "innerHTML",
            "let-me-in",
        ] {
            assert!(!page.text().contains(absent), "{absent}");
        }
    }
    assert_ne!(nonces[0], nonces[1]);
    for path in ["/", "/admin/"] {
        assert_eq!(get(&gateway, path).status, 404, "the API has no page");
    }
    let without = Gateway::start(&[("a", &engine)], "");
    assert_eq!(get(&without, "/admin/").status, 200);
    assert_eq!(get(&without, "/").status, 404);
}
