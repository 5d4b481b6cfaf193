//! From tokens to blocks: our own chained hash, in which a block's hash stands for all tokens up to
//! its end. Engines hash in their own ways; their hashes are never compared with these.

use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

/// The hash of a block and of everything before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub u64);

/// What separates prompts of equal tokens: they share no KV.
#[derive(Debug, Clone, Copy, Default)]
pub struct Realm<'a> {
    /// The model, or the adapter where one is used.
    pub model: &'a str,
    /// The salt that the client gave.
    pub cache_salt: Option<&'a str>,
    /// Tokens per block: chains of different sizes never meet.
    pub block_size: u32,
}

impl Realm<'_> {
    /// What a chain begins with.
    pub fn root(&self) -> BlockHash {
        let mut hash = Xxh3::new();
        hash.update(&self.block_size.to_le_bytes());
        hash.update(&(self.model.len() as u64).to_le_bytes());
        hash.update(self.model.as_bytes());
        if let Some(salt) = self.cache_salt {
            hash.update(salt.as_bytes());
        }
        BlockHash(hash.digest())
    }
}

/// The hash of the block that follows `parent`.
pub fn next(parent: BlockHash, tokens: &[u32]) -> BlockHash {
    const TOKENS_ON_STACK: usize = 64;
    let mut bytes = [0u8; TOKENS_ON_STACK * 4];
    if tokens.len() <= TOKENS_ON_STACK {
        for (four, token) in bytes.chunks_exact_mut(4).zip(tokens) {
            four.copy_from_slice(&token.to_le_bytes());
        }
        return BlockHash(xxh3_64_with_seed(&bytes[..tokens.len() * 4], parent.0));
    }
    let mut hash = Xxh3::with_seed(parent.0);
    for token in tokens {
        hash.update(&token.to_le_bytes());
    }
    BlockHash(hash.digest())
}

/// The hashes of the full blocks of a prompt, in order.
pub fn chain(realm: &Realm<'_>, tokens: &[u32]) -> Vec<BlockHash> {
    let mut parent = realm.root();
    let size = realm.block_size.max(1) as usize;
    let blocks = tokens.chunks_exact(size);
    blocks
        .map(|block| {
            parent = next(parent, block);
            parent
        })
        .collect()
}

/// Bytes of text in a block, where tokens are not known: prompts that begin alike for so long meet.
pub const TEXT_BLOCK_BYTES: usize = 512;
/// Tokens that such a block stands for: about four bytes make one.
pub const TEXT_BLOCK_TOKENS: u32 = 128;

/// The hashes of the full blocks of a prompt's text, in order. `head` is what stands before it in
/// the engine's eyes, such as tools: other heads make other chains.
pub fn text_chain(model: &str, head: &[&[u8]], text: &[u8]) -> Vec<BlockHash> {
    let mut hash = Xxh3::new();
    for part in [b"text".as_slice(), model.as_bytes()].iter().chain(head) {
        hash.update(&(part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    let mut parent = hash.digest();
    let blocks = text.chunks_exact(TEXT_BLOCK_BYTES);
    blocks
        .map(|block| {
            parent = xxh3_64_with_seed(block, parent);
            BlockHash(parent)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const REALM: Realm<'static> = Realm {
        model: "m",
        cache_salt: None,
        block_size: 4,
    };

    #[test]
    fn a_chain_covers_full_blocks_and_everything_before_them() {
        let tokens: Vec<u32> = (0..10).collect();
        let all = chain(&REALM, &tokens);
        assert_eq!(all.len(), 2, "two tokens do not fill a block");
        assert_eq!(chain(&REALM, &tokens[..4]), all[..1]);
        let mut other = tokens.clone();
        other[0] = 99;
        assert!(chain(&REALM, &other).iter().zip(&all).all(|(a, b)| a != b));
        assert_eq!(next(all[0], &tokens[4..8]), all[1]);
    }

    #[test]
    fn models_salts_and_block_sizes_keep_apart() {
        let roots = [
            REALM,
            Realm {
                model: "n",
                ..REALM
            },
            Realm {
                cache_salt: Some("s"),
                ..REALM
            },
            Realm {
                block_size: 8,
                ..REALM
            },
        ]
        .map(|realm| realm.root());
        for (i, root) in roots.iter().enumerate() {
            assert!(!roots[..i].contains(root));
        }
    }

    #[test]
    fn texts_that_begin_alike_share_blocks_unless_what_stands_before_differs() {
        let long = "a".repeat(3 * TEXT_BLOCK_BYTES + 5);
        let longer = format!("{long}b and more");
        let of = |head: &[&[u8]], text: &str| text_chain("m", head, text.as_bytes());
        assert_eq!(of(&[], &long).len(), 3);
        assert_eq!(of(&[], &long), of(&[], &longer));
        assert_ne!(of(&[b"tools"], &long)[0], of(&[], &long)[0]);
        assert_ne!(of(&[b"ab", b"c"], &long)[0], of(&[b"a", b"bc"], &long)[0]);
        assert_ne!(text_chain("n", &[], long.as_bytes())[0], of(&[], &long)[0]);
        assert!(of(&[], "short").is_empty());
    }

    #[test]
    fn long_blocks_hash_like_short_ones_by_content() {
        let long: Vec<u32> = (0..200).collect();
        let realm = Realm {
            block_size: 200,
            ..REALM
        };
        let mut other = long.clone();
        other[199] = 0;
        assert_ne!(chain(&realm, &long), chain(&realm, &other));
        let edge: Vec<u32> = (0..64).collect();
        let streamed = {
            let mut hash = Xxh3::with_seed(7);
            edge.iter()
                .for_each(|token| hash.update(&token.to_le_bytes()));
            BlockHash(hash.digest())
        };
        assert_eq!(next(BlockHash(7), &edge), streamed);
    }
}
