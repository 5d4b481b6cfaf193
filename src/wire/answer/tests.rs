use super::*;
use serde_json::{Value, json};

fn stream(chunks: &[Value]) -> Vec<u8> {
    let mut out = Vec::new();
    for chunk in chunks {
        out.extend_from_slice(&crate::sse::data_event(chunk.to_string().as_bytes()));
    }
    out.extend_from_slice(crate::sse::DONE);
    out
}

fn chunk(choices: Value) -> Value {
    json!({"id": "c1", "object": "chat.completion.chunk", "created": 7, "model": "m", "choices": choices})
}

fn folded(chunks: &[Value]) -> Value {
    let json = fold(&stream(chunks), Dialect::Chat).expect("a chat");
    serde_json::from_slice(&json).unwrap()
}

#[test]
fn texts_reasoning_tool_calls_and_log_probabilities_survive_folding() {
    let answer = folded(&[
        chunk(
            json!([{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null}]),
        ),
        chunk(json!([{"index": 0, "delta": {"reasoning_content": "Let "}, "finish_reason": null}])),
        chunk(json!([{"index": 0, "delta": {"reasoning_content": "me"}, "finish_reason": null}])),
        chunk(
            json!([{"index": 0, "delta": {"content": "Hel"}, "logprobs": {"content": [{"token": "Hel", "logprob": -0.25, "bytes": [72], "top_logprobs": []}]}, "finish_reason": null}]),
        ),
        chunk(
            json!([{"index": 0, "delta": {"content": "lo"}, "logprobs": {"content": [{"token": "lo", "logprob": -1.5, "bytes": null, "top_logprobs": []}]}, "token_ids": [1], "finish_reason": null}]),
        ),
        chunk(
            json!([{"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "t0", "type": "function", "function": {"name": "f", "arguments": ""}}]}, "token_ids": [2], "finish_reason": null}]),
        ),
        chunk(
            json!([{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{\"a\""}}]}, "finish_reason": null}]),
        ),
        chunk(
            json!([{"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "t0", "type": "function", "function": {"arguments": ":1}"}}, {"index": 1, "id": "t1", "type": "function", "function": {"name": "g", "arguments": "{}"}}]}, "finish_reason": null}]),
        ),
        chunk(json!([{"index": 0, "delta": {}, "finish_reason": "tool_calls", "stop_reason": 9}])),
        json!({"id": "c1", "object": "chat.completion.chunk", "created": 7, "model": "m", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}}),
    ]);
    let choice = &answer["choices"][0];
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["id"], "c1");
    assert_eq!(answer["usage"]["total_tokens"], 7);
    assert_eq!(choice["message"]["role"], "assistant");
    assert_eq!(choice["message"]["content"], "Hello");
    assert_eq!(choice["message"]["reasoning_content"], "Let me");
    assert_eq!(choice["logprobs"]["content"][1]["logprob"], -1.5);
    assert_eq!(choice["token_ids"], json!([1, 2]));
    assert_eq!(
        choice["message"]["tool_calls"],
        json!([
            {"id": "t0", "type": "function", "function": {"name": "f", "arguments": "{\"a\":1}"}},
            {"id": "t1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ])
    );
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["stop_reason"], 9);
}

#[test]
fn choices_whose_chunks_are_mixed_come_apart_again() {
    let answer = folded(&[
        chunk(
            json!([{"index": 1, "delta": {"role": "assistant", "content": "b"}, "finish_reason": null}]),
        ),
        chunk(
            json!([{"index": 0, "delta": {"role": "assistant", "content": "a"}, "finish_reason": null}]),
        ),
        chunk(
            json!([{"index": 1, "delta": {"content": "B"}, "finish_reason": "stop"}, {"index": 0, "delta": {"content": "A"}, "finish_reason": "length"}]),
        ),
    ]);
    assert_eq!(answer["choices"][0]["message"]["content"], "aA");
    assert_eq!(answer["choices"][1]["message"]["content"], "bB");
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert!(answer.get("usage").is_none(), "nobody counted");
}

#[test]
fn a_finish_reason_that_is_said_twice_is_one_reason() {
    let end = json!([{"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": "END"}]);
    let answer = folded(&[
        chunk(json!([{"index": 0, "delta": {"content": "a"}, "finish_reason": null}])),
        chunk(end.clone()),
        chunk(end),
    ]);
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(answer["choices"][0]["stop_reason"], "END");
}

#[test]
fn what_stands_beside_the_choices_is_not_repeated_in_every_chunk() {
    let answer = json!({"id": "x", "object": "chat.completion", "created": 1, "model": "m", "prompt_logprobs": ["long"],
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}]});
    let stream = unfold(answer.to_string().as_bytes(), Dialect::Chat).unwrap();
    let text = std::str::from_utf8(&stream).unwrap();
    assert_eq!(text.matches("prompt_logprobs").count(), 1);
    assert_eq!(text.matches("\"id\":\"x\"").count(), 3);
}

