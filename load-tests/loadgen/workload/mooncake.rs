//! Requests of a trace in Mooncake's format: a JSON object a line with `timestamp` in milliseconds, `input_length` and
//! `output_length` in tokens, and `hash_ids`, one for each 512 tokens of the prompt; equal ids at the beginning are an equal
//! beginning. Source: github.com/kvcache-ai/Mooncake, "Trace". Or a synthetic one that is like the public conversation trace.

use super::{Ask, Message, words::words};
use crate::zipf::Zipf;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Error};
use std::path::Path;
use std::time::Duration;

/// Tokens that one id stands for.
pub const BLOCK_TOKENS: usize = 512;

/// One line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    /// Milliseconds from the beginning.
    pub timestamp: u64,
    /// Tokens.
    pub input_length: usize,
    /// Tokens.
    pub output_length: usize,
    /// Blocks.
    pub hash_ids: Vec<u64>,
}

/// Reads a trace.
///
/// # Errors
/// The file that cannot be read, or the line that is not of this format.
pub fn read(path: &Path) -> std::io::Result<Vec<Line>> {
    let lines = BufReader::new(std::fs::File::open(path)?).lines();
    let parse = |(at, line): (usize, std::io::Result<String>)| {
        serde_json::from_str(&line?)
            .map_err(|error| Error::other(format!("{}, line {}: {error}", path.display(), at + 1)))
    };
    lines.enumerate().map(parse).collect()
}

/// How a trace is made smaller.
#[derive(Debug, Clone, Copy)]
pub struct Scale {
    /// Words that stand for a block of 512 tokens, and answers in proportion.
    pub block_words: usize,
    /// So many times faster than it was recorded.
    pub speed_up: f64,
}

/// The requests of a trace.
pub fn requests(lines: &[Line], scale: Scale) -> Vec<Ask> {
    let scaled = |tokens: usize| (tokens * scale.block_words / BLOCK_TOKENS).max(1);
    let ask = |line: &Line| {
        let blocks = line.hash_ids.iter().map(|id| words(*id, scale.block_words));
        let mut text = blocks.collect::<Vec<_>>().join(" ");
        // the last block may be begun only
        let over =
            (line.hash_ids.len() * scale.block_words).saturating_sub(scaled(line.input_length));
        for _ in 0..over.min(scale.block_words.saturating_sub(1)) {
            text.truncate(text.rfind(' ').unwrap_or(text.len()));
        }
        let message = Message {
            role: "user",
            text: text.into(),
        };
        Ask {
            due: Some(Duration::from_millis(line.timestamp).div_f64(scale.speed_up)),
            ..Ask::once(vec![message], scaled(line.output_length))
        }
    };
    lines.iter().map(ask).collect()
}

// Of the public conversation trace: 12,031 requests in 3,537 s; all begin with one block; prompts of 12,035 tokens on average
// (deciles 964 and 27,367, p99 85,399), answers of 343 (24, 597, 1,115); 36.6 % of all blocks were seen before in their place.
const REQUESTS_PER_SECOND: f64 = 12_031.0 / 3_537.0;
/// The share of requests that go on with an earlier conversation.
const GO_ON: f64 = 0.36;
/// Logarithms of tokens: what a new conversation begins with, and what a turn adds.
const OPENING: (f64, f64) = (8.5, 1.25);
const TURN: (f64, f64) = (7.5, 1.1);
const ANSWER: (f64, f64) = (5.5, 0.95);
const PROMPT_MAX: f64 = 126_000.0;
const ANSWER_MAX: f64 = 2_000.0;
/// Conversations that are gone on with, the last ones first and most.
const OPEN_MAX: usize = 2_000;

