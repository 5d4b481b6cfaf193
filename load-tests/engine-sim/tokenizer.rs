//! Text to tokens and back: the shipped byte-level BPE and the chat template. Loaded once per process; encoding is CPU work, so
//! callers take long texts off the HTTP thread.

use minijinja::{Environment, context};
use serde::Serialize;
use std::sync::OnceLock;
use tokenizers::Tokenizer as Bpe;

const TOKENIZER_JSON: &[u8] = include_bytes!("assets/tokenizer.json");
const CHAT_TEMPLATE: &str = include_str!("assets/chat_template.jinja");
const TEMPLATE_NAME: &str = "chat";

/// The tokenizer and chat template of every simulated model.
pub struct Tokenizer {
    bpe: Bpe,
    templates: Environment<'static>,
    /// What each token stands for; nothing for special ones.
    bytes: Vec<Vec<u8>>,
    begin_of_text: u32,
    end_of_turn: u32,
}

/// A chat as the template reads it: content flattened to text.
#[derive(Debug, Serialize)]
pub struct ChatPrompt {
    /// In order.
    pub messages: Vec<PlainMessage>,
    /// As the request gives them.
    pub tools: Vec<serde_json::Value>,
    /// Whether the prompt ends where the assistant begins to speak.
    pub add_generation_prompt: bool,
    /// Whether the last message stays open.
    pub continue_final_message: bool,
}

/// One message of [`ChatPrompt`].
#[derive(Debug, Serialize)]
pub struct PlainMessage {
    /// `system`, `user`, `assistant`, `tool`.
    pub role: String,
    /// Its text.
    pub content: String,
    /// Calls that an assistant made.
    pub tool_calls: Vec<PlainCall>,
}

/// A tool call in a message.
#[derive(Debug, Serialize)]
pub struct PlainCall {
    /// The function.
    pub name: String,
    /// JSON text.
    pub arguments: String,
}

impl Tokenizer {
    /// The one instance.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<Tokenizer> = OnceLock::new();
        SHARED.get_or_init(|| {
            let bpe = Bpe::from_bytes(TOKENIZER_JSON)
                .expect("the shipped tokenizer parses, as tests show");
            let mut templates = Environment::new();
            templates
                .add_template(TEMPLATE_NAME, CHAT_TEMPLATE)
                .expect("the shipped template compiles, as tests show");
            let special = |token: &str| {
                bpe.token_to_id(token)
                    .expect("trained with its special tokens")
            };
            let bytes = (0..bpe.get_vocab_size(true) as u32).map(|token| bytes_of(&bpe, token));
            Self {
                begin_of_text: special("<|begin_of_text|>"),
                end_of_turn: special("<|eot_id|>"),
                bytes: bytes.collect(),
                bpe,
                templates,
            }
        })
    }

    /// The tokens of a text, with the begin-of-text mark before them if asked.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Vec<u32> {
        let encoding = self
            .bpe
            .encode_fast(text, false)
            .expect("byte-level BPE encodes every text");
        let begin = add_special_tokens.then_some(self.begin_of_text);
        begin
            .into_iter()
            .chain(encoding.get_ids().iter().copied())
            .collect()
    }

    /// The text of tokens, special ones left out.
    pub fn decode(&self, tokens: &[u32]) -> String {
        self.pieces(tokens).concat()
    }

    /// What each token adds to the text. A letter of several tokens comes with its last one; special tokens add nothing.
    pub fn pieces(&self, tokens: &[u32]) -> Vec<String> {
        let mut pending = Vec::new();
        let mut pieces: Vec<String> = tokens
            .iter()
            .map(|token| {
                pending.extend(self.bytes.get(*token as usize).into_iter().flatten());
                take_text(&mut pending)
            })
            .collect();
        if let Some(last) = pieces.last_mut() {
            last.push_str(&String::from_utf8_lossy(&pending));
        }
        pieces
    }

    /// The vocabulary's own spelling of a token.
    pub fn spelling(&self, token: u32) -> String {
        self.bpe.id_to_token(token).unwrap_or_default()
    }

    /// The text of a chat as the model reads it.
    ///
    /// # Errors
    /// What the template engine says; a request can cause it with values that the template cannot join.
    pub fn render(&self, chat: &ChatPrompt) -> Result<String, minijinja::Error> {
        self.templates
            .get_template(TEMPLATE_NAME)?
            .render(context! {
                messages => chat.messages,
                tools => chat.tools,
                add_generation_prompt => chat.add_generation_prompt,
                continue_final_message => chat.continue_final_message,
            })
    }

    /// Ends an assistant's turn.
    pub fn end_of_turn(&self) -> u32 {
        self.end_of_turn
    }

    /// Tokens are below this.
    pub fn vocabulary(&self) -> u32 {
        self.bytes.len() as u32
    }
}

