//! The KV index from the requests' side: which backends feed it, which tokens a request has, and
//! who holds them. All of it is best effort: late or dead, it costs a counter and a bounded wait.

mod dispatch;
pub mod lookup;
pub mod parity;
mod prompt;
mod remote_tokens;
pub mod share;
mod tokens;
pub mod wiring;

pub use dispatch::{Dispatch, Stored, checked};
pub use lookup::Found;
pub use remote_tokens::TokenCache;
