//! What actors share: watching children die, limits on restarts, published snapshots.

pub mod bounded;
pub mod fault;
pub mod mailbox;
pub mod published;
pub mod supervise;
pub mod watch;
