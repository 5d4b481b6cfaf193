//! Runs one pure function of a request's walk a number of times:
//!
//!     hot-paths PATH TIMES
//!     hot-paths --list
//!
//! guard.py runs this under callgrind, twice with different numbers, and so counts the instructions of one
//! call, whatever the machine does beside it.

mod events;
mod fleet;
mod requests;

use std::hint::black_box;

/// A function to be run once, made of what it needs beforehand.
type Run = Box<dyn FnMut() -> usize>;

/// What a path is called, and how it is made.
type HotPath = (&'static str, fn() -> Run);

const PATHS: [HotPath; 12] = [
    ("parse_request_8k", requests::parse),
    ("prefix_key_8k", requests::prefix),
    ("canonical_key_8k", requests::canonical_key),
    ("token_chain_2k", requests::token_chain),
    ("text_chain_8k", requests::text_chain),
    ("choose_by_strategy_of_8", fleet::by_strategy),
    ("choose_by_prefix_of_8", fleet::by_prefix),
    ("choose_by_overlap_of_8", fleet::by_overlap),
    ("admit_under_3_limits", fleet::admit),
    ("find_overlap_of_128_blocks", events::find_overlap),
    ("store_and_remove_64_blocks", events::store),
    ("scan_64_events", events::scan),
];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let known = |name: &str| PATHS.iter().find(|(of, _)| *of == name);
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--list"] => PATHS.iter().for_each(|(name, _)| println!("{name}")),
        [name, times] => match (known(name), times.parse::<usize>()) {
            (Some((_, make)), Ok(times)) => {
                let mut run = make();
                let sum: usize = (0..times).map(|_| black_box(run())).sum();
                black_box(sum);
            }
            _ => usage(),
        },
        _ => usage(),
    }
}

fn usage() {
    eprintln!("hot-paths PATH TIMES, or --list");
    std::process::exit(2);
}
