//! Chat messages as clients send them, made plain for the template.

use crate::tokenizer::{PlainCall, PlainMessage};
use serde::Deserialize;
use serde_json::Value;

/// One message of a chat, as clients send it.
#[derive(Debug, Deserialize)]
pub struct Message {
    role: String,
    #[serde(default)]
    content: Option<Content>,
    #[serde(default)]
    tool_calls: Option<Vec<MessageCall>>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "content is a string or a list of parts")]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Debug, Deserialize)]
struct Part {
    #[serde(rename = "type", default)]
    kind: String,
    #[serde(default)]
    text: Option<String>,
}

#[derive(Debug, Deserialize)]
struct MessageCall {
    function: MessageFunction,
}

#[derive(Debug, Deserialize)]
struct MessageFunction {
    name: String,
    #[serde(default)]
    arguments: Value,
}

/// Flattens messages for the template. Media parts stand as a mark of their kind.
pub fn plain_messages(messages: Vec<Message>) -> Vec<PlainMessage> {
    let content = |content| match content {
        None => String::new(),
        Some(Content::Text(text)) => text,
        Some(Content::Parts(parts)) => parts
            .into_iter()
            .map(|part| part.text.unwrap_or_else(|| format!("[{}]", part.kind)))
            .collect(),
    };
    let call = |call: MessageCall| PlainCall {
        name: call.function.name,
        arguments: match call.function.arguments {
            Value::String(text) => text,
            Value::Null => "{}".to_owned(),
            other => other.to_string(),
        },
    };
    let plain = |message: Message| PlainMessage {
        role: message.role,
        content: content(message.content),
        tool_calls: message
            .tool_calls
            .unwrap_or_default()
            .into_iter()
            .map(call)
            .collect(),
    };
    messages.into_iter().map(plain).collect()
}