/// The bytes behind a token's letters; a special token stands for no text.
fn bytes_of(bpe: &Bpe, token: u32) -> Vec<u8> {
    let letters = bpe.id_to_token(token).unwrap_or_default();
    match bpe.get_added_vocabulary().is_special_token(&letters) {
        true => Vec::new(),
        false => letters.chars().filter_map(byte_of).collect(),
    }
}

/// The byte behind a letter of a byte-level vocabulary: printable Latin-1 stands for itself, the rest are counted from U+0100.
fn byte_of(letter: char) -> Option<u8> {
    let stands_for_itself = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    match u32::from(letter) {
        code @ 0..=0xff => Some(code as u8).filter(|byte| stands_for_itself(*byte)),
        code => (0..=255)
            .filter(|byte| !stands_for_itself(*byte))
            .nth((code - 0x100) as usize),
    }
}

/// Cuts the complete letters off the front of `bytes`.
fn take_text(bytes: &mut Vec<u8>) -> String {
    let complete = match std::str::from_utf8(bytes) {
        Ok(_) => bytes.len(),
        Err(fault) if fault.error_len().is_none() => fault.valid_up_to(),
        Err(_) => bytes.len(),
    };
    String::from_utf8_lossy(&bytes.drain(..complete).collect::<Vec<u8>>()).into_owned()
}

#[cfg(test)]
mod test {
    use super::*;
    use proptest::prelude::*;

    fn message(role: &str, content: &str) -> PlainMessage {
        PlainMessage {
            role: role.into(),
            content: content.into(),
            tool_calls: Vec::new(),
        }
    }

    fn chat(messages: Vec<PlainMessage>) -> ChatPrompt {
        ChatPrompt {
            messages,
            tools: Vec::new(),
            add_generation_prompt: true,
            continue_final_message: false,
        }
    }

    #[test]
    fn common_words_are_single_tokens() {
        let tokenizer = Tokenizer::shared();
        assert_eq!(tokenizer.encode("The request returns", false).len(), 3);
        assert_eq!(tokenizer.encode("The request returns", true).len(), 4);
    }

    #[test]
    fn the_template_writes_headers_tools_and_end_marks() {
        let tokenizer = Tokenizer::shared();
        let mut prompt = chat(vec![
            message("system", "Be brief."),
            message("user", "Hello"),
        ]);
        let start = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.";
        let rest = "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n";
        assert_eq!(tokenizer.render(&prompt).unwrap(), format!("{start}{rest}"));
        prompt
            .tools
            .push(serde_json::json!({"type": "function", "function": {"name": "look_up"}}));
        let with_tools = tokenizer.render(&prompt).unwrap();
        assert!(
            with_tools.starts_with(start)
                && with_tools.ends_with(rest)
                && with_tools.contains(r#""look_up""#),
            "{with_tools}"
        );
    }

    #[test]
    fn the_next_turn_begins_with_the_tokens_of_this_one() {
        let tokenizer = Tokenizer::shared();
        let encode =
            |prompt: &ChatPrompt| tokenizer.encode(&tokenizer.render(prompt).unwrap(), false);
        let mut so_far = encode(&chat(vec![message("user", "What is it?")]));
        so_far.extend(tokenizer.encode("Some answer. More", false));
        so_far.push(tokenizer.end_of_turn());
        let next = encode(&chat(vec![
            message("user", "What is it?"),
            message("assistant", "Some answer. More"),
            message("user", "And?"),
        ]));
        assert_eq!(next[..so_far.len()], so_far);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn every_text_comes_back(text in "\\PC{0,40}") {
            let tokenizer = Tokenizer::shared();
            prop_assume!(!text.contains("<|"));
            let tokens = tokenizer.encode(&text, false);
            prop_assert_eq!(tokenizer.pieces(&tokens).len(), tokens.len());
            prop_assert_eq!(tokenizer.decode(&tokens), text);
        }
    }
}
