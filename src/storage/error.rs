//! What can go wrong, by whose fault it is: what a caller does next follows from the kind.

use std::fmt;
use thiserror::Error;

/// A call that failed. Names neither secrets nor values.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{act}: {kind}: {detail}")]
pub struct StoreError {
    /// What was to be done.
    pub act: Act,
    /// Whose fault it is.
    pub kind: ErrorKind,
    /// What happened, for a log line.
    pub detail: String,
}

/// What was to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// Set the store up.
    Open,
    /// Read a value.
    Get,
    /// Keep a value.
    Put,
    /// Remove one value, or a page of them.
    Delete,
    /// List keys.
    List,
}

/// Whose fault it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The store does not know these credentials (401, 403). Stays so until somebody changes something.
    Refused,
    /// The store says 403 to a `get`, but not because of the credentials: so do stores that hide absent keys from those who may
    /// not list. Absent, as long as a `put` succeeds.
    RefusedOrAbsent,
    /// The store's clock and ours are too far apart for signatures.
    ClockSkew,
    /// The store is away, overloaded or failing. May be over soon.
    Unavailable,
    /// No answer in time. May be over soon.
    TooSlow,
    /// What came back is not what was stored, or not an answer at all.
    Broken,
    /// The answer ended early. What is stored may be whole.
    CutShort,
    /// The value is larger than the store was set up for.
    TooLarge,
    /// The store has no room for it. What it has, it still gives.
    Full,
    /// The store gives what it has, and takes nothing.
    ReadOnly,
    /// The settings do not fit the store: no such bucket, another region, an unknown certificate.
    Misconfigured,
}

impl StoreError {
    pub(crate) fn new(act: Act, kind: ErrorKind, detail: impl Into<String>) -> Self {
        let detail = detail.into();
        StoreError { act, kind, detail }
    }
}

impl fmt::Display for Act {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Act::Open => "set up the store",
            Act::Get => "read from the store",
            Act::Put => "write to the store",
            Act::Delete => "delete from the store",
            Act::List => "list the store",
        })
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ErrorKind::Refused => "refused",
            ErrorKind::RefusedOrAbsent => "refused, or absent",
            ErrorKind::ClockSkew => "clock skew",
            ErrorKind::Unavailable => "unavailable",
            ErrorKind::TooSlow => "too slow",
            ErrorKind::Broken => "broken",
            ErrorKind::CutShort => "cut short",
            ErrorKind::TooLarge => "too large",
            ErrorKind::Full => "full",
            ErrorKind::ReadOnly => "read-only",
            ErrorKind::Misconfigured => "misconfigured",
        })
    }
}
