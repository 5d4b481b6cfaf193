//! Reads typed values out of the merged tree, notes every key with its default and description,
//! and collects all faults instead of stopping at the first.

use super::fault::{Fault, Known, MASK, Shown, mark, redact_url};
use super::suggest::nearest;
use super::units;
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

#[derive(Default)]
struct Notes {
    faults: Vec<Fault>,
    unknown: Vec<String>,
    known: Vec<Known>,
}

/// See the module.
pub struct Reader<'t> {
    tree: &'t Value,
    /// Paths whose value is known to be wrong already.
    unresolved: BTreeSet<String>,
    schema: bool,
    notes: RefCell<Notes>,
}

impl<'t> Reader<'t> {
    /// Reads `tree`. Nothing more is said of values at `unresolved` paths.
    pub fn new(tree: &'t Value, unresolved: BTreeSet<String>) -> Self {
        Reader {
            tree,
            unresolved,
            schema: false,
            notes: RefCell::default(),
        }
    }

    /// Lists every key: lists have one element, faults do not matter.
    pub fn for_schema(tree: &'t Value) -> Self {
        Reader {
            schema: true,
            ..Reader::new(tree, BTreeSet::new())
        }
    }

    /// Faults, and the keys with their values.
    pub fn finish(self, known: &[String]) -> (Vec<Fault>, Vec<Known>) {
        let notes = self.notes.into_inner();
        let mut faults = notes.faults;
        faults.extend(notes.unknown.into_iter().map(|path| {
            let message = match nearest(&path, known) {
                Some(near) => format!("unknown key, did you mean `{near}`?"),
                None => "unknown key".to_owned(),
            };
            Fault::new(path, message)
        }));
        (faults, notes.known)
    }
}

/// One map of the tree. When it is dropped, keys that nobody asked for are unknown.
pub struct Section<'t> {
    reader: &'t Reader<'t>,
    path: String,
    map: Option<&'t Map<String, Value>>,
    asked: RefCell<Vec<&'static str>>,
}

impl Drop for Section<'_> {
    fn drop(&mut self) {
        let asked = self.asked.borrow();
        let keys = self.map.into_iter().flat_map(|map| map.keys());
        for key in keys.filter(|key| !asked.contains(&key.as_str())) {
            let path = join(&self.path, key);
            self.reader.notes.borrow_mut().unknown.push(path);
        }
    }
}

fn join(path: &str, key: &str) -> String {
    if path.is_empty() {
        key.to_owned()
    } else {
        format!("{path}.{key}")
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "a section",
    }
}

impl<'t> Section<'t> {
    /// The whole tree.
    pub fn root(reader: &'t Reader<'t>) -> Self {
        Section::over(reader, String::new(), reader.tree)
    }

    fn over(reader: &'t Reader<'t>, path: String, value: &'t Value) -> Self {
        let map = match value {
            Value::Object(map) => Some(map),
            Value::Null => None,
            other => {
                let message = format!(
                    "must be a section with keys of its own, not {}",
                    kind(other)
                );
                reader
                    .notes
                    .borrow_mut()
                    .faults
                    .push(Fault::new(path.clone(), message));
                None
            }
        };
        Section {
            reader,
            path,
            map,
            asked: RefCell::default(),
        }
    }

    fn get(&self, key: &'static str) -> Option<&'t Value> {
        self.asked.borrow_mut().push(key);
        self.map
            .and_then(|map| map.get(key))
            .filter(|v| !v.is_null())
    }

    /// Reports what is wrong with a key of this section.
    pub fn fault(&self, key: &str, message: impl Into<String>) {
        let path = join(&self.path, key);
        if self.reader.unresolved.contains(&path) {
            return; // reported already, with the reason
        }
        let fault = Fault::new(path, message);
        self.reader.notes.borrow_mut().faults.push(fault);
    }

    fn know(&self, key: &str, doc: &'static str, value: Shown) {
        let masked = matches!(&value, Shown::Value(Value::String(text)) if text.contains(MASK));
        let raw = self.map.and_then(|map| map.get(key));
        let mark = raw.filter(|_| masked).map_or(0, mark);
        let path = join(&self.path, key);
        self.reader.notes.borrow_mut().known.push(Known {
            path,
            doc,
            value,
            mark,
        });
    }

    /// A section within this one.
    pub fn section(&self, key: &'static str, doc: &'static str) -> Section<'t> {
        self.know(key, doc, Shown::Section);
        let value = self.get(key).unwrap_or(&Value::Null);
        Section::over(self.reader, join(&self.path, key), value)
    }

