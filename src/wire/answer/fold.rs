//! A stream of chunks as the one object that a caller without `stream` would have got.
//!
//! Chunks say what is new: texts are joined, lists are joined too (those whose elements have an `index`,
//! such as tool calls, element by element), and what names things stands as it was said first. Fields
//! that nobody here knows are treated the same, so that reasoning, log probabilities and whatever
//! engines add survive.

use super::{Dialect, each_data};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Texts that name things: engines that repeat them do not mean more of them.
const NAMES: [&str; 8] = [
    "role",
    "id",
    "type",
    "name",
    "object",
    "finish_reason",
    "stop_reason",
    "matched_stop",
];

/// The JSON object of a whole stream. None when it is no stream of chunks in this dialect.
pub fn fold(events: &[u8], dialect: Dialect) -> Option<Vec<u8>> {
    if !dialect.converts() {
        return None;
    }
    let mut answer = Map::new();
    let mut choices: BTreeMap<u64, Map<String, Value>> = BTreeMap::new();
    let mut readable = true;
    each_data(events, |data| {
        if data.trim_ascii() == b"[DONE]" {
            return;
        }
        match serde_json::from_slice::<Value>(data) {
            Ok(Value::Object(chunk)) => take_chunk(chunk, &mut answer, &mut choices),
            _ => readable = false,
        }
    });
    if !readable || choices.is_empty() {
        return None;
    }
    let choices = choices
        .into_values()
        .map(|choice| finished(choice, dialect));
    let choices = Value::Array(choices.map(Value::Object).collect());
    if dialect == Dialect::Chat {
        answer.insert("object".into(), "chat.completion".into());
    }
    // usage behind the choices, as engines write it
    let usage = answer.shift_remove("usage");
    answer.insert("choices".into(), choices);
    if let Some(usage) = usage {
        answer.insert("usage".into(), usage);
    }
    serde_json::to_vec(&answer).ok()
}

fn take_chunk(
    chunk: Map<String, Value>,
    answer: &mut Map<String, Value>,
    choices: &mut BTreeMap<u64, Map<String, Value>>,
) {
    for (key, value) in chunk {
        match (key.as_str(), value) {
            ("choices", Value::Array(list)) => {
                for choice in list {
                    let Value::Object(choice) = choice else {
                        continue;
                    };
                    let index = choice.get("index").and_then(Value::as_u64).unwrap_or(0);
                    take_choice(choice, choices.entry(index).or_default());
                }
            }
            // the last count is that of all
            ("usage", value) if !value.is_null() => {
                answer.insert(key, value);
            }
            ("usage", _) => {}
            (_, value) if answer.get(&key).is_none_or(Value::is_null) => {
                answer.insert(key, value);
            }
            _ => {}
        }
    }
}

fn take_choice(choice: Map<String, Value>, into: &mut Map<String, Value>) {
    for (key, value) in choice {
        match key.as_str() {
            "index" => {
                into.insert(key, value);
            }
            "delta" => merge(into, "message".into(), value),
            _ => merge(into, key, value),
        }
    }
}

/// Joins one field of a chunk to what came before.
fn merge(into: &mut Map<String, Value>, key: String, new: Value) {
    let Some(old) = into.get_mut(&key) else {
        into.insert(key, new);
        return;
    };
    match (old, new) {
        (_, Value::Null) => {}
        (old, new) if old.is_null() => *old = new,
        (Value::String(old), Value::String(new)) => {
            if !NAMES.contains(&key.as_str()) || old.is_empty() {
                old.push_str(&new);
            }
        }
        (Value::Array(old), Value::Array(new)) => merge_lists(old, new),
        (Value::Object(old), Value::Object(new)) => {
            for (key, value) in new {
                merge(old, key, value);
            }
        }
        (old, new) => *old = new,
    }
}

fn merge_lists(old: &mut Vec<Value>, new: Vec<Value>) {
    for element in new {
        let same = index_of(&element).and_then(|index| {
            let mut old = old.iter_mut();
            old.find(|element| index_of(element) == Some(index))
        });
        match (same, element) {
            (Some(Value::Object(old)), Value::Object(new)) => {
                for (key, value) in new {
                    if key != "index" {
                        merge(old, key, value);
                    }
                }
            }
            (_, element) => old.push(element),
        }
    }
}

fn index_of(element: &Value) -> Option<u64> {
    element.get("index")?.as_u64()
}

/// What a choice of a whole answer has, and a chunk's has not.
fn finished(mut choice: Map<String, Value>, dialect: Dialect) -> Map<String, Value> {
    if dialect != Dialect::Chat {
        return choice;
    }
    let Some(Value::Object(message)) = choice.get_mut("message") else {
        let message = serde_json::json!({"role": "assistant", "content": ""});
        choice.insert("message".into(), message);
        return choice;
    };
    message.entry("role").or_insert("assistant".into());
    message.entry("content").or_insert(Value::Null);
    let Some(Value::Array(calls)) = message.get_mut("tool_calls") else {
        return choice;
    };
    for call in calls.iter_mut() {
        if let Value::Object(call) = call {
            call.shift_remove("index");
        }
    }
    let has_calls = !calls.is_empty();
    if has_calls && message.get("content").and_then(Value::as_str) == Some("") {
        message.insert("content".into(), Value::Null);
    }
    choice
}
