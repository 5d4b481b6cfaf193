//! Joins the layers (files in order, then the environment) into one tree and fills in `${VAR}`.

use super::fault::{Fault, Faults};
use config::{Config, FileFormat, ValueKind};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// The variables of the process, or of a test.
pub type Environment = BTreeMap<String, String>;

/// One settings file.
#[derive(Debug, Clone)]
pub struct Source {
    /// Its path, for messages.
    pub name: String,
    /// Its text, YAML.
    pub text: String,
}

const PREFIX: &str = "TIDEGATE";
const SEPARATOR: &str = "__";
/// What the guide tells its readers to export, and the names that the settings use.
const STANDS_IN: [(&str, &str); 2] = [
    ("S3_ACCESS_KEY", "VAST_ACCESS_KEY"),
    ("S3_SECRET_KEY", "VAST_SECRET_KEY"),
];

/// Merges the layers; maps are joined, lists and values of later layers replace earlier ones.
/// Values that cannot be filled in are left out of the tree, and reported beside it.
///
/// # Errors
/// When there is no tree, because a file is no YAML.
pub fn merge(sources: &[Source], environment: &Environment) -> Result<(Value, Vec<Fault>), Faults> {
    let mut builder = Config::builder();
    let mut faults = Vec::new();
    for source in sources {
        // each on its own first, so that a fault names its file
        let file = config::File::from_str(&source.text, FileFormat::Yaml);
        if let Err(error) = Config::builder().add_source(file.clone()).build() {
            faults.push(Fault::new(source.name.clone(), error.to_string()));
        } else {
            builder = builder.add_source(file);
        }
    }
    if !faults.is_empty() {
        return Err(Faults(faults));
    }
    let variables = environment
        .iter()
        .filter(|(name, _)| name.starts_with("TIDEGATE__"))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    let overrides = config::Environment::with_prefix(PREFIX)
        .prefix_separator(SEPARATOR)
        .separator(SEPARATOR)
        .source(Some(variables));
    let merged = builder
        .add_source(overrides)
        .build()
        .map_err(|error| Faults(vec![Fault::new("environment", error.to_string())]))?;
    let mut fill = Fill {
        environment,
        faults,
    };
    let tree = fill.value("", merged.cache);
    Ok((tree, fill.faults))
}

fn is_name(text: &str) -> bool {
    let mut bytes = text.bytes();
    let first = bytes
        .next()
        .is_some_and(|b| b.is_ascii_alphabetic() || b == b'_');
    first && bytes.all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

struct Fill<'a> {
    environment: &'a Environment,
    faults: Vec<Fault>,
}

impl Fill<'_> {
    fn value(&mut self, path: &str, value: config::Value) -> Value {
        match value.kind {
            ValueKind::Nil => Value::Null,
            ValueKind::Boolean(b) => Value::Bool(b),
            ValueKind::I64(n) => n.into(),
            ValueKind::U64(n) => n.into(),
            ValueKind::I128(n) => n.to_string().into(),
            ValueKind::U128(n) => n.to_string().into(),
            ValueKind::Float(n) => n.into(),
            ValueKind::String(text) => {
                let before = self.faults.len();
                let filled = self.text(path, &text);
                if self.faults.len() > before {
                    Value::Null
                } else {
                    filled.into()
                }
            }
            ValueKind::Array(items) => {
                let items = items.into_iter().enumerate();
                items
                    .map(|(i, item)| self.value(&format!("{path}[{i}]"), item))
                    .collect::<Vec<_>>()
                    .into()
            }
            ValueKind::Table(table) => {
                let mut keys: Vec<_> = table.into_iter().collect();
                keys.sort_by(|a, b| a.0.cmp(&b.0));
                let mut map = Map::new();
                for (key, item) in keys {
                    let path = if path.is_empty() {
                        key.clone()
                    } else {
                        format!("{path}.{key}")
                    };
                    if key == "<<" {
                        self.faults.push(Fault::new(path, "YAML merge keys (<<) are not supported; write the values out, or pass several files"));
                        continue;
                    }
                    if path.starts_with("x-") {
                        continue; // an extension block, for anchors
                    }
                    let item = self.value(&path, item);
                    map.insert(key, item);
                }
                Value::Object(map)
            }
        }
    }

    /// Fills in `${VAR}` and `${VAR:-default}`, once: what a variable holds is not read again.
    fn text(&mut self, path: &str, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(at) = rest.find("${") {
            if let Some(before) = rest[..at].strip_suffix('$') {
                // $${LITERAL} means ${LITERAL}
                out.push_str(before);
                out.push_str("${");
                rest = &rest[at + 2..];
                continue;
            }
            out.push_str(&rest[..at]);
            let Some(end) = rest[at..].find('}') else {
                self.faults
                    .push(Fault::new(path, "holds ${ without a closing }"));
                return out;
            };
            let inside = &rest[at + 2..at + end];
            if !is_name(inside.split(":-").next().unwrap_or_default()) || inside.contains("${") {
                let message = format!(
                    "holds `${{{inside}}}`, which is neither ${{NAME}} nor ${{NAME:-default}}; defaults cannot be nested, and $${{ stands for a literal ${{"
                );
                self.faults.push(Fault::new(path, message));
                return out;
            }
            match self.lookup(inside) {
                Some(value) => out.push_str(&value),
                None => {
                    let name = inside.split(":-").next().unwrap_or(inside);
                    let stand_in = STANDS_IN.iter().find(|(first, _)| *first == name);
                    let or = stand_in.map_or(String::new(), |(_, other)| format!(" (or {other})"));
                    let message =
                        format!("needs the environment variable {name}{or}, which is not set");
                    self.faults.push(Fault::new(path, message));
                }
            }
            rest = &rest[at + end + 1..];
        }
        out.push_str(rest);
        out
    }

    fn lookup(&self, inside: &str) -> Option<String> {
        let (name, default) = match inside.split_once(":-") {
            Some((name, default)) => (name, Some(default)),
            None => (inside, None),
        };
        let stand_in = || {
            let (_, other) = STANDS_IN.iter().find(|(first, _)| *first == name)?;
            self.environment.get(*other)
        };
        let found = self.environment.get(name).or_else(stand_in);
        // as in a shell: the default also stands in for an empty value
        match (found, default) {
            (Some(value), Some(default)) if value.is_empty() => Some(default.to_owned()),
            (Some(value), _) => Some(value.clone()),
            (None, default) => default.map(str::to_owned),
        }
    }
}
