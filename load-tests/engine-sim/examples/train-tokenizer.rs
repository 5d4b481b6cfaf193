//! Trains `assets/tokenizer.json`: a byte-level BPE of about 8,000 tokens. Run it again only when the word list or the split rule
//! changes; the result is committed, so that token counts are the same on every machine.
//! The corpus is the standard licence texts that Debian ships plus sentences made here from `assets/words.txt`.
//!
//! `cargo run -p engine-sim --example train-tokenizer -- load-tests/engine-sim/assets/tokenizer.json`

use std::error::Error;
use std::fs;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::{AddedToken, SplitDelimiterBehavior, Tokenizer};

const VOCABULARY: usize = 8192;
const SENTENCES: usize = 6000;
const SPECIAL: [&str; 4] = [
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
];
/// Words with their leading space, numbers of up to three digits, line ends in one piece, punctuation, other white space.
/// A run of line ends is one piece whatever follows it, so that a prompt's tail keeps its tokens when an answer is appended.
const PIECES: &str = r" ?\p{L}+|\p{N}{1,3}|\s*[\r\n]+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LICENCES: [&str; 12] = [
    "Apache-2.0",
    "Artistic",
    "BSD",
    "CC0-1.0",
    "GFDL-1.3",
    "GPL-1",
    "GPL-2",
    "GPL-3",
    "LGPL-2.1",
    "LGPL-3",
    "MPL-1.1",
    "MPL-2.0",
];

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let target = std::env::args()
        .nth(1)
        .ok_or("usage: train-tokenizer TARGET.json")?;
    let mut corpus = made_sentences();
    for licence in LICENCES {
        corpus.push(fs::read_to_string(format!(
            "/usr/share/common-licenses/{licence}"
        ))?);
    }

    let split = Split::new(
        SplitPattern::Regex(PIECES.into()),
        SplitDelimiterBehavior::Isolated,
        false,
    )?;
    let bytes = ByteLevel::new(false, true, false);
    let mut tokenizer = Tokenizer::new(BPE::default());
    tokenizer.with_pre_tokenizer(Some(Sequence::new(vec![
        PreTokenizerWrapper::Split(split),
        PreTokenizerWrapper::ByteLevel(bytes),
    ])));
    tokenizer.with_decoder(Some(bytes));
    let mut trainer: TrainerWrapper = BpeTrainer::builder()
        .vocab_size(VOCABULARY)
        .min_frequency(1)
        .show_progress(false)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .special_tokens(
            SPECIAL
                .iter()
                .map(|token| AddedToken::from(*token, true))
                .collect(),
        )
        .build()
        .into();
    tokenizer.train(&mut trainer, corpus.into_iter())?;
    tokenizer.save(&target, false)?;
    println!(
        "{} tokens, {} bytes in {target}",
        tokenizer.get_vocab_size(true),
        fs::metadata(&target)?.len()
    );
    Ok(())
}

/// Sentences, JSON and code-like lines, so that what tests and demos send is not cut into letters.
fn made_sentences() -> Vec<String> {
    let words: Vec<&str> = include_str!("../assets/words.txt")
        .split_whitespace()
        .collect();
    let mut chance = fastrand::Rng::with_seed(1);
    let mut sentences = Vec::with_capacity(SENTENCES * 2);
    for number in 0..SENTENCES {
        let mut sentence = String::new();
        for position in 0..chance.usize(6..16) {
            let word = words[chance.usize(..words.len())];
            if position == 0 {
                sentence.push_str(&capitalised(word));
            } else {
                sentence.push(' ');
                sentence.push_str(word);
            }
        }
        sentences.push(sentence + ".");
        let (key, value) = (
            words[chance.usize(..words.len())],
            words[chance.usize(..words.len())],
        );
        sentences.push(match number % 4 {
            0 => format!(r#"{{"name": "{key}", "parameters": {{"{value}": {number}}}}}"#),
            1 => format!(
                "fn {key}_{value}(&self) -> usize {{\n    self.{value}.len() + {number}\n}}"
            ),
            2 => format!("You are a helpful assistant. What is the {key} of {value}?"),
            _ => {
                format!("- {key}: {value}\n\nPlease explain the {key} and then the {value}, user.")
            }
        });
    }
    sentences
}

fn capitalised(word: &str) -> String {
    let mut letters = word.chars();
    letters
        .next()
        .map(|first| first.to_uppercase().collect::<String>() + letters.as_str())
        .unwrap_or_default()
}
