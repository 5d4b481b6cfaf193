//! Changes single values of a JSON text and leaves every other byte as it was, so that the order
//! of keys, the digits of numbers and the client's own spacing survive.

use crate::sse::{Edit, data_of};
use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::borrow::Cow;

/// Replaces `part`, a slice of `whole`, by `new`.
///
/// # Panics
/// When `part` is not a slice of `whole`.
pub fn replace(whole: &[u8], part: &[u8], new: &[u8]) -> Bytes {
    let start = (part.as_ptr() as usize)
        .checked_sub(whole.as_ptr() as usize)
        .expect("part lies within whole");
    let mut out = Vec::with_capacity(whole.len() + new.len());
    out.extend_from_slice(&whole[..start]);
    out.extend_from_slice(new);
    out.extend_from_slice(&whole[start + part.len()..]);
    Bytes::from(out)
}

/// Adds `"key": value` as the last member of a JSON object.
pub fn append_member(object: &[u8], key: &str, value: &str) -> Bytes {
    let end = object
        .iter()
        .rposition(|byte| *byte == b'}')
        .expect("a parsed object ends with a brace");
    let empty = object[..end]
        .iter()
        .rfind(|byte| !byte.is_ascii_whitespace())
        == Some(&b'{');
    let comma = if empty { "" } else { "," };
    let mut out = Vec::with_capacity(object.len() + key.len() + value.len() + 8);
    out.extend_from_slice(&object[..end]);
    out.extend_from_slice(format!("{comma}\"{key}\":{value}").as_bytes());
    out.extend_from_slice(&object[end..]);
    Bytes::from(out)
}

/// The string that is the value of the top-level member `key` (quotes included) in the beginning
/// of a JSON object, if it is there whole.
fn member_of_beginning<'a>(beginning: &'a [u8], key: &[u8]) -> Option<&'a [u8]> {
    let (mut at, mut depth, mut is_value) = (0, 0u32, false);
    let mut found = false;
    while at < beginning.len() {
        match beginning[at] {
            b'"' => {
                let length = string_length(&beginning[at..])?;
                let string = &beginning[at..at + length];
                if depth == 1 && found && is_value {
                    return Some(string);
                }
                found = depth == 1 && !is_value && string == key;
                at += length;
                continue;
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.checked_sub(1)?,
            b':' if depth == 1 => is_value = true,
            b',' if depth == 1 => (is_value, found) = (false, false),
            _ => {}
        }
        at += 1;
    }
    None
}

/// The length of the JSON string that `bytes` begins with, quotes included.
fn string_length(bytes: &[u8]) -> Option<usize> {
    let mut at = 1;
    loop {
        at += memchr::memchr2(b'"', b'\\', bytes.get(at..)?)?;
        if bytes[at] == b'"' {
            return Some(at + 1);
        }
        at += 2;
    }
}

