//! Request bodies reach the engine as the client wrote them, and only what cannot be routed is
//! refused.

use crate::support::{Gateway, Upstream, client};
use serde_json::{Value, json};

const GOOD: &str = r#"{"id":"1","choices":[]}"#;
const ALIAS: &str = "model_aliases: { gpt: m }";

/// Sends a body under the backends' model name and under an alias; the engine must get exactly
/// these bytes, but for the name.
fn passes(path: &str, members: &str) {
    let engine = Upstream::json(GOOD);
    let gateway = Gateway::start(&[("a", &engine)], ALIAS);
    for name in ["m", "gpt"] {
        let body = |name: &str| format!(r#"{{ "model":"{name}" , {members} }}"#);
        let answer = client::post(&gateway, path, body(name));
        assert_eq!(answer.status, 200, "{members:.200}: {answer:?}");
        let got = engine.requests().pop().unwrap();
        assert_eq!(got.text(), body("m"), "as {name}");
        assert_eq!(got.path(), path);
    }
}

const CHAT: &str = "/v1/chat/completions";
const HI: &str = r#""messages":[{"role":"user","content":"hi"}]"#;

#[test]
fn fields_that_the_gateway_does_not_know_reach_the_engine() {
    let unknown = r#""chat_template_kwargs":{"enable_thinking":false},"x_future":{"a":[1,null]}"#;
    passes(CHAT, &format!("{HI},{unknown}"));
}

#[test]
fn the_order_of_keys_survives() {
    let schema = r#""response_format":{"type":"json_schema","json_schema":{"schema":{"properties":{"zebra":{},"apple":{},"mango":{}}}}}"#;
    passes(CHAT, &format!("{HI},{schema}"));
}

#[test]
fn numbers_keep_all_their_digits() {
    for number in [
        "9007199254740993",
        "18446744073709551615",
        "18446744073709551616",
        "1e400",
        "0.10",
        "1.0",
        "-0.0",
    ] {
        passes(CHAT, &format!(r#"{HI},"seed":{number},"x":[{number}]"#));
    }
}

#[test]
fn numbers_survive_when_engine_internal_fields_are_taken_out() {
    let engine = Upstream::json(GOOD);
    let gateway = Gateway::start(&[("a", &engine)], ALIAS);
    let body = |extra: &str| {
        format!(r#"{{"model":"gpt","seed":18446744073709551616,"z":1.0{extra},"a":-0.0}}"#)
    };
    let answer = gateway.chat(&body(r#","kv_transfer_params":{"remote":1}"#));
    assert_eq!(answer.status, 200);
    let got = engine.only_request();
    let wanted = body("").replace("gpt", "m");
    assert_eq!(got.text().replace(' ', ""), wanted);
}

#[test]
fn legal_json_of_an_odd_kind_passes_or_is_refused_and_never_harms() {
    let odd = [
        r#""$serde_json::private::Number":"1""#,
        r#""$serde_json::private::RawValue":"1""#,
        r#""x":"\ud800""#,
        r#""x":"a\u0000b""#,
        r#""\u006dodel_x":1"#,
        r#""":{"":[]}"#,
    ];
    for members in odd {
        passes(CHAT, &format!("{HI},{members}"));
    }
    let deep = format!("{}{}", "[".repeat(10_000), "]".repeat(10_000));
    passes(CHAT, &format!(r#"{HI},"x":{deep}"#));
    passes(CHAT, &format!(r#""messages":{deep}"#));
}

#[test]
fn bodies_that_cannot_be_routed_are_refused_in_the_envelope_and_reach_no_engine() {
    let engine = Upstream::json(GOOD);
    let gateway = Gateway::start(&[("a", &engine)], "");
    let bodies: [&[u8]; 10] = [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xef\xbb\xbf{\"model\":\"m\"}",
        br#"{"model":"m","model":"n"}"#,
        br#"{"model":"m","m\u006fdel":"n"}"#,
        br#"{"model":"m"} trailing"#,
        b"{\"model\":\"\xff\"}",
        b"{\"model\":\"m\",\"stream\":true,\"stream\":false}",
    ];
    for body in bodies {
        let answer = client::post(&gateway, CHAT, body);
        let shown = String::from_utf8_lossy(body).into_owned();
        assert_eq!(answer.status, 400, "{shown}: {answer:?}");
        let error = &answer.json()["error"];
        assert_eq!(error["type"], "invalid_request_error", "{shown}");
        assert!(error["message"].is_string());
    }
    let deep = [b"{\"model\":\"m\",\"x\":".to_vec(), vec![b'['; 100_000]].concat();
    assert_eq!(client::post(&gateway, CHAT, deep).status, 400);
    assert_eq!(engine.count(), 0);
    gateway.assert_idle();
}

#[test]
fn a_model_is_refused_when_missing_or_unknown_and_no_engine_is_asked() {
    let engines = [Upstream::json(GOOD), Upstream::json(GOOD)];
    let backends = [
        engines[0].yaml_for("a", &["m"]),
        engines[1].yaml_for("b", &["n"]),
    ];
    let gateway = Gateway::with(&backends.concat(), "");
    let cases = [
        ("{}", 400),
        (r#"{"model":""}"#, 400),
        (r#"{"model":null}"#, 400),
        (r#"{"model":["m"]}"#, 400),
        (r#"{"model":"nope"}"#, 404),
    ];
    for (body, status) in cases {
        let answer = gateway.chat(body);
        assert_eq!(answer.status, status, "{body}: {answer:?}");
        assert_eq!(answer.json()["error"]["param"], "model");
    }
    let unknown = gateway.chat(r#"{"model":"nope"}"#).json();
    assert_eq!(unknown["error"]["code"], "model_not_found");
    assert!(engines.iter().all(|engine| engine.count() == 0));
    engines[0].stop_listening();
    gateway.wait_for_state("a", "unhealthy");
    let down = gateway.chat(r#"{"model":"m"}"#);
    assert_eq!(down.status, 503, "{down:?}");
    assert!(down.header("retry-after").is_some());
    assert_eq!(engines[1].count(), 0, "another model's engine");
}

#[test]
fn all_shapes_of_a_prompt_pass_and_odd_ones_are_left_to_the_engine() {
    for prompt in [
        r#""hi""#,
        r#"["a","b"]"#,
        "[1,2,3]",
        "[[1,2],[3,4]]",
        "[]",
        r#"["a",1,null]"#,
        "7",
    ] {
        passes("/v1/completions", &format!(r#""prompt":{prompt}"#));
    }
    let engine = Upstream::start(|_, wire| {
        wire.json("400 Bad Request", r#"{"error":{"message":"mixed"}}"#);
    });
    let gateway = Gateway::start(&[("a", &engine)], "");
    let body = r#"{"model":"m","prompt":["a",1]}"#;
    let answer = client::post(&gateway, "/v1/completions", body);
    assert_eq!(answer.status, 400);
    assert_eq!(answer.json(), json!({"error":{"message":"mixed"}}));
}

#[test]
fn each_path_goes_by_its_own_prompt_field_and_paths_without_one_are_routed_too() {
    let engines = [Upstream::json(GOOD), Upstream::json(GOOD)];
    let gateway = Gateway::start(&[("a", &engines[0]), ("b", &engines[1])], "");
    let cases = [
        (CHAT, HI, "prefix"),
        (CHAT, r#""prompt":"hi""#, "strategy"),
        ("/v1/completions", r#""prompt":"hi""#, "prefix"),
        ("/v1/completions", HI, "strategy"),
        ("/v1/completions", r#""prompt":"hi","messages":7"#, "prefix"),
        ("/v1/responses", r#""input":"hi""#, "prefix"),
        ("/v1/messages", HI, "prefix"),
        ("/v1/embeddings", r#""input":"hi""#, "strategy"),
        ("/v1/rerank", r#""query":"q","documents":["d"]"#, "strategy"),
        ("/tokenize", r#""prompt":"hi""#, "strategy"),
        ("/detokenize", r#""tokens":[1]"#, "strategy"),
    ];
    for (path, members, route) in cases {
        let answer = client::post(&gateway, path, format!(r#"{{"model":"m",{members}}}"#));
        assert_eq!(answer.status, 200, "{path} {members}");
        let decided = answer.header("x-tidegate-route");
        assert_eq!(decided, Some(route), "{path} {members}");
    }
}

#[test]
fn tools_are_the_engines_business() {
    let tool = |name: usize| json!({"type":"function","function":{"name":format!("t{name}"),"parameters":{}}});
    let mut tools: Vec<Value> = (0..44).map(tool).collect();
    tools.push(json!({"type":"function","function":{"name":"bare","description":"d"}}));
    tools.push(json!({"type":"function","function":{"name":"null","parameters":null}}));
    tools.push(json!({"type":"x_unknown"}));
    passes(CHAT, &format!(r#"{HI},"tools":{}"#, Value::from(tools)));
}

#[test]
fn unfamiliar_roles_and_content_parts_pass_beside_familiar_ones() {
    let messages = r#""messages":[{"role":"developer","content":"d"},{"role":"x_role","content":null},{"role":"user","content":[{"type":"text","text":"hi"},{"type":"x_new","x":{}},7]},{"role":3}]"#;
    passes(CHAT, messages);
}
