//! Decides which backend serves a request. Pure: no actors, sockets, clocks or global
//! randomness; time and chance are arguments, so that the same inputs give the same plan.
//!
//! Where a rule lives: [`choose`] filters and orders, [`strategy`] picks when nothing better is
//! known, [`ring`] keeps equal prefixes together, [`breaker`] and [`health`] say who may serve,
//! [`retry`] says when a second attempt is allowed, [`prefix_key`] says what a prefix is.

pub mod access;
pub mod averages;
pub mod block;
pub mod breaker;
pub mod cache_key;
pub mod cache_policy;
pub mod choose;
pub mod disagg;
pub mod eligible;
pub mod event_stream;
pub mod explain;
mod fair;
pub mod health;
pub mod ids;
pub mod knowledge;
pub mod pairing;
pub mod prefix_index;
pub mod prefix_key;
pub mod quota;
pub mod retry;
pub mod ring;
pub mod score;
pub mod strategy;
pub mod view;
