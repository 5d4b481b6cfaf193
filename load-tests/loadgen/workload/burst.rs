//! Unrelated prompts, among which now and then many clients ask about the same new document at once.

use super::{Ask, Message};

/// How much of it; lengths in words.
#[derive(Debug, Clone)]
pub struct Bursts {
    /// Requests in all.
    pub requests: usize,
    /// A burst after so many unrelated requests.
    pub every: usize,
    /// Requests of one burst.
    pub size: usize,
    /// Words of the new document.
    pub document_words: usize,
    /// Words of every request's own.
    pub own_words: usize,
    /// Tokens of an answer.
    pub answer_tokens: usize,
}

const DOCUMENT: u64 = 4 << 40;
const OWN: u64 = 5 << 40;

/// All requests, in order.
pub fn requests(bursts: &Bursts, seed: u64) -> Vec<Ask> {
    let round = bursts.every + bursts.size;
    let ask = |at: usize| {
        let own = Message::of("user", OWN ^ seed ^ at as u64, bursts.own_words.max(1));
        let messages = match at % round < bursts.every {
            true => vec![own],
            false => {
                let document = DOCUMENT ^ seed ^ (at / round) as u64;
                vec![Message::of("system", document, bursts.document_words), own]
            }
        };
        Ask::once(messages, bursts.answer_tokens)
    };
    (0..bursts.requests).map(ask).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_shares_its_document_with_nobody_else() {
        let bursts = Bursts {
            requests: 60,
            every: 20,
            size: 10,
            document_words: 30,
            own_words: 5,
            answer_tokens: 1,
        };
        let asks = requests(&bursts, 2);
        let documents: Vec<_> = asks
            .iter()
            .filter(|a| a.messages.len() == 2)
            .map(|a| &a.messages[0].text)
            .collect();
        assert_eq!(documents.len(), 20);
        assert!(documents[..10].iter().all(|d| *d == documents[0]));
        assert_ne!(documents[0], documents[10]);
        let mut own: Vec<_> = asks
            .iter()
            .filter_map(|a| a.messages.last())
            .map(|m| m.text.clone())
            .collect();
        own.sort();
        own.dedup();
        assert_eq!(own.len(), 60);
    }
}
