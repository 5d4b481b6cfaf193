//! Writes settings as YAML: the reference of every key with its default, and what is in effect.

use super::fault::{Known, Shown};
use serde_json::Value;
use std::fmt::Write;

/// Lines of comments are wrapped at this.
const COMMENT_WIDTH: usize = 100;

const HEAD: &str = "\
# Every setting of Tidegate with its default. Copy what you need; all keys may be left out but
# backends, with name and url.
#
# Layers: defaults < files in the order of --config < environment. A variable names a key by its
# path: TIDEGATE__SERVER__PORT=9000. In any value ${VAR} takes an environment variable,
# ${VAR:-default} has a default, $${VAR} stands for itself.
# Durations need a unit: 250ms, 15s, 30m, 24h, 7d. Sizes are bytes, or such as 1MiB.
";

/// The reference file: every key with its default, in order.
pub fn reference_yaml() -> String {
    let mut out = HEAD.to_owned();
    for known in super::schema() {
        let (indent, key) = place(&known.path);
        if indent == 0 {
            out.push('\n');
        }
        let in_list = known.path.contains("[]");
        for line in wrap(known.doc, COMMENT_WIDTH - 2 * indent) {
            writeln!(out, "{}# {line}", pad(indent, in_list)).expect("strings take writes");
        }
        let line = match &known.value {
            Shown::Section => format!("{key}:"),
            Shown::Value(value) => format!("{key}: {}", inline(value)),
            Shown::Unset => format!("{key}:"),
            Shown::Required => format!("{key}: {}", example(&known.path)),
        };
        let hash = if known.value == Shown::Unset {
            "# "
        } else {
            ""
        };
        let dash = if first_of_item(&known.path) { "- " } else { "" };
        let width = indent.saturating_sub(usize::from(!dash.is_empty()));
        writeln!(out, "{}{dash}{hash}{line}", pad(width, in_list)).expect("strings take writes");
    }
    out
}

/// Where a path stands: its indentation level and its last key.
fn place(path: &str) -> (usize, &str) {
    let key = path.rsplit_once('.').map_or(path, |(_, key)| key);
    let lists = path.matches("[").count();
    (path.matches('.').count() + lists, key)
}

/// List examples are comments: a backend that nobody configured must not appear.
fn pad(indent: usize, in_list: bool) -> String {
    let spaces = "  ".repeat(indent);
    if in_list {
        format!("#{spaces}")
    } else {
        spaces
    }
}

fn first_of_item(path: &str) -> bool {
    path.ends_with("[].name") || path.ends_with("[].endpoint") && path.contains("event_sources")
}

fn example(path: &str) -> &'static str {
    match path {
        "backends[].name" => "vllm-1",
        "backends[].url" => "\"http://vllm-1:8000\"",
        "kv_cache_index.event_sources[].backend_name" => "vllm-1",
        "kv_cache_index.event_sources[].endpoint" => "\"http://vllm-1:8000/v1/kv_events\"",
        _ => "\"\"",
    }
}

fn inline(value: &Value) -> String {
    match value {
        Value::Number(n) if n.is_f64() => format!("{:?}", n.as_f64().unwrap_or_default()),
        other => other.to_string(), // JSON is YAML
    }
}

fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.last_mut().expect("never empty");
        if !last.is_empty() && last.len() + word.len() + 1 > width {
            lines.push(word.to_owned());
        } else {
            if !last.is_empty() {
                last.push(' ');
            }
            last.push_str(word);
        }
    }
    lines
}

/// What is in effect, secrets masked.
pub fn effective_yaml(effective: &[Known]) -> String {
    let mut out = String::new();
    let mut items: Vec<String> = Vec::new();
    for known in effective {
        let (indent, key) = place(&known.path);
        let item = known
            .path
            .rfind(']')
            .map(|end| known.path[..=end].to_owned());
        let mut dash = "";
        if let Some(item) = item
            && !items.contains(&item)
        {
            items.push(item);
            dash = "- ";
        }
        let width = indent - usize::from(!dash.is_empty());
        let value = match &known.value {
            Shown::Section => String::new(),
            Shown::Value(value) => format!(" {}", inline(value)),
            Shown::Unset | Shown::Required => " null".into(),
        };
        writeln!(out, "{}{dash}{key}:{value}", "  ".repeat(width)).expect("strings take writes");
    }
    out
}
