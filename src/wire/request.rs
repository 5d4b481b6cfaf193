//! Reads from a request body only what routing needs, in one pass, and leaves the bytes alone.
//! Unknown fields, roles, content parts and tools are the engine's business, not ours.

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::fmt;

/// Names go into answers and log lines.
const MODEL_NAME_LENGTH_MAX: usize = 256;

/// Why a body cannot be routed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BodyFault {
    /// The field at fault, if it is one field.
    pub param: Option<&'static str>,
    /// One sentence for the client.
    pub message: String,
}

impl fmt::Display for BodyFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// What routing reads from a body. Borrowed from it.
#[derive(Debug, Deserialize)]
pub struct RequestView<'a> {
    #[serde(borrow, default)]
    model: Option<&'a RawValue>,
    #[serde(borrow, default)]
    stream: Option<&'a RawValue>,
    #[serde(borrow, default)]
    stream_options: Option<&'a RawValue>,
    #[serde(borrow, default)]
    messages: MessagesHead<'a>,
    #[serde(borrow, default)]
    system: Option<&'a RawValue>,
    #[serde(borrow, default)]
    instructions: Option<&'a RawValue>,
    #[serde(borrow, default)]
    prompt: Option<&'a RawValue>,
    #[serde(borrow, default)]
    input: Option<&'a RawValue>,
    #[serde(borrow, default)]
    tools: Option<&'a RawValue>,
    #[serde(borrow, default)]
    user: Option<&'a RawValue>,
    #[serde(default)]
    kv_transfer_params: Option<IgnoredAny>,
    #[serde(default)]
    bootstrap_host: Option<IgnoredAny>,
    #[serde(default)]
    bootstrap_port: Option<IgnoredAny>,
    #[serde(default)]
    bootstrap_room: Option<IgnoredAny>,
    #[serde(default)]
    disaggregated_params: Option<IgnoredAny>,
    #[serde(borrow, default)]
    temperature: Option<&'a RawValue>,
    #[serde(borrow, default)]
    max_tokens: Option<&'a RawValue>,
    #[serde(borrow, default)]
    max_completion_tokens: Option<&'a RawValue>,
    #[serde(borrow, default)]
    max_output_tokens: Option<&'a RawValue>,
    #[serde(borrow, default)]
    n: Option<&'a RawValue>,
    #[serde(borrow, default)]
    best_of: Option<&'a RawValue>,
    #[serde(borrow, default)]
    prompt_logprobs: Option<&'a RawValue>,
    #[serde(borrow, default)]
    echo: Option<&'a RawValue>,
    #[serde(borrow, default)]
    use_beam_search: Option<&'a RawValue>,
    #[serde(borrow, default)]
    store: Option<&'a RawValue>,
    #[serde(default)]
    previous_response_id: Option<IgnoredAny>,
    #[serde(default)]
    conversation: Option<IgnoredAny>,
    #[serde(borrow, default)]
    background: Option<&'a RawValue>,
}

/// Whether `prompt` is a text, a list of token ids, or a list with one of either.
fn is_one_prompt(raw: &RawValue) -> bool {
    let Some(items) = raw.get().strip_prefix('[') else {
        return true;
    };
    if items
        .trim_start()
        .starts_with(|first: char| first.is_ascii_digit())
    {
        return true; // token ids
    }
    let items = serde_json::from_str::<Vec<&RawValue>>(raw.get());
    items.is_ok_and(|items| items.len() == 1)
}

/// Which field holds the prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PromptField {
    /// `messages`, with an optional `system` beside it.
    Messages,
    /// `prompt`, in any of its four shapes.
    Prompt,
    /// `input`, with optional `instructions`.
    Input,
    /// The route has no prompt whose KV cache could be shared.
    None,
}

/// Raw bytes of the parts that a prompt begins with. Empty where there is none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Opening<'a> {
    /// System content.
    pub system: &'a [u8],
    /// Tool definitions.
    pub tools: &'a [u8],
    /// The first other message's content, or the prompt.
    pub first: &'a [u8],
}

