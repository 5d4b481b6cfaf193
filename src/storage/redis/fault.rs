//! What a failed command means: whose fault it is, and what an operator can do.
//!
//! Servers put keys, names of users and addresses into the text of an error. None of it is repeated: only the code of an error
//! is, which is a word of Redis itself.

use crate::error::{Act, ErrorKind, StoreError};
use deadpool_redis::redis::{ErrorKind as Cause, RedisError as Failure, ServerErrorKind};
use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;

/// How the standard library begins the error of a resolver, which has no kind of its own.
const LOOKUP_FAILED: &str = "failed to lookup address information";

/// Why commands were not answered as they should be. Names no key, no value and no secret.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{kind}: {detail}")]
pub struct RedisError {
    /// Whose fault it is.
    pub kind: ErrorKind,
    /// What happened and what to do about it, for a log line.
    pub detail: String,
}

impl RedisError {
    pub(super) fn new(kind: ErrorKind, detail: impl Into<String>) -> Self {
        let detail = detail.into();
        RedisError { kind, detail }
    }

    pub(super) fn too_slow(limit: Duration) -> Self {
        let detail = format!(
            "no answer within {limit:?}: the server hangs, is overloaded, or the network loses packets"
        );
        RedisError::new(ErrorKind::TooSlow, detail)
    }

    pub(super) fn while_doing(self, act: Act) -> StoreError {
        StoreError::new(act, self.kind, self.detail)
    }

    pub(super) fn of(failure: &Failure) -> Self {
        if let Some(code) = code(failure) {
            return of_code(&code);
        }
        match failure.kind() {
            Cause::AuthenticationFailed => of_code("WRONGPASS"),
            Cause::Io => of_io(failure),
            Cause::ClusterConnectionNotFound => RedisError::new(
                ErrorKind::Unavailable,
                "a node of the cluster cannot be reached: is it up, and is the address that it announces reachable from here?",
            ),
            Cause::InvalidClientConfig => {
                RedisError::new(ErrorKind::Misconfigured, "the url cannot be used as it is")
            }
            Cause::Client if is_certificate_fault(failure) => of_certificate(),
            _ => RedisError::new(
                ErrorKind::Broken,
                "the answer is not of the expected form: is this a Redis server, and is the key somebody else's?",
            ),
        }
    }
}

/// The code of the first error that a server sent, as `NOAUTH`.
pub(super) fn code(failure: &Failure) -> Option<String> {
    let errors = failure.clone().into_server_errors()?;
    let (_, first) = errors.first()?;
    Some(first.code().to_owned())
}

/// Whether a supposed single server spoke as a node of a cluster.
pub(super) fn is_of_a_cluster(failure: &Failure) -> bool {
    let code = code(failure);
    code.is_some_and(|code| ["MOVED", "ASK", "CLUSTERDOWN", "CROSSSLOT"].contains(&&*code))
}

/// Whether the connection is gone, rather than the command wrong.
pub(super) fn is_dropped(failure: &Failure) -> bool {
    failure.is_connection_dropped() || matches!(failure.kind(), Cause::ClusterConnectionNotFound)
}

fn of_code(code: &str) -> RedisError {
    let (kind, advice) = match code {
        "NOAUTH" => (
            ErrorKind::Refused,
            "the server wants a password: put it into the url",
        ),
        "DENIED" => (
            ErrorKind::Refused,
            "the server is in protected mode: give it a password, or switch protected-mode off",
        ),
        "WRONGPASS" => (
            ErrorKind::Refused,
            "the server does not take the user or the password of the url",
        ),
        "NOPERM" => (
            ErrorKind::Refused,
            "the user of the url may not do this: allow it the commands and keys in the server's ACL",
        ),
        "OOM" => (
            ErrorKind::Full,
            "the server's memory is full: raise maxmemory, or let maxmemory-policy evict (allkeys-lru)",
        ),
        "READONLY" => (
            ErrorKind::ReadOnly,
            "the server is a replica: let the url name the master",
        ),
        "NOREPLICAS" => (
            ErrorKind::ReadOnly,
            "the server has too few replicas for writes (min-replicas-to-write)",
        ),
        "MISCONF" => (
            ErrorKind::ReadOnly,
            "the server cannot save to its disk and takes no writes until it can",
        ),
        "LOADING" => (
            ErrorKind::Unavailable,
            "the server is loading its data and will answer soon",
        ),
        "CLUSTERDOWN" | "MASTERDOWN" | "TRYAGAIN" => (
            ErrorKind::Unavailable,
            "a part of the cluster is down or moving: look at CLUSTER INFO",
        ),
        "MOVED" | "ASK" => (
            ErrorKind::Unavailable,
            "the server is a node of a cluster, and its nodes do not agree, or this user may not ask CLUSTER SLOTS",
        ),
        "BUSY" => (ErrorKind::Unavailable, "the server is held up by a script"),
        "WRONGTYPE" => (
            ErrorKind::Broken,
            "the key belongs to somebody else: use another key_prefix",
        ),
        _ => (
            ErrorKind::Unavailable,
            "the server does not take the command: is it Redis 6 or newer, and does the database of the url exist?",
        ),
    };
    // a code is a word of the server's: nothing else is taken for one
    let is_word = code.len() <= 20 && code.bytes().all(|byte| byte.is_ascii_uppercase());
    let code = if is_word { code } else { "an error" };
    RedisError::new(kind, format!("{code}: {advice}"))
}

