//! One form for all bodies that ask for the same: keys in order, no blanks, texts escaped in one way.
//! Numbers keep the digits that the client wrote, since engines may read `1` and `1.0` differently.

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::fmt;

/// Nesting beyond this has no canonical form; no request needs it.
const DEPTH_MAX: usize = 64;

/// The canonical form of a JSON object, without these keys of its own. None when it is no object, has
/// a key twice (engines may believe either), or nests too deeply.
pub fn canonical(body: &[u8], without: &[&str]) -> Option<Vec<u8>> {
    let raw: &RawValue = serde_json::from_slice(body).ok()?;
    let mut object = object(raw)?;
    for key in without {
        object.remove(*key);
    }
    let mut out = Vec::with_capacity(body.len());
    write_object(&object, 0, &mut out)?;
    Some(out)
}

type Object<'a> = BTreeMap<String, &'a RawValue>;

/// An object's members; none when it is something else, or a key stands twice.
fn object(raw: &RawValue) -> Option<Object<'_>> {
    struct Members<'a>(Object<'a>);
    struct Once;
    impl<'de> Visitor<'de> for Once {
        type Value = Members<'de>;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object whose keys stand once")
        }
        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut members = Object::new();
            while let Some((key, value)) = map.next_entry::<String, &RawValue>()? {
                if members.insert(key, value).is_some() {
                    return Err(serde::de::Error::custom("a key stands twice"));
                }
            }
            Ok(Members(members))
        }
    }
    impl<'de: 'a, 'a> Deserialize<'de> for Members<'a> {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            deserializer.deserialize_map(Once)
        }
    }
    let members: Members<'_> = serde_json::from_str(raw.get()).ok()?;
    Some(members.0)
}

fn write(raw: &RawValue, depth: usize, out: &mut Vec<u8>) -> Option<()> {
    if depth > DEPTH_MAX {
        return None;
    }
    match raw.get().as_bytes().first()? {
        b'{' => write_object(&object(raw)?, depth, out),
        b'[' => {
            let items: Vec<&RawValue> = serde_json::from_str(raw.get()).ok()?;
            out.push(b'[');
            for (at, item) in items.into_iter().enumerate() {
                if at > 0 {
                    out.push(b',');
                }
                write(item, depth + 1, out)?;
            }
            out.push(b']');
            Some(())
        }
        b'"' => write_text(&serde_json::from_str::<String>(raw.get()).ok()?, out),
        _ => {
            out.extend_from_slice(raw.get().as_bytes());
            Some(())
        }
    }
}

fn write_object(object: &Object<'_>, depth: usize, out: &mut Vec<u8>) -> Option<()> {
    out.push(b'{');
    for (at, (key, value)) in object.iter().enumerate() {
        if at > 0 {
            out.push(b',');
        }
        write_text(key, out)?;
        out.push(b':');
        write(value, depth + 1, out)?;
    }
    out.push(b'}');
    Some(())
}

fn write_text(text: &str, out: &mut Vec<u8>) -> Option<()> {
    serde_json::to_writer(out, text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Map, Value};

    fn form(body: &str) -> Option<String> {
        let form = canonical(body.as_bytes(), &["stream", "stream_options"])?;
        Some(String::from_utf8(form).unwrap())
    }

    #[test]
    fn order_blanks_escapes_and_stream_make_no_difference_and_all_else_does() {
        let plain = form(r#"{"model":"m","messages":[{"role":"user","content":"é/\n"}],"n":1}"#);
        let other = "{ \"n\" : 1,\n \"stream\": true, \"messages\":[ {\"content\":\"\\u00e9\\/\\n\", \"role\":\"user\"} ],\t\"model\":\"m\", \"stream_options\":{\"include_usage\":true}}";
        assert_eq!(form(other), plain);
        for changed in [
            r#"{"model":"m","messages":[{"role":"user","content":"é/\n"}],"n":1.0}"#,
            r#"{"model":"m","messages":[{"role":"user","content":"é/\n"}],"n":"1"}"#,
            r#"{"model":"m","messages":[{"role":"user","content":"é/\n"}],"n":1,"x_vendor":null}"#,
            r#"{"model":"m","messages":[{"role":"user","content":"é/\n","stream":1}],"n":1}"#,
        ] {
            assert_ne!(form(changed), plain, "{changed}");
        }
    }

    #[test]
    fn what_could_be_read_in_two_ways_has_no_form() {
        for body in [
            "",
            "[1]",
            "1",
            "{",
            r#"{"a":1,"a":1}"#,
            r#"{"x":{"a":1,"a":2}}"#,
        ] {
            assert_eq!(form(body), None, "{body}");
        }
        let deep = format!("{{\"a\":{}1{}}}", "[".repeat(100), "]".repeat(100));
        assert_eq!(form(&deep), None);
        assert_eq!(
            form(r#"{"big":12345678901234567890123}"#).unwrap(),
            r#"{"big":12345678901234567890123}"#
        );
    }

    fn json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            "\\PC{0,8}".prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 20, 4, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                proptest::collection::btree_map("[a-c]{1,2}", inner, 0..4)
                    .prop_map(|members| Value::Object(members.into_iter().collect())),
            ]
        })
    }

    fn reversed(value: &Value) -> Value {
        match value {
            Value::Object(members) => {
                let members = members.iter().rev();
                let members: Map<String, Value> = members
                    .map(|(key, value)| (key.clone(), reversed(value)))
                    .collect();
                Value::Object(members)
            }
            Value::Array(items) => items.iter().map(reversed).collect(),
            other => other.clone(),
        }
    }

    proptest! {
        #[test]
        fn bodies_have_one_form_exactly_when_they_are_equal(a in json(), b in json()) {
            let of = |value: &Value, pretty: bool| {
                let body = serde_json::json!({"x": value});
                let text = if pretty { serde_json::to_string_pretty(&body) } else { serde_json::to_string(&body) };
                form(&text.unwrap())
            };
            prop_assert_eq!(of(&a, false), of(&reversed(&a), true));
            prop_assert_eq!(of(&a, false) == of(&b, false), a == b);
        }
    }
}
