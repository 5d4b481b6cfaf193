//! Chats as a client sees them: text, streams, usage, tools.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod support;

use engine_sim::SimConfig;
use serde_json::{Value, json};
use support::{chat, fast, long_text, post, start, with};

#[actix_web::test]
async fn equal_chats_get_equal_answers_and_the_second_one_is_cached() {
    let sim = start(fast());
    let first = post(sim.addr(), "/v1/chat/completions", chat(&long_text()))
        .await
        .json();
    let second = post(sim.addr(), "/v1/chat/completions", chat(&long_text()))
        .await
        .json();
    assert_eq!(first["choices"], second["choices"]);
    assert_eq!(first["object"], "chat.completion");
    assert_eq!(first["choices"][0]["message"]["role"], "assistant");
    assert_eq!(first["choices"][0]["finish_reason"], "stop");
    let (cold, warm) = (&first["usage"], &second["usage"]);
    assert_eq!(cold["prompt_tokens"], warm["prompt_tokens"]);
    assert_eq!(cold["completion_tokens"], warm["completion_tokens"]);
    assert_eq!(cold["prompt_tokens_details"]["cached_tokens"], 0);
    let (cached, prompt) = (
        warm["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap(),
        warm["prompt_tokens"].as_u64().unwrap(),
    );
    assert_eq!(cached, (prompt - 1) / 16 * 16);
    let stats = sim.stats();
    assert_eq!(
        (
            stats.requests_total,
            stats.cached_tokens,
            stats.running,
            stats.aborted_total
        ),
        (2, cached, 0, 0)
    );
    assert!(!sim.events().is_empty());
}

#[actix_web::test]
async fn the_next_turn_finds_the_answer_in_the_cache() {
    let sim = start(fast());
    let first = post(
        sim.addr(),
        "/v1/chat/completions",
        with(
            chat("Tell me"),
            json!({"min_tokens": 60, "max_tokens": 400}),
        ),
    )
    .await
    .json();
    let answer = first["choices"][0]["message"]["content"].clone();
    let so_far = first["usage"]["total_tokens"].as_u64().unwrap();
    let turns = json!({"messages": [
        {"role": "user", "content": "Tell me"}, {"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"},
    ]});
    let second = post(sim.addr(), "/v1/chat/completions", turns).await.json();
    let cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .unwrap();
    assert_eq!(
        cached,
        (so_far - 1) / 16 * 16,
        "all full blocks of prompt and answer, but the unfed last token"
    );
}

#[actix_web::test]
async fn a_chat_stream_says_role_content_finish_usage_done() {
    let sim = start(fast());
    let body = with(
        chat("Hello"),
        json!({"stream": true, "stream_options": {"include_usage": true}}),
    );
    let whole = post(sim.addr(), "/v1/chat/completions", chat("Hello"))
        .await
        .json();
    let answer = post(sim.addr(), "/v1/chat/completions", body).await;
    assert!(
        answer
            .head
            .to_ascii_lowercase()
            .contains("content-type: text/event-stream"),
        "{}",
        answer.head
    );
    let events = answer.events();
    assert_eq!(
        events[0]["choices"][0]["delta"],
        json!({"role": "assistant", "content": ""})
    );
    let text: String = events
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["content"].as_str())
        .collect();
    assert_eq!(
        text,
        whole["choices"][0]["message"]["content"].as_str().unwrap()
    );
    let [.., last, usage, done] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!(last["choices"][0]["finish_reason"], "stop");
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(
        usage["usage"]["completion_tokens"],
        whole["usage"]["completion_tokens"]
    );
    assert_eq!(done, "[DONE]");
}

#[actix_web::test]
async fn a_stream_tells_no_usage_unless_asked() {
    let sim = start(fast());
    let answer = post(
        sim.addr(),
        "/v1/chat/completions",
        with(chat("Hello"), json!({"stream": true})),
    )
    .await;
    assert!(answer.body.ends_with("data: [DONE]\n\n") && !answer.body.contains("usage"));
}

#[actix_web::test]
async fn several_choices_differ_and_are_counted_together() {
    let sim = start(fast());
    let body = with(chat("Hello"), json!({"n": 3, "max_tokens": 7}));
    let answer = post(sim.addr(), "/v1/chat/completions", body.clone())
        .await
        .json();
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 3);
    assert_ne!(choices[0]["message"], choices[1]["message"]);
    assert_eq!(choices[2]["finish_reason"], "length");
    assert_eq!(answer["usage"]["completion_tokens"], 21);
    let stream = post(
        sim.addr(),
        "/v1/chat/completions",
        with(body, json!({"stream": true})),
    )
    .await
    .events();
    for choice in choices {
        let deltas = stream
            .iter()
            .filter(|event| event["choices"][0]["index"] == choice["index"]);
        let text: String = deltas
            .filter_map(|event| event["choices"][0]["delta"]["content"].as_str())
            .collect();
        assert_eq!(text, choice["message"]["content"].as_str().unwrap());
    }
}

