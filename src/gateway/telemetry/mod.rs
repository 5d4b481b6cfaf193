//! What operators see: metrics, log lines, one report per request.

pub mod export;
pub mod handles;
pub mod log;
pub mod names;
pub mod prediction;
pub mod recent;
pub mod report;
