//! API keys: who may ask for what, and what engines and tenants see of each other.

use crate::support::client::Answer;
use crate::support::{Client, Gateway, MODEL, Request, Upstream, Wire, chat, user};
use serde_json::{Value, json};

const KEYS: &str = "
api_keys:
  mode: MODE
  keys:
    - { name: a1, key: 'key-of-a-number-1', tenant: a }
    - { name: a2, sha256: '2c2d8f1ad6b39a1e0d1f5e9c5e2b4e3ad6a6f0b6f3f4f5f6f7f8f9fafbfcfdfe', tenant: a }
    - { name: b, key: 'key-of-b-number-1', models: [m], expires: '2999-12-31' }
    - { name: old, key: 'key-that-is-over-', expires: '2020-01-01' }
    - { name: boss, key: 'key-of-the-admins', scopes: [admin, models] }
    - { name: other, key: 'key-for-another-1', models: [other] }
";

fn keys(mode: &str) -> String {
    KEYS.replace("MODE", mode)
}

fn answers(request: &Request, wire: &mut Wire) {
    let seen = |name: &str| {
        let value = request.header(name).map(String::from_utf8_lossy);
        value.map_or(Value::Null, |value| value.into_owned().into())
    };
    let body = json!({
        "id": "c", "model": "m", "seen": [seen("authorization"), seen("x-api-key")],
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    });
    wire.json("200 OK", &body.to_string());
}

fn ask(gateway: &Gateway, headers: &str) -> Answer {
    Client::connect(gateway).post("/v1/chat/completions", headers, chat(&user("hi")))
}

fn bearer(key: &str) -> String {
    format!("authorization: Bearer {key}\r\n")
}

fn code(answer: &Answer) -> (u16, String) {
    let code = answer.json()["error"]["code"].as_str().unwrap().to_owned();
    (answer.status, code)
}

#[test]
fn without_a_key_of_ours_nothing_is_served_and_no_engine_asked() {
    let engine = Upstream::start(answers);
    let gateway = Gateway::start(&[("e", &engine)], &keys("blocking"));
    for headers in [
        String::new(),
        bearer("key-of-a-number-2"),
        bearer(""),
        "authorization: Basic a2V5LW9mLWEtbnVtYmVyLTE=\r\n".into(),
        "x-api-key: nope\r\n".into(),
    ] {
        let answer = ask(&gateway, &headers);
        assert_eq!(code(&answer), (401, "invalid_api_key".into()), "{headers}");
        assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
    }
    assert_eq!(
        code(&ask(&gateway, &bearer("key-that-is-over-"))),
        (401, "expired_api_key".into())
    );
    assert_eq!(
        code(&ask(&gateway, &bearer("key-of-the-admins"))),
        (403, "scope_not_allowed".into())
    );
    assert_eq!(
        code(&ask(&gateway, &bearer("key-for-another-1"))),
        (403, "model_not_allowed".into())
    );
    assert_eq!(engine.count(), 0);
    for path in ["/health", "/ready", "/metrics"] {
        assert_eq!(
            crate::support::client::get(&gateway, path).status,
            200,
            "{path}"
        );
    }
    gateway.assert_idle();
}

#[test]
fn a_key_of_ours_opens_and_never_reaches_an_engine() {
    let engine = Upstream::start(answers);
    let gateway = Gateway::start(&[("e", &engine)], &keys("blocking"));
    for headers in [
        bearer("key-of-a-number-1"),
        "authorization: bearer key-of-b-number-1\r\n".into(),
        "x-api-key: key-of-a-number-1\r\n".into(),
    ] {
        let answer = ask(&gateway, &headers);
        assert_eq!(answer.status, 200, "{answer:?}");
        assert_eq!(answer.json()["seen"], json!([null, null]));
    }
    let backends = format!(
        "  - {{ name: e, url: 'http://{}', models: [{MODEL}], api_key: 'the-engines-own' }}\n",
        engine.address
    );
    let gateway = Gateway::with(&backends, &keys("blocking"));
    let answer = ask(&gateway, &bearer("key-of-a-number-1"));
    assert_eq!(
        answer.json()["seen"],
        json!(["Bearer the-engines-own", null])
    );
}

#[test]
fn in_permissive_mode_others_are_served_with_their_own_credentials() {
    let engine = Upstream::start(answers);
    let gateway = Gateway::start(&[("e", &engine)], &keys("permissive"));
    let seen = |headers: &str| ask(&gateway, headers).json()["seen"].clone();
    assert_eq!(seen(""), json!([null, null]));
    assert_eq!(
        seen(&bearer("the-engines-own-key")),
        json!(["Bearer the-engines-own-key", null])
    );
    assert_eq!(seen(&bearer("key-of-a-number-1")), json!([null, null]));
    assert_eq!(
        code(&ask(&gateway, &bearer("key-that-is-over-"))),
        (401, "expired_api_key".into())
    );
}

