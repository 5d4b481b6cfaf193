//! What a prefix is: requests with the same model, system prompt, tools and opening words share
//! one key, whatever follows. Works on the raw JSON bytes, so that nothing is decoded for it.

use crate::ids::{PrefixKey, SessionKey};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// The parts of a request that its KV cache begins with.
#[derive(Debug, Default, Clone, Copy)]
pub struct PrefixParts<'a> {
    /// The model that serves the request.
    pub model: &'a str,
    /// Raw bytes of the system or developer messages' content, if any.
    pub system: &'a [u8],
    /// Raw bytes of the tool definitions, if any.
    pub tools: &'a [u8],
    /// Raw bytes of the first other message's content; for completions, of the prompt.
    pub opening: &'a [u8],
}

/// The ring key, or none when there is nothing to tell prompts apart by.
///
/// `max_prefix_length` is in bytes and cuts the opening only: a long system prompt counts whole.
pub fn prefix_key(parts: PrefixParts<'_>, max_prefix_length: usize) -> Option<PrefixKey> {
    if parts.system.is_empty() && parts.opening.is_empty() {
        return None;
    }
    let cut = parts.opening.len().min(max_prefix_length);
    let mut hash = Xxh3::new();
    for part in [
        parts.model.as_bytes(),
        parts.system,
        parts.tools,
        &parts.opening[..cut],
    ] {
        // the length first, so that bytes cannot move from one part to the next unseen
        hash.update(&(part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    Some(PrefixKey(hash.digest()))
}

/// The key of a session header or user field; an empty one is no key.
pub fn session_key(session: &[u8]) -> Option<SessionKey> {
    (!session.is_empty()).then(|| SessionKey(xxh3_64(session)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts<'a>(system: &'a str, opening: &'a str) -> PrefixParts<'a> {
        PrefixParts {
            model: "m",
            system: system.as_bytes(),
            tools: b"",
            opening: opening.as_bytes(),
        }
    }

    #[test]
    fn what_follows_the_cut_does_not_change_the_key() {
        let a = prefix_key(parts("s", "hello there"), 5);
        assert_eq!(a, prefix_key(parts("s", "hello world"), 5));
        assert_ne!(a, prefix_key(parts("s", "help me out"), 5));
    }

    #[test]
    fn the_border_between_system_and_opening_counts() {
        assert_ne!(
            prefix_key(parts("ab", "c"), 99),
            prefix_key(parts("a", "bc"), 99)
        );
    }

    #[test]
    fn model_and_tools_separate_equal_words() {
        let base = parts("s", "o");
        let other_model = PrefixParts { model: "n", ..base };
        let with_tools = PrefixParts {
            tools: b"[1]",
            ..base
        };
        assert_ne!(prefix_key(base, 9), prefix_key(other_model, 9));
        assert_ne!(prefix_key(base, 9), prefix_key(with_tools, 9));
    }

    #[test]
    fn an_empty_request_or_session_has_no_key() {
        assert_eq!(prefix_key(parts("", ""), 9), None);
        assert_eq!(session_key(b""), None);
        assert!(session_key(b"\xff").is_some(), "bytes need not be text");
    }
}
