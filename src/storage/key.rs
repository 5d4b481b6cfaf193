//! Names of values, as every store can take them.

use std::fmt;
use thiserror::Error;

/// The longest key. S3 takes 1024 bytes, of which a prefix from the settings needs some.
pub const KEY_BYTES_MAX: usize = 900;

/// The name of a value: segments with `/` between them.
///
/// What servers, proxies or XML are known to change on the way is refused: control characters, empty segments, `.` and `..`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(String);

/// Why a text is no key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum KeyError {
    /// Nothing, or more than [`KEY_BYTES_MAX`] bytes.
    #[error("a key has 1 to {KEY_BYTES_MAX} bytes, not {0}")]
    Length(usize),
    /// A segment that a path would not keep.
    #[error("a key has no empty segment, and none that is . or ..")]
    Segment,
    /// A character that XML cannot carry.
    #[error("a key has no control characters")]
    Character,
}

impl Key {
    /// Checks a text.
    pub fn new(text: impl Into<String>) -> Result<Self, KeyError> {
        let text = text.into();
        if !(1..=KEY_BYTES_MAX).contains(&text.len()) {
            return Err(KeyError::Length(text.len()));
        }
        if text
            .split('/')
            .any(|segment| ["", ".", ".."].contains(&segment))
        {
            return Err(KeyError::Segment);
        }
        if text.contains(|c: char| c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}')) {
            return Err(KeyError::Character);
        }
        Ok(Key(text))
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_spaces_plus_signs_and_accents_are_keys() {
        for text in [
            "a",
            "v1/meta-llama/Llama 3+é/t/0f",
            "a.b/..c",
            &"x".repeat(KEY_BYTES_MAX),
        ] {
            assert_eq!(Key::new(text).unwrap().as_str(), text);
        }
    }

    #[test]
    fn what_a_path_or_xml_would_change_is_refused() {
        let too_long = "x".repeat(KEY_BYTES_MAX + 1);
        for text in ["", &too_long] {
            assert_eq!(Key::new(text), Err(KeyError::Length(text.len())));
        }
        for text in ["/a", "a/", "a//b", "../a", "a/./b", "a/..", ".."] {
            assert_eq!(Key::new(text), Err(KeyError::Segment), "{text:?}");
        }
        for text in ["a\0b", "a\nb", "\u{85}", "a\u{ffff}"] {
            assert_eq!(Key::new(text), Err(KeyError::Character), "{text:?}");
        }
    }
}
