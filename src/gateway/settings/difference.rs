//! What differs between two settings, and what of it only a restart can bring about.

use super::fault::{Known, Shown};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Keys, or all keys below them, that are read at the start alone: they are of the listeners, of caches
/// and connections that live as long as the process, or of the log's form.
const AT_START: [&str; 23] = [
    "server",
    "admin.listen",
    "admin.tls",
    "logging.format",
    "tracing",
    "metrics",
    "retry.budget_ratio",
    "health_checks.path",
    "upstream.connect_timeout",
    "upstream.pool_idle_timeout",
    "upstream.connection_max_age",
    "upstream.max_idle_per_backend",
    "upstream.tls",
    "response_cache",
    "kv_cache_index.enabled",
    "kv_cache_index.backend",
    "kv_cache_index.max_entries",
    "kv_cache_index.entry_ttl_seconds",
    "kv_cache_index.approximate",
    "kv_cache_index.parity_check",
    "kv_cache_index.tokenizers",
    "disaggregated_serving.enabled",
    "reload",
];
/// What stands for an element of a list in place of its number, which shifts when another one leaves.
const NAMES: [&str; 2] = ["name", "backend_name"];

/// Whether a key takes effect at a restart only.
pub fn needs_restart(path: &str) -> bool {
    let below = |key: &str| {
        path.strip_prefix(key)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    AT_START.into_iter().any(below)
}

/// How a key differs.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    /// With elements of lists by their names, as `backends[vllm-1].weight`.
    pub path: String,
    /// As it is; none where it is not there.
    pub from: Option<Value>,
    /// As it shall be; none where it is not there.
    pub to: Option<Value>,
    /// Whether it takes effect at a restart only.
    pub needs_restart: bool,
}

/// A value as it may be shown, with its mark.
type Stated = (Value, u64);

/// Values by paths in which elements of lists stand by their names.
pub fn by_name(known: &[Known]) -> BTreeMap<String, Stated> {
    let mut names: BTreeMap<&str, &str> = BTreeMap::new();
    for of in known {
        if let (Some((element, key)), Shown::Value(Value::String(name))) =
            (of.path.rsplit_once('.'), &of.value)
            && element.ends_with(']')
            && NAMES.contains(&key)
        {
            names.entry(element).or_insert(name);
        }
    }
    let renamed = known.iter().filter_map(|of| {
        let Shown::Value(value) = &of.value else {
            return None;
        };
        Some((renamed(&of.path, &names), (value.clone(), of.mark)))
    });
    renamed.collect()
}

fn renamed(path: &str, names: &BTreeMap<&str, &str>) -> String {
    let Some(end) = path.find(']') else {
        return path.to_owned();
    };
    let (element, rest) = path.split_at(end + 1);
    match (names.get(element), element.find('[')) {
        (Some(name), Some(open)) => format!("{}[{name}]{rest}", &element[..open]),
        _ => path.to_owned(),
    }
}

/// What differs, in the order of the paths.
pub fn difference(from: &[Known], to: &[Known]) -> Vec<Difference> {
    compare(&by_name(from), &by_name(to))
}

/// The same of paths and values alone.
pub fn compare(from: &BTreeMap<String, Stated>, to: &BTreeMap<String, Stated>) -> Vec<Difference> {
    let paths: BTreeSet<&String> = from.keys().chain(to.keys()).collect();
    let differ = paths
        .into_iter()
        .filter(|path| from.get(*path) != to.get(*path));
    differ
        .map(|path| Difference {
            path: path.clone(),
            from: from.get(path).map(|(value, _)| value.clone()),
            to: to.get(path).map(|(value, _)| value.clone()),
            needs_restart: needs_restart(path),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{Environment, Source, load};

    fn effective(text: &str) -> Vec<Known> {
        let source = Source {
            name: "test".into(),
            text: text.into(),
        };
        load(&[source], &Environment::new()).unwrap().effective
    }

    fn paths(from: &str, to: &str) -> Vec<(String, bool)> {
        let all = difference(&effective(from), &effective(to));
        all.into_iter()
            .map(|of| (of.path, of.needs_restart))
            .collect()
    }

    #[test]
    fn elements_of_lists_are_compared_by_name_so_that_one_that_leaves_moves_no_other() {
        let both = "backends: [{name: a, url: 'http://a'}, {name: b, url: 'http://b', weight: 2}]";
        let one = "backends: [{name: b, url: 'http://b', weight: 3}]";
        let changed = paths(both, one);
        assert!(
            changed.contains(&("backends[b].weight".into(), false)),
            "{changed:?}"
        );
        assert!(changed.iter().any(|(path, _)| path == "backends[a].url"));
        assert!(!changed.iter().any(|(path, _)| path == "backends[b].url"));
        assert_eq!(paths(one, one), []);
    }

    #[test]
    fn a_secret_that_changes_is_seen_and_not_shown() {
        let with = |key: &str| format!("backends: [{{name: a, url: 'http://a', api_key: {key}}}]");
        let all = difference(
            &effective(&with("first-secret")),
            &effective(&with("other-secret")),
        );
        assert_eq!(all.len(), 1);
        assert_eq!(all[0].path, "backends[a].api_key");
        assert!(!format!("{all:?}").contains("secret"));
    }

    #[test]
    fn what_is_read_at_the_start_is_told_from_what_is_not() {
        for path in ["server.port", "response_cache.l1.type", "logging.format"] {
            assert!(needs_restart(path), "{path}");
        }
        for path in [
            "backends[server].weight",
            "logging.access",
            "retry.max_attempts",
            "servers",
        ] {
            assert!(!needs_restart(path), "{path}");
        }
    }

    #[test]
    fn every_key_that_is_said_to_be_read_at_the_start_is_a_key() {
        let known = crate::settings::schema();
        // those of sections that other parts bring are checked with them
        for key in AT_START {
            let there = known
                .iter()
                .any(|of| of.path == key || of.path.starts_with(&format!("{key}.")));
            assert!(there, "{key} is none");
        }
    }
}
