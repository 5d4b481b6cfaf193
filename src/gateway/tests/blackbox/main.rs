//! The gateway as clients and engines meet it: real sockets on both sides, the settings as an
//! operator writes them, and nothing of its insides but the counters that must return to zero.

#![allow(clippy::unwrap_used)] // all of this is a test

mod support;

mod abort;
mod admin;
mod admin_listener;
mod body;
mod breaker;
mod cache;
mod cache_faults;
mod cache_flights;
mod cache_gateways;
mod cache_redis_cluster;
mod cache_s3_faults;
mod cache_tiers;
mod cancellation;
mod config;
mod cors;
mod fallback;
mod health;
mod http;
mod keys;
mod kv_index;
mod kv_modes;
mod kv_sharing;
mod logging;
mod metrics;
mod overload;
mod quotas;
mod reload;
mod retry;
mod routing;
mod shutdown;
mod smoke;
mod split;
mod status_page;
mod streaming;
mod tls;
mod tls_backends;
mod traces;