impl<'a> RequestView<'a> {
    /// Reads a body. A key that routing depends on must not stand twice: the engine might believe
    /// the other one.
    pub fn parse(body: &'a [u8]) -> Result<Self, BodyFault> {
        let fault = |message: String| BodyFault {
            param: None,
            message,
        };
        if body.is_empty() {
            return Err(fault("the request body is empty".into()));
        }
        // a struct may also be read from a list; a request may not
        if body.iter().find(|byte| !byte.is_ascii_whitespace()) != Some(&b'{') {
            return Err(fault("the request body is not a JSON object".into()));
        }
        serde_json::from_slice(body)
            .map_err(|e| fault(format!("the request body is not valid JSON: {e}")))
    }

    /// The model's name.
    pub fn model(&self) -> Result<Cow<'a, str>, BodyFault> {
        let fault = |message: &str| BodyFault {
            param: Some("model"),
            message: message.into(),
        };
        let raw = self
            .model
            .ok_or_else(|| fault("you must provide a model parameter"))?;
        let name = text(raw).ok_or_else(|| fault("model must be a string"))?;
        if name.is_empty() {
            return Err(fault("model must not be empty"));
        }
        if name.len() > MODEL_NAME_LENGTH_MAX {
            return Err(fault("model is longer than any model's name"));
        }
        Ok(name)
    }

    /// The raw bytes of the `model` value, quotes included.
    pub fn raw_model(&self) -> Option<&'a str> {
        self.model.map(RawValue::get)
    }

    /// Whether the client asked for a stream. Engines also take `1` and `"true"` for true.
    pub fn wants_stream(&self) -> bool {
        self.stream
            .is_some_and(|raw| matches!(raw.get(), "true" | "1" | "\"true\""))
    }

    /// Whether `stream` is said in a way that every engine reads alike.
    pub fn says_stream_plainly(&self) -> bool {
        let plain = |raw: &RawValue| {
            matches!(
                raw.get(),
                "true" | "false" | "null" | "0" | "1" | "\"true\"" | "\"false\""
            )
        };
        self.stream.is_none_or(plain)
    }

    /// The most tokens that each answer may have, by whichever name the client says it; none where it does
    /// not say, or says nonsense.
    pub fn answer_tokens(&self) -> Option<u64> {
        let limits = [
            self.max_tokens,
            self.max_completion_tokens,
            self.max_output_tokens,
        ];
        let limits = limits.into_iter().flatten();
        limits.filter_map(|raw| raw.get().parse().ok()).max()
    }

    /// The raw `stream_options`, absent when missing or null.
    pub fn stream_options(&self) -> Option<&'a str> {
        self.stream_options.map(RawValue::get)
    }

    /// Whether the client asked for the usage chunk.
    pub fn wants_usage(&self) -> bool {
        #[derive(Deserialize)]
        struct Options {
            #[serde(default)]
            include_usage: bool,
        }
        self.stream_options()
            .and_then(|raw| serde_json::from_str::<Options>(raw).ok())
            .is_some_and(|options| options.include_usage)
    }

    /// Whether the stream is asked for in a way that changes its chunks, beyond the usage chunk.
    pub fn shapes_stream(&self) -> bool {
        let options = self.stream_options().map(|raw| {
            serde_json::from_str::<std::collections::BTreeMap<Cow<'_, str>, &RawValue>>(raw)
        });
        match options {
            None => false,
            Some(Err(_)) => true, // for the engine to refuse
            Some(Ok(options)) => options.iter().any(|(name, value)| {
                name != "include_usage" && !matches!(value.get(), "false" | "null")
            }),
        }
    }

    /// The sampling temperature, when it is given as a number.
    pub fn temperature(&self) -> Option<f64> {
        self.temperature?.get().parse().ok()
    }

    /// Whether tools are given.
    pub fn has_tools(&self) -> bool {
        self.tools.is_some_and(|raw| raw.get() != "[]")
    }

    /// How many choices are asked for.
    pub fn choices(&self) -> usize {
        self.n.and_then(|raw| raw.get().parse().ok()).unwrap_or(1)
    }

    /// Whether one engine may compute the prompt and another generate: one prompt, one choice, and nothing
    /// asked about the prompt's own tokens, which only who computes them can tell.
    pub fn can_be_split(&self) -> bool {
        let is = |raw: Option<&RawValue>, plain: &[&str]| {
            raw.is_none_or(|raw| plain.contains(&raw.get()))
        };
        let unset = ["null", "false", "0"];
        is(self.n, &["null", "1"])
            && is(self.best_of, &["null", "1"])
            && is(self.prompt_logprobs, &["null", "false"])
            && is(self.echo, &unset)
            && is(self.use_beam_search, &unset)
            && self.prompt.is_none_or(is_one_prompt)
    }

    /// Whether a server is to remember the answer, or to refer to what one remembers. The answers of
    /// `/v1/responses` are remembered unless the client says no.
    pub fn is_remembered(&self, unless_said: bool) -> bool {
        let stored = self.store.map_or(unless_said, |raw| raw.get() != "false");
        stored
            || self.previous_response_id.is_some()
            || self.conversation.is_some()
            || self.background.is_some_and(|raw| raw.get() != "false")
    }

    /// The `user` field's bytes, empty when there is none.
    pub fn user(&self) -> Cow<'a, str> {
        self.user.and_then(text).unwrap_or_default()
    }

    /// The members by which engines hand KV to each other that the client has set, which are not its to set: an
    /// engine would fetch from where it says.
    pub fn hand_off_members(&self) -> impl Iterator<Item = &'static str> {
        let given = [
            ("kv_transfer_params", self.kv_transfer_params.is_some()),
            ("bootstrap_host", self.bootstrap_host.is_some()),
            ("bootstrap_port", self.bootstrap_port.is_some()),
            ("bootstrap_room", self.bootstrap_room.is_some()),
            ("disaggregated_params", self.disaggregated_params.is_some()),
        ];
        let given = given.into_iter().filter(|(_, given)| *given);
        given.map(|(name, _)| name)
    }

    /// The parts that the prompt begins with.
    pub fn opening(&self, field: PromptField) -> Opening<'a> {
        let raw = |value: Option<&'a RawValue>| value.map_or(&b""[..], |v| v.get().as_bytes());
        let tools = raw(self.tools);
        match field {
            PromptField::Messages => Opening {
                system: match self.messages.system {
                    Some(system) => system.get().as_bytes(),
                    None => raw(self.system),
                },
                tools,
                first: raw(self.messages.first),
            },
            PromptField::Prompt => Opening {
                first: raw(self.prompt),
                ..Opening::default()
            },
            PromptField::Input => Opening {
                system: raw(self.instructions),
                tools,
                first: raw(self.input),
            },
            PromptField::None => Opening::default(),
        }
    }
}

