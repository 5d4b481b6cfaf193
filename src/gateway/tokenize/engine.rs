//! What makes tokens of a piece of text: a fast encoder where it agrees with the one that engines
//! use on everything that it is asked at the start, else that one itself.

use serde_json::Value as Json;
use std::path::Path;
use std::sync::Arc;
use tokenizers::Tokenizer;
use tracing::{info, warn};

/// See the module.
pub(super) enum Engine {
    Fast(Box<fastokens::Tokenizer>),
    Plain(Box<Tokenizer>),
}

/// What both encoders are asked: words, blanks, digits, marks, letters that are composed in two ways,
/// other scripts, and marks of special tokens, whole and broken.
const ASKED: [&str; 12] = [
    "The tide comes in, and don't we KNOW it'll go out again?",
    "   three spaces,\ttabs\t\tand\r\nlines\n\n\n  of  all   kinds  ",
    "1 12 123 1234 12345 3.14159 1e-9 0xFF 2026-11-30",
    "fn main() { let x = vec![1, 2]; println!(\"{x:?}\"); } // ==> <= != && ||",
    "caf\u{e9} cafe\u{301} na\u{ef}ve \u{fb01}ne \u{130}stanbul stra\u{df}e \u{a0}\u{200d}\u{feff}",
    "\u{4e2d}\u{6587}\u{3068}\u{65e5}\u{672c}\u{8a9e} \u{d55c}\u{ad6d}\u{c5b4} \u{1100}\u{1161} \u{0627}\u{0644}\u{0639} \u{0e44}\u{0e17}\u{0e22}",
    "\u{1f980}\u{1f469}\u{200d}\u{1f469}\u{200d}\u{1f467} \u{1f1e9}\u{1f1ea} \u{2764}\u{fe0f}",
    "<|im_start|>user\nhi<|im_end|>\n<think>\n\n</think>\n\n<|im_start",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|> <|eot_id",
    "<s>[INST] hi [/INST] </s><tool_call>{\"a\": 1}</tool_call> <unk> <pad>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "",
];

impl Engine {
    /// For a vocabulary as both read it; `file` is for the log.
    pub(super) fn new(plain: Tokenizer, bytes: &[u8], file: &Path) -> Self {
        match agreeing(&plain, bytes) {
            Ok(fast) => {
                info!(file = %file.display(), encoder = "fastokens", "tokenizer loaded");
                Engine::Fast(Box::new(fast))
            }
            Err(why) => {
                warn!(file = %file.display(), encoder = "tokenizers", why, "tokenizer loaded, without its faster encoder");
                Engine::Plain(Box::new(plain))
            }
        }
    }

    /// The tokens of a piece, as they are within a longer text.
    pub(super) fn encode(&self, piece: &str) -> Result<Arc<[u32]>, String> {
        match self {
            Engine::Fast(fast) => fast
                .encode(piece)
                .map(Into::into)
                .map_err(|e| e.to_string()),
            Engine::Plain(plain) => {
                let encoding = plain.encode_fast(piece, false).map_err(|e| e.to_string())?;
                Ok(encoding.get_ids().into())
            }
        }
    }
}

/// The fast encoder, if it reads the vocabulary and says the same as the plain one.
fn agreeing(plain: &Tokenizer, bytes: &[u8]) -> Result<fastokens::Tokenizer, String> {
    let mut json: Json = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
    for cuts_or_fills in ["truncation", "padding"] {
        json[cuts_or_fills] = Json::Null;
    }
    let fast = fastokens::Tokenizer::from_json(json).map_err(|e| e.to_string())?;
    for text in ASKED {
        let expected = plain.encode_fast(text, false).map_err(|e| e.to_string())?;
        let made = fast.encode(text).map_err(|e| e.to_string())?;
        if made != expected.get_ids() {
            return Err(format!("it makes other tokens of {text:?}"));
        }
    }
    Ok(fast)
}