#[test]
fn a_key_sees_and_asks_for_its_own_models_by_either_name() {
    let engine = Upstream::start(answers);
    let backends = engine.yaml_for("e", &["m", "other", "third"]);
    let overrides = keys("blocking") + "model_aliases: { nick: m, elsewhere: third }\n";
    let gateway = Gateway::with(&backends, &overrides);
    let models = |key: &str| -> Vec<String> {
        let mut client = Client::connect(&gateway);
        client.send(format!(
            "GET /v1/models HTTP/1.1\r\nhost: x\r\n{}\r\n",
            bearer(key)
        ));
        let list = client.answer().json();
        let cards = list["data"].as_array().unwrap().iter();
        cards
            .map(|card| card["id"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(models("key-of-b-number-1"), ["m", "nick"]);
    assert_eq!(
        models("key-of-a-number-1"),
        ["elsewhere", "m", "nick", "other", "third"]
    );
    assert_eq!(models("key-of-the-admins").len(), 5);
    let asked = |model: &str| {
        let body = format!(r#"{{"model":"{model}",{}}}"#, user("hi"));
        let headers = bearer("key-of-b-number-1");
        Client::connect(&gateway)
            .post("/v1/chat/completions", &headers, body)
            .status
    };
    assert_eq!((asked("m"), asked("nick")), (200, 200));
    assert_eq!(
        (asked("other"), asked("elsewhere"), asked("unknown")),
        (403, 403, 403)
    );
    assert_eq!(
        crate::support::client::get(&gateway, "/v1/models").status,
        401
    );
}

#[test]
fn keys_of_one_tenant_share_cached_answers_and_others_do_not() {
    let engine = Upstream::start(answers);
    let more = "
api_keys:
  keys:
    - { name: a1, key: 'key-of-a-number-1', tenant: a }
    - { name: a2, key: 'key-of-a-number-2', tenant: a }
    - { name: b, key: 'key-of-b-number-1' }
response_cache: { enabled: true, backend: memory }
";
    let gateway = Gateway::start(&[("e", &engine)], more);
    let body = chat(&format!("\"temperature\":0,{}", user("hi")));
    let cached = |key: &str| {
        let answer = Client::connect(&gateway).post("/v1/chat/completions", &bearer(key), &body);
        crate::support::wait_until("it is kept", crate::support::DEADLINE, || {
            gateway.inner.flights() == 0
        });
        answer.header("x-cache").unwrap().to_owned()
    };
    assert_eq!(cached("key-of-a-number-1"), "MISS");
    assert_eq!(cached("key-of-a-number-2"), "HIT");
    assert_eq!(cached("key-of-b-number-1"), "MISS");
    assert_eq!(cached("key-of-b-number-1"), "HIT");
    assert_eq!(engine.count(), 2);
}

#[test]
fn a_key_for_administrators_opens_admin_where_a_token_is_asked_for() {
    let engine = Upstream::start(answers);
    let overrides = keys("blocking") + "admin: { token: 'the-token-of-admin' }\n";
    let gateway = Gateway::start(&[("e", &engine)], &overrides);
    let status = |key: &str| {
        let mut client = Client::connect(&gateway);
        client.send(format!(
            "GET /admin/kv-index HTTP/1.1\r\nhost: x\r\n{}\r\n",
            bearer(key)
        ));
        client.answer().status
    };
    assert_eq!(
        (status("the-token-of-admin"), status("key-of-the-admins")),
        (200, 200)
    );
    assert_eq!((status("key-of-a-number-1"), status("nothing")), (401, 401));
}

#[test]
fn keys_are_also_read_from_a_file_that_has_only_their_digests() {
    let path = std::env::temp_dir().join(format!("tidegate-keys-{}.yaml", std::process::id()));
    // the SHA-256 of "abc", from FIPS 180-2
    let digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    std::fs::write(&path, format!("keys: [{{name: f, sha256: '{digest}'}}]\n")).unwrap();
    let engine = Upstream::start(answers);
    let overrides = format!("api_keys: {{ file: '{}' }}\n", path.display());
    let gateway = Gateway::start(&[("e", &engine)], &overrides);
    assert_eq!(ask(&gateway, &bearer("abc")).status, 200);
    assert_eq!(
        ask(&gateway, &bearer(digest)).status,
        401,
        "a digest is no key"
    );
    std::fs::remove_file(path).unwrap();
}
