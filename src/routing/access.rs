//! Who may ask for what: API keys, known by their digests alone. Pure: the time of day is an argument.

use crate::quota::{Limits, Priority};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::sync::Arc;

/// What is kept of a key: nothing that the key could be told from.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyDigest([u8; 32]);

impl KeyDigest {
    /// Of a key as a client sends it.
    pub fn of(key: &[u8]) -> Self {
        KeyDigest(Sha256::digest(key).into())
    }

    /// Of its 64 hexadecimal digits.
    pub fn from_hex(text: &str) -> Option<Self> {
        if text.len() != 64 || !text.is_ascii() {
            return None;
        }
        let mut digest = [0; 32];
        for (at, byte) in digest.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).ok()?;
        }
        Some(KeyDigest(digest))
    }
}

impl std::fmt::Debug for KeyDigest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("***")
    }
}

/// What a key opens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scope {
    /// The paths that are forwarded to engines.
    Inference,
    /// `/v1/models`.
    Models,
    /// `/admin`.
    Admin,
}

/// One key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiKey {
    /// For logs and metrics.
    pub name: Arc<str>,
    /// Of the key itself.
    pub digest: KeyDigest,
    /// Whose it is: tenants never see each other's cached answers.
    pub tenant: Arc<str>,
    /// What it opens.
    pub scopes: Vec<Scope>,
    /// The models that it may ask for; empty: all.
    pub models: Vec<Arc<str>>,
    /// When it ends, in Unix seconds.
    pub expires: Option<u64>,
    /// What may be asked for with it; where it says nothing, what holds for all keys.
    pub limits: Limits,
    /// Who goes first where requests wait.
    pub priority: Priority,
}

impl ApiKey {
    /// Whether a model may be asked for by either of these names: the client's, and that of the model behind it.
    pub fn allows(&self, names: [&str; 2]) -> bool {
        let named = |model: &Arc<str>| names.contains(&&**model);
        self.models.is_empty() || self.models.iter().any(named)
    }
}

/// What becomes of requests without a key of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyMode {
    /// They are served as before, and what credentials they have go to the engines.
    Permissive,
    /// They are refused.
    Blocking,
}

/// Why a request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Denied {
    /// It has no key.
    NoKey,
    /// Its key is none of ours.
    UnknownKey,
    /// Its key has ended.
    Expired,
    /// Its key does not open this.
    Scope(Scope),
}

/// All keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyRing {
    mode: KeyMode,
    // found by digest: how long that takes says nothing about any key
    keys: HashMap<KeyDigest, Arc<ApiKey>>,
}

impl KeyRing {
    /// Of these keys.
    pub fn new(mode: KeyMode, keys: impl IntoIterator<Item = ApiKey>) -> Self {
        let keys = keys.into_iter().map(|key| (key.digest, Arc::new(key)));
        KeyRing {
            mode,
            keys: keys.collect(),
        }
    }

    /// Whose request it is, by the key that it brings; nobody's where those are served, too.
    ///
    /// # Errors
    /// Why it is refused. A key of ours that has ended, or does not open this, is refused in either mode.
    pub fn admit(
        &self,
        given: Option<&[u8]>,
        scope: Scope,
        now_unix: u64,
    ) -> Result<Option<Arc<ApiKey>>, Denied> {
        let known = given.and_then(|key| self.keys.get(&KeyDigest::of(key)));
        let Some(key) = known else {
            return match (self.mode, given) {
                (KeyMode::Permissive, _) => Ok(None),
                (KeyMode::Blocking, None) => Err(Denied::NoKey),
                (KeyMode::Blocking, Some(_)) => Err(Denied::UnknownKey),
            };
        };
        if key.expires.is_some_and(|end| now_unix >= end) {
            return Err(Denied::Expired);
        }
        if !key.scopes.contains(&scope) {
            return Err(Denied::Scope(scope));
        }
        Ok(Some(key.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str, secret: &str) -> ApiKey {
        ApiKey {
            name: name.into(),
            digest: KeyDigest::of(secret.as_bytes()),
            tenant: "t".into(),
            scopes: vec![Scope::Inference],
            models: vec![],
            expires: None,
            limits: Limits::default(),
            priority: Priority::default(),
        }
    }

    fn admitted(ring: &KeyRing, given: Option<&str>) -> Result<Option<Arc<str>>, Denied> {
        let admitted = ring.admit(given.map(str::as_bytes), Scope::Inference, 1000);
        admitted.map(|key| key.map(|key| key.name.clone()))
    }

    #[test]
    fn a_key_is_known_by_its_digest_and_others_are_refused_or_passed_over() {
        let ring = |mode| KeyRing::new(mode, [key("a", "secret-a"), key("b", "secret-b")]);
        let (open, closed) = (ring(KeyMode::Permissive), ring(KeyMode::Blocking));
        for ring in [&open, &closed] {
            assert_eq!(admitted(ring, Some("secret-b")), Ok(Some("b".into())));
        }
        for given in [None, Some(""), Some("secret-"), Some("secret-bb")] {
            assert_eq!(admitted(&open, given), Ok(None));
            let why = if given.is_some() {
                Denied::UnknownKey
            } else {
                Denied::NoKey
            };
            assert_eq!(admitted(&closed, given), Err(why));
        }
        assert!(!format!("{open:?}").contains("secret"));
    }

    #[test]
    fn a_key_that_has_ended_or_opens_something_else_is_refused_in_either_mode() {
        for mode in [KeyMode::Permissive, KeyMode::Blocking] {
            let ended = ApiKey {
                expires: Some(1000),
                ..key("a", "a")
            };
            let goes_on = ApiKey {
                expires: Some(1001),
                ..key("b", "b")
            };
            let other = ApiKey {
                scopes: vec![Scope::Models],
                ..key("c", "c")
            };
            let ring = KeyRing::new(mode, [ended, goes_on, other]);
            assert_eq!(admitted(&ring, Some("a")), Err(Denied::Expired));
            assert_eq!(admitted(&ring, Some("b")), Ok(Some("b".into())));
            assert_eq!(
                admitted(&ring, Some("c")),
                Err(Denied::Scope(Scope::Inference))
            );
        }
    }

    #[test]
    fn models_are_allowed_by_the_clients_name_or_the_one_behind_it() {
        let some = ApiKey {
            models: vec!["m".into()],
            ..key("a", "a")
        };
        assert!(some.allows(["alias", "m"]) && some.allows(["m", "x"]));
        assert!(!some.allows(["alias", "x"]));
        assert!(key("b", "b").allows(["anything", "at-all"]));
    }

    #[test]
    fn a_digest_reads_back_from_its_digits_and_from_nothing_else() {
        // SHA-256 of "abc", from FIPS 180-2
        let digits = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(KeyDigest::from_hex(digits), Some(KeyDigest::of(b"abc")));
        for odd in [
            "",
            &digits[1..],
            &format!("{digits}0"),
            &digits.replace('b', "x"),
            &"é".repeat(32),
        ] {
            assert_eq!(KeyDigest::from_hex(odd), None, "{odd}");
        }
    }
}
