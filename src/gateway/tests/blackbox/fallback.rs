//! Another model, while nobody can serve the one that was asked for.

use crate::support::{Gateway, Upstream, chat, user};
use serde_json::json;

/// Answers under the name of the model that it was asked for.
fn engine() -> Upstream {
    Upstream::start(|request, wire| {
        let model = request.json()["model"].clone();
        let choice = json!({"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "a"}});
        let usage = json!({"prompt_tokens": 1, "completion_tokens": 1});
        let body = json!({"object": "chat.completion", "model": model, "choices": [choice], "usage": usage});
        wire.json("200 OK", &body.to_string());
    })
}

const CHAIN: &str = "fallback_chains: {m: [none, small, smaller]}\n";

struct Fleet {
    large: Upstream,
    small: Upstream,
}

fn fleet() -> Fleet {
    Fleet {
        large: engine(),
        small: engine(),
    }
}

impl Fleet {
    fn gateway(&self, more: &str) -> Gateway {
        let backends =
            self.large.yaml("large") + &self.small.yaml_for("small", &["small", "smaller"]);
        Gateway::with(&backends, &(CHAIN.to_owned() + more))
    }
}

fn drain(gateway: &Gateway, backend: &str, draining: bool) {
    gateway.set_draining(backend, draining);
    gateway.wait_for_state(backend, if draining { "draining" } else { "healthy" });
}

#[test]
fn the_first_able_model_of_the_chain_serves_and_answers_say_so() {
    let fleet = fleet();
    let gateway = fleet.gateway("");
    let own = gateway.chat(&chat(&user("hi")));
    assert_eq!(
        (own.backend(), own.header("x-tidegate-fallback-from")),
        ("large", None)
    );
    drain(&gateway, "large", true);
    let other = gateway.chat(&chat(&user("hi")));
    assert_eq!((other.status, other.backend()), (200, "small"));
    assert_eq!(other.header("x-tidegate-model"), Some("small"));
    assert_eq!(other.header("x-tidegate-fallback-from"), Some("m"));
    assert_eq!(other.json()["model"], "small");
    assert_eq!(fleet.small.only_request().json()["model"], "small");
    assert_eq!(
        gateway.metric(
            "tidegate_model_fallbacks_total",
            &["from=\"m\"", "to=\"small\""]
        ),
        1.0
    );
    // and back as soon as it can
    drain(&gateway, "large", false);
    assert_eq!(gateway.chat(&chat(&user("hi"))).backend(), "large");
    // without anybody in the chain it is the model's own error
    drain(&gateway, "large", true);
    drain(&gateway, "small", true);
    let nobody = gateway.chat(&chat(&user("hi")));
    assert_eq!(nobody.status, 503);
    assert!(nobody.text().contains("`m`"), "{}", nobody.text());
}

#[test]
fn an_answer_of_another_model_is_never_cached_under_the_wrong_name() {
    let fleet = fleet();
    let gateway = fleet.gateway("response_cache: {enabled: true}\n");
    let ask = |text: &str| gateway.chat(&chat(&(user(text) + r#", "temperature": 0"#)));
    // one answer of the model's own is in memory
    assert_eq!(ask("first").header("x-cache"), Some("MISS"));
    drain(&gateway, "large", true);
    let kept = ask("first");
    assert_eq!(
        (
            kept.header("x-cache"),
            kept.header("x-tidegate-fallback-from")
        ),
        (Some("HIT"), None)
    );
    assert_eq!(
        kept.json()["model"],
        "m",
        "its own answer is better than another model's"
    );
    // another one is made, and kept, by the other
    for expected in ["MISS", "HIT"] {
        let other = ask("second");
        assert_eq!(other.header("x-cache"), Some(expected));
        assert_eq!(other.json()["model"], "small");
        assert_eq!(other.header("x-tidegate-fallback-from"), Some("m"));
    }
    drain(&gateway, "large", false);
    let own = ask("second");
    assert_eq!(
        (own.header("x-cache"), own.backend()),
        (Some("MISS"), "large")
    );
    assert_eq!(own.json()["model"], "m");
}

#[test]
fn a_key_gets_no_model_by_a_chain_that_it_may_not_ask_for() {
    let fleet = fleet();
    let keys =
        "api_keys: {keys: [{name: k, key: secret-of-sixteen-or-more, models: [m, smaller]}]}\n";
    let gateway = fleet.gateway(keys);
    drain(&gateway, "large", true);
    let mut client = crate::support::Client::connect(&gateway);
    let key = "x-api-key: secret-of-sixteen-or-more\r\n";
    let answer = client.post("/v1/chat/completions", key, chat(&user("hi")));
    assert_eq!(answer.header("x-tidegate-model"), Some("smaller"));
}

#[test]
fn an_alias_of_a_model_that_another_stands_in_for_shows_the_other() {
    let fleet = fleet();
    let gateway = fleet.gateway("model_aliases: {short: m}\n");
    let body = r#"{"model":"short","messages":[]}"#;
    assert_eq!(gateway.chat(body).json()["model"], "short");
    drain(&gateway, "large", true);
    assert_eq!(gateway.chat(body).json()["model"], "small");
}
