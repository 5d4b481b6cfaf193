//! What the tests stand on: a scripted engine, the gateway in this process, a strict raw client.
//!
//! Tests wait on levels with [`wait_until`], never on time. Scripted silences of an engine are
//! inputs, and may sleep.

pub mod client;
pub mod fault_proxy;
pub mod gateway;
pub mod process;
pub mod signal;
pub mod sse;
pub mod stores;
pub mod tls;
pub mod upstream;
pub mod wire;

pub use client::Client;
pub use fault_proxy::{Fault, FaultProxy};
pub use gateway::Gateway;
pub use signal::Signal;
pub use stores::ObjectStore;
pub use upstream::{Health, Request, Upstream};
pub use wire::Wire;

use std::time::{Duration, Instant};

/// How long anything may take before a test gives up. Generous: test machines are slow and noisy.
pub const DEADLINE: Duration = Duration::from_secs(20);

/// The model that test backends serve unless told otherwise.
pub const MODEL: &str = "m";

/// Waits until `condition` holds.
///
/// # Panics
/// When it does not hold within `deadline`; says `what` was waited for.
pub fn wait_until(what: &str, deadline: Duration, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + deadline;
    while !condition() {
        assert!(Instant::now() < end, "waited {deadline:?} in vain: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Shorthand for [`Duration::from_millis`].
pub fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// `messages` with one user message of this text.
pub fn user(text: &str) -> String {
    format!(
        r#""messages":[{{"role":"user","content":{}}}]"#,
        serde_json::Value::from(text)
    )
}

/// A chat body for the test model that is answered whole, with these members.
pub fn chat(members: &str) -> String {
    format!(r#"{{"model":"{MODEL}",{members}}}"#)
}

/// A chat body for the test model that is answered as a stream, with these members.
pub fn chat_stream(members: &str) -> String {
    chat(&format!(r#""stream":true,{members}"#))
}