/// What becomes of a top-level member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change<'a> {
    /// It goes.
    Remove,
    /// It has this value, in place of any that it has.
    Put(&'a str),
    /// It has this value, if it is there at all.
    Replace(&'a str),
}

/// Changes top-level members of a JSON object in one pass; every other one keeps its bytes. New values stand at the
/// end. What is no object is left as it is.
pub fn change_members(object: &[u8], changes: &[(&str, Change<'_>)]) -> Bytes {
    let Ok(raw) = serde_json::from_slice::<RawMembers<'_>>(object) else {
        return Bytes::copy_from_slice(object);
    };
    let changes_it = |name: &str| changes.iter().any(|(other, _)| *other == name);
    let has = |name: &str| raw.0.iter().any(|(other, _)| other == name);
    let new = changes.iter().filter_map(|(name, change)| match change {
        Change::Remove => None,
        Change::Put(value) => Some((*name, *value)),
        Change::Replace(value) => has(name).then_some((*name, *value)),
    });
    if !raw.0.iter().any(|(name, _)| changes_it(name)) {
        // nothing goes, so the spacing can stay
        let mut out = Bytes::copy_from_slice(object);
        for (name, value) in new {
            out = append_member(&out, name, value);
        }
        return out;
    }
    let mut out = Vec::with_capacity(object.len() + 64);
    let mut put = |name: &str, value: &str| {
        out.push(if out.is_empty() { b'{' } else { b',' });
        out.extend_from_slice(serde_json::to_string(name).unwrap_or_default().as_bytes());
        out.push(b':');
        out.extend_from_slice(value.as_bytes());
    };
    for (name, value) in raw.0.iter().filter(|(name, _)| !changes_it(name)) {
        put(name, value.get());
    }
    for (name, value) in new {
        put(name, value);
    }
    if out.is_empty() {
        out.push(b'{');
    }
    out.push(b'}');
    Bytes::from(out)
}

/// Asks the engine for the usage chunk of a stream; options that the client gave are kept.
pub fn ask_for_usage(body: &[u8]) -> Bytes {
    #[derive(Deserialize)]
    struct Body<'a> {
        #[serde(borrow, default)]
        stream_options: Option<&'a RawValue>,
    }
    let options = serde_json::from_slice::<Body<'_>>(body).ok();
    match options.and_then(|body| body.stream_options) {
        None => {
            let bare = change_members(body, &[("stream_options", Change::Remove)]); // an explicit null
            append_member(&bare, "stream_options", r#"{"include_usage":true}"#)
        }
        Some(options) => {
            let old = options.get().as_bytes();
            let bare = change_members(old, &[("include_usage", Change::Remove)]); // an explicit false
            if serde_json::from_slice::<RawMembers<'_>>(&bare).is_err() {
                return Bytes::copy_from_slice(body); // not an object: for the engine to refuse
            }
            replace(body, old, &append_member(&bare, "include_usage", "true"))
        }
    }
}

/// All members of an object in order, duplicates included, values untouched.
struct RawMembers<'a>(Vec<(String, &'a RawValue)>);

impl<'de: 'a, 'a> Deserialize<'de> for RawMembers<'a> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members;
        impl<'de> serde::de::Visitor<'de> for Members {
            type Value = Vec<(String, &'de RawValue)>;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: serde::de::MapAccess<'de>>(
                self,
                mut map: A,
            ) -> Result<Self::Value, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(members)
            }
        }
        deserializer.deserialize_map(Members).map(RawMembers)
    }
}

#[derive(Deserialize)]
struct Answer<'a> {
    #[serde(borrow, default)]
    model: Option<&'a RawValue>,
    #[serde(borrow, default)]
    choices: Option<&'a RawValue>,
    #[serde(borrow, default)]
    usage: Option<&'a RawValue>,
}

/// What is changed in answers on their way to the client.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AnswerEdit {
    /// The name that the client used for the model, as a JSON string; none: leave the engine's.
    pub model: Option<String>,
    /// Drop the chunk that only carries usage: the client did not ask for it, we did.
    pub strip_usage_chunk: bool,
    /// What counts as cached of the prompt, where the engine that answers does not know.
    pub cached: Option<Cached>,
}

/// Cached tokens of a prompt that another engine has computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cached {
    /// As that one says.
    Tokens(u64),
    /// It does not say: then nobody says.
    Unknown,
}

impl Cached {
    /// Of what that engine has said.
    pub fn of(tokens: Option<u64>) -> Self {
        tokens.map_or(Cached::Unknown, Cached::Tokens)
    }

    /// The same for one event of a stream.
    fn put_into_event(self, event: &[u8]) -> Option<Bytes> {
        memchr::memmem::find(event, b"\"cached_tokens\"")?;
        match data_of(event)? {
            Cow::Borrowed(data) => Some(replace(event, data, &self.put_into(data)?)),
            Cow::Owned(_) => None, // data in several lines is no JSON of an engine's
        }
    }