#[test]
fn what_is_no_stream_of_chunks_is_not_folded() {
    for text in [
        "",
        "data: [DONE]\n\n",
        "data: {broken\n\n",
        "data: 7\n\n",
        "{\"choices\":[]}",
    ] {
        assert_eq!(fold(text.as_bytes(), Dialect::Chat), None, "{text}");
    }
    assert_eq!(
        fold(b"data: {\"choices\":[{}]}\n\n", Dialect::Messages),
        None
    );
}

/// Chat and completion answers as engines give them.
fn answers() -> Vec<(Dialect, Value)> {
    let usage = json!({"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}});
    vec![
        (
            Dialect::Chat,
            json!({"id": "x", "object": "chat.completion", "created": 1, "model": "m", "system_fingerprint": "fp",
            "choices": [
                {"index": 0, "message": {"role": "assistant", "content": "Hi \u{1F30A}", "reasoning": "hm", "refusal": null}, "logprobs": {"content": [{"token": "Hi", "logprob": -0.125, "bytes": [72, 105], "top_logprobs": [{"token": "Ho", "logprob": -9.0, "bytes": null}]}]}, "finish_reason": "stop", "stop_reason": "END"},
                {"index": 1, "message": {"role": "assistant", "content": null, "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{\"q\":\"\\u00e9\"}"}}, {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}}]}, "logprobs": null, "finish_reason": "tool_calls"},
            ], "usage": usage}),
        ),
        (
            Dialect::Completions,
            json!({"id": "y", "object": "text_completion", "created": 1, "model": "m",
            "choices": [{"index": 0, "text": "abc", "logprobs": {"tokens": ["a", "bc"], "token_logprobs": [null, -0.5], "text_offset": [0, 1], "top_logprobs": [null, {"bc": -0.5}]}, "finish_reason": "length", "stop_reason": null, "prompt_logprobs": null}],
            "usage": usage}),
        ),
    ]
}

/// Without members that are null: an absent one means the same.
fn without_nulls(value: &Value) -> Value {
    match value {
        Value::Object(members) => {
            let kept = members.iter().filter(|(_, value)| !value.is_null());
            Value::Object(
                kept.map(|(key, value)| (key.clone(), without_nulls(value)))
                    .collect(),
            )
        }
        Value::Array(list) => Value::Array(list.iter().map(without_nulls).collect()),
        other => other.clone(),
    }
}

#[test]
fn an_answer_comes_back_whole_from_its_stream() {
    for (dialect, answer) in answers() {
        let stream = unfold(answer.to_string().as_bytes(), dialect).unwrap();
        let said = of_events(&stream, dialect);
        assert!(said.whole && said.readable && !said.error);
        assert_eq!(
            said.reasons.len(),
            answer["choices"].as_array().unwrap().len()
        );
        assert!(said.reasons.iter().all(Option::is_some));
        assert_eq!(said.usage.unwrap().prompt_tokens, 5);
        let back: Value = serde_json::from_slice(&fold(&stream, dialect).unwrap()).unwrap();
        assert_eq!(without_nulls(&back), without_nulls(&answer), "{dialect:?}");
    }
}