#[actix_web::test]
async fn a_seed_changes_the_answer_and_stop_ends_it() {
    let sim = start(fast());
    let ask = |more| {
        post(
            sim.addr(),
            "/v1/chat/completions",
            with(chat("Hello"), more),
        )
    };
    let text = |answer: Value| {
        answer["choices"][0]["message"]["content"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    let plain = text(ask(json!({})).await.json());
    assert_ne!(plain, text(ask(json!({"seed": 5})).await.json()));
    let word = plain.split(' ').nth(3).unwrap();
    let stopped = ask(json!({"stop": [word], "logprobs": true})).await.json();
    assert!(plain.starts_with(&text(stopped.clone())) && !text(stopped.clone()).contains(word));
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    let logprobs = stopped["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap();
    assert_eq!(
        Some(logprobs.len() as u64),
        stopped["usage"]["completion_tokens"].as_u64()
    );
    let long = ask(json!({"ignore_eos": true, "max_completion_tokens": 300}))
        .await
        .json();
    assert_eq!(
        (
            long["usage"]["completion_tokens"].as_u64(),
            &long["choices"][0]["finish_reason"]
        ),
        (Some(300), &json!("length"))
    );
}

fn tools() -> Value {
    json!({"tools": [
        {"type": "function", "function": {"name": "find_page", "parameters": {"type": "object", "properties": {"title": {"type": "string"}}}}},
        {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}},
    ]})
}

#[actix_web::test]
async fn tools_are_called_when_asked_for() {
    let sim = start(fast());
    let ask = |text: &str, choice: Value| {
        let body = with(with(chat(text), tools()), json!({"tool_choice": choice}));
        post(sim.addr(), "/v1/chat/completions", body)
    };
    let called = |answer: &Value| {
        answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"]
            .as_str()
            .map(str::to_owned)
    };
    let named = ask(
        "Hi",
        json!({"type": "function", "function": {"name": "get_weather"}}),
    )
    .await
    .json();
    assert_eq!(called(&named).as_deref(), Some("get_weather"));
    assert_eq!(named["choices"][0]["finish_reason"], "tool_calls");
    let arguments = named["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
        .as_str()
        .unwrap();
    assert!(serde_json::from_str::<Value>(arguments).unwrap()["city"].is_string());
    assert_eq!(
        called(&ask("Hi", json!("required")).await.json()).as_deref(),
        Some("find_page")
    );
    assert_eq!(
        called(&ask("use get_weather", json!("auto")).await.json()).as_deref(),
        Some("get_weather")
    );
    assert_eq!(called(&ask("Hi", json!("auto")).await.json()), None);
    assert_eq!(
        called(&ask("use get_weather", json!("none")).await.json()),
        None
    );
    assert_eq!(
        ask(
            "Hi",
            json!({"type": "function", "function": {"name": "no_such"}})
        )
        .await
        .status,
        400
    );
}

#[actix_web::test]
async fn a_streamed_tool_call_names_itself_once_then_gives_arguments() {
    let sim = start(fast());
    let body = with(
        with(chat("Hi"), tools()),
        json!({"tool_choice": "required", "stream": true}),
    );
    let events = post(sim.addr(), "/v1/chat/completions", body)
        .await
        .events();
    let calls: Vec<&Value> = events
        .iter()
        .map(|event| &event["choices"][0]["delta"]["tool_calls"][0])
        .filter(|call| !call.is_null())
        .collect();
    assert!(calls[0]["id"].is_string() && calls[0]["function"]["name"] == "find_page");
    assert!(
        calls[1..]
            .iter()
            .all(|call| call.get("id").is_none() && call["function"].get("name").is_none())
    );
    let arguments: String = calls
        .iter()
        .filter_map(|call| call["function"]["arguments"].as_str())
        .collect();
    assert!(serde_json::from_str::<Value>(&arguments).unwrap()["title"].is_string());
    assert_eq!(
        events[events.len() - 2]["choices"][0]["finish_reason"],
        "tool_calls"
    );
}

#[actix_web::test]
async fn cached_tokens_are_omitted_where_vllm_omits_them() {
    let sim = start(SimConfig {
        prompt_tokens_details: false,
        ..fast()
    });
    let answer = post(sim.addr(), "/v1/chat/completions", chat("Hi"))
        .await
        .json();
    assert!(answer["usage"].get("prompt_tokens_details").is_none());
}

#[actix_web::test]
async fn a_salt_separates_and_a_reset_forgets() {
    let sim = start(fast());
    let cached = async |more: Value| {
        let answer = post(
            sim.addr(),
            "/v1/chat/completions",
            with(chat(&long_text()), more),
        )
        .await
        .json();
        answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap()
    };
    assert_eq!(cached(json!({})).await, 0);
    assert_eq!(cached(json!({"cache_salt": "tenant"})).await, 0);
    assert!(
        cached(json!({"cache_salt": "tenant", "kv_transfer_params": {"do_remote_decode": false}}))
            .await
            > 0
    );
    assert_eq!(
        post(sim.addr(), "/reset_prefix_cache", json!({}))
            .await
            .status,
        200
    );
    assert_eq!(cached(json!({})).await, 0);
}
