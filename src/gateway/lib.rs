//! The inference router: serves HTTP in OpenAI form and routes it through the actors.

mod access;
mod against;
pub mod cache;
pub mod cli;
pub mod gateway;
mod handoff;
mod healthcheck;
pub mod http;
pub mod kv;
mod listener;
pub mod proxy;
pub mod quotas;
mod redis;
pub mod reload;
pub mod settings;
pub mod spans;
pub mod startup;
pub mod telemetry;
pub mod tls;
pub mod tokenize;
pub mod upstream;
