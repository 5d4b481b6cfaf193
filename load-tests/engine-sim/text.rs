//! What the engine answers: made-up sentences (or a call, see `tool_call`), decided when the request comes, the same for the same prompt and
//! seed. The tokens are those that the tokenizer gives for the text, so that an answer sent back in the next turn is found in the
//! prefix cache.

use crate::tokenizer::Tokenizer;
use std::sync::{Arc, OnceLock};

/// What sentences are made of.
pub const WORDS: &str = include_str!("assets/words.txt");
/// Sentence lengths in words.
const SENTENCE: std::ops::Range<usize> = 5..14;

/// Why an answer ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// The model was done, or a stop string came.
    Stop,
    /// A limit was reached.
    Length,
    /// It called a tool.
    ToolCalls,
}

impl Finish {
    /// As in `finish_reason`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
        }
    }
}

/// A complete answer, before the engine has "generated" it.
#[derive(Debug, Clone)]
pub struct Answer {
    /// One per step.
    pub tokens: Arc<[u32]>,
    /// The text that each token adds; as many as tokens.
    pub pieces: Vec<String>,
    /// How it ends.
    pub finish: Finish,
    /// Set when the pieces are a tool's arguments instead of content.
    pub call: Option<Call>,
}

/// The function that an answer calls.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    /// Its name.
    pub function: String,
    /// Tokens before the arguments begin: the function's name.
    pub name_tokens: usize,
}

/// What bounds an answer.
#[derive(Debug, Clone, Default)]
pub struct Bounds {
    /// No more tokens than this.
    pub max_tokens: usize,
    /// No fewer, unless `max_tokens` says so.
    pub min_tokens: usize,
    /// Go on to `max_tokens`.
    pub ignore_eos: bool,
    /// End before any of these.
    pub stop: Vec<String>,
    /// Whether the stop string stays in the text.
    pub include_stop: bool,
    /// Average length where nothing else ends it.
    pub usual_tokens: usize,
}

/// Sentences for a prompt. `seed` joins the engine's, the request's and the choice's.
pub fn sentences(tokenizer: &Tokenizer, prompt: &[u32], seed: u64, bounds: &Bounds) -> Answer {
    let mut chance = fastrand::Rng::with_seed(digest(prompt, seed));
    let usual = bounds.usual_tokens.max(1);
    let natural = chance
        .usize(usual.div_ceil(2)..=usual + usual / 2)
        .max(bounds.min_tokens);
    let length = if bounds.ignore_eos {
        bounds.max_tokens
    } else {
        natural.min(bounds.max_tokens)
    };
    let ends_itself = !bounds.ignore_eos && natural <= bounds.max_tokens;

    let vocabulary = words(tokenizer);
    let mut tokens = Vec::with_capacity(length + SENTENCE.end);
    while tokens.len() < length {
        for position in 0..chance.usize(SENTENCE) {
            let word = &vocabulary.words[chance.usize(..vocabulary.words.len())];
            tokens.extend(match (position, tokens.is_empty()) {
                (0, true) => &word.at_start,
                (0, false) => &word.capitalised,
                _ => &word.plain,
            });
        }
        tokens.extend(&vocabulary.full_stop);
    }
    tokens.truncate(length);
    if ends_itself && let Some(last) = tokens.last_mut() {
        *last = tokenizer.end_of_turn();
    }
    let finish = if ends_itself {
        Finish::Stop
    } else {
        Finish::Length
    };
    let pieces = tokenizer.pieces(&tokens);
    cut_at_stop(tokens, pieces, finish, bounds)
}

/// Ends an answer with the token that completes the first stop string, and its text before (or after) that string.
fn cut_at_stop(
    mut tokens: Vec<u32>,
    mut pieces: Vec<String>,
    mut finish: Finish,
    bounds: &Bounds,
) -> Answer {
    let text = pieces.concat();
    let first = bounds
        .stop
        .iter()
        .filter(|stop| !stop.is_empty())
        .filter_map(|stop| text.find(stop.as_str()).map(|at| (at + stop.len(), at)))
        .min();
    if let Some((end, start)) = first {
        let visible = if bounds.include_stop { end } else { start };
        let (mut before, mut kept) = (0, 0);
        for piece in &mut pieces {
            if before >= end {
                break;
            }
            let length = piece.len();
            piece.truncate(visible.saturating_sub(before).min(length));
            before += length;
            kept += 1;
        }
        tokens.truncate(kept);
        pieces.truncate(kept);
        finish = Finish::Stop;
    }
    Answer {
        tokens: tokens.into(),
        pieces,
        finish,
        call: None,
    }
}

