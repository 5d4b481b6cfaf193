//! Stores as their users see them: what all have in common, and what only Redis, an object store or a directory can do
//! wrong.

#![allow(clippy::unwrap_used)] // a test panics on purpose

mod contract;
mod disk;
mod redis_cluster;
mod redis_server;
mod redis_tls;
mod s3_answers;
mod s3_connections;
mod s3_server;
mod s3_tls;
mod scripted;
mod support;
