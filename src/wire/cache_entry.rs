//! How a cached answer is written down for Redis, S3 or a disk. Whatever keeps it adds a checksum, its
//! key and its expiry (the `storage` crate's envelope); here is what the answer itself needs.
//!
//! `TGA` and a version (4 bytes), the form (1), flags (1), then little-endian: when it was made, in
//! Unix milliseconds (8), prompt tokens (8), completion tokens (8), the length of its content type (2),
//! the content type, the body. Another version is unreadable on purpose: at worst a miss.

use crate::answer::Form;
use bytes::{Buf, BufMut, Bytes};

const MAGIC: &[u8; 4] = b"TGA1";
const HEAD_LENGTH: usize = 4 + 1 + 1 + 8 + 8 + 8 + 2;
const HAS_USAGE: u8 = 1;
/// A content type is not longer.
const CONTENT_TYPE_LENGTH_MAX: usize = 256;

/// An answer as it is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The shape of the body.
    pub form: Form,
    /// When the engine finished it, in Unix milliseconds by the clock of the gateway that kept it.
    pub made_ms: u64,
    /// Prompt and completion tokens, where the engine counted.
    pub tokens: Option<(u64, u64)>,
    /// As the engine said it.
    pub content_type: Box<str>,
    /// As the engine sent it.
    pub body: Bytes,
}

impl Entry {
    /// Bytes of [`Entry::encode`].
    pub fn encoded_length(&self) -> usize {
        HEAD_LENGTH + self.content_type.len() + self.body.len()
    }

    /// The entry as bytes.
    pub fn encode(&self) -> Bytes {
        let mut out = Vec::with_capacity(self.encoded_length());
        out.put_slice(MAGIC);
        out.put_u8(match self.form {
            Form::Json => 0,
            Form::Events => 1,
        });
        out.put_u8(if self.tokens.is_some() { HAS_USAGE } else { 0 });
        let (prompt, completion) = self.tokens.unwrap_or_default();
        out.put_u64_le(self.made_ms);
        out.put_u64_le(prompt);
        out.put_u64_le(completion);
        let fits = self.content_type.len() <= CONTENT_TYPE_LENGTH_MAX;
        let content_type = if fits { &*self.content_type } else { "" };
        out.put_u16_le(content_type.len() as u16);
        out.put_slice(content_type.as_bytes());
        out.put_slice(&self.body);
        out.into()
    }

    /// Reads an entry; its body shares the memory of `bytes`. None when it is of another version, or
    /// no entry.
    pub fn decode(mut bytes: Bytes) -> Option<Self> {
        if bytes.len() < HEAD_LENGTH || !bytes.starts_with(MAGIC) {
            return None;
        }
        bytes.advance(MAGIC.len());
        let form = match bytes.get_u8() {
            0 => Form::Json,
            1 => Form::Events,
            _ => return None,
        };
        let has_usage = bytes.get_u8() & HAS_USAGE != 0;
        let made_ms = bytes.get_u64_le();
        let tokens = (bytes.get_u64_le(), bytes.get_u64_le());
        let length = usize::from(bytes.get_u16_le());
        if length > bytes.len() {
            return None;
        }
        let content_type = bytes.split_to(length);
        Some(Entry {
            form,
            made_ms,
            tokens: has_usage.then_some(tokens),
            content_type: std::str::from_utf8(&content_type).ok()?.into(),
            body: bytes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn entries_come_back_and_nothing_else_passes_for_one(
            events in any::<bool>(),
            made_ms in any::<u64>(),
            tokens in any::<Option<(u64, u64)>>(),
            content_type in "[ -~]{0,40}",
            body in proptest::collection::vec(any::<u8>(), 0..200),
            noise in proptest::collection::vec(any::<u8>(), 0..60),
        ) {
            let form = if events { Form::Events } else { Form::Json };
            let entry = Entry { form, made_ms, tokens, content_type: content_type.into(), body: body.into() };
            let bytes = entry.encode();
            prop_assert_eq!(bytes.len(), entry.encoded_length());
            prop_assert_eq!(Entry::decode(bytes.clone()), Some(entry));
            for length in 0..HEAD_LENGTH {
                prop_assert_eq!(Entry::decode(bytes.slice(..length)), None);
            }
            prop_assert_eq!(Entry::decode(noise.into()), None);
        }
    }

    #[test]
    fn another_version_is_not_misread() {
        let entry = Entry {
            form: Form::Json,
            made_ms: 1,
            tokens: None,
            content_type: "application/json".into(),
            body: Bytes::from_static(b"{}"),
        };
        let mut bytes = entry.encode().to_vec();
        bytes[3] = b'2';
        assert_eq!(Entry::decode(bytes.into()), None);
    }
}