    /// Whether anything was written in this section.
    pub fn is_given(&self) -> bool {
        self.map
            .is_some_and(|map| map.values().any(|value| !value.is_null()))
    }

    /// A list of sections.
    pub fn list(&self, key: &'static str, doc: &'static str) -> Vec<Section<'t>> {
        self.know(key, doc, Shown::Section);
        let path = join(&self.path, key);
        if self.reader.schema {
            return vec![Section::over(
                self.reader,
                format!("{path}[]"),
                &Value::Null,
            )];
        }
        match self.get(key) {
            None => Vec::new(),
            Some(Value::Array(items)) => items
                .iter()
                .enumerate()
                .map(|(i, item)| Section::over(self.reader, format!("{path}[{i}]"), item))
                .collect(),
            Some(other) => {
                self.fault(key, format!("must be a list, not {}", kind(other)));
                Vec::new()
            }
        }
    }

    /// Reads a value with `parse`, which says what would be right when it fails.
    fn value<T>(
        &self,
        key: &'static str,
        doc: &'static str,
        (default, show): (Option<T>, impl Fn(&T) -> Value),
        parse: impl Fn(&Value) -> Result<T, String>,
    ) -> Option<T> {
        let parsed = match self.get(key).map(&parse) {
            Some(Ok(value)) => Some(value),
            Some(Err(message)) => {
                self.fault(key, message);
                None
            }
            None => None,
        };
        let value = parsed.or(default);
        let shown = value
            .as_ref()
            .map_or(Shown::Unset, |v| Shown::Value(show(v)));
        self.know(key, doc, shown);
        value
    }

    /// A whole number within `range`.
    pub fn int(
        &self,
        key: &'static str,
        (default, range): (u64, std::ops::RangeInclusive<u64>),
        doc: &'static str,
    ) -> u64 {
        let wanted = || match *range.end() {
            u64::MAX => format!("must be a whole number of at least {}", range.start()),
            _ => format!(
                "must be a whole number from {} to {}",
                range.start(),
                range.end()
            ),
        };
        let parse = |value: &Value| {
            let number = match value {
                Value::Number(n) => n.as_u64(),
                Value::String(text) => text.parse().ok(),
                _ => None,
            };
            number.filter(|n| range.contains(n)).ok_or_else(wanted)
        };
        let show = (Some(default), |n: &u64| (*n).into());
        self.value(key, doc, show, parse).unwrap_or(default)
    }

    /// A number from `min` to `max`.
    pub fn number(
        &self,
        key: &'static str,
        (default, min, max): (f64, f64, f64),
        doc: &'static str,
    ) -> f64 {
        let parse = |value: &Value| {
            let number = match value {
                Value::Number(n) => n.as_f64(),
                Value::String(text) => text.parse().ok(),
                _ => None,
            };
            number
                .filter(|n| (min..=max).contains(n))
                .ok_or_else(|| format!("must be a number from {min} to {max}"))
        };
        let show = (Some(default), |n: &f64| (*n).into());
        self.value(key, doc, show, parse).unwrap_or(default)
    }

    /// `true` or `false`.
    pub fn flag(&self, key: &'static str, default: bool, doc: &'static str) -> bool {
        let parse = |value: &Value| match value {
            Value::Bool(b) => Ok(*b),
            Value::String(text) if text == "true" => Ok(true),
            Value::String(text) if text == "false" => Ok(false),
            _ => Err("must be true or false".to_owned()),
        };
        let show = (Some(default), |b: &bool| (*b).into());
        self.value(key, doc, show, parse).unwrap_or(default)
    }

    /// A duration such as "15s", of at least a millisecond.
    pub fn duration(
        &self,
        key: &'static str,
        default: &'static str,
        doc: &'static str,
    ) -> Duration {
        let duration = self.pause(key, default, doc);
        if duration < Duration::from_millis(1) {
            self.fault(key, "must be at least 1ms");
        }
        duration
    }

    /// A duration that may be zero.
    pub fn pause(&self, key: &'static str, default: &'static str, doc: &'static str) -> Duration {
        let default = units::duration(default).expect("defaults are well formed");
        self.duration_or(key, Some(default), doc).unwrap_or(default)
    }

    /// A duration that may be absent.
    pub fn duration_or(
        &self,
        key: &'static str,
        default: Option<Duration>,
        doc: &'static str,
    ) -> Option<Duration> {
        let parse = |value: &Value| {
            let text = value.as_str().unwrap_or_default();
            units::duration(text).ok_or_else(|| {
                "must be a duration with a unit (ms, s, m, h, d), for example \"15s\"".to_owned()
            })
        };
        let show = (default, |d: &Duration| units::show_duration(*d).into());
        self.value(key, doc, show, parse)
    }

    /// A size in bytes, or such as "1MiB".
    pub fn size(&self, key: &'static str, default: u64, doc: &'static str) -> u64 {
        let parse = |value: &Value| {
            let bytes = match value {
                Value::Number(n) => n.as_u64(),
                Value::String(text) => units::size(text),
                _ => None,
            };
            bytes
                .filter(|n| *n > 0)
                .ok_or_else(|| "must be a size in bytes, or for example \"1MiB\"".to_owned())
        };
        let show = (Some(default), |n: &u64| units::show_size(*n).into());
        self.value(key, doc, show, parse).unwrap_or(default)
    }

    /// A text with a default.
    pub fn text(&self, key: &'static str, default: &'static str, doc: &'static str) -> String {
        let show = (Some(default.to_owned()), |s: &String| s.clone().into());
        self.value(key, doc, show, as_text)
            .unwrap_or_else(|| default.to_owned())
    }

    /// A text that may be absent; an empty one counts as absent.
    pub fn text_or_none(&self, key: &'static str, doc: &'static str) -> Option<String> {
        let show = (None, |s: &String| s.clone().into());
        self.value(key, doc, show, as_text)
            .filter(|s| !s.is_empty())
    }

    /// A text that must be there.
    pub fn required(&self, key: &'static str, doc: &'static str) -> String {
        let show = (None, |s: &String| s.clone().into());
        let found = self.value(key, doc, show, as_text);
        let mut notes = self.reader.notes.borrow_mut();
        if self.reader.schema
            && let Some(last) = notes.known.last_mut()
        {
            last.value = Shown::Required;
        }
        drop(notes);
        let given = self
            .map
            .is_some_and(|map| map.get(key).is_some_and(|v| !v.is_null()));
        if !given || found.as_deref() == Some("") {
            self.fault(key, "is required");
        }
        found.unwrap_or_default()
    }

    /// A secret that may be absent; an empty one is a fault, since it would be sent as it is.
    pub fn secret(&self, key: &'static str, doc: &'static str) -> Option<Arc<str>> {
        let show = (None, |_: &String| MASK.into());
        let secret = self.value(key, doc, show, as_text)?;
        if secret.is_empty() {
            self.fault(key, "is empty; remove the key to use none");
            return None;
        }
        Some(secret.into())
    }

    /// A URL whose user and password are masked when it is shown.
    pub fn url_or_none(&self, key: &'static str, doc: &'static str) -> Option<String> {
        let show = (None, |s: &String| redact_url(s).into());
        self.value(key, doc, show, as_text)
            .filter(|s| !s.is_empty())
    }

    /// A list of texts.
    pub fn texts(&self, key: &'static str, doc: &'static str) -> Vec<Arc<str>> {
        let parse = |value: &Value| {
            let wrong = || "must be a list of texts".to_owned();
            let items = value.as_array().ok_or_else(wrong)?;
            let texts = items.iter().map(|item| {
                item.as_str()
                    .filter(|s| !s.is_empty())
                    .map(Arc::from)
                    .ok_or_else(wrong)
            });
            texts.collect::<Result<Vec<Arc<str>>, String>>()
        };
        let show = (Some(Vec::new()), |v: &Vec<Arc<str>>| {
            v.iter().map(|s| s.to_string()).collect()
        });
        self.value(key, doc, show, parse).unwrap_or_default()
    }

    /// A list of numbers that grow, above 0.
    pub fn growing(&self, key: &'static str, default: &[f64], doc: &'static str) -> Vec<f64> {
        let wrong =
            || "must be a list of numbers above 0, each larger than the one before".to_owned();
        let parse = |value: &Value| {
            let items = value.as_array().ok_or_else(wrong)?.iter();
            let numbers = items.map(|item| item.as_f64().ok_or_else(wrong));
            let numbers = numbers.collect::<Result<Vec<f64>, String>>()?;
            let grows = numbers.windows(2).all(|two| two[0] < two[1]);
            let above_0 = numbers.first().is_some_and(|first| *first > 0.0);
            (grows && above_0).then_some(numbers).ok_or_else(wrong)
        };
        let show = (Some(default.to_vec()), |of: &Vec<f64>| of.clone().into());
        self.value(key, doc, show, parse)
            .unwrap_or_else(|| default.to_vec())
    }

    /// A map from free names to lists of texts.
    pub fn lists(&self, key: &'static str, doc: &'static str) -> BTreeMap<Arc<str>, Vec<Arc<str>>> {
        let parse = |value: &Value| {
            let wrong = || "must map names to lists of texts".to_owned();
            let map = value.as_object().ok_or_else(wrong)?;
            let entries = map.iter().map(|(name, items)| {
                let items = items.as_array().ok_or_else(wrong)?.iter();
                let texts = items.map(|item| {
                    let text = item.as_str().filter(|s| !s.is_empty());
                    text.map(Arc::from).ok_or_else(wrong)
                });
                Ok((Arc::from(name.as_str()), texts.collect::<Result<_, _>>()?))
            });
            entries.collect::<Result<BTreeMap<Arc<str>, Vec<Arc<str>>>, String>>()
        };
        let show = (
            Some(BTreeMap::new()),
            |of: &BTreeMap<Arc<str>, Vec<Arc<str>>>| {
                let entries = of.iter().map(|(name, items)| {
                    let items: Vec<Value> = items.iter().map(|s| s.to_string().into()).collect();
                    (name.to_string(), Value::from(items))
                });
                Value::Object(entries.collect())
            },
        );
        self.value(key, doc, show, parse).unwrap_or_default()
    }

    /// A map from free names to texts.
    pub fn map(&self, key: &'static str, doc: &'static str) -> BTreeMap<Arc<str>, Arc<str>> {
        let parse = |value: &Value| {
            let wrong = || "must map names to texts".to_owned();
            let map = value.as_object().ok_or_else(wrong)?;
            let entries = map.iter().map(|(name, target)| {
                let target = target
                    .as_str()
                    .filter(|s| !s.is_empty())
                    .ok_or_else(wrong)?;
                Ok((Arc::from(name.as_str()), Arc::from(target)))
            });
            entries.collect::<Result<BTreeMap<Arc<str>, Arc<str>>, String>>()
        };
        let show = (Some(BTreeMap::new()), |m: &BTreeMap<Arc<str>, Arc<str>>| {
            Value::Object(
                m.iter()
                    .map(|(k, v)| (k.to_string(), v.to_string().into()))
                    .collect(),
            )
        });
        self.value(key, doc, show, parse).unwrap_or_default()
    }

    /// An object of the operator's own, as JSON; none when absent.
    pub fn object_or_none(&self, key: &'static str, doc: &'static str) -> Option<String> {
        let parse = |value: &Value| match value {
            Value::Object(_) => Ok(value.clone()),
            other => Err(format!("must be a map, not {}", kind(other))),
        };
        let show = (None, Value::clone);
        let object = self.value(key, doc, show, parse)?;
        Some(object.to_string())
    }

    /// One of several words, or none.
    pub fn choice_or_none<T: Copy>(
        &self,
        key: &'static str,
        choices: &[(&'static str, T)],
        doc: &'static str,
    ) -> Option<T> {
        let parse = |value: &Value| parse_choice(choices, value);
        let show = (None, |c: &(&'static str, T)| c.0.into());
        self.value(key, doc, show, parse).map(|(_, choice)| choice)
    }

    /// One of several words.
    pub fn choice<T: Copy>(
        &self,
        key: &'static str,
        choices: &[(&'static str, T)],
        default: &'static str,
        doc: &'static str,
    ) -> T {
        let find = |word: &str| choices.iter().find(|(name, _)| *name == word).copied();
        let parse = |value: &Value| parse_choice(choices, value);
        let default = find(default).expect("the default is a choice");
        let show = (Some(default), |c: &(&'static str, T)| c.0.into());
        self.value(key, doc, show, parse).unwrap_or(default).1
    }
}

fn parse_choice<T: Copy>(
    choices: &[(&'static str, T)],
    value: &Value,
) -> Result<(&'static str, T), String> {
    let named = |word: &str| choices.iter().find(|(name, _)| *name == word).copied();
    value.as_str().and_then(named).ok_or_else(|| {
        let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
        format!("must be one of {}", names.join(", "))
    })
}

fn as_text(value: &Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text.clone()),
        // digits may have been lost already: 00123 is read as 123
        other => Err(format!(
            "must be a text, not {}; put it in quotes",
            kind(other)
        )),
    }
}
