//! What a whole answer says about itself: whether it came to its end, why each choice ended, and what
//! the engine counted.

use super::{Dialect, each_data};
use crate::openai::Usage;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::borrow::Cow;

/// See the module.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Said {
    /// Whether it could be read as what the path answers with.
    pub readable: bool,
    /// Whether the end was said: of a stream, its last event.
    pub whole: bool,
    /// Whether an error is in it.
    pub error: bool,
    /// Why each choice ended, by index; none for one that did not.
    pub reasons: Vec<Option<String>>,
    /// Token counts.
    pub usage: Option<Usage>,
}

#[derive(Deserialize)]
struct View<'a> {
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
    #[serde(borrow, default, rename = "type")]
    kind: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    object: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    choices: Option<Vec<Choice<'a>>>,
    #[serde(default)]
    usage: Option<Counts>,
    /// `/v1/responses`.
    #[serde(borrow, default)]
    status: Option<Cow<'a, str>>,
    /// `/v1/messages`.
    #[serde(borrow, default)]
    stop_reason: Option<Cow<'a, str>>,
    /// Of an event of `/v1/messages`.
    #[serde(borrow, default)]
    delta: Option<&'a RawValue>,
    /// Of an event of `/v1/responses`.
    #[serde(borrow, default)]
    response: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(default)]
    index: usize,
    #[serde(borrow, default)]
    finish_reason: Option<Cow<'a, str>>,
}

#[derive(Deserialize)]
struct Delta<'a> {
    #[serde(borrow, default)]
    stop_reason: Option<Cow<'a, str>>,
}

/// Token counts under either pair of names; some engines give both.
#[derive(Deserialize)]
struct Counts {
    #[serde(default)]
    prompt_tokens: Option<u64>,
    #[serde(default)]
    input_tokens: Option<u64>,
    #[serde(default)]
    completion_tokens: Option<u64>,
    #[serde(default)]
    output_tokens: Option<u64>,
    #[serde(default)]
    total_tokens: Option<u64>,
}

impl Counts {
    fn usage(self) -> Usage {
        Usage {
            prompt_tokens: self.prompt_tokens.or(self.input_tokens).unwrap_or(0),
            completion_tokens: self.completion_tokens.or(self.output_tokens),
            total_tokens: self.total_tokens.unwrap_or(0),
            prompt_tokens_details: None,
        }
    }
}

/// More choices than any engine makes for one request.
const CHOICES_MAX: usize = 4096;

impl Said {
    fn ended(&mut self, index: usize, reason: Option<&str>) {
        if index >= CHOICES_MAX {
            return;
        }
        if self.reasons.len() <= index {
            self.reasons.resize(index + 1, None);
        }
        if let Some(reason) = reason {
            self.reasons[index] = Some(reason.to_owned());
        }
    }
}

/// Reads a whole JSON answer.
pub fn of_json(json: &[u8], dialect: Dialect) -> Said {
    let mut said = Said::default();
    let Ok(view) = serde_json::from_slice::<View<'_>>(json) else {
        return said;
    };
    said.readable = true;
    said.whole = true;
    said.error = view.error.is_some_and(|error| error.get() != "null")
        || [&view.object, &view.kind]
            .into_iter()
            .any(|is| is.as_deref() == Some("error"));
    said.usage = view.usage.map(Counts::usage);
    match dialect {
        Dialect::Chat | Dialect::Completions => {
            for choice in view.choices.unwrap_or_default() {
                said.ended(choice.index, choice.finish_reason.as_deref());
            }
        }
        Dialect::Embeddings => {}
        Dialect::Responses => said.whole = view.status.as_deref() == Some("completed"),
        Dialect::Messages => said.ended(0, view.stop_reason.as_deref()),
    }
    said
}

/// Reads a whole stream. Most events are text and are told by their bytes, without parsing.
pub fn of_events(events: &[u8], dialect: Dialect) -> Said {
    let mut said = Said {
        readable: true,
        ..Said::default()
    };
    each_data(events, |data| {
        if data.trim_ascii() == b"[DONE]" {
            said.whole |= dialect.converts();
        } else if is_of_note(data, dialect) {
            match serde_json::from_slice::<View<'_>>(data) {
                Ok(view) => take_event(view, dialect, &mut said),
                Err(_) => said.readable = false,
            }
        }
    });
    said
}

fn is_of_note(data: &[u8], dialect: Dialect) -> bool {
    let has = |needle: &[u8]| memchr::memmem::find(data, needle).is_some();
    if has(b"\"error\"") || !dialect.converts() {
        return true;
    }
    has(b"\"usage\"") || !all_null(data, b"\"finish_reason\"")
}

/// Whether the key stands there, each time with null behind it: nothing has ended yet.
fn all_null(data: &[u8], key: &[u8]) -> bool {
    let mut found = memchr::memmem::find_iter(data, key).peekable();
    let some = found.peek().is_some();
    some && found.all(|at| {
        let behind = data[at + key.len()..].trim_ascii_start();
        let value = behind.strip_prefix(b":").map(<[u8]>::trim_ascii_start);
        value.is_some_and(|value| value.starts_with(b"null"))
    })
}

fn take_event(view: View<'_>, dialect: Dialect, said: &mut Said) {
    said.error |= view.error.is_some_and(|error| error.get() != "null")
        || [&view.object, &view.kind]
            .into_iter()
            .any(|is| is.as_deref() == Some("error"));
    if let Some(usage) = view.usage {
        said.usage = Some(usage.usage());
    }
    match dialect {
        Dialect::Chat | Dialect::Completions => {
            for choice in view.choices.unwrap_or_default() {
                said.ended(choice.index, choice.finish_reason.as_deref());
            }
        }
        Dialect::Embeddings => {}
        Dialect::Responses => {
            if view.kind.as_deref() == Some("response.completed")
                && let Some(response) = view.response
            {
                let last = of_json(response.get().as_bytes(), dialect);
                said.whole = last.whole;
                said.error |= last.error;
                said.usage = last.usage;
            }
        }
        Dialect::Messages => match view.kind.as_deref() {
            Some("message_start") => said.ended(0, None),
            Some("message_delta") => {
                let delta = view
                    .delta
                    .map(|delta| serde_json::from_str::<Delta<'_>>(delta.get()));
                let reason = delta.and_then(|delta| delta.ok()?.stop_reason);
                said.ended(0, reason.as_deref());
            }
            Some("message_stop") => said.whole = true,
            _ => {}
        },
    }
}
