//! Requests as lists of block ids: from a file in Mooncake's format, or made up alike.

use serde::Deserialize;
use std::io::{BufRead, BufReader, Error};
use std::path::Path;

/// A prompt: ids of its 512-token blocks, equal ids for equal beginnings.
pub type Request = Vec<u64>;

#[derive(Deserialize)]
struct Line {
    hash_ids: Request,
}

/// Reads a trace.
pub fn read(path: &Path) -> std::io::Result<Vec<Request>> {
    let file = std::fs::File::open(path)?;
    let lines = BufReader::new(file).lines();
    lines
        .map(|line| {
            let line: Line = serde_json::from_str(&line?).map_err(Error::other)?;
            Ok(line.hash_ids)
        })
        .collect()
}

/// Conversations that grow turn by turn behind one of a few system prompts: about 24 blocks a
/// request, of which two thirds were seen before.
pub fn synthetic(n: usize) -> Vec<Request> {
    const SYSTEMS: u64 = 20;
    const OPEN: usize = 400;
    let mut chance = 42u64;
    let mut below = |limit: u64| {
        chance = chance
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (chance >> 33) % limit
    };
    let mut fresh = 1_000_000;
    let mut open: Vec<Request> = Vec::new();
    let mut requests = Vec::with_capacity(n);
    while requests.len() < n {
        if open.len() < OPEN {
            let system = below(SYSTEMS) * 100;
            open.push((system..system + 4).collect());
        }
        let at = below(open.len() as u64) as usize;
        for _ in 0..2 + below(6) {
            fresh += 1;
            open[at].push(fresh);
        }
        requests.push(open[at].clone());
        if open[at].len() > 60 {
            open.swap_remove(at);
        }
    }
    requests
}