fn text(raw: &RawValue) -> Option<Cow<'_, str>> {
    #[derive(Deserialize)]
    struct Text<'a>(#[serde(borrow)] Cow<'a, str>);
    serde_json::from_str::<Text<'_>>(raw.get())
        .ok()
        .map(|t| t.0)
}

/// The visits of values that are no lists and no objects: any of them means `$value`.
macro_rules! no_such_value {
    ($value:expr) => {
        fn visit_bool<E>(self, _: bool) -> Result<Self::Value, E> {
            Ok($value)
        }
        fn visit_i64<E>(self, _: i64) -> Result<Self::Value, E> {
            Ok($value)
        }
        fn visit_u64<E>(self, _: u64) -> Result<Self::Value, E> {
            Ok($value)
        }
        fn visit_f64<E>(self, _: f64) -> Result<Self::Value, E> {
            Ok($value)
        }
        fn visit_str<E>(self, _: &str) -> Result<Self::Value, E> {
            Ok($value)
        }
        fn visit_unit<E>(self) -> Result<Self::Value, E> {
            Ok($value)
        }
    };
}

/// The first system message's content and the first other message's; whatever else `messages`
/// is or holds is passed over.
#[derive(Debug, Default)]
struct MessagesHead<'a> {
    system: Option<&'a RawValue>,
    first: Option<&'a RawValue>,
}