fn of_io(failure: &Failure) -> RedisError {
    if is_certificate_fault(failure) {
        return of_certificate();
    }
    if failure.is_timeout() {
        return RedisError::new(
            ErrorKind::TooSlow,
            "the server did not answer in time: it hangs, the network loses packets, or one side speaks TLS and the other does not (redis:// or rediss://)",
        );
    }
    let what = match io_cause(failure) {
        Some(cause) if cause.to_string().starts_with(LOOKUP_FAILED) => {
            "the host's name cannot be looked up".to_owned()
        }
        Some(cause) => cause.kind().to_string(), // without the address, which an error of the resolver repeats
        None => "the connection was lost".to_owned(),
    };
    let advice =
        "is the server up, and are the host, the port and redis:// or rediss:// of the url right?";
    RedisError::new(ErrorKind::Unavailable, format!("{what}: {advice}"))
}

fn of_certificate() -> RedisError {
    RedisError::new(
        ErrorKind::Misconfigured,
        "the certificate of the server is not trusted: name its authority in ca_file, and let it be for the host of the url",
    )
}

/// The error below, which the client keeps behind a shared pointer.
fn cause(failure: &Failure) -> Option<&(dyn Error + 'static)> {
    let source = failure.source()?;
    Some(
        match source.downcast_ref::<Arc<dyn Error + Send + Sync>>() {
            Some(shared) => &**shared,
            None => source,
        },
    )
}

fn io_cause(failure: &Failure) -> Option<&io::Error> {
    cause(failure)?.downcast_ref()
}

fn is_certificate_fault(failure: &Failure) -> bool {
    let inner = match io_cause(failure) {
        Some(cause) => cause.get_ref().and_then(|inner| inner.downcast_ref()),
        None => cause(failure).and_then(|cause| cause.downcast_ref()),
    };
    matches!(inner, Some(rustls::Error::InvalidCertificate(_)))
}

/// Whether a server that was asked for its slots said that it is no cluster.
pub(super) fn has_no_slots(failure: &Failure) -> bool {
    match failure.kind() {
        Cause::Server(ServerErrorKind::ResponseError | ServerErrorKind::NoPerm) => true,
        // servers before 6, and proxies, have words of their own
        Cause::Extension => {
            code(failure).is_some_and(|code| !["NOAUTH", "WRONGPASS", "DENIED"].contains(&&*code))
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use deadpool_redis::redis::parse_redis_value;

    fn of_reply(reply: &str) -> RedisError {
        let value = parse_redis_value(format!("-{reply}\r\n").as_bytes()).unwrap();
        RedisError::of(&value.extract_error().unwrap_err())
    }

    #[test]
    fn what_a_server_says_is_told_apart_and_not_repeated() {
        let replies = [
            (
                "NOAUTH Authentication required, hush.",
                ErrorKind::Refused,
                "password",
            ),
            (
                "DENIED Redis is running in protected mode, hush",
                ErrorKind::Refused,
                "protected-mode",
            ),
            (
                "WRONGPASS invalid username-password pair hush",
                ErrorKind::Refused,
                "password",
            ),
            (
                "NOPERM User hush has no permissions",
                ErrorKind::Refused,
                "ACL",
            ),
            (
                "OOM command not allowed when used memory > 'maxmemory' hush",
                ErrorKind::Full,
                "maxmemory",
            ),
            (
                "READONLY You can't write hush",
                ErrorKind::ReadOnly,
                "master",
            ),
            ("MISCONF hush", ErrorKind::ReadOnly, "disk"),
            ("LOADING hush", ErrorKind::Unavailable, "loading"),
            (
                "CLUSTERDOWN Hash slot not served hush",
                ErrorKind::Unavailable,
                "CLUSTER INFO",
            ),
            (
                "MOVED 12 hush.example:6379",
                ErrorKind::Unavailable,
                "cluster",
            ),
            ("WRONGTYPE hush", ErrorKind::Broken, "key_prefix"),
            (
                "ERR unknown command hush",
                ErrorKind::Unavailable,
                "ERR: the server does not take",
            ),
            (
                "hush-hush and more",
                ErrorKind::Unavailable,
                "an error: the server",
            ),
        ];
        for (reply, kind, said) in replies {
            let error = of_reply(reply);
            assert_eq!(error.kind, kind, "{reply}: {error}");
            assert!(error.detail.contains(said), "{reply}: {error}");
            assert!(!error.to_string().contains("hush"), "{error}");
        }
    }
}
