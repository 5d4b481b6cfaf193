//! What measurements of the router share: an engine that answers at once, a closed loop of clients,
//! and processes whose CPU time is read.

pub mod engine;
pub mod load;
pub mod process;
