//! Prompts to tokens as the engine makes them: the model's own `tokenizer.json` and chat template,
//! with a cache that makes a conversation's next turn cost only its new text.

mod boundaries;
mod encoder;
mod engine;
mod pyjson;
mod segments;
mod template;
mod threads;

pub use encoder::{EncodeError, Encoder};
pub use threads::EncodingThreads;

use crate::settings::{Settings, Tokenizer};
use std::collections::HashMap;
use std::sync::Arc;

/// The encoders of the models that have one, by model.
pub type Encoders = HashMap<Arc<str>, Arc<Encoder>>;

/// Loads every tokenizer that the settings name. Takes about a second for each.
///
/// # Errors
/// When one cannot be loaded; the message names the key and the file.
pub fn load(settings: &Settings) -> std::io::Result<Encoders> {
    let index = &settings.kv_cache_index;
    let local = index
        .tokenizers
        .iter()
        .filter_map(|(model, from)| match from {
            Tokenizer::Local(path) if index.enabled => Some((model, path)),
            _ => None,
        });
    local
        .map(|(model, path)| {
            let encoder = Encoder::load(path).map_err(|error| {
                let key = format!("kv_cache_index.tokenizers.{model}");
                std::io::Error::other(format!("{key}: {error}"))
            })?;
            Ok((model.clone(), Arc::new(encoder)))
        })
        .collect()
}
