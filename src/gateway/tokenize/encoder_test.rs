use super::*;
use proptest::prelude::*;
use serde_json::json;
use std::sync::{Arc, OnceLock};

/// Directories of vocabularies: the simulator's, and real ones where `TIDEGATE_TEST_TOKENIZERS`
/// names a directory of them (test.sh does).
fn directories() -> Vec<PathBuf> {
    let assets = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../load-tests/engine-sim/assets"
    );
    let mut all = vec![PathBuf::from(assets)];
    if let Some(real) = std::env::var_os("TIDEGATE_TEST_TOKENIZERS") {
        let entries = std::fs::read_dir(real).unwrap();
        all.extend(entries.map(|entry| entry.unwrap().path()));
        assert!(all.len() > 1, "there are real vocabularies to test with");
    }
    all
}

/// An encoder, and what engines encode with.
type Pair = (Encoder, Tokenizer);

fn encoders() -> &'static [Pair] {
    static LOADED: OnceLock<Vec<Pair>> = OnceLock::new();
    LOADED.get_or_init(|| {
        let load = |path: PathBuf| {
            let encoder = Encoder::load(&path).unwrap_or_else(|e| panic!("{e}"));
            let engines = Tokenizer::from_file(path.join("tokenizer.json")).unwrap();
            (encoder, engines)
        };
        directories().into_iter().map(load).collect()
    })
}

fn whole(engines: &Tokenizer, text: &str, special: bool) -> Vec<u32> {
    let encoding = engines.encode_fast(text, special).unwrap();
    encoding.get_ids().to_vec()
}

/// What prompts are made of: words, blanks, letters of all kinds, and special tokens, whole and
/// broken.
fn text() -> impl Strategy<Value = String> {
    let special = prop_oneof![
        Just("<|im_start|>"),
        Just("<|im_end|>\n"),
        Just("<|eot_id|>"),
        Just("<|begin_of_text|>"),
        Just("<|start_header_id|>user<|end_header_id|>\n\n"),
        Just("<think>"),
        Just("</think>\n\n"),
        Just("<tool_call>"),
        Just("<|im_start"),
        Just("<|im_<|im_end|>"),
        Just("|>"),
    ];
    let piece = prop_oneof![
        3 => special.prop_map(str::to_owned),
        3 => "[a-zA-Z' ]{0,30}",
        2 => "[ \\t\\n\\r]{1,6}",
        2 => "[0-9.,;:!?-]{1,12}",
        2 => "\\PC{0,12}",
        1 => "[e\u{301}ﬁÅ\u{0130}가中🦀]{1,6}",
    ];
    proptest::collection::vec(piece, 0..14).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn pieces_encode_to_what_the_whole_text_does(text in text(), special: bool) {
        for (encoder, engines) in encoders() {
            let expected = whole(engines, &text, special);
            prop_assert_eq!(&encoder.text(&text, special).unwrap(), &expected, "new pieces of {:?}", text);
            prop_assert_eq!(&encoder.text(&text, special).unwrap(), &expected, "kept pieces of {:?}", text);
            let pieces = encoder.boundaries.pieces(&text);
            prop_assert_eq!(pieces.concat(), text.clone());
        }
    }
}

fn chat(turns: usize) -> serde_json::Map<String, Json> {
    let turn = |n: usize| {
        let role = ["user", "assistant"][n % 2];
        json!({"role": role, "content": format!("Turn {n}: {}", "some words ".repeat(20))})
    };
    let mut messages = vec![json!({"role": "system", "content": "Be brief."})];
    messages.extend((0..turns).map(turn));
    json!({"messages": messages}).as_object().unwrap().clone()
}

#[test]
fn a_conversations_next_turn_encodes_only_its_new_text() {
    for (encoder, engines) in encoders() {
        let first = encoder.chat(&chat(5)).unwrap().unwrap();
        let text = |turns| {
            let body = chat(turns);
            let chat = Chat {
                messages: body["messages"].as_array().unwrap().clone(),
                add_generation_prompt: true,
                ..Chat::default()
            };
            encoder
                .template
                .as_ref()
                .unwrap()
                .render(&chat)
                .unwrap()
                .unwrap()
        };
        assert_eq!(first, whole(engines, &text(5), false));
        let next = encoder.chat(&chat(7)).unwrap().unwrap();
        assert_eq!(next, whole(engines, &text(7), false));
        let later = text(9);
        let mut new_bytes = 0;
        for piece in encoder.boundaries.pieces(&later) {
            let encode = |piece: &str| {
                new_bytes += piece.len();
                Ok::<_, ()>(Arc::from([]))
            };
            encoder.segments.tokens(piece, encode).unwrap();
        }
        // two turns of about 230 bytes each, and no more of the nine
        assert!(new_bytes < 600, "{new_bytes} bytes were new");
    }
}

#[test]
fn what_has_no_one_text_here_has_no_tokens_here() {
    let (encoder, _) = &encoders()[0];
    let image = json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]});
    let open = json!({"messages": [{"role": "assistant", "content": "x"}], "continue_final_message": true});
    for body in [image, open, json!({"prompt": "x"})] {
        assert!(encoder.chat(body.as_object().unwrap()).unwrap().is_none());
    }
}

#[test]
fn files_that_are_missing_or_wrong_are_named() {
    let fails = |path: &str| Encoder::load(Path::new(path)).err().unwrap().to_string();
    assert!(fails("/nowhere").starts_with("cannot read /nowhere: "));
    let here = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    assert!(fails(here).contains("Cargo.toml is not usable: "));
}

#[test]
fn the_fast_encoder_serves_these_vocabularies() {
    for (encoder, _) in encoders() {
        assert!(matches!(encoder.engine, Engine::Fast(_)));
    }
}

#[test]
fn a_vocabulary_that_the_fast_encoder_cannot_read_is_encoded_all_the_same() {
    let file = directories()[0].join("tokenizer.json");
    let plain = Tokenizer::from_file(&file).unwrap();
    let expected = whole(&plain, "The tide", false);
    let engine = Engine::new(plain, b"{}", &file);
    assert!(matches!(engine, Engine::Plain(_)));
    assert_eq!(engine.encode("The tide").unwrap()[..], expected);
}
