//! Streams as engines write them, and a parser that follows the standard and forgives nothing.

use serde_json::Value;

pub const DONE: &str = "data: [DONE]\n\n";

/// A text delta.
pub fn delta(text: &str) -> String {
    let text = Value::from(text);
    format!(
        "data: {{\"id\":\"c1\",\"object\":\"chat.completion.chunk\",\"created\":17,\"model\":\"m\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":{text}}},\"finish_reason\":null}}]}}\n\n"
    )
}

/// The chunk with the finish reason.
pub fn finish(reason: &str) -> String {
    format!(
        "data: {{\"id\":\"c1\",\"object\":\"chat.completion.chunk\",\"created\":17,\"model\":\"m\",\"choices\":[{{\"index\":0,\"delta\":{{}},\"finish_reason\":\"{reason}\"}}]}}\n\n"
    )
}

/// The chunk with the counts, whose choices are empty.
pub fn usage(prompt: u64, completion: u64) -> String {
    format!(
        "data: {{\"id\":\"c1\",\"object\":\"chat.completion.chunk\",\"created\":17,\"model\":\"m\",\"choices\":[],\"usage\":{{\"prompt_tokens\":{prompt},\"completion_tokens\":{completion},\"total_tokens\":{}}}}}\n\n",
        prompt + completion
    )
}

/// A complete stream of these deltas.
pub fn stream(deltas: &[&str]) -> String {
    let deltas: String = deltas.iter().map(|text| delta(text)).collect();
    deltas + &finish("stop") + DONE
}

/// One event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    pub name: Option<String>,
    pub data: String,
}

impl Event {
    /// Its data as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.data).unwrap_or_else(|e| panic!("{e}: {:?}", self.data))
    }
}

/// The events of a stream, as a client that follows the standard sees them; an event without its
/// blank line is none.
pub fn parse(stream: &[u8]) -> Vec<Event> {
    let text = std::str::from_utf8(stream).expect("a stream is UTF-8");
    let (mut events, mut name, mut data) = (Vec::new(), None, Vec::<&str>::new());
    let Some(whole) = text.rfind('\n').map(|end| &text[..end]) else {
        return events;
    };
    for line in whole.split('\n') {
        let line = line.strip_suffix('\r').unwrap_or(line);
        let field = |prefix: &str| {
            line.strip_prefix(prefix)
                .map(|value| value.strip_prefix(' ').unwrap_or(value))
        };
        if line.is_empty() {
            if !data.is_empty() {
                let data = data.join("\n");
                events.push(Event {
                    name: name.take(),
                    data,
                });
            }
            (name, data) = (None, Vec::new());
        } else if let Some(value) = field("data:") {
            data.push(value);
        } else if let Some(value) = field("event:") {
            name = Some(value.to_owned());
        }
    }
    events
}

/// The text that all deltas make together.
pub fn text_of(events: &[Event]) -> String {
    let deltas = events.iter().filter(|event| event.data != "[DONE]");
    deltas
        .filter_map(|event| {
            let content = &event.json()["choices"][0]["delta"]["content"];
            content.as_str().map(str::to_owned)
        })
        .collect()
}
