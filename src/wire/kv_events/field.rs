//! Fields as they come: every reader here takes any value, and says `None` of one that does not
//! fit, so that one odd field does not cost the frame.

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::fmt;
use std::marker::PhantomData;

/// Reads a `T` out of whatever value comes.
pub(super) trait FromAny: Default {
    fn from_u64(_: u64) -> Self {
        Self::default()
    }
    fn from_i64(_: i64) -> Self {
        Self::default()
    }
    fn from_f64(_: f64) -> Self {
        Self::default()
    }
    fn from_text(_: &str) -> Self {
        Self::default()
    }
    fn from_bytes(_: &[u8]) -> Self {
        Self::default()
    }
    fn from_seq<'de, A: SeqAccess<'de>>(mut seq: A) -> Result<Self, A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Self::default())
    }
    fn from_map<'de, A: MapAccess<'de>>(mut map: A) -> Result<Self, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Self::default())
    }
}

/// A value read by [`FromAny`].
pub(super) struct Any<T>(pub T);

impl<'de, T: FromAny> Deserialize<'de> for Any<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer
            .deserialize_any(AnyVisitor(PhantomData))
            .map(Any)
    }
}

struct AnyVisitor<T>(PhantomData<T>);

impl<'de, T: FromAny> Visitor<'de> for AnyVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }
    fn visit_u64<E>(self, n: u64) -> Result<T, E> {
        Ok(T::from_u64(n))
    }
    fn visit_i64<E>(self, n: i64) -> Result<T, E> {
        Ok(T::from_i64(n))
    }
    fn visit_f64<E>(self, n: f64) -> Result<T, E> {
        Ok(T::from_f64(n))
    }
    fn visit_bool<E>(self, _: bool) -> Result<T, E> {
        Ok(T::default())
    }
    fn visit_unit<E>(self) -> Result<T, E> {
        Ok(T::default())
    }
    fn visit_none<E>(self) -> Result<T, E> {
        Ok(T::default())
    }
    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<T, D::Error> {
        deserializer.deserialize_any(self)
    }
    fn visit_newtype_struct<D: Deserializer<'de>>(self, _: D) -> Result<T, D::Error> {
        Ok(T::default()) // a msgpack extension type
    }
    fn visit_str<E>(self, text: &str) -> Result<T, E> {
        Ok(T::from_text(text))
    }
    fn visit_bytes<E>(self, bytes: &[u8]) -> Result<T, E> {
        Ok(T::from_bytes(bytes))
    }
    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<T, A::Error> {
        T::from_seq(seq)
    }
    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
        T::from_map(map)
    }
}

/// Names longer than this are no names.
const TEXT_LENGTH_MAX: usize = 1024;

/// A text.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Text(pub Option<String>);

impl FromAny for Text {
    fn from_text(text: &str) -> Self {
        Text((text.len() <= TEXT_LENGTH_MAX).then(|| text.to_owned()))
    }
}

/// A whole number that is not negative.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Whole(pub Option<u64>);

impl FromAny for Whole {
    fn from_u64(n: u64) -> Self {
        Whole(Some(n))
    }
    fn from_i64(n: i64) -> Self {
        Whole(u64::try_from(n).ok())
    }
}

/// A block hash: 64 bits, signed or not, or the last 8 of a digest's bytes.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hash(pub Option<u64>);

impl FromAny for Hash {
    fn from_u64(n: u64) -> Self {
        Hash(Some(n))
    }
    fn from_i64(n: i64) -> Self {
        Hash(Some(n as u64))
    }
    fn from_bytes(bytes: &[u8]) -> Self {
        let last = bytes.last_chunk::<8>();
        Hash(last.map(|eight| u64::from_be_bytes(*eight)))
    }
}

/// A list of hashes; none when any of them is no hash.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Hashes(pub Option<Vec<u64>>);