#[test]
fn a_stream_made_of_an_answer_says_the_role_first_and_the_reason_last() {
    let (dialect, answer) = answers().remove(0);
    let stream = unfold(answer.to_string().as_bytes(), dialect).unwrap();
    let mut chunks: Vec<Value> = Vec::new();
    each_data(&stream, |data| {
        chunks.extend(serde_json::from_slice::<Value>(data))
    });
    let of = |index: u64| {
        chunks
            .iter()
            .filter(move |c| c["choices"][0]["index"] == index)
    };
    for index in [0, 1] {
        assert_eq!(
            of(index).next().unwrap()["choices"][0]["delta"]["role"],
            "assistant"
        );
        assert!(of(index).next_back().unwrap()["choices"][0]["finish_reason"].is_string());
        let early = of(index).count() - 1;
        assert!(
            of(index)
                .take(early)
                .all(|c| c["choices"][0]["finish_reason"].is_null())
        );
    }
    assert!(
        chunks
            .iter()
            .all(|c| c["object"] == "chat.completion.chunk" && c["model"] == "m")
    );
    let calls = of(1)
        .find(|c| c["choices"][0]["delta"]["tool_calls"].is_array())
        .unwrap();
    assert_eq!(calls["choices"][0]["delta"]["tool_calls"][1]["index"], 1);
    assert_eq!(chunks.last().unwrap()["choices"], json!([]));
    assert!(stream.ends_with(crate::sse::DONE));
}

#[test]
fn an_answer_is_whole_only_when_its_end_was_said() {
    let two = |second: Value| {
        stream(&[
            chunk(
                json!([{"index": 0, "delta": {"content": "a \"finish_reason\":\"stop\" in the text"}, "finish_reason": null}]),
            ),
            chunk(json!([{"index": 0, "delta": {}, "finish_reason": "stop"}])),
            chunk(json!([{"index": 1, "delta": {"content": "b"}, "finish_reason": second}])),
        ])
    };
    let said = of_events(&two(Value::Null), Dialect::Chat);
    assert_eq!(
        said.reasons,
        [Some("stop".to_owned())],
        "the second said nothing of an end"
    );
    let said = of_events(&two(json!("abort")), Dialect::Chat);
    assert_eq!(said.reasons[1].as_deref(), Some("abort"));
    let whole = two(json!("stop"));
    let cut = &whole[..whole.len() - crate::sse::DONE.len()];
    assert!(of_events(&whole, Dialect::Chat).whole && !of_events(cut, Dialect::Chat).whole);
    let error = stream(&[json!({"error": {"message": "x"}})]);
    assert!(of_events(&error, Dialect::Chat).error);
    assert!(of_json(br#"{"object":"error","message":"x"}"#, Dialect::Chat).error);
    assert!(!of_json(br#"{"error":null,"choices":[]}"#, Dialect::Chat).error);
    assert!(!of_json(b"<html>", Dialect::Chat).readable);
}

#[test]
fn other_dialects_say_their_end_in_their_own_words() {
    let messages = b"event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":3}}}\n\nevent: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"},\"usage\":{\"output_tokens\":2}}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";
    let said = of_events(messages, Dialect::Messages);
    assert!(said.whole && said.reasons == [Some("end_turn".to_owned())]);
    assert!(!of_events(&messages[..200], Dialect::Messages).whole);
    let json = br#"{"type":"message","stop_reason":"max_tokens","usage":{"input_tokens":3,"output_tokens":2}}"#;
    assert_eq!(
        of_json(json, Dialect::Messages)
            .usage
            .unwrap()
            .completion_tokens,
        Some(2)
    );
    let completed = b"event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"text\"}\n\nevent: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"status\":\"completed\",\"error\":null}}\n\n";
    let said = of_events(completed, Dialect::Responses);
    assert!(said.whole && said.readable, "its deltas are texts");
    assert!(!of_json(br#"{"status":"incomplete"}"#, Dialect::Responses).whole);
    assert!(of_json(br#"{"object":"list","data":[]}"#, Dialect::Embeddings).whole);
}