    /// The text of an answer with the count in place; none when there is no count in it. Only the count's own
    /// digits are touched, or, where nothing can be said, the object around it.
    fn put_into(self, whole: &[u8]) -> Option<Bytes> {
        #[derive(Deserialize)]
        struct Details<'a> {
            #[serde(borrow, default)]
            cached_tokens: Option<&'a RawValue>,
        }
        #[derive(Deserialize)]
        struct Usage<'a> {
            #[serde(borrow, default)]
            prompt_tokens_details: Option<&'a RawValue>,
        }
        #[derive(Deserialize)]
        struct Answer<'a> {
            #[serde(borrow, default)]
            usage: Option<Usage<'a>>,
        }
        memchr::memmem::find(whole, b"\"cached_tokens\"")?;
        let details = serde_json::from_slice::<Answer<'_>>(whole).ok()?.usage?;
        let details = details.prompt_tokens_details?.get();
        let said = serde_json::from_str::<Details<'_>>(details)
            .ok()?
            .cached_tokens?;
        Some(match self {
            Cached::Tokens(tokens) => {
                replace(whole, said.get().as_bytes(), tokens.to_string().as_bytes())
            }
            Cached::Unknown => replace(whole, details.as_bytes(), b"null"),
        })
    }
}

impl AnswerEdit {
    /// Whether answers pass untouched.
    pub fn is_none(&self) -> bool {
        self.model.is_none() && !self.strip_usage_chunk && self.cached.is_none()
    }

    /// A whole JSON answer; what is no JSON passes.
    pub fn json(&self, body: &Bytes) -> Bytes {
        let counted = self.cached.and_then(|cached| cached.put_into(body));
        let body = counted.as_ref().unwrap_or(body);
        let Some(model) = &self.model else {
            return body.clone();
        };
        match serde_json::from_slice::<Answer<'_>>(body) {
            Ok(Answer {
                model: Some(old), ..
            }) => replace(body, old.get().as_bytes(), model.as_bytes()),
            _ => body.clone(),
        }
    }

    /// The beginning of a long JSON answer, whose rest has not come: the model is renamed when it
    /// stands there, before the long part, as engines write it.
    pub fn json_beginning(&self, beginning: &Bytes) -> Bytes {
        let Some(model) = &self.model else {
            return beginning.clone();
        };
        match member_of_beginning(beginning, b"\"model\"") {
            Some(old) => replace(beginning, old, model.as_bytes()),
            None => beginning.clone(),
        }
    }

    /// One event of a stream.
    pub fn event(&self, event: &[u8]) -> Edit {
        let counted = self.cached.and_then(|cached| cached.put_into_event(event));
        match counted {
            None if self.model.is_none() && !self.strip_usage_chunk => Edit::Keep,
            None => self.named(event),
            Some(counted) => match self.named(&counted) {
                Edit::Keep => Edit::Replace(counted),
                changed => changed,
            },
        }
    }

    fn named(&self, event: &[u8]) -> Edit {
        let Some(data) = data_of(event) else {
            return Edit::Keep;
        };
        let Ok(answer) = serde_json::from_slice::<Answer<'_>>(&data) else {
            return Edit::Keep;
        };
        let no_choices = answer
            .choices
            .is_some_and(|choices| is_empty_list(choices.get()));
        if self.strip_usage_chunk && no_choices && answer.usage.is_some() {
            return Edit::Drop;
        }
        match (&self.model, answer.model) {
            // in place, so that other fields of the event stay; data in several lines is no JSON of
            // an engine's
            (Some(new), Some(old)) if old.get() != new && matches!(data, Cow::Borrowed(_)) => {
                Edit::Replace(replace(event, old.get().as_bytes(), new.as_bytes()))
            }
            _ => Edit::Keep,
        }
    }
}