impl FromAny for Hashes {
    fn from_seq<'de, A: SeqAccess<'de>>(mut seq: A) -> Result<Self, A::Error> {
        let mut hashes = Some(Vec::new());
        while let Some(Any(Hash(hash))) = seq.next_element()? {
            match (hash, &mut hashes) {
                (Some(hash), Some(hashes)) => hashes.push(hash),
                _ => hashes = None,
            }
        }
        Ok(Hashes(hashes))
    }
}

/// A token id; of a pair (as speculative decoding sends), the first.
#[derive(Debug, Default, Clone, Copy)]
struct Token(Option<u32>);

impl FromAny for Token {
    fn from_u64(n: u64) -> Self {
        Token(u32::try_from(n).ok())
    }
    fn from_i64(n: i64) -> Self {
        Token(u32::try_from(n).ok())
    }
    fn from_seq<'de, A: SeqAccess<'de>>(mut seq: A) -> Result<Self, A::Error> {
        let first: Option<Any<Whole>> = seq.next_element()?;
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        let first = first.and_then(|Any(Whole(n))| n);
        Ok(first.map_or(Token(None), Token::from_u64))
    }
}

/// Token ids; none when any of them is none.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Tokens(pub Option<Vec<u32>>);

impl FromAny for Tokens {
    fn from_seq<'de, A: SeqAccess<'de>>(mut seq: A) -> Result<Self, A::Error> {
        let mut tokens = Some(Vec::new());
        while let Some(Any(Token(token))) = seq.next_element()? {
            match (token, &mut tokens) {
                (Some(token), Some(tokens)) => tokens.push(token),
                _ => tokens = None,
            }
        }
        Ok(Tokens(tokens))
    }
}

/// The extra keys of the first block: texts among them are an adapter's name or a salt.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct ExtraKeys(pub Vec<String>);

impl FromAny for ExtraKeys {
    fn from_seq<'de, A: SeqAccess<'de>>(mut seq: A) -> Result<Self, A::Error> {
        let first: Option<Any<Texts>> = seq.next_element()?;
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(ExtraKeys(
            first.map(|Any(Texts(texts))| texts).unwrap_or_default(),
        ))
    }
}

#[derive(Debug, Default)]
struct Texts(Vec<String>);

/// Keys per block that are looked at.
const EXTRA_KEYS_MAX: usize = 16;

impl FromAny for Texts {
    fn from_text(text: &str) -> Self {
        Texts(Text::from_text(text).0.into_iter().collect())
    }
    fn from_seq<'de, A: SeqAccess<'de>>(mut seq: A) -> Result<Self, A::Error> {
        let mut texts = Vec::new();
        while let Some(Any(Text(text))) = seq.next_element()? {
            if texts.len() < EXTRA_KEYS_MAX {
                texts.extend(text);
            }
        }
        Ok(Texts(texts))
    }
}

/// An element of a positional tail, by its type: forks insert elements, so places do not hold.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) enum Tail {
    #[default]
    Nothing,
    Whole(u64),
    Text(String),
    Keys(ExtraKeys),
    Salt(String),
}

impl FromAny for Tail {
    fn from_u64(n: u64) -> Self {
        Tail::Whole(n)
    }
    fn from_i64(n: i64) -> Self {
        u64::try_from(n).map_or(Tail::Nothing, Tail::Whole)
    }
    fn from_text(text: &str) -> Self {
        Text::from_text(text).0.map_or(Tail::Nothing, Tail::Text)
    }
    fn from_seq<'de, A: SeqAccess<'de>>(seq: A) -> Result<Self, A::Error> {
        ExtraKeys::from_seq(seq).map(Tail::Keys)
    }
    fn from_map<'de, A: MapAccess<'de>>(mut map: A) -> Result<Self, A::Error> {
        let mut salt = None;
        while let Some((Any(Text(key)), Any(Text(value)))) = map.next_entry()? {
            if key.as_deref() == Some("cache_salt") {
                salt = value;
            }
        }
        Ok(salt.map_or(Tail::Nothing, Tail::Salt))
    }
}