/// What an element of `messages` says, read in the same pass; nothing of what is no message, or says one thing twice.
#[derive(Default)]
struct Message<'a> {
    role: Option<&'a RawValue>,
    content: Option<&'a RawValue>,
    is_unclear: bool,
}

impl<'a> Message<'a> {
    /// Its role; none where it is passed over.
    fn role(&self) -> Option<Cow<'a, str>> {
        match self.role {
            _ if self.is_unclear => None,
            None => Some(Cow::Borrowed("")),
            Some(raw) if raw.get() == "null" => Some(Cow::Borrowed("")),
            Some(raw) => text(raw),
        }
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Message<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(MessageVisitor)
    }
}

struct MessageVisitor;

impl<'de> Visitor<'de> for MessageVisitor {
    type Value = Message<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a message")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut message = Message::default();
        while let Some(key) = map.next_key::<&'de RawValue>()? {
            let place = match text(key).as_deref().unwrap_or_default() {
                "role" => &mut message.role,
                "content" => &mut message.content,
                _ => {
                    map.next_value::<IgnoredAny>()?;
                    continue;
                }
            };
            let before = place.replace(map.next_value()?);
            message.is_unclear |= before.is_some();
        }
        Ok(message)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(NO_MESSAGE)
    }

    no_such_value!(NO_MESSAGE);
}

const NO_MESSAGE: Message<'static> = Message {
    role: None,
    content: None,
    is_unclear: true,
};

impl<'de: 'a, 'a> Deserialize<'de> for MessagesHead<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(MessagesVisitor)
    }
}

struct MessagesVisitor;