/// A number that depends on every token: seeds what looks random.
pub fn digest(tokens: &[u32], seed: u64) -> u64 {
    tokens
        .iter()
        .fold(seed ^ 0x51_7c_c1_b7_27_22_0a_95, |state, token| {
            (state.rotate_left(5) ^ u64::from(*token)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        })
}

struct Word {
    plain: Vec<u32>,
    capitalised: Vec<u32>,
    at_start: Vec<u32>,
}

struct Vocabulary {
    words: Vec<Word>,
    full_stop: Vec<u32>,
}

fn words(tokenizer: &Tokenizer) -> &'static Vocabulary {
    static VOCABULARY: OnceLock<Vocabulary> = OnceLock::new();
    VOCABULARY.get_or_init(|| {
        let words = WORDS.split_whitespace().map(|word| {
            let (first, rest) = word.split_at(1);
            let capitalised = first.to_uppercase() + rest;
            Word {
                plain: tokenizer.encode(&format!(" {word}"), false),
                capitalised: tokenizer.encode(&format!(" {capitalised}"), false),
                at_start: tokenizer.encode(&capitalised, false),
            }
        });
        Vocabulary {
            words: words.collect(),
            full_stop: tokenizer.encode(".", false),
        }
    })
}

#[cfg(test)]
mod test {
    use super::*;

    fn bounds(max_tokens: usize) -> Bounds {
        Bounds {
            max_tokens,
            usual_tokens: 64,
            ..Default::default()
        }
    }

    #[test]
    fn equal_prompts_and_seeds_get_equal_answers() {
        let tokenizer = Tokenizer::shared();
        let answer = |prompt: &[u32], seed| {
            sentences(tokenizer, prompt, seed, &bounds(500))
                .pieces
                .concat()
        };
        assert_eq!(answer(&[1, 2, 3], 0), answer(&[1, 2, 3], 0));
        assert_ne!(answer(&[1, 2, 3], 0), answer(&[1, 2, 3], 1));
        assert_ne!(answer(&[1, 2, 3], 0), answer(&[3, 2, 1], 0));
    }

    #[test]
    fn the_tokens_are_those_of_the_text() {
        let tokenizer = Tokenizer::shared();
        let answer = sentences(tokenizer, &[1, 2, 3], 0, &bounds(500));
        assert_eq!(answer.finish, Finish::Stop);
        let (end, text) = answer.tokens.split_last().unwrap();
        assert_eq!(*end, tokenizer.end_of_turn());
        assert_eq!(tokenizer.encode(&answer.pieces.concat(), false), text);
    }

    #[test]
    fn limits_end_answers() {
        let tokenizer = Tokenizer::shared();
        let short = sentences(tokenizer, &[1], 0, &bounds(5));
        assert_eq!((short.tokens.len(), short.finish), (5, Finish::Length));
        let forced = sentences(
            tokenizer,
            &[1],
            0,
            &Bounds {
                ignore_eos: true,
                ..bounds(300)
            },
        );
        assert_eq!((forced.tokens.len(), forced.finish), (300, Finish::Length));
        let long = sentences(
            tokenizer,
            &[1],
            0,
            &Bounds {
                min_tokens: 200,
                ..bounds(300)
            },
        );
        assert_eq!((long.tokens.len(), long.finish), (200, Finish::Stop));
    }

    #[test]
    fn a_stop_string_ends_the_answer_before_it() {
        let tokenizer = Tokenizer::shared();
        let whole = sentences(
            tokenizer,
            &[1],
            0,
            &Bounds {
                ignore_eos: true,
                ..bounds(100)
            },
        );
        let text = whole.pieces.concat();
        let stop = text[20..27].to_owned();
        let cut = sentences(
            tokenizer,
            &[1],
            0,
            &Bounds {
                ignore_eos: true,
                stop: vec![stop.clone()],
                ..bounds(100)
            },
        );
        assert_eq!(cut.pieces.concat(), text[..text.find(&stop).unwrap()]);
        assert_eq!(cut.finish, Finish::Stop);
        assert_eq!(cut.pieces.len(), cut.tokens.len());
        let with = sentences(
            tokenizer,
            &[1],
            0,
            &Bounds {
                ignore_eos: true,
                include_stop: true,
                stop: vec![stop.clone()],
                ..bounds(100)
            },
        );
        assert!(with.pieces.concat().ends_with(&stop));
    }
}
