//! Engines behind `https://`: whom the gateway takes for them, and what happens when it is somebody else.

use crate::kv_modes::{GUESSING, announcing, completion};
use crate::support::process::{SettingsFile, run};
use crate::support::tls::{Authority, front, shown};
use crate::support::{
    DEADLINE, Gateway, Upstream, chat, chat_stream, client, sse, user, wait_until,
};
use std::net::SocketAddr;
use std::sync::Arc;

const LOCAL: &str = "127.0.0.1";

fn backend(name: &str, address: SocketAddr, more: &str) -> String {
    format!("  - {{ name: {name}, url: 'https://{address}', models: [m]{more} }}\n")
}

fn trusting(authority: &Authority) -> String {
    format!(
        "upstream: {{ tls: {{ ca_file: {} }} }}\n",
        shown(&authority.file())
    )
}

/// One attempt is told by its answer, however probes end.
const UNPROBED: &str = "health_checks: { enabled: false }\n";

#[test]
fn an_engine_of_the_operators_authority_is_asked_within_tls() {
    let engine = Upstream::start(|request, wire| match request.path() {
        "/v1/models" => {
            wire.json("200 OK", r#"{"object":"list","data":[{"id":"m"}]}"#);
        }
        _ if request.text().contains("\"stream\":true") => {
            wire.stream(&[sse::delta("a"), sse::finish("stop")]);
        }
        _ => {
            wire.json("200 OK", r#"{"choices":[]}"#);
        }
    });
    let authority = Authority::new();
    let address = front(engine.address, &authority.sign(&[LOCAL]));
    // probes and the list of models go the same way
    let backends = format!("  - {{ name: a, url: 'https://{address}' }}\n");
    let gateway = Gateway::with(&backends, &trusting(&authority));
    wait_until("the model is discovered", DEADLINE, || {
        client::get(&gateway, "/v1/models").text().contains("\"m\"")
    });
    assert!(engine.probes() > 0);
    for _ in 0..3 {
        let answer = gateway.chat(&chat(&user("hi")));
        assert_eq!((answer.status, answer.backend()), (200, "a"), "{answer:?}");
    }
    let answer = gateway.chat(&chat_stream(&user("hi")));
    assert!(answer.text().contains("stop"), "{answer:?}");
    let reused = ["backend=\"a\"", "kind=\"reused\""];
    assert!(gateway.metric("tidegate_upstream_connections_total", &reused) >= 1.0);
    gateway.assert_idle();
}

#[test]
fn an_engine_of_another_authority_is_refused_and_another_backend_answers() {
    let (impostor, good) = (
        Upstream::json(r#"{"choices":[]}"#),
        Upstream::json(r#"{"choices":[]}"#),
    );
    let (ours, theirs) = (Authority::new(), Authority::new());
    let wrong = front(impostor.address, &theirs.sign(&[LOCAL]));
    let right = front(good.address, &ours.sign(&[LOCAL]));
    let settings = format!(
        "{}{UNPROBED}selection_strategy: RoundRobin\nprefix_routing: {{ enabled: false }}\n",
        trusting(&ours)
    );
    let alone = Gateway::not_ready(&backend("x", wrong, ""), &settings);
    wait_until("the backend is known", DEADLINE, || {
        !alone.inner.directory.load().view.backends.is_empty()
    });
    let answer = alone.chat(&chat(&user("hi")));
    assert_eq!(answer.status, 502, "{answer:?}");
    let error = &answer.json()["error"];
    assert_eq!(error["code"], "connect");
    assert_eq!(error["message"], "backend `x` failed the TLS handshake");
    let both = backend("x", wrong, "") + &backend("y", right, "");
    let gateway = Gateway::not_ready(&both, &settings);
    wait_until("both are known", DEADLINE, || {
        gateway.inner.directory.load().view.backends.len() == 2
    });
    for _ in 0..4 {
        let answer = gateway.chat(&chat(&user("hi")));
        assert_eq!((answer.status, answer.backend()), (200, "y"), "{answer:?}");
    }
    assert_eq!(impostor.count(), 0, "not a byte of a request reached it");
    let failures = ["backend=\"x\"", "outcome=\"failure\""];
    assert!(gateway.metric("tidegate_backend_requests_total", &failures) >= 1.0);
    gateway.assert_idle();
}

#[test]
fn a_backend_that_cannot_prove_who_it_is_never_comes_into_rotation() {
    let engine = Upstream::json("{}");
    let address = front(engine.address, &Authority::new().sign(&[LOCAL]));
    let gateway = Gateway::with(&backend("x", address, ""), &trusting(&Authority::new()));
    gateway.wait_for_state("x", "starting");
    assert_eq!(gateway.chat(&chat(&user("hi"))).status, 503);
}

#[test]
fn a_backend_may_have_an_authority_and_a_name_of_its_own() {
    let (a, b) = (
        Upstream::json(r#"{"choices":[]}"#),
        Upstream::json(r#"{"choices":[]}"#),
    );
    let (all, own) = (Authority::new(), Authority::new());
    let first = front(a.address, &all.sign(&[LOCAL]));
    let second = front(b.address, &own.sign(&["engine.test"]));
    let tls = format!(
        ", tls: {{ ca_file: {}, server_name: engine.test }}",
        shown(&own.file())
    );
    let backends = backend("a", first, "") + &backend("b", second, &tls);
    let gateway = Gateway::with(&backends, &trusting(&all));
    for name in ["a", "b"] {
        gateway.wait_for_state(name, "healthy");
    }
}

#[test]
fn a_changed_authority_is_taken_over() {
    let engine = Upstream::json(r#"{"choices":[]}"#);
    let (old, new) = (Authority::new(), Authority::new());
    let address = front(engine.address, &new.sign(&[LOCAL]));
    let file = old.file();
    let settings = format!("upstream: {{ tls: {{ ca_file: {} }} }}\n", shown(&file));
    let gateway = Gateway::with(&backend("a", address, ""), &settings);
    gateway.wait_for_state("a", "starting");
    std::fs::write(&file, "nothing").unwrap();
    gateway.reload_certificates();
    std::fs::write(&file, new.pem()).unwrap();
    gateway.reload_certificates();
    gateway.wait_for_state("a", "healthy");
    assert_eq!(gateway.chat(&chat(&user("hi"))).status, 200);
}

#[test]
fn event_streams_are_read_within_tls() {
    let (a, b) = (
        announcing(0, Arc::default()),
        Upstream::start(|_, wire| completion(wire, 0)),
    );
    let authority = Authority::new();
    let address = front(a.address, &authority.sign(&[LOCAL]));
    let index = "\n  enabled: true\n  parity_check: false";
    let settings = format!(
        "{}  event_sources:\n    - {{ backend_name: a, endpoint: 'https://{address}/v1/kv_events' }}\n{}",
        GUESSING.replace("{ enabled: true }", index),
        trusting(&authority)
    );
    let backends = backend("a", address, "") + &b.yaml("b");
    let gateway = Gateway::with(&backends, &settings);
    wait_until("the announced blocks are known", DEADLINE, || {
        gateway.inner.kv.as_ref().unwrap().gauges.load().applied >= 8
    });
    // by WebSocket first, which this engine refuses
    let asked = a.requests().into_iter();
    let asked: Vec<bool> = asked
        .filter(|r| r.path() == "/v1/kv_events")
        .map(|r| r.header("upgrade").is_some())
        .collect();
    assert_eq!(asked[..2], [true, false]);
}

#[test]
fn authorities_that_cannot_be_used_are_named_with_their_key() {
    let authority = Authority::new();
    let empty = authority.file();
    std::fs::write(&empty, "nothing").unwrap();
    let empty = shown(&empty);
    for (settings, expected) in [
        (
            "upstream: {tls: {ca_file: '/nowhere.pem'}}\nbackends: [{name: a, url: 'https://a'}]"
                .to_owned(),
            "upstream.tls.ca_file: /nowhere.pem: ",
        ),
        (
            format!(
                "upstream: {{tls: {{ca_file: {empty}}}}}\nbackends: [{{name: a, url: 'https://a'}}]"
            ),
            "upstream.tls.ca_file: has no certificate",
        ),
        (
            format!("backends: [{{name: a, url: 'https://a', tls: {{ca_file: {empty}}}}}]"),
            "backends[0].tls.ca_file: has no certificate",
        ),
        (
            "backends: [{name: a, url: 'https://a', tls: {server_name: 'a b'}}]".into(),
            "backends[0].tls.server_name: must be a host name or an address",
        ),
    ] {
        let file = SettingsFile::new(&settings);
        let refused = run(&["check", "--config", file.0.to_str().unwrap()], &[]);
        assert!(
            refused.stderr.contains(expected),
            "{expected}: {}",
            refused.stderr
        );
    }
}

#[test]
fn a_backend_that_a_reload_adds_is_trusted_as_its_settings_say() {
    let (plain, engine) = (
        Upstream::json(r#"{"choices":[]}"#),
        Upstream::json(r#"{"choices":[]}"#),
    );
    let authority = Authority::new();
    let address = front(engine.address, &authority.sign(&["engine.test"]));
    let gateway = Gateway::with(&plain.yaml("plain"), "");
    let ca = shown(&authority.file());
    let own = format!(", tls: {{ ca_file: {ca}, server_name: engine.test }}");
    let reloaded = gateway.reload(&backend("encrypted", address, &own), "");
    assert_eq!(reloaded.status, 200, "{}", reloaded.text());
    gateway.wait_for_state("encrypted", "healthy");
    let answer = gateway.chat(&chat(&user("hi")));
    assert_eq!(
        (answer.status, answer.backend()),
        (200, "encrypted"),
        "{answer:?}"
    );
    // a file that cannot be read is a fault, and nothing has changed
    let missing = ", tls: { ca_file: /there/is/none.pem }";
    let refused = gateway.reload(&backend("encrypted", address, missing), "");
    assert_eq!(refused.status, 400);
    assert!(
        refused.text().contains("backends[0].tls.ca_file"),
        "{}",
        refused.text()
    );
    assert_eq!(gateway.chat(&chat(&user("hi"))).status, 200);
}
