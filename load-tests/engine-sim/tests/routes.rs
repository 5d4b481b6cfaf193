//! Each route as a client sees it.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod support;

use engine_sim::{FaultSettings, SimConfig};
use serde_json::{Value, json};
use support::{fast, get, post, send, start};

fn chat(text: &str) -> Value {
    json!({"model": "sim-model", "messages": [{"role": "user", "content": text}], "temperature": 0})
}

fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    body
}

/// A prompt of several blocks.
fn long_text() -> String {
    "The server shares the prompt with the worker. ".repeat(20)
}

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
async fn a_completion_takes_all_four_prompt_shapes() {
    let sim = start(fast());
    let text = "The request returns";
    let tokens = post(sim.addr(), "/tokenize", json!({"prompt": text}))
        .await
        .json()["tokens"]
        .clone();
    let ask = async |prompt: Value| {
        post(
            sim.addr(),
            "/v1/completions",
            json!({"model": "sim-model", "prompt": prompt}),
        )
        .await
        .json()
    };
    let expected = ask(json!(text)).await;
    assert_eq!(expected["object"], "text_completion");
    assert_eq!(
        expected["usage"]["completion_tokens"], 16,
        "the default limit"
    );
    for same in [json!([text]), tokens.clone(), json!([tokens])] {
        assert_eq!(ask(same).await["choices"], expected["choices"]);
    }
    let two = ask(json!([text, "Another"])).await;
    assert_eq!(two["choices"][0], expected["choices"][0]);
    assert_eq!(two["choices"][1]["index"], 1);
    assert_eq!(two["usage"]["completion_tokens"], 32);
}

#[actix_web::test]
async fn a_completion_streams_and_echoes() {
    let sim = start(fast());
    let body = json!({"prompt": "The request", "stream": true, "echo": true, "logprobs": 1, "stream_options": {"include_usage": true}});
    let events = post(sim.addr(), "/v1/completions", body).await.events();
    let text: String = events
        .iter()
        .filter_map(|event| event["choices"][0]["text"].as_str())
        .collect();
    assert!(text.starts_with("The request") && text.len() > 20, "{text}");
    assert_eq!(
        events[0]["choices"][0]["logprobs"]["tokens"]
            .as_array()
            .unwrap()
            .len(),
        1
    );
    assert_eq!(
        events[events.len() - 3]["choices"][0]["finish_reason"],
        "length"
    );
    assert_eq!(events[events.len() - 2]["usage"]["completion_tokens"], 16);
    assert_eq!(events[events.len() - 1], "[DONE]");
}

#[actix_web::test]
async fn embeddings_come_as_numbers_or_base64() {
    let sim = start(fast());
    let ask = async |more: Value| {
        post(
            sim.addr(),
            "/v1/embeddings",
            with(json!({"model": "sim-model", "dimensions": 8}), more),
        )
        .await
        .json()
    };
    let one = ask(json!({"input": ["a word", "another word"]})).await;
    assert_eq!(one["data"].as_array().unwrap().len(), 2);
    assert_eq!(one["data"][0]["embedding"].as_array().unwrap().len(), 8);
    assert_eq!(
        one["data"][0],
        ask(json!({"input": "a word"})).await["data"][0]
    );
    assert_eq!(
        ask(json!({"input": "a word", "encoding_format": "base64"})).await["data"][0]["embedding"]
            .as_str()
            .unwrap()
            .len(),
        44
    );
    assert_eq!(one["usage"]["total_tokens"], one["usage"]["prompt_tokens"]);
}

