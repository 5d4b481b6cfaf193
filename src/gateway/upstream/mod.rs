//! Speaks HTTP/1.1 to backends: one pool of connections per worker thread, streams first.
//!
//! Connections are driven by whoever reads from them, not by tasks of their own: a chunk costs no
//! hop between tasks, and dropping a reply closes its connection at once, which is how engines
//! learn that nobody waits for the answer.

mod client;
mod connection;
pub mod events;
mod prober;
mod question;
mod stream;

pub use client::{Client, ClientSettings, NotWhole, Outgoing, Reply, ReplyBody, SendError};
pub use prober::{HttpProber, bearer};
pub use question::{Unanswered, ask};
pub use stream::Stream;
