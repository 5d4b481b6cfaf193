//! Web pages that call the API from a browser: which may, and what they may read.

use crate::support::client::Answer;
use crate::support::process::{SettingsFile, run};
use crate::support::{Client, Gateway, Request, Upstream, Wire, chat, chat_stream, sse, user};

const TWO: &str = "server: { cors: { allowed_origins: ['https://chat.example.com', 'http://localhost:5173'] } }\n";
const CHAT: &str = "/v1/chat/completions";

/// An engine that allows everybody, as vLLM does.
fn engine() -> Upstream {
    Upstream::start(|request: &Request, wire: &mut Wire| {
        let stream = request.text().contains("\"stream\":true");
        if !stream {
            let headers = "content-type: application/json\r\naccess-control-allow-origin: *\r\n";
            wire.answer("200 OK", headers, r#"{"choices":[]}"#);
            return;
        }
        wire.stream_head();
        wire.chunk(sse::delta("first"));
        wire.hang();
    })
}

fn preflight(gateway: &Gateway, path: &str, origin: &str, headers: &str) -> Answer {
    let mut client = Client::connect(gateway);
    client.send(format!(
        "OPTIONS {path} HTTP/1.1\r\nhost: gateway\r\norigin: {origin}\r\naccess-control-request-method: POST\r\naccess-control-request-headers: {headers}\r\n\r\n"
    ));
    client.answer()
}

fn allowed(answer: &Answer) -> Option<&str> {
    answer.header("access-control-allow-origin")
}

fn varies(answer: &Answer) -> bool {
    answer.header("vary").is_some_and(|v| v.contains("Origin"))
}

#[test]
fn a_page_that_is_named_may_ask_and_read_and_others_may_not() {
    let engine = engine();
    let gateway = Gateway::start(&[("a", &engine)], TWO);
    let wanted = "authorization,content-type,x-api-key,x-session-id,x-request-id,x-tidegate-cache,cache-control,x-stainless-os";
    for path in [CHAT, "/v1/embeddings", "/v1/models", "/v1/models/m"] {
        let answer = preflight(&gateway, path, "https://chat.example.com", wanted);
        assert_eq!(answer.status, 200, "{answer:?}");
        assert_eq!(allowed(&answer), Some("https://chat.example.com"), "{path}");
        assert_eq!(answer.header("access-control-allow-headers"), Some(wanted));
        let methods = answer.header("access-control-allow-methods").unwrap();
        assert!(methods.contains("POST"), "{methods}");
        assert!(varies(&answer), "{answer:?}");
    }
    let answer = preflight(&gateway, CHAT, "https://evil.example.com", wanted);
    assert_eq!((answer.status, allowed(&answer)), (400, None));
    let ask = |origin: &str, body: &str| {
        let headers = format!("origin: {origin}\r\n");
        Client::connect(&gateway).post(CHAT, &headers, body)
    };
    let answer = ask("http://localhost:5173", &chat(&user("hi")));
    assert_eq!(
        (answer.status, allowed(&answer)),
        (200, Some("http://localhost:5173"))
    );
    let exposed = answer.header("access-control-expose-headers").unwrap();
    for header in [
        "x-request-id",
        "x-tidegate-backend",
        "x-cache",
        "retry-after",
    ] {
        assert!(exposed.contains(header), "{header}: {exposed}");
    }
    assert!(varies(&answer));
    // errors are read as well
    let answer = ask("http://localhost:5173", "{");
    assert_eq!(
        (answer.status, allowed(&answer)),
        (400, Some("http://localhost:5173"))
    );
    // served, since it is the browser that keeps the page from reading; and not by the engine's word
    let answer = ask("https://evil.example.com", &chat(&user("hi")));
    assert_eq!((answer.status, allowed(&answer)), (200, None));
    assert!(varies(&answer));
}

#[test]
fn streams_carry_the_headers_and_flow_as_ever() {
    let engine = engine();
    let settings = "server: { cors: { allowed_origins: ['*'] } }\n";
    let gateway = Gateway::start(&[("a", &engine)], settings);
    let mut client = Client::connect(&gateway);
    let headers = "origin: https://any.example.com\r\n";
    let body = chat_stream(&user("hi"));
    client.send(crate::support::client::request(CHAT, headers, body));
    let mut answer = client.head();
    assert_eq!(allowed(&answer), Some("*"));
    assert!(
        client.read_until(&mut answer, "first"),
        "the engine has not ended its stream"
    );
    client.leave();
    engine.wait_for_close(0);
    gateway.assert_idle();
}

#[test]
fn admin_and_probes_never_carry_them_and_nothing_does_by_default() {
    let engine = engine();
    let gateway = Gateway::start(&[("a", &engine)], TWO);
    for path in ["/admin/backends", "/metrics", "/health"] {
        let answer = preflight(&gateway, path, "https://chat.example.com", "authorization");
        assert_eq!((answer.status, allowed(&answer)), (405, None), "{path}");
        let headers = "origin: https://chat.example.com\r\n";
        let answer = Client::connect(&gateway).get(path, headers);
        assert_eq!(allowed(&answer), None, "{path}");
    }
    let off = Gateway::start(&[("a", &engine)], "");
    let answer = preflight(&off, CHAT, "https://chat.example.com", "authorization");
    assert_eq!((answer.status, allowed(&answer)), (405, None));
    let headers = "origin: https://chat.example.com\r\n";
    let answer = Client::connect(&off).post(CHAT, headers, chat(&user("hi")));
    assert_eq!((answer.status, allowed(&answer)), (200, None));
}

#[test]
fn what_is_no_origin_is_a_fault() {
    for wrong in [
        "chat.example.com",
        "https://a/",
        "https://A",
        "https://",
        "https://*.a",
        "null",
    ] {
        let file = SettingsFile::new(&format!(
            "server: {{cors: {{allowed_origins: ['{wrong}']}}}}\nbackends: [{{name: a, url: 'http://a'}}]"
        ));
        let refused = run(&["check", "--config", file.0.to_str().unwrap()], &[]);
        let expected = format!("server.cors.allowed_origins: `{wrong}` is no origin");
        assert!(
            refused.stderr.starts_with(&expected),
            "{wrong}: {}",
            refused.stderr
        );
    }
}
