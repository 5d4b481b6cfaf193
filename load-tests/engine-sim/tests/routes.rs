//! The other routes, errors and injected failures as a client sees them.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod support;

use engine_sim::{FaultSettings, SimConfig};
use serde_json::{Value, json};
use support::{chat, fast, get, long_text, post, send, start, with};

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