fn is_empty_list(raw: &str) -> bool {
    raw.strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'))
        .is_some_and(|inside| inside.trim().is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::RequestView;

    const BODY: &str = r#"{"model": "alias" ,"seed":9007199254740993,"s2":18446744073709551615,"t":0.10,"u":1.0,"v":-0.0,"w":1e400,
 "response_format":{"json_schema":{"properties":{"zebra":1,"apple":2,"mango":3}}}}"#;

    #[test]
    fn replacing_a_value_leaves_every_other_byte() {
        let view = RequestView::parse(BODY.as_bytes()).unwrap();
        let out = replace(
            BODY.as_bytes(),
            view.raw_model().unwrap().as_bytes(),
            b"\"served\"",
        );
        assert_eq!(out, BODY.replace("\"alias\"", "\"served\""));
    }

    #[test]
    fn appending_keeps_what_is_there() {
        assert_eq!(append_member(b"{}", "a", "1"), "{\"a\":1}");
        assert_eq!(append_member(b"{ }", "a", "1"), "{ \"a\":1}");
        let out = append_member(BODY.as_bytes(), "a", "{\"b\":true}");
        assert!(out.ends_with(b",\"a\":{\"b\":true}}"));
        assert!(out.starts_with(&BODY.as_bytes()[..BODY.len() - 1]));
    }

    #[test]
    fn removing_a_member_keeps_order_and_digits_of_the_rest() {
        let remove = |text: &[u8]| change_members(text, &[("kv", Change::Remove)]);
        assert_eq!(
            remove(br#"{"z":1e400,"kv":{"a":1},"a":9007199254740993,"m":1.0}"#),
            r#"{"z":1e400,"a":9007199254740993,"m":1.0}"#.as_bytes()
        );
        assert_eq!(remove(b"{\"a\": 1}"), "{\"a\": 1}");
    }

    #[test]
    fn members_change_in_one_pass_and_the_others_keep_their_bytes() {
        let changes = [
            ("a", Change::Remove),
            ("b", Change::Put("1")),
            ("c", Change::Replace("2")),
        ];
        for (before, after) in [
            (
                r#"{"a":7,"b":8,"c":9,"z":1e400}"#,
                r#"{"z":1e400,"b":1,"c":2}"#,
            ),
            (r#"{ "z": 1.0 }"#, r#"{ "z": 1.0 ,"b":1}"#),
            (r#"{"a":7}"#, r#"{"b":1}"#),
            (r#"{"a":1,"a":2,"z":"\u00e9"}"#, r#"{"z":"\u00e9","b":1}"#),
            ("[1]", "[1]"),
        ] {
            assert_eq!(change_members(before.as_bytes(), &changes), after);
        }
        assert_eq!(
            change_members(br#"{"a":7}"#, &[("a", Change::Remove)]),
            "{}"
        );
    }

    #[test]
    fn usage_is_asked_for_beside_the_clients_own_options() {
        for (before, after) in [
            (
                r#"{"a":1.0}"#,
                r#"{"a":1.0,"stream_options":{"include_usage":true}}"#,
            ),
            (
                r#"{"stream_options":null,"a":1}"#,
                r#"{"a":1,"stream_options":{"include_usage":true}}"#,
            ),
            (
                r#"{"stream_options":{"include_usage":false,"x":2},"a":1}"#,
                r#"{"stream_options":{"x":2,"include_usage":true},"a":1}"#,
            ),
            (r#"{"stream_options":7}"#, r#"{"stream_options":7}"#),
        ] {
            assert_eq!(ask_for_usage(before.as_bytes()), after);
        }
    }

    #[test]
    fn a_long_answer_is_renamed_by_its_beginning_or_not_at_all() {
        let edit = AnswerEdit {
            model: Some("\"gpt\"".into()),
            ..AnswerEdit::default()
        };
        let renamed = |text: &str| edit.json_beginning(&Bytes::copy_from_slice(text.as_bytes()));
        for (before, after) in [
            (r#"{"model":"m","data":["#, r#"{"model":"gpt","data":["#),
            (r#"{"model" : "m" , "x"#, r#"{"model" : "gpt" , "x"#),
            (
                r#"{"a":"\"model\":\"m\"","b":{"model":"m"},"c":["model","m"],"model":"m\\","#,
                r#"{"a":"\"model\":\"m\"","b":{"model":"m"},"c":["model","m"],"model":"gpt","#,
            ),
            (r#"{"x":"model","y":"m","#, r#"{"x":"model","y":"m","#),
            (r#"{"model":null,"y":"m","#, r#"{"model":null,"y":"m","#),
            (r#"{"model":"m"#, r#"{"model":"m"#),
            (r#"{"model":["m"],"#, r#"{"model":["m"],"#),
            (r#"{"a":"\"#, r#"{"a":"\"#),
            ("<html>]]", "<html>]]"),
            ("", ""),
        ] {
            assert_eq!(renamed(before), after, "{before}");
        }
    }

    #[test]
    fn only_the_usage_chunk_is_stripped_and_only_when_asked() {
        let strip = AnswerEdit {
            strip_usage_chunk: true,
            ..AnswerEdit::default()
        };
        let usage = br#"data: {"id":"x","choices":[],"usage":{"prompt_tokens":1}}"#;
        let last = br#"data: {"choices":[{"delta":{"content":"x"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1}}"#;
        let event = |json: &[u8]| [json, b"\n\n"].concat();
        assert_eq!(strip.event(&event(usage)), Edit::Drop);
        assert_eq!(strip.event(&event(last)), Edit::Keep);
        assert_eq!(strip.event(crate::sse::DONE), Edit::Keep);
        assert_eq!(AnswerEdit::default().event(&event(usage)), Edit::Keep);
    }

    #[test]
    fn the_alias_replaces_the_engines_name_and_nothing_else() {
        let edit = AnswerEdit {
            model: Some("\"gpt\"".into()),
            ..AnswerEdit::default()
        };
        let event = b"data: {\"id\":\"1\",\"model\":\"served\",\"choices\":[{\"delta\":{\"content\":\"\\\"model\\\":\\\"served\\\"\"}}]}\n\n";
        let Edit::Replace(out) = edit.event(event) else {
            panic!("not replaced")
        };
        assert_eq!(
            out,
            std::str::from_utf8(event)
                .unwrap()
                .replacen("\"served\"", "\"gpt\"", 1)
        );
        let body = Bytes::from_static(b"{\"model\":\"served\",\"x\":1.0}");
        assert_eq!(edit.json(&body), "{\"model\":\"gpt\",\"x\":1.0}");
        assert_eq!(edit.json(&Bytes::from_static(b"<html>")), "<html>");
    }

    #[test]
    fn cached_tokens_are_those_of_who_computed_the_prompt_or_nobody_says() {
        let of = |cached| AnswerEdit {
            cached: Some(cached),
            ..AnswerEdit::default()
        };
        let answer = r#"{"x":1.0,"usage":{"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens": 100,"audio":2}},"y":"\"cached_tokens\""}"#;
        let edited = |cached, text: &str| of(cached).json(&Bytes::copy_from_slice(text.as_bytes()));
        assert_eq!(
            edited(Cached::Tokens(20), answer),
            answer.replace(" 100,\"audio", " 20,\"audio")
        );
        let left_out = answer.replace(r#"{"cached_tokens": 100,"audio":2}"#, "null");
        assert_eq!(edited(Cached::Unknown, answer), left_out);
        for silent in [
            r#"{"usage":{"prompt_tokens":100}}"#,
            r#"{"usage":null,"z":"\"cached_tokens\""}"#,
            r#"{"cached_tokens":5}"#,
            "cached_tokens",
        ] {
            assert_eq!(edited(Cached::Tokens(20), silent), silent);
        }
        let event = format!("id: 7\ndata: {answer}\n\n");
        let expected = event.replace(" 100,\"audio", " 20,\"audio");
        assert_eq!(
            of(Cached::Tokens(20)).event(event.as_bytes()),
            Edit::Replace(expected.into())
        );
        assert_eq!(
            of(Cached::Unknown).event(b"data: {\"choices\":[]}\n\n"),
            Edit::Keep
        );
    }
}
