//! The inference router: serves HTTP in OpenAI form and routes it through the actors.

pub mod cli;
mod healthcheck;
pub mod settings;
pub mod startup;
pub mod upstream;
