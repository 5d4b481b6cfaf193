//! The actors of the gateway: each owns one concern and answers at once. Waiting for engines,
//! clients or timers longer than a moment is done by those who ask.
//!
//! The tree: [`cluster::Cluster`] starts a [`health_checker::HealthChecker`] and a
//! [`circuit_breaker::CircuitBreaker`] per backend and publishes the [`directory::Directory`];
//! every HTTP worker has a [`router::Router`] that reads it; one [`disagg_coordinator::DisaggCoordinator`]
//! pairs workers where serving is split. Nobody keeps a child's address but
//! its parent: a restart makes a new one, and callers find it in the directory.

pub mod backend;
pub mod circuit_breaker;
pub mod cluster;
pub mod directory;
pub mod disagg_coordinator;
pub mod health_checker;
pub mod index_shard;
pub mod kv_index;
pub mod kv_share;
pub mod kv_subscriber;
pub mod placement;
pub mod response_cache;
pub mod router;
pub mod support;
