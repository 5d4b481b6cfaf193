//! Requests from a file in Mooncake's format, a quarter of their size: 128 tokens for each block of 512.

use crate::draw::tokens;
use crate::request::Request;
use routing::strategy::Chance;
use serde::Deserialize;
use std::io::{BufRead, BufReader, Error};
use std::path::Path;

/// Tokens of a block of the trace, and of one here.
const BLOCK_TOKENS: usize = 512;
const SCALED_TOKENS: usize = 128;

/// One line.
#[derive(Debug, Clone, Deserialize)]
pub struct Line {
    input_length: usize,
    output_length: usize,
    hash_ids: Vec<u64>,
}

/// Reads a trace.
///
/// # Errors
/// A file that cannot be read, or a line that is not of this format.
pub fn read(path: &Path) -> std::io::Result<Vec<Line>> {
    let lines = BufReader::new(std::fs::File::open(path)?).lines();
    lines
        .map(|line| serde_json::from_str(&line?).map_err(Error::other))
        .collect()
}

/// `count` requests that follow each other in the trace, from a place of the seed's.
pub fn requests(trace: &[Line], count: usize, chance: &mut Chance) -> Vec<Request> {
    let last = trace.len().saturating_sub(count);
    let from = chance.below(last as u64 + 1) as usize;
    let lines = trace[from..].iter().take(count);
    lines.map(|line| line.request()).collect()
}

impl Line {
    fn request(&self) -> Request {
        let block = |id: &u64| tokens(&mut Chance(*id), SCALED_TOKENS);
        let mut prompt: Vec<u32> = self.hash_ids.iter().flat_map(block).collect();
        let scaled = |length: usize| (length * SCALED_TOKENS / BLOCK_TOKENS).max(1);
        prompt.truncate(scaled(self.input_length));
        let last = self.hash_ids.last().copied().unwrap_or(0);
        let answer = tokens(&mut Chance(!last), scaled(self.output_length));
        Request::new(prompt, answer, (0, 4 * SCALED_TOKENS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_share_ids_share_blocks() {
        let line = |ids: &[u64]| Line {
            input_length: 512 * ids.len(),
            output_length: 40,
            hash_ids: ids.to_vec(),
        };
        let trace = [line(&[0, 1, 2]), line(&[0, 1, 3])];
        let made = requests(&trace, 2, &mut Chance(1));
        assert_eq!(made[0].names[..16], made[1].names[..16]);
        assert_ne!(made[0].names[16], made[1].names[16]);
        assert_eq!((made[0].prompt.len(), made[0].answer.len()), (384, 10));
    }
}