#[actix_web::test]
async fn tokenize_and_detokenize_agree_with_usage() {
    let sim = start(fast());
    let chat_tokens = post(sim.addr(), "/tokenize", chat("Hello there"))
        .await
        .json();
    let usage = post(sim.addr(), "/v1/chat/completions", chat("Hello there"))
        .await
        .json()["usage"]
        .clone();
    assert_eq!(chat_tokens["count"], usage["prompt_tokens"]);
    assert_eq!(chat_tokens["max_model_len"], 8192);
    let tokens = post(
        sim.addr(),
        "/tokenize",
        json!({"prompt": "안녕 world", "add_special_tokens": false}),
    )
    .await
    .json()["tokens"]
        .clone();
    assert_eq!(
        post(sim.addr(), "/detokenize", json!({"tokens": tokens}))
            .await
            .json()["prompt"],
        "안녕 world"
    );
    assert_eq!(
        post(sim.addr(), "/detokenize", json!({"tokens": [999_999]}))
            .await
            .status,
        400
    );
}

#[actix_web::test]
async fn models_health_and_version_answer() {
    let sim = start(fast());
    let models = get(sim.addr(), "/v1/models").await.json();
    assert_eq!(models["data"][0]["id"], "sim-model");
    assert_eq!(models["data"][0]["max_model_len"], 8192);
    assert_eq!(get(sim.addr(), "/health").await.status, 200);
    assert_eq!(get(sim.addr(), "/ping").await.status, 200);
    assert!(get(sim.addr(), "/version").await.json()["version"].is_string());
    sim.faults().health_status(503);
    assert_eq!(get(sim.addr(), "/health").await.status, 503);
}

