//! What engines say: their KV events and their streams.

use super::Run;
use routing::block::{BlockHash, Realm, chain};
use routing::prefix_index::{Afterwards, HolderId, Limits, PrefixIndex, StoredRun, Tier};
use wire::sse::{Event, EventScanner, data_event};

const HOLDERS: u32 = 8;
const PROMPTS: u32 = 64;
const BLOCKS: u32 = 128;
const BLOCK_SIZE: u32 = 16;
const REALM: Realm<'static> = Realm {
    model: "",
    cache_salt: None,
    block_size: BLOCK_SIZE,
};

fn tokens(prompt: u32, blocks: u32) -> Vec<u32> {
    // the first half of each prompt is that of all
    (0..blocks * BLOCK_SIZE)
        .map(|n| {
            if n < BLOCKS * BLOCK_SIZE / 2 {
                n
            } else {
                n + prompt * 100_000
            }
        })
        .collect()
}

fn hashes(holder: u32, prompt: u32, blocks: u32) -> Vec<u64> {
    (0..blocks)
        .map(|n| {
            let prompt = if n < BLOCKS / 2 { 0 } else { prompt + 1 };
            u64::from(holder) << 48 | u64::from(prompt) << 24 | u64::from(n)
        })
        .collect()
}

fn filled() -> PrefixIndex {
    let mut index = PrefixIndex::new(Limits {
        max_entries: 1_000_000,
        ttl: 900,
    });
    for holder in 0..HOLDERS {
        for prompt in (0..PROMPTS).filter(|prompt| prompt % HOLDERS <= holder) {
            let run = StoredRun {
                realm: REALM,
                hashes: &hashes(holder, prompt, BLOCKS),
                parent: None,
                tokens: &tokens(prompt, BLOCKS),
                tier: Tier::Gpu,
            };
            index.store(HolderId(holder), &run, 0);
        }
    }
    index
}

pub fn find_overlap() -> Run {
    let index = filled();
    let chains: Vec<Vec<BlockHash>> = (0..PROMPTS)
        .map(|prompt| chain(&REALM, &tokens(prompt, BLOCKS)))
        .collect();
    let mut next = 0;
    Box::new(move || {
        next = (next + 1) % chains.len();
        index.find_overlap(&chains[next]).len()
    })
}

pub fn store() -> Run {
    let mut index = filled();
    let (blocks, prompt) = (64, PROMPTS + 1);
    let tokens: Vec<u32> = (0..blocks * BLOCK_SIZE).map(|n| n + 50_000_000).collect();
    let hashes: Vec<u64> = (0..u64::from(blocks))
        .map(|n| u64::from(prompt) << 32 | n)
        .collect();
    Box::new(move || {
        let run = StoredRun {
            realm: REALM,
            hashes: &hashes,
            parent: None,
            tokens: &tokens,
            tier: Tier::Gpu,
        };
        let stored = index.store(HolderId(0), &run, 1).blocks;
        index.remove(HolderId(0), &hashes, Tier::Gpu, (Afterwards::Gone, 1));
        stored
    })
}

pub fn scan() -> Run {
    let event = data_event(
        br#"{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}"#,
    );
    Box::new(move || {
        let mut scanner = EventScanner::new(256 << 10);
        let mut bytes = 0;
        for _ in 0..64 {
            scanner.feed(&event, |event| {
                if let Event::Whole(whole) = event {
                    bytes += whole.len();
                }
            });
        }
        bytes
    })
}
