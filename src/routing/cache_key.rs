//! Under which key an answer is kept: a digest of all that it depends on, so that two requests share
//! an answer only if nothing that an engine or a tenant could tell apart differs.

use sha2::{Digest, Sha256};
use std::fmt;

/// All that an answer depends on.
#[derive(Debug, Clone, Copy)]
pub struct KeyParts<'a> {
    /// The path family, such as `chat`.
    pub route: &'a str,
    /// The model, as backends name it.
    pub model: &'a str,
    /// Raised to make all that was kept before unreachable.
    pub key_version: u32,
    /// Whose answer it is: tenants never see each other's.
    pub tenant: &'a str,
    /// The body in its canonical form, without what only shapes the transport.
    pub body: &'a [u8],
}

/// The SHA-256 of [`KeyParts`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CacheKey([u8; 32]);

/// Stands before every stored key: entries of another layout are never read.
const LAYOUT: &str = "v1";
/// A model's name in a key is at most this long; the digest tells longer ones apart.
const NAME_LENGTH_MAX: usize = 64;

impl KeyParts<'_> {
    /// The key. Each part is hashed with its length, so that none can pass for another's end.
    pub fn key(&self) -> CacheKey {
        let mut hash = Sha256::new();
        let version = self.key_version.to_le_bytes();
        let parts = [
            self.route.as_bytes(),
            self.model.as_bytes(),
            &version,
            self.tenant.as_bytes(),
            self.body,
        ];
        for part in parts {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        CacheKey(hash.finalize().into())
    }
}

/// Where an answer is stored: `v1/MODEL/TENANT/DIGEST`, so that a model's or a tenant's answers can be
/// removed. Printable ASCII of bounded length, whatever the names are.
pub fn path(model: &str, tenant: &str, key: &CacheKey) -> String {
    let (model, tenant) = (folder(model), short_digest(tenant));
    format!("{LAYOUT}/{model}/{tenant}/{key}")
}

impl CacheKey {
    /// A byte that says nothing, and is spread evenly.
    pub fn first_byte(&self) -> u8 {
        self.0[0]
    }
}

impl fmt::Display for CacheKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for CacheKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The folder of a model's answers: its name as far as it is harmless, and a digest of all of it.
pub fn folder(model: &str) -> String {
    let harmless = |c: char| {
        if c.is_ascii_alphanumeric() || c == '-' {
            c
        } else {
            '_'
        }
    };
    let name: String = model.chars().take(NAME_LENGTH_MAX).map(harmless).collect();
    format!("{name}-{}", short_digest(model))
}

/// A digest of texts, each with its length, in hexadecimal digits.
pub fn digest_of(parts: &[&[u8]]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    CacheKey(hash.finalize().into()).to_string()
}

/// The folder of a tenant's answers: names of tenants may be secrets.
pub fn short_digest(name: &str) -> String {
    let digest = Sha256::digest(name.as_bytes());
    digest[..8]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARTS: KeyParts<'static> = KeyParts {
        route: "chat",
        model: "m",
        key_version: 1,
        tenant: "t",
        body: b"{}",
    };

    #[test]
    fn every_part_makes_another_key_and_none_passes_for_anothers_end() {
        let others = [
            PARTS,
            KeyParts {
                route: "completions",
                ..PARTS
            },
            KeyParts {
                model: "n",
                ..PARTS
            },
            KeyParts {
                key_version: 2,
                ..PARTS
            },
            KeyParts {
                tenant: "u",
                ..PARTS
            },
            KeyParts {
                body: b"{ }",
                ..PARTS
            },
            KeyParts {
                route: "cha",
                model: "tm",
                ..PARTS
            },
            KeyParts {
                tenant: "t{}",
                body: b"",
                ..PARTS
            },
        ];
        for (at, parts) in others.iter().enumerate() {
            assert!(
                others[..at].iter().all(|other| other.key() != parts.key()),
                "{parts:?}"
            );
        }
        assert_eq!(PARTS.key(), PARTS.key());
    }

    #[test]
    fn paths_are_short_and_printable_whatever_the_names_are() {
        let long = "x".repeat(500);
        for model in [
            "meta-llama/Llama-3.1",
            "../../etc",
            "a\nb\0",
            "\u{4e2d}\u{6587}",
            &long,
        ] {
            let path = path(model, "secret-tenant", &PARTS.key());
            assert!(
                path.len() < 200 && path.bytes().all(|b| b.is_ascii_graphic()),
                "{path}"
            );
            assert!(!path.contains("..") && !path.contains("secret"), "{path}");
            assert_eq!(path.split('/').count(), 4, "{path}");
            assert!(path.starts_with(&format!("v1/{}/", folder(model))));
        }
        assert_ne!(
            folder("a/b"),
            folder("a_b"),
            "names that look alike keep apart"
        );
    }
}
