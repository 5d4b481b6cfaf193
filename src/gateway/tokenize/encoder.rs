//! One model's encoder: text or chat in, the engine's tokens out.

use super::boundaries::Boundaries;
use super::engine::Engine;
use super::segments::Segments;
use super::template::{Chat, Template};
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tokenizers::Tokenizer;

/// Why a prompt has no tokens here, or an encoder cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum EncodeError {
    /// A file cannot be read.
    #[error("cannot read {0}: {1}")]
    Read(PathBuf, std::io::Error),
    /// A file is not what it should be.
    #[error("{0} is not usable: {1}")]
    File(PathBuf, String),
    /// The encoder refuses the text.
    #[error("encode: {0}")]
    Encode(String),
    /// The template refuses the chat.
    #[error("render the chat template: {0}")]
    Render(#[from] minijinja::Error),
}

/// See the module. Shared by all threads.
pub struct Encoder {
    engine: Engine,
    template: Option<Template>,
    boundaries: Boundaries,
    segments: Segments,
    /// What the encoder puts before and behind a text that is no chat.
    around: (Vec<u32>, Vec<u32>),
}

impl Encoder {
    /// From a `tokenizer.json`, or the directory where it stands. The chat template is taken from
    /// `chat_template.jinja` or `tokenizer_config.json` beside it; without one, chats have no
    /// tokens here.
    ///
    /// # Errors
    /// When a file cannot be read or is not what it should be.
    pub fn load(path: &Path) -> Result<Self, EncodeError> {
        let file = if path.is_dir() {
            path.join("tokenizer.json")
        } else {
            path.to_owned()
        };
        let bytes = std::fs::read(&file).map_err(|e| EncodeError::Read(file.clone(), e))?;
        let unusable = |why: String| EncodeError::File(file.clone(), why);
        let mut bpe = Tokenizer::from_bytes(&bytes).map_err(|e| unusable(e.to_string()))?;
        // prompts are never cut or filled up
        let whole = bpe.with_padding(None).with_truncation(None);
        whole.map_err(|e| unusable(e.to_string()))?;
        let template = template(file.parent().unwrap_or(Path::new(".")))?;
        let around = around(&bpe).map_err(|e| unusable(e.to_string()))?;
        Ok(Encoder {
            boundaries: Boundaries::of(&bpe),
            engine: Engine::new(bpe, &bytes, &file),
            segments: Segments::new(),
            template,
            around,
        })
    }

    /// The tokens of a text, with those that the model expects around it if asked.
    ///
    /// # Errors
    /// What the encoder says; byte-level ones take every text.
    pub fn text(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, EncodeError> {
        let (before, behind) = &self.around;
        let around = |tokens: &[u32]| {
            if add_special_tokens {
                tokens.to_vec()
            } else {
                Vec::new()
            }
        };
        let mut tokens = around(before);
        for piece in self.boundaries.pieces(text) {
            let encoded = self
                .segments
                .tokens(piece, |piece| self.engine.encode(piece));
            tokens.extend_from_slice(&encoded.map_err(EncodeError::Encode)?);
        }
        tokens.extend(around(behind));
        Ok(tokens)
    }

    /// The tokens of a chat request; none when it has no messages, the model has no template, or
    /// a message has parts other than text.
    ///
    /// # Errors
    /// What template or encoder say.
    pub fn chat(
        &self,
        body: &serde_json::Map<String, Json>,
    ) -> Result<Option<Vec<u32>>, EncodeError> {
        let (Some(template), Some(Json::Array(messages))) = (&self.template, body.get("messages"))
        else {
            return Ok(None);
        };
        let flag = |name: &str| body.get(name).and_then(Json::as_bool);
        if flag("continue_final_message") == Some(true) {
            return Ok(None); // engines cut the rendered text in ways of their own
        }
        let mut kwargs = body
            .get("chat_template_kwargs")
            .and_then(Json::as_object)
            .cloned()
            .unwrap_or_default();
        if let Some(documents) = body.get("documents") {
            kwargs.insert("documents".into(), documents.clone());
        }
        let chat = Chat {
            messages: messages.clone(),
            tools: body.get("tools").filter(|tools| !tools.is_null()).cloned(),
            add_generation_prompt: flag("add_generation_prompt").unwrap_or(true),
            kwargs,
        };
        let Some(text) = template.render(&chat)? else {
            return Ok(None);
        };
        let special = flag("add_special_tokens").unwrap_or(false);
        self.text(&text, special).map(Some)
    }
}

/// What stands before and behind a text's own tokens when special ones are asked for.
fn around(bpe: &Tokenizer) -> Result<(Vec<u32>, Vec<u32>), tokenizers::Error> {
    const PROBE: &str = "a";
    let bare = bpe.encode_fast(PROBE, false)?.get_ids().to_vec();
    let full = bpe.encode_fast(PROBE, true)?.get_ids().to_vec();
    let at = full.windows(bare.len().max(1)).position(|ids| ids == bare);
    Ok(at.map_or_else(Default::default, |at| {
        (full[..at].to_vec(), full[at + bare.len()..].to_vec())
    }))
}

fn template(directory: &Path) -> Result<Option<Template>, EncodeError> {
    let config_file = directory.join("tokenizer_config.json");
    let config: Json = match read_optional(&config_file)? {
        Some(text) => serde_json::from_str(&text)
            .map_err(|e| EncodeError::File(config_file.clone(), e.to_string()))?,
        None => Json::Null,
    };
    let source_file = directory.join("chat_template.jinja");
    let (file, source) = match read_optional(&source_file)? {
        Some(source) => (source_file, Some(source)),
        None => (config_file, in_config(&config)),
    };
    let Some(source) = source else {
        return Ok(None);
    };
    let template = Template::new(source, special_tokens(&config));
    template
        .map(Some)
        .map_err(|e| EncodeError::File(file, e.to_string()))
}

fn read_optional(file: &Path) -> Result<Option<String>, EncodeError> {
    match std::fs::read_to_string(file) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(EncodeError::Read(file.to_owned(), error)),
    }
}

/// One template, or the one that is named `default` among several.
fn in_config(config: &Json) -> Option<String> {
    let text = |value: &Json| value.as_str().map(str::to_owned);
    match config.get("chat_template")? {
        Json::Array(named) => {
            let default = named.iter().find(|entry| entry["name"] == "default")?;
            text(&default["template"])
        }
        one => text(one),
    }
}

/// `bos_token` and the like, given as text or as an object with `content`.
fn special_tokens(config: &Json) -> BTreeMap<String, String> {
    let keys = config.as_object().into_iter().flatten();
    let tokens = keys
        .filter(|(key, _)| key.ends_with("_token"))
        .filter_map(|(key, value)| {
            let content = value.get("content").unwrap_or(value).as_str()?;
            Some((key.clone(), content.to_owned()))
        });
    tokens.collect()
}

#[cfg(test)]
#[path = "encoder_test.rs"]
mod tests;
