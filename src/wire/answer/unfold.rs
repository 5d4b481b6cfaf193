//! A whole answer as the stream of chunks that a caller with `stream` would have got: the role, what
//! was thought, what was said, what is to be called, why it ended, what it cost, `[DONE]`.

use super::Dialect;
use crate::sse::{DONE, data_event};
use serde_json::{Map, Value, json};

/// The stream of a whole answer; usage stands in a last chunk of its own, for those who want it. None
/// when it is no answer in this dialect.
pub fn unfold(json: &[u8], dialect: Dialect) -> Option<Vec<u8>> {
    if !dialect.converts() {
        return None;
    }
    let Value::Object(mut answer) = serde_json::from_slice(json).ok()? else {
        return None;
    };
    let Value::Array(choices) = answer.shift_remove("choices")? else {
        return None;
    };
    let usage = answer
        .shift_remove("usage")
        .filter(|usage| !usage.is_null());
    // what a whole answer says is not there, chunks do not mention
    answer.retain(|_, value| !value.is_null());
    if dialect == Dialect::Chat {
        answer.insert("object".into(), "chat.completion.chunk".into());
    }
    // what every chunk says; anything else, which may be long, stands in the first
    let mut common = Map::new();
    for key in IN_EVERY_CHUNK {
        if let Some(value) = answer.get(key) {
            common.insert(key.into(), value.clone());
        }
    }
    let mut first = Some(answer);
    let mut out = Vec::with_capacity(json.len() * 2);
    let mut send = |choices: Value, usage: Option<Value>| {
        let mut chunk = first.take().unwrap_or_else(|| common.clone());
        chunk.insert("choices".into(), choices);
        if let Some(usage) = usage {
            chunk.insert("usage".into(), usage);
        }
        let chunk = serde_json::to_vec(&chunk).unwrap_or_default();
        out.extend_from_slice(&data_event(&chunk));
    };
    for (at, choice) in choices.into_iter().enumerate() {
        let Value::Object(choice) = choice else {
            return None;
        };
        let parts = match dialect {
            Dialect::Chat => chat(choice, at)?,
            _ => text(choice, at),
        };
        for part in parts {
            send(json!([part]), None);
        }
    }
    if usage.is_some() {
        send(json!([]), usage);
    }
    out.extend_from_slice(DONE);
    Some(out)
}

/// Short members that clients read of any chunk.
const IN_EVERY_CHUNK: [&str; 6] = [
    "id",
    "object",
    "created",
    "model",
    "system_fingerprint",
    "service_tier",
];

/// What says that and why a choice ended.
const ENDS: [&str; 2] = ["finish_reason", "stop_reason"];

/// A choice's members in three: its index, how it ended, and the rest.
fn parts_of(
    mut choice: Map<String, Value>,
    at: usize,
) -> (Value, Map<String, Value>, Map<String, Value>) {
    let index = choice.shift_remove("index").unwrap_or_else(|| at.into());
    let mut end = Map::new();
    for key in ENDS {
        if let Some(value) = choice.shift_remove(key) {
            end.insert(key.into(), value);
        }
    }
    end.entry("finish_reason").or_insert(Value::Null);
    (index, end, choice)
}

fn text(choice: Map<String, Value>, at: usize) -> Vec<Value> {
    let (index, end, mut said) = parts_of(choice, at);
    let mut last = json!({"index": index, "text": "", "logprobs": null});
    said.insert("index".into(), index);
    said.insert("finish_reason".into(), Value::Null);
    if let Value::Object(last) = &mut last {
        last.extend(end);
    }
    vec![Value::Object(said), last]
}

fn chat(choice: Map<String, Value>, at: usize) -> Option<Vec<Value>> {
    let (index, end, mut beside) = parts_of(choice, at);
    let Value::Object(mut message) = beside.shift_remove("message")? else {
        return None;
    };
    let part = |delta: Value, beside: Map<String, Value>| {
        let mut part = Map::new();
        part.insert("index".into(), index.clone());
        part.insert("delta".into(), delta);
        part.insert("logprobs".into(), Value::Null);
        part.insert("finish_reason".into(), Value::Null);
        part.extend(beside);
        Value::Object(part)
    };
    let role = message
        .shift_remove("role")
        .unwrap_or_else(|| "assistant".into());
    let mut parts = vec![part(json!({"role": role, "content": ""}), Map::new())];
    let thought: Vec<String> = message
        .keys()
        .filter(|key| key.contains("reasoning"))
        .cloned()
        .collect();
    for key in thought {
        let value = message.shift_remove(&key);
        let value = value.filter(|value| !value.is_null());
        parts.extend(value.map(|value| part(json!({ key: value }), Map::new())));
    }
    // what stands beside the message, such as log probabilities, belongs to what is said
    let content = message
        .shift_remove("content")
        .filter(|content| !content.is_null());
    if content.is_some() || beside.values().any(|value| !value.is_null()) {
        let delta = content.map_or_else(|| json!({}), |content| json!({"content": content}));
        parts.push(part(delta, beside));
    }
    for (key, value) in message {
        let value = match (key.as_str(), value) {
            (_, Value::Null) => continue,
            ("tool_calls", Value::Array(calls)) if calls.is_empty() => continue,
            ("tool_calls", Value::Array(calls)) => Value::Array(numbered(calls)),
            (_, value) => value,
        };
        parts.push(part(json!({ key: value }), Map::new()));
    }
    parts.push(part(json!({}), end));
    Some(parts)
}

/// Chunks tell calls apart by their index.
fn numbered(calls: Vec<Value>) -> Vec<Value> {
    let calls = calls.into_iter().enumerate();
    calls
        .map(|(at, call)| match call {
            Value::Object(call) => {
                let mut numbered = Map::new();
                numbered.insert("index".into(), at.into());
                numbered.extend(call);
                Value::Object(numbered)
            }
            other => other,
        })
        .collect()
}
