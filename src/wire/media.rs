//! Whether a request names media, or files, that stand somewhere else: what is there may change while
//! the request's own bytes do not.

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::fmt;

/// Whether a body's messages, prompt or input refer to media by anything but `data:`. Text that only
/// speaks of a URL refers to nothing.
pub fn refers_elsewhere(body: &[u8]) -> bool {
    let has = |needle: &[u8]| memchr::memmem::find(body, needle).is_some();
    let named = [
        &b"url\""[..],
        b"_id\"",
        b"image\"",
        b"video\"",
        b"audio\"",
        b"item_reference\"",
        b"\\u",
    ];
    if !named.into_iter().any(has) {
        return false; // no member is named so
    }
    #[derive(Deserialize)]
    struct Body<'a> {
        #[serde(borrow, default)]
        messages: Option<&'a RawValue>,
        #[serde(borrow, default)]
        input: Option<&'a RawValue>,
        #[serde(borrow, default)]
        prompt: Option<&'a RawValue>,
        #[serde(borrow, default)]
        system: Option<&'a RawValue>,
    }
    let Ok(body) = serde_json::from_slice::<Body<'_>>(body) else {
        return true; // who knows
    };
    let parts = [body.messages, body.input, body.prompt, body.system];
    parts.into_iter().flatten().any(|part| {
        let found = serde_json::from_str::<Refers>(part.get());
        found.map_or(true, |refers| refers.0) // who knows
    })
}

/// What a member's text says.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Means {
    /// Nothing that stands elsewhere.
    Itself,
    /// Where something is, unless it is `data:`.
    Place,
    /// Media, or where they are.
    Media,
    /// What kind of thing this is.
    Kind,
}

fn meaning(key: &str) -> Means {
    match key {
        "url" | "file_id" | "image_id" => Means::Place,
        "image" | "video" | "audio" => Means::Media,
        "type" => Means::Kind,
        _ if key.ends_with("_url") => Means::Place,
        _ => Means::Itself,
    }
}

/// Whether something within refers elsewhere.
struct Refers(bool);

struct Walk(Means);

impl<'de> Deserialize<'de> for Refers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer
            .deserialize_any(Walk(Means::Itself))
            .map(Refers)
    }
}

impl<'de> serde::de::DeserializeSeed<'de> for Walk {
    type Value = bool;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Walk {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_str<E>(self, text: &str) -> Result<bool, E> {
        Ok(match self.0 {
            Means::Itself => false,
            Means::Place => !text.starts_with("data:"),
            Means::Media => text.contains("://") || text.starts_with('/'),
            Means::Kind => text == "item_reference",
        })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<bool, A::Error> {
        let mut found = false;
        while let Some(key) = map.next_key::<Cow<'de, str>>()? {
            found |= map.next_value_seed(Walk(meaning(&key)))?;
        }
        Ok(found)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<bool, A::Error> {
        let mut found = false;
        while let Some(element) = seq.next_element::<Refers>()? {
            found |= element.0;
            if found {
                while seq.next_element::<IgnoredAny>()?.is_some() {}
            }
        }
        Ok(found)
    }

    fn visit_bool<E>(self, _: bool) -> Result<bool, E> {
        Ok(false)
    }
    fn visit_i64<E>(self, _: i64) -> Result<bool, E> {
        Ok(false)
    }
    fn visit_u64<E>(self, _: u64) -> Result<bool, E> {
        Ok(false)
    }
    fn visit_f64<E>(self, _: f64) -> Result<bool, E> {
        Ok(false)
    }
    fn visit_unit<E>(self) -> Result<bool, E> {
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn media_by_url_or_id_refer_elsewhere_and_inline_media_and_text_do_not() {
        let refers = |content: &str| {
            let body = format!(r#"{{"messages":[{{"role":"user","content":{content}}}]}}"#);
            refers_elsewhere(body.as_bytes())
        };
        for elsewhere in [
            r#"[{"type":"image_url","image_url":{"url":"https://x/y.png"}}]"#,
            r#"[{"type":"image_url","image_url":"http://x/y.png"}]"#,
            r#"[{"type":"video_url","video_url":{"url":"s3://b/k"}}]"#,
            r#"[{"type":"input_image","image_\u0075rl":"https://x"}]"#,
            r#"[{"type":"file","file":{"file_id":"f-1"}}]"#,
            r#"[{"type":"image","source":{"type":"url","url":"https://x"}}]"#,
            r#"[{"text":"a","image":"https://x/y.png"}]"#,
            r#"[{"type":"item_reference","id":"msg_1"}]"#,
            r#"[{"image_url":"https://x","n":1e400}]"#,
        ] {
            assert!(refers(elsewhere), "{elsewhere}");
        }
        for here in [
            r#""see \"url\": https://example.org""#,
            r#"[{"type":"image_url","image_url":{"url":"data:image/png;base64,AA"}}]"#,
            r#"[{"type":"text","text":"image_url"}]"#,
            r#"[{"text":"a","image":"iVBORw0KGgo="}]"#,
            r#"null"#,
        ] {
            assert!(!refers(here), "{here}");
        }
        let tool =
            br#"{"messages":[],"tools":[{"function":{"parameters":{"url":"https://schema"}}}]}"#;
        assert!(!refers_elsewhere(tool), "a schema is no media");
    }
}
