//! Where a text may be cut so that its pieces encode to the same tokens as the whole: before special
//! tokens. An encoder takes these out of the text before it does anything else, so that what stands
//! between two of them never depends on what stands before or after.

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::{AddedToken, Tokenizer};

/// See the module.
pub(super) struct Boundaries {
    matcher: Option<AhoCorasick>,
    /// Whether the text may be cut before this token: not where it takes blanks around it along,
    /// or depends on its neighbours.
    cuts: Vec<bool>,
}

impl Boundaries {
    /// The boundaries of a vocabulary.
    pub(super) fn of(tokenizer: &Tokenizer) -> Self {
        // those of `normalized` tokens are looked for later, within the pieces
        let added = tokenizer.get_added_tokens_decoder().into_values();
        let added: Vec<AddedToken> = added.filter(|token| !token.normalized).collect();
        let contents = added.iter().map(|token| token.content.as_str());
        let cuts = |token: &AddedToken| !(token.lstrip || token.rstrip || token.single_word);
        Boundaries {
            // as the encoder itself looks for them
            matcher: AhoCorasick::builder()
                .match_kind(MatchKind::LeftmostLongest)
                .build(contents)
                .ok(),
            cuts: added.iter().map(cuts).collect(),
        }
    }

    /// The pieces of a text, in order; together they are the text.
    pub(super) fn pieces<'a>(&self, text: &'a str) -> Vec<&'a str> {
        let (mut pieces, mut from) = (Vec::new(), 0);
        let matches = self.matcher.iter().flat_map(|m| m.find_iter(text));
        for found in matches {
            if found.start() > from && self.cuts[found.pattern().as_usize()] {
                pieces.push(&text[from..found.start()]);
                from = found.start();
            }
        }
        if from < text.len() {
            pieces.push(&text[from..]);
        }
        pieces
    }
}