/// A trace with the same statistics as the public conversation trace, as the constants above say and a test checks.
pub fn synthetic(requests: usize, seed: u64) -> Vec<Line> {
    let mut chance = fastrand::Rng::with_seed(seed);
    let recent = Zipf::new(OPEN_MAX, 0.6);
    let mut open: Vec<(Vec<u64>, usize)> = Vec::new();
    let (mut fresh, mut now) = (1, 0.0);
    let mut lines = Vec::with_capacity(requests);
    for _ in 0..requests {
        now += -chance.f64().max(f64::MIN_POSITIVE).ln() / REQUESTS_PER_SECOND * 1e3;
        let goes_on = chance.f64() < GO_ON && !open.is_empty();
        let (mut ids, before) = match goes_on {
            true => {
                let back = recent.draw(&mut chance).min(open.len() - 1);
                open.remove(open.len() - 1 - back)
            }
            false => (vec![0], BLOCK_TOKENS),
        };
        let more = lognormal(if goes_on { TURN } else { OPENING }, &mut chance);
        let tokens = (before + more as usize).min(PROMPT_MAX as usize).max(1);
        ids.truncate((before / BLOCK_TOKENS).max(1)); // a block that was not full is another one now
        while ids.len() < tokens.div_ceil(BLOCK_TOKENS) {
            ids.push(fresh);
            fresh += 1;
        }
        let output_length = lognormal(ANSWER, &mut chance).clamp(1.0, ANSWER_MAX) as usize;
        lines.push(Line {
            timestamp: now as u64,
            input_length: tokens,
            output_length,
            hash_ids: ids.clone(),
        });
        open.push((ids, tokens));
        if open.len() > OPEN_MAX {
            open.remove(0);
        }
    }
    lines
}

/// Of a logarithm's mean and deviation; Box and Muller's method.
fn lognormal((mean, deviation): (f64, f64), chance: &mut fastrand::Rng) -> f64 {
    let (u, v) = (chance.f64().max(f64::MIN_POSITIVE), chance.f64());
    let normal = (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos();
    (mean + deviation * normal).exp()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn mean(of: impl Iterator<Item = usize>) -> f64 {
        let all: Vec<usize> = of.collect();
        all.iter().sum::<usize>() as f64 / all.len() as f64
    }

    #[test]
    fn the_synthetic_trace_is_like_the_public_one() {
        let lines = synthetic(12_031, 1);
        let seconds = lines.last().unwrap().timestamp as f64 / 1e3;
        assert!((seconds / 3_537.0 - 1.0).abs() < 0.05, "{seconds}");
        let prompt = mean(lines.iter().map(|l| l.input_length));
        assert!((prompt / 12_035.0 - 1.0).abs() < 0.15, "{prompt}");
        let answer = mean(lines.iter().map(|l| l.output_length));
        assert!((answer / 343.0 - 1.0).abs() < 0.15, "{answer}");
        let mut prompts: Vec<usize> = lines.iter().map(|l| l.input_length).collect();
        prompts.sort_unstable();
        let median = prompts[prompts.len() / 2] as f64;
        assert!((median / 6_909.0 - 1.0).abs() < 0.25, "{median}");
        let (mut seen, mut hits, mut all) = (HashSet::new(), 0, 0);
        for line in &lines {
            hits += line
                .hash_ids
                .iter()
                .take_while(|id| seen.contains(*id))
                .count();
            all += line.hash_ids.len();
            seen.extend(line.hash_ids.iter().copied());
        }
        let share = hits as f64 / all as f64;
        assert!((share - 0.366).abs() < 0.05, "{share}");
        assert!(lines.iter().all(|l| l.hash_ids[0] == 0));
    }

    #[test]
    fn prompts_share_text_as_far_as_their_ids_are_equal() {
        let line = |ids: &[u64], timestamp| Line {
            timestamp,
            input_length: ids.len() * BLOCK_TOKENS - 256,
            output_length: 512,
            hash_ids: ids.to_vec(),
        };
        let scale = Scale {
            block_words: 16,
            speed_up: 10.0,
        };
        let asks = requests(&[line(&[0, 1, 2], 0), line(&[0, 1, 3], 5000)], scale);
        let text = |at: usize| {
            asks[at].messages[0]
                .text
                .split(' ')
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        assert_eq!(text(0).len(), 40);
        assert_eq!(text(0)[..32], text(1)[..32]);
        assert_ne!(text(0)[32..], text(1)[32..]);
        assert_eq!(asks[1].due, Some(Duration::from_millis(500)));
        assert_eq!(asks[0].answer_tokens, 16);
    }

    #[test]
    fn a_line_of_another_format_is_named() {
        let path = std::env::temp_dir().join(format!("loadgen-{}.jsonl", std::process::id()));
        std::fs::write(
            &path,
            "{\"timestamp\":0,\"input_length\":1,\"output_length\":1,\"hash_ids\":[0]}\n{}\n",
        )
        .unwrap();
        let error = read(&path).unwrap_err().to_string();
        std::fs::remove_file(&path).unwrap();
        assert!(error.contains("line 2"), "{error}");
    }
}
