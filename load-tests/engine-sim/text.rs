//! What the engine answers: made-up sentences or a tool call, decided when the request comes, the same for the same prompt and
//! seed. The tokens are those that the tokenizer gives for the text, so that an answer sent back in the next turn is found in the
//! prefix cache.

use crate::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};
use std::sync::{Arc, OnceLock};

const WORDS: &str = include_str!("assets/words.txt");
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
    let natural = chance.usize(usual.div_ceil(2)..=usual + usual / 2).max(bounds.min_tokens);
    let length = if bounds.ignore_eos { bounds.max_tokens } else { natural.min(bounds.max_tokens) };
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
    let finish = if ends_itself { Finish::Stop } else { Finish::Length };
    let pieces = tokenizer.pieces(&tokens);
    cut_at_stop(tokens, pieces, finish, bounds)
}

/// A call of `function` with arguments that its JSON schema allows.
pub fn tool_call(tokenizer: &Tokenizer, function: &str, schema: &Value, seed: u64, max_tokens: usize) -> Answer {
    let mut chance = fastrand::Rng::with_seed(digest(&tokenizer.encode(function, false), seed));
    let arguments = value_for(schema, &mut chance, 0).to_string();
    let mut tokens = tokenizer.encode(&format!("{{\"name\": {}, \"parameters\": ", json!(function)), false);
    let name_tokens = tokens.len();
    let argument_tokens = tokenizer.encode(&arguments, false);
    let mut pieces = vec![String::new(); name_tokens];
    pieces.extend(tokenizer.pieces(&argument_tokens));
    tokens.extend(argument_tokens);
    tokens.push(tokenizer.end_of_turn());
    pieces.push(String::new());
    let finish = if tokens.len() > max_tokens { Finish::Length } else { Finish::ToolCalls };
    tokens.truncate(max_tokens);
    pieces.truncate(max_tokens);
    Answer { tokens: tokens.into(), pieces, finish, call: Some(Call { function: function.to_owned(), name_tokens }) }
}

/// Ends an answer with the token that completes the first stop string, and its text before (or after) that string.
fn cut_at_stop(mut tokens: Vec<u32>, mut pieces: Vec<String>, mut finish: Finish, bounds: &Bounds) -> Answer {
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
    Answer { tokens: tokens.into(), pieces, finish, call: None }
}

/// A number that depends on every token: seeds what looks random.
pub fn digest(tokens: &[u32], seed: u64) -> u64 {
    tokens.iter().fold(seed ^ 0x51_7c_c1_b7_27_22_0a_95, |state, token| {
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
        Vocabulary { words: words.collect(), full_stop: tokenizer.encode(".", false) }
    })
}

/// Schemas can refer to themselves without end only through `$ref`, which is not followed; the depth is bounded all the same.
const SCHEMA_DEPTH_MAX: usize = 8;

fn value_for(schema: &Value, chance: &mut fastrand::Rng, depth: usize) -> Value {
    if depth > SCHEMA_DEPTH_MAX {
        return Value::Null;
    }
    if let Some(choices) = schema["enum"].as_array().filter(|choices| !choices.is_empty()) {
        return choices[chance.usize(..choices.len())].clone();
    }
    let kind = match &schema["type"] {
        Value::Array(kinds) => kinds.first().and_then(Value::as_str),
        kind => kind.as_str(),
    };
    match kind {
        Some("string") => json!(WORDS.split_whitespace().nth(chance.usize(..500)).unwrap_or("word")),
        Some("integer") => json!(schema["minimum"].as_i64().unwrap_or(0).saturating_add(chance.i64(1..10))),
        Some("number") => json!(schema["minimum"].as_f64().unwrap_or(0.0) + f64::from(chance.u32(1..10)) / 2.0),
        Some("boolean") => json!(chance.bool()),
        Some("array") => json!([value_for(&schema["items"], chance, depth + 1)]),
        Some("null") => Value::Null,
        _ => {
            let empty = Map::new();
            let properties = schema["properties"].as_object().unwrap_or(&empty);
            properties.iter().map(|(name, inner)| (name.clone(), value_for(inner, chance, depth + 1))).collect::<Map<_, _>>().into()
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn bounds(max_tokens: usize) -> Bounds {
        Bounds { max_tokens, usual_tokens: 64, ..Default::default() }
    }

    #[test]
    fn equal_prompts_and_seeds_get_equal_answers() {
        let tokenizer = Tokenizer::shared();
        let answer = |prompt: &[u32], seed| sentences(tokenizer, prompt, seed, &bounds(500)).pieces.concat();
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
        let forced = sentences(tokenizer, &[1], 0, &Bounds { ignore_eos: true, ..bounds(300) });
        assert_eq!((forced.tokens.len(), forced.finish), (300, Finish::Length));
        let long = sentences(tokenizer, &[1], 0, &Bounds { min_tokens: 200, ..bounds(300) });
        assert_eq!((long.tokens.len(), long.finish), (200, Finish::Stop));
    }

    #[test]
    fn a_stop_string_ends_the_answer_before_it() {
        let tokenizer = Tokenizer::shared();
        let whole = sentences(tokenizer, &[1], 0, &Bounds { ignore_eos: true, ..bounds(100) });
        let text = whole.pieces.concat();
        let stop = text[20..27].to_owned();
        let cut = sentences(tokenizer, &[1], 0, &Bounds { ignore_eos: true, stop: vec![stop.clone()], ..bounds(100) });
        assert_eq!(cut.pieces.concat(), text[..text.find(&stop).unwrap()]);
        assert_eq!(cut.finish, Finish::Stop);
        assert_eq!(cut.pieces.len(), cut.tokens.len());
        let with = sentences(tokenizer, &[1], 0, &Bounds { ignore_eos: true, include_stop: true, stop: vec![stop.clone()], ..bounds(100) });
        assert!(with.pieces.concat().ends_with(&stop));
    }

    #[test]
    fn a_tool_call_fits_its_schema() {
        let schema = json!({"type": "object", "properties": {
            "city": {"type": "string"}, "unit": {"enum": ["섭씨"]}, "days": {"type": "integer", "minimum": 1}, "where": {"type": "array", "items": {"type": "number"}}
        }});
        let answer = tool_call(Tokenizer::shared(), "get_weather", &schema, 0, 500);
        let arguments: Value = serde_json::from_str(&answer.pieces.concat()).unwrap();
        assert_eq!(arguments["unit"], "섭씨");
        assert!(arguments["city"].is_string() && arguments["days"].as_i64().unwrap() >= 1 && arguments["where"][0].is_number());
        assert_eq!(answer.finish, Finish::ToolCalls);
        assert_eq!(answer.pieces.len(), answer.tokens.len());
    }
}
