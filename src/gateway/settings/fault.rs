//! What is wrong with settings, and what settings there are: the words in which both are told.

use serde_json::Value;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;

/// One thing that is wrong with the settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The key's path, such as `backends[2].url`.
    pub path: String,
    /// What is wrong and what would be right. Never holds a secret's value.
    pub message: String,
}

impl Fault {
    /// A fault at a path.
    pub fn new(path: impl Into<String>, message: impl Into<String>) -> Self {
        Fault {
            path: path.into(),
            message: message.into(),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.message)
    }
}

/// All that is wrong with the settings.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct Faults(pub Vec<Fault>);

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, fault) in self.0.iter().enumerate() {
            let end = if i == 0 { "" } else { "\n" };
            write!(f, "{end}{fault}")?;
        }
        Ok(())
    }
}

/// A key that exists.
#[derive(Debug, Clone)]
pub struct Known {
    /// With indices in a loaded tree, with `[]` in the schema.
    pub path: String,
    /// What it is for.
    pub doc: &'static str,
    /// Its effective value, secrets masked; the default in the schema; none for sections.
    pub value: Shown,
    /// Differs where masked values differ; says nothing of them outside of this process.
    pub mark: u64,
}

/// A value as it may be printed.
#[derive(Debug, Clone, PartialEq)]
pub enum Shown {
    /// A section begins.
    Section,
    /// A value.
    Value(Value),
    /// Nothing is set and there is no default.
    Unset,
    /// Must be given.
    Required,
}

/// A number that tells values apart within this process, and nothing else.
pub(super) fn mark(value: &Value) -> u64 {
    static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    HASHER.hash_one(value.to_string())
}

/// What a masked secret looks like.
pub(super) const MASK: &str = "***";

/// A URL without user and password.
pub fn redact_url(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else {
        return url.to_owned();
    };
    // the last @ of all: an unescaped / or ? in a password must not end the search
    match rest.rfind('@') {
        Some(at) => format!("{scheme}://{MASK}@{}", &rest[at + 1..]),
        None => url.to_owned(),
    }
}
