//! Encoders of prompts beside each other, on the same texts in the same run: tokens per second on one
//! thread, and how many of many random texts have other tokens than `tokenizers` gives them.

use clap::Parser;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Compares encoders of prompts: speed, and equality with `tokenizers`
#[derive(Debug, Parser)]
struct Args {
    /// Directory of a tokenizer.json
    #[arg(long)]
    vocabulary: PathBuf,
    /// Files whose text is encoded; by default documents and sources of this repository
    #[arg(long)]
    text: Vec<PathBuf>,
    /// Random texts that are compared
    #[arg(long, default_value_t = 20_000)]
    compared: usize,
}

/// The text that is timed; shorter ones are repeated with changes.
const TIMED_BYTES: usize = 400_000;
/// Rounds of the timed text; the fastest counts, the first one is told apart.
const ROUNDS: usize = 5;

type Encode = Box<dyn Fn(&str) -> Option<Vec<u32>>>;

fn encoders(file: &Path) -> Vec<(&'static str, Result<Encode, String>)> {
    let bytes = std::fs::read(file).expect("the vocabulary can be read");
    let reference = || -> Result<Encode, String> {
        let tokenizer = tokenizers::Tokenizer::from_bytes(&bytes).map_err(|e| e.to_string())?;
        Ok(Box::new(move |text| {
            let encoding = tokenizer.encode_fast(text, false).ok()?;
            Some(encoding.get_ids().to_vec())
        }))
    };
    let fastokens = || -> Result<Encode, String> {
        let tokenizer = fastokens::Tokenizer::from_file(file).map_err(|e| e.to_string())?;
        Ok(Box::new(move |text| tokenizer.encode(text).ok()))
    };
    let kitoken = || -> Result<Encode, String> {
        let tokenizer = kitoken::Kitoken::from_tokenizers_slice(&bytes).map_err(|e| e.to_string())?;
        Ok(Box::new(move |text| tokenizer.encode(text, true).ok()))
    };
    let tokie = || -> Result<Encode, String> {
        let tokenizer = tokie::Tokenizer::from_json(file).map_err(|e| e.to_string())?;
        Ok(Box::new(move |text| Some(tokenizer.encode_ids(text, false))))
    };
    vec![
        ("tokenizers", reference()),
        ("fastokens", fastokens()),
        ("kitoken", kitoken()),
        ("tokie", tokie()),
    ]
}

fn main() {
    let args = Args::parse();
    let file = args.vocabulary.join("tokenizer.json");
    let text = timed_text(&args.text);
    let texts: Vec<String> = (0..args.compared).map(|_| random_text(&text)).collect();
    let all = encoders(&file);
    let Ok(reference) = &all[0].1 else {
        panic!("tokenizers cannot read the vocabulary");
    };
    let expected: Vec<_> = texts.iter().map(|text| reference(text)).collect();
    let tokens = reference(&text).map_or(0, |tokens| tokens.len());
    println!("{} bytes, {tokens} tokens; {} random texts", text.len(), texts.len());
    println!("| encoder | first time: tokens/s | again: tokens/s | texts with other tokens |");
    println!("|---|--:|--:|--:|");
    for (name, encode) in &all {
        let encode = match encode {
            Ok(encode) => encode,
            Err(why) => {
                println!("| {name} | cannot read this vocabulary: {why} | | |");
                continue;
            }
        };
        let rounds: Vec<Duration> = (0..ROUNDS).map(|_| time(encode, &text)).collect();
        let fastest = rounds[1..].iter().min().copied().unwrap_or_default();
        let rate = |took: Duration| tokens as f64 / took.as_secs_f64();
        let other = texts.iter().zip(&expected);
        let other = other.filter(|(text, expected)| encode(text) != **expected).count();
        println!("| {name} | {:.0} | {:.0} | {other} |", rate(rounds[0]), rate(fastest));
    }
}

fn time(encode: &Encode, text: &str) -> Duration {
    let start = Instant::now();
    std::hint::black_box(encode(text));
    start.elapsed()
}

fn timed_text(files: &[PathBuf]) -> String {
    const DEFAULT: [&str; 4] = [
        "../../ARCHITECTURE.md",
        "../../README.md",
        "../../src/gateway/proxy/answer.rs",
        "../../src/routing/choose.rs",
    ];
    let files: Vec<PathBuf> = match files {
        [] => DEFAULT.map(PathBuf::from).into(),
        given => given.to_vec(),
    };
    let read = |file: &PathBuf| std::fs::read_to_string(file).expect("the text can be read");
    let once: String = files.iter().map(read).collect();
    let mut text = String::new();
    let mut round = 0;
    while text.len() < TIMED_BYTES {
        // other numbers each time, so that not all of it was seen before
        text += &once.replace('1', &format!("{round}"));
        round += 1;
    }
    text
}

/// Parts of the text, with what encoders stumble over between them.
fn random_text(text: &str) -> String {
    const ODD: [&str; 18] = [
        "<|im_start|>", "<|im_end|>\n", "<|eot_id|>", "<think>", "</think>\n\n", "  \n\t ", "\r\n", "é", "e\u{301}", "中文字",
        "🦀👩‍👩‍👧", "ﬁ", "'LL", "don't", "1234567", "\u{a0}", "ß\u{200d}", "İ",
    ];
    let mut out = String::new();
    for _ in 0..fastrand::usize(1..8) {
        let from = fastrand::usize(..text.len() - 40);
        let from = text.floor_char_boundary(from);
        let to = text.floor_char_boundary(from + fastrand::usize(1..40));
        out += &text[from..to];
        out += ODD[fastrand::usize(..ODD.len())];
    }
    out
}
