//! What a value looks like where it is kept: a fixed head, the key, the value. So a value carries its own expiry, and one that was
//! cut, changed, or is somebody else's is told from a whole one. The checksum is against accidents, not against forgery.

use crate::key::{KEY_BYTES_MAX, Key};
use crate::store::{Value, from_unix_ms, to_unix_ms};
use bytes::Bytes;
use std::time::SystemTime;
use thiserror::Error;
use xxhash_rust::xxh3::Xxh3;

/// Begins every envelope, with the version of its format.
const MAGIC: [u8; 4] = *b"TGS1";
/// Magic, length of the key, expiry, time of storing, length of the value, checksum; numbers are little-endian.
const HEAD_BYTES: usize = 4 + 4 + 8 * 4;
/// The longest beginning of an envelope that tells all but the value.
pub(crate) const HEAD_BYTES_MAX: usize = HEAD_BYTES + KEY_BYTES_MAX;

/// What an envelope says of its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Head {
    /// Whose value it is.
    pub(crate) key: Key,
    /// When it was stored.
    pub(crate) stored_at: SystemTime,
    /// Bytes of the value.
    pub(crate) value_bytes: u64,
    expires_at: SystemTime,
    checksum: u64,
}

/// What is not as it was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{0} of a stored value is not as it was written")]
pub(crate) struct Unreadable(&'static str);

/// Bytes of an envelope beside those of its value.
pub(crate) fn overhead(key: &Key) -> usize {
    HEAD_BYTES + key.as_str().len()
}

/// Puts a value into an envelope.
pub(crate) fn seal(key: &Key, value: &Value, stored_at: SystemTime) -> Vec<u8> {
    let mut sealed = Vec::with_capacity(overhead(key) + value.bytes.len());
    sealed.extend_from_slice(&MAGIC);
    sealed.extend_from_slice(&(key.as_str().len() as u32).to_le_bytes());
    let times = [value.expires_at, stored_at].map(to_unix_ms);
    for number in [times[0], times[1], value.bytes.len() as u64] {
        sealed.extend_from_slice(&number.to_le_bytes());
    }
    let checksum = checksum(&sealed, key.as_str().as_bytes(), &value.bytes);
    sealed.extend_from_slice(&checksum.to_le_bytes());
    sealed.extend_from_slice(key.as_str().as_bytes());
    sealed.extend_from_slice(&value.bytes);
    sealed
}

/// Takes a value out of a whole envelope, without a copy.
pub(crate) fn open(sealed: Bytes) -> Result<(Key, Value), Unreadable> {
    let head = read_head(&sealed)?;
    let at = overhead(&head.key);
    let bytes = sealed.slice(at..);
    if bytes.len() as u64 != head.value_bytes {
        return Err(Unreadable("the length"));
    }
    let numbers = &sealed[..HEAD_BYTES - 8];
    if checksum(numbers, &sealed[HEAD_BYTES..at], &bytes) != head.checksum {
        return Err(Unreadable("the checksum"));
    }
    let expires_at = head.expires_at;
    Ok((head.key, Value { bytes, expires_at }))
}

/// Reads the head from the beginning of an envelope: [`HEAD_BYTES_MAX`] bytes, or as many as there are.
pub(crate) fn read_head(sealed: &[u8]) -> Result<Head, Unreadable> {
    if sealed.len() < HEAD_BYTES || !sealed.starts_with(&MAGIC) {
        return Err(Unreadable("the head"));
    }
    let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| sealed[at + i]));
    let time = |at| from_unix_ms(number(at)).ok_or(Unreadable("a time"));
    let key_bytes = u32::from_le_bytes(std::array::from_fn(|i| sealed[4 + i])) as usize;
    let key = HEAD_BYTES
        .checked_add(key_bytes)
        .and_then(|end| sealed.get(HEAD_BYTES..end));
    let key = key.and_then(|key| std::str::from_utf8(key).ok());
    let key = key
        .and_then(|key| Key::new(key).ok())
        .ok_or(Unreadable("the key"))?;
    let (expires_at, stored_at) = (time(8)?, time(16)?);
    Ok(Head {
        key,
        stored_at,
        value_bytes: number(24),
        expires_at,
        checksum: number(32),
    })
}

fn checksum(numbers: &[u8], key: &[u8], value: &[u8]) -> u64 {
    let mut sum = Xxh3::new();
    for part in [numbers, key, value] {
        sum.update(part);
    }
    sum.digest()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sealed(bytes: &[u8]) -> Vec<u8> {
        let expires_at = from_unix_ms(1_900_000_000_123).unwrap();
        let value = Value {
            bytes: Bytes::copy_from_slice(bytes),
            expires_at,
        };
        seal(
            &Key::new("v1/m/t/0f").unwrap(),
            &value,
            from_unix_ms(1_800_000_000_456).unwrap(),
        )
    }

    #[test]
    fn every_changed_byte_and_every_other_length_is_noticed() {
        let whole = sealed(b"a value");
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 0x20;
            assert!(open(changed.into()).is_err(), "byte {at}");
            assert!(
                open(Bytes::copy_from_slice(&whole[..at])).is_err(),
                "{at} bytes"
            );
        }
        assert!(open([&whole[..], b"x"].concat().into()).is_err());
    }

    proptest! {
        #[test]
        fn what_was_sealed_is_what_is_opened(
            name in "[a-z +é/.]{1,60}",
            bytes in prop::collection::vec(any::<u8>(), 0..2000),
            times in [0u64..1 << 42, 0u64..1 << 42],
        ) {
            prop_assume!(Key::new(&*name).is_ok());
            let key = Key::new(name).unwrap();
            let [expires_at, stored_at] = times.map(|ms| from_unix_ms(ms).unwrap());
            let value = Value { bytes: bytes.into(), expires_at };
            let sealed = seal(&key, &value, stored_at);
            prop_assert_eq!(sealed.len(), overhead(&key) + value.bytes.len());
            let head = read_head(&sealed[..sealed.len().min(HEAD_BYTES_MAX)]).unwrap();
            prop_assert_eq!((&head.key, head.stored_at), (&key, stored_at));
            prop_assert_eq!(head.value_bytes, value.bytes.len() as u64);
            prop_assert_eq!(open(sealed.into()).unwrap(), (key, value));
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), magic: bool) {
            let bytes = if magic { [&MAGIC[..], &bytes].concat() } else { bytes };
            let _ = open(bytes.into());
        }
    }
}