impl<'de> Visitor<'de> for MessagesVisitor {
    type Value = MessagesHead<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("messages")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut head = MessagesHead::default();
        while head.first.is_none() {
            let Some(message) = seq.next_element::<Message<'de>>()? else {
                return Ok(head);
            };
            match message.role().as_deref() {
                None => {}
                Some("system" | "developer") => head.system = head.system.or(message.content),
                Some(_) => head.first = message.content,
            }
        }
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(head)
    }

    // any other shape is for the engine to refuse
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(MessagesHead::default())
    }
    no_such_value!(MessagesHead::default());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(body: &str) -> RequestView<'_> {
        RequestView::parse(body.as_bytes()).unwrap()
    }

    #[test]
    fn the_opening_of_a_chat_is_its_system_and_first_other_message() {
        let body = r#"{"model":"m","messages":[{"role":"developer","content":"S"},{"role":"user","content":[{"type":"x_new"}]},{"role":"user","content":"later"}],"tools":[{"name":"t"}]}"#;
        let view = view(body);
        let opening = view.opening(PromptField::Messages);
        assert_eq!(opening.system, b"\"S\"");
        assert_eq!(opening.first, br#"[{"type":"x_new"}]"#);
        assert_eq!(opening.tools, br#"[{"name":"t"}]"#);
    }

    #[test]
    fn one_prompt_with_one_choice_can_be_split_and_nothing_else() {
        for plain in [
            r#"{"messages":[]}"#,
            r#"{"n":1,"best_of":null,"echo":false,"prompt":"x"}"#,
            r#"{"prompt":[1,2,3]}"#,
            r#"{"prompt":[ [1,2,3] ]}"#,
            r#"{"prompt":["x"],"logprobs":5}"#,
        ] {
            assert!(view(plain).can_be_split(), "{plain}");
        }
        for whole in [
            r#"{"n":2}"#,
            r#"{"best_of":3}"#,
            r#"{"prompt":["x","y"]}"#,
            r#"{"prompt":[[1],[2]]}"#,
            r#"{"prompt_logprobs":0}"#,
            r#"{"echo":true}"#,
            r#"{"use_beam_search":true}"#,
        ] {
            assert!(!view(whole).can_be_split(), "{whole}");
        }
    }

    #[test]
    fn unfamiliar_messages_are_passed_over_not_refused() {
        for messages in [
            "7",
            "null",
            "true",
            "\"hi\"",
            "{}",
            "1.5",
            "[1,[],null,{\"role\":3},{\"role\":\"user\",\"content\":\"x\"}]",
            r#"[1.5,"s",true,{"\ud800":1,"role":"\ud800"},{"role":"user","role":"user","content":"x"}]"#,
        ] {
            let body = format!(r#"{{"model":"m","messages":{messages}}}"#);
            assert_eq!(view(&body).model().unwrap(), "m", "{messages}");
        }
    }

    #[test]
    fn every_prompt_shape_has_its_raw_opening() {
        for prompt in [
            r#""hi""#,
            r#"["a","b"]"#,
            "[1,2,3]",
            "[[1,2],[3,4]]",
            "[]",
            r#"["a",1]"#,
        ] {
            let body = format!(r#"{{"model":"m","prompt":{prompt}}}"#);
            let opening = view(&body).opening(PromptField::Prompt).first.to_vec();
            assert_eq!(opening, prompt.as_bytes());
        }
    }

    #[test]
    fn a_model_that_is_missing_or_no_name_is_a_fault_of_that_field() {
        for body in [
            "{}",
            r#"{"model":null}"#,
            r#"{"model":""}"#,
            r#"{"model":7}"#,
            r#"{"model":"\ud800"}"#,
        ] {
            assert_eq!(
                view(body).model().unwrap_err().param,
                Some("model"),
                "{body}"
            );
        }
    }

    #[test]
    fn an_endless_model_name_is_refused() {
        let body = format!(r#"{{"model":"{}"}}"#, "x".repeat(300));
        assert!(view(&body).model().is_err());
    }

    #[test]
    fn bodies_that_are_no_json_object_are_faults_and_never_panics() {
        let deep = format!(r#"{{"model":"m","x":{}"#, "[".repeat(10_000));
        for body in [
            "",
            "[]",
            "7",
            "{",
            "\u{feff}{}",
            r#"["m",true]"#,
            &deep,
            "{\"model\":\"a\",\"model\":\"b\"}",
        ] {
            assert!(RequestView::parse(body.as_bytes()).is_err(), "{:.20}", body);
        }
        assert!(RequestView::parse(b"{\"model\":\"\xff\"}").is_err());
    }

    #[test]
    fn deep_nesting_and_odd_keys_in_fields_that_are_not_ours_pass() {
        let deep = format!(
            r#"{{"model":"m","x":{}{}}}"#,
            "[".repeat(10_000),
            "]".repeat(10_000)
        );
        assert_eq!(view(&deep).model().unwrap(), "m");
        let odd = r#"{"model":"m","$serde_json::private::Number":"1","a":"\u0000","b":1e400,"c":18446744073709551616}"#;
        assert_eq!(view(odd).model().unwrap(), "m");
    }

    #[test]
    fn usage_is_wanted_only_when_asked_for() {
        for (options, wanted) in [
            ("null", false),
            ("{}", false),
            (r#"{"include_usage":false}"#, false),
            (
                r#"{"include_usage":true,"continuous_usage_stats":true}"#,
                true,
            ),
        ] {
            let body = format!(r#"{{"model":"m","stream":true,"stream_options":{options}}}"#);
            assert_eq!(view(&body).wants_usage(), wanted, "{options}");
            assert!(view(&body).wants_stream());
        }
    }
}
