//! What is read from a request, and what is made of it.

use super::Run;
use routing::block::{Realm, chain, text_chain as chain_of_text};
use routing::cache_key::KeyParts;
use routing::prefix_key::{PrefixParts, prefix_key};
use std::fmt::Write;
use wire::canonical::canonical;
use wire::request::{PromptField, RequestView};

/// A chat of two turns whose texts take so many bytes.
fn chat(bytes: usize) -> Vec<u8> {
    let words = |count: usize| {
        (0..count).fold(String::new(), |mut text, n| {
            write!(text, "word{} ", n % 100).expect("strings take writes");
            text
        })
    };
    let (system, user) = (words(bytes / 16), words(bytes / 16));
    format!(
        r#"{{"model":"meta-llama/Llama-3.1-70B-Instruct","temperature":0,"stream":true,"messages":[{{"role":"system","content":"{system}"}},{{"role":"user","content":"{user}"}}]}}"#
    )
    .into_bytes()
}

pub fn parse() -> Run {
    let body = chat(8192);
    Box::new(move || {
        let view = RequestView::parse(&body).expect("it is a chat");
        let model = view.model().expect("it has one");
        view.opening(PromptField::Messages).first.len() + model.len()
    })
}

pub fn prefix() -> Run {
    let body = chat(8192);
    Box::new(move || {
        let parts = PrefixParts {
            model: "m",
            system: &body[..4096],
            tools: b"",
            opening: &body[4096..],
        };
        prefix_key(parts, 2048).map_or(0, |_| 1)
    })
}

pub fn canonical_key() -> Run {
    let body = chat(8192);
    Box::new(move || {
        let form = canonical(&body, &["stream", "stream_options"]).expect("it has a form");
        let key = KeyParts {
            route: "chat",
            model: "m",
            key_version: 1,
            tenant: "t",
            body: &form,
        };
        usize::from(key.key().first_byte())
    })
}

pub fn token_chain() -> Run {
    let tokens: Vec<u32> = (0..2048).collect();
    let realm = Realm {
        model: "",
        cache_salt: None,
        block_size: 16,
    };
    Box::new(move || chain(&realm, &tokens).len())
}

pub fn text_chain() -> Run {
    let body = chat(8192);
    Box::new(move || chain_of_text("m", &[b"", b""], &body).len())
}