#[actix_web::test]
async fn metrics_are_vllms() {
    let sim = start(fast());
    for _ in 0..2 {
        post(
            sim.addr(),
            "/v1/chat/completions",
            with(chat(&long_text()), json!({"max_tokens": 5})),
        )
        .await;
    }
    let text = get(sim.addr(), "/metrics").await.body;
    let value = |name: &str| -> f64 {
        let line = text
            .lines()
            .find(|line| line.starts_with(name))
            .unwrap_or_else(|| panic!("{name} is not in\n{text}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    let labels = r#"{engine="0",model_name="sim-model""#;
    assert_eq!(value(&format!("vllm:num_requests_running{labels}}}")), 0.0);
    assert_eq!(value(&format!("vllm:num_requests_waiting{labels}}}")), 0.0);
    assert_eq!(value(&format!("vllm:kv_cache_usage_perc{labels}}}")), 0.0);
    assert_eq!(
        value(&format!("vllm:generation_tokens_total{labels}}}")),
        10.0
    );
    assert_eq!(
        value(&format!(
            "vllm:request_success_total{labels},finished_reason=\"length\"}}"
        )),
        2.0
    );
    assert_eq!(
        value(&format!("vllm:time_to_first_token_seconds_count{labels}}}")),
        2.0
    );
    assert_eq!(value("vllm:num_preemptions_total"), 0.0);
    let (asked, hit) = (
        value("vllm:prefix_cache_queries_total"),
        value("vllm:prefix_cache_hits_total"),
    );
    assert_eq!(asked, value("vllm:prompt_tokens_total"));
    assert!(hit > 0.0 && hit < asked / 2.0);
    assert!(text.contains(r#"vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0",num_gpu_blocks="1024"} 1.0"#));
}

#[actix_web::test]
async fn errors_have_vllms_shapes() {
    let sim = start(SimConfig {
        max_model_len: 64,
        ..fast()
    });
    let ask = |body: Value| post(sim.addr(), "/v1/chat/completions", body);
    let unknown = ask(with(chat("Hi"), json!({"model": "other"}))).await;
    assert_eq!(unknown.status, 404);
    assert_eq!(unknown.json()["error"]["type"], "NotFoundError");
    assert_eq!(
        unknown.json()["error"]["message"],
        "The model `other` does not exist."
    );
    let long = ask(chat(&long_text())).await;
    assert_eq!(
        (long.status, &long.json()["error"]["code"]),
        (400, &json!(400))
    );
    assert!(
        long.json()["error"]["message"]
            .as_str()
            .unwrap()
            .starts_with("This model's maximum context length is 64 tokens. However")
    );
    let much = ask(with(chat("Hi"), json!({"max_tokens": 64})))
        .await
        .json();
    assert!(
        much["error"]["message"]
            .as_str()
            .unwrap()
            .contains("is too large: 64")
    );
    for bad in [
        json!({"messages": []}),
        json!({"messages": 5}),
        with(chat("Hi"), json!({"max_tokens": 0})),
        with(chat("Hi"), json!({"n": 0})),
    ] {
        let answer = ask(bad).await;
        assert_eq!(
            (answer.status, &answer.json()["error"]["type"]),
            (400, &json!("BadRequestError")),
            "{}",
            answer.body
        );
    }
    let broken = send(sim.addr(), "POST", "/v1/completions", "", "{").await;
    assert_eq!(
        (broken.status, &broken.json()["error"]["param"]),
        (400, &Value::Null)
    );
    assert_eq!(
        get(sim.addr(), "/v1/no-such").await.json()["error"]["code"],
        404
    );
    assert_eq!(get(sim.addr(), "/no-such").await.status, 404);
    assert_eq!(get(sim.addr(), "/v1/chat/completions").await.status, 405);
}

#[actix_web::test]
async fn a_key_guards_only_v1() {
    let sim = start(SimConfig {
        api_keys: vec!["secret".into()],
        ..fast()
    });
    let refused = get(sim.addr(), "/v1/models").await;
    assert_eq!(
        (refused.status, refused.json()),
        (401, json!({"error": "Unauthorized"}))
    );
    assert_eq!(
        send(
            sim.addr(),
            "GET",
            "/v1/models",
            "authorization: Bearer secret\r\n",
            ""
        )
        .await
        .status,
        200
    );
    assert_eq!(get(sim.addr(), "/health").await.status, 200);
    assert_eq!(
        post(sim.addr(), "/tokenize", json!({"prompt": "x"}))
            .await
            .status,
        200
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

#[actix_web::test]
async fn a_megabyte_of_prompt_is_served() {
    let sim = start(SimConfig {
        max_model_len: 600_000,
        num_blocks: 40_000,
        speed: support::slow().speed,
        ..fast()
    });
    let answer = post(
        sim.addr(),
        "/v1/completions",
        json!({"prompt": "The prompt ".repeat(100_000), "max_tokens": 2}),
    )
    .await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert!(answer.json()["usage"]["prompt_tokens"].as_u64().unwrap() > 150_000);
}

#[actix_web::test]
async fn injected_failures_come_as_asked() {
    let sim = start(SimConfig {
        faults: FaultSettings {
            fail_after_tokens: Some(3),
            ..Default::default()
        },
        ..fast()
    });
    let ask = |more| post(sim.addr(), "/v1/chat/completions", with(chat("Hi"), more));
    let broken = ask(json!({"stream": true})).await;
    assert_eq!(broken.status, 200);
    let events = broken.events();
    let [.., error, done] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!(
        (&error["error"]["code"], done),
        (&json!(500), &json!("[DONE]"))
    );
    assert_eq!(events.len(), 1 + 3 + 2, "role, three tokens, error, done");
    assert_eq!(ask(json!({})).await.status, 500);

    sim.faults().fail_after_tokens(None);
    sim.faults().drop_after_tokens(Some(2));
    let cut = ask(json!({"stream": true})).await;
    assert!(cut.cut && cut.reset, "{cut:?}");
    assert_eq!(cut.events().len(), 1 + 2, "role and two tokens, no [DONE]");
    let cut = ask(json!({})).await;
    assert!(cut.cut && cut.reset && cut.body.is_empty(), "{cut:?}");
    sim.faults().drop_after_tokens(None);
    sim.faults().refuse_with(Some(429));
    assert_eq!(ask(json!({})).await.status, 429);
    assert_eq!(get(sim.addr(), "/health").await.status, 200);
    sim.faults().refuse_with(None);
    sim.faults().fail_rate(1.0, 503);
    assert_eq!(ask(json!({})).await.status, 503);
    sim.faults().fail_rate(0.0, 503);
    assert_eq!(ask(json!({})).await.status, 200);
}
