//! What may be asked for within a minute and at one time, by whom: the arithmetic of it. Pure: the time is
//! an argument.

mod admission;
mod bucket;

pub use admission::{Admission, Full, Need, Ticket};
pub use bucket::{Bucket, Short};

/// Whose limit it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Scope {
    /// Of all requests together.
    Gateway,
    /// Of one key.
    Key,
    /// Of one tenant: all of its keys together.
    Tenant,
    /// Of one model.
    Model,
    /// Of one address, for clients without a key.
    Address,
}

impl Scope {
    /// The word used in metrics and errors.
    pub fn as_str(self) -> &'static str {
        match self {
            Scope::Gateway => "gateway",
            Scope::Key => "key",
            Scope::Tenant => "tenant",
            Scope::Model => "model",
            Scope::Address => "address",
        }
    }
}

/// What is limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Limited {
    /// Requests in a minute.
    Requests,
    /// Tokens of prompts and answers in a minute.
    Tokens,
    /// Requests at one time.
    Concurrency,
}

impl Limited {
    /// The word used in metrics, headers and errors.
    pub fn as_str(self) -> &'static str {
        match self {
            Limited::Requests => "requests",
            Limited::Tokens => "tokens",
            Limited::Concurrency => "concurrency",
        }
    }
}

/// Limits of one key, tenant, model or address; none where it has none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// Requests in a minute; as many may come at once after a minute of rest.
    pub requests_per_minute: Option<u32>,
    /// Tokens of prompts and answers in a minute, likewise.
    pub tokens_per_minute: Option<u64>,
    /// Requests at one time.
    pub concurrent: Option<u32>,
}

impl Limits {
    /// Where these say nothing, the others count.
    pub fn or(self, others: Limits) -> Limits {
        Limits {
            requests_per_minute: self.requests_per_minute.or(others.requests_per_minute),
            tokens_per_minute: self.tokens_per_minute.or(others.tokens_per_minute),
            concurrent: self.concurrent.or(others.concurrent),
        }
    }

    /// Whether nothing is limited.
    pub fn is_none(&self) -> bool {
        *self == Limits::default()
    }
}

/// Who goes first where requests wait.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// After all others.
    Low,
    /// As usual.
    #[default]
    Normal,
    /// Before all others.
    High,
}
