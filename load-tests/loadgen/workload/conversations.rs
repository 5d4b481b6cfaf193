//! Conversations of several turns behind system prompts of which a few are popular. Answers are put into the history by us,
//! so that prompts do not depend on who answered.

use super::{Ask, Message};
use crate::zipf::Zipf;

/// How many and how long; lengths in words.
#[derive(Debug, Clone)]
pub struct Talk {
    /// Conversations.
    pub conversations: usize,
    /// Turns of each.
    pub turns: usize,
    /// Conversations that are open at one time.
    pub open: usize,
    /// Different system prompts; 0: none.
    pub systems: usize,
    /// How popularity falls from one system prompt to the next.
    pub zipf: f64,
    /// Words of a system prompt.
    pub system_words: usize,
    /// Words of a user's message, half to one and a half times as many.
    pub user_words: usize,
    /// Tokens of an answer.
    pub answer_tokens: usize,
}

// what a number stands for, so that no two texts are alike by chance
const SYSTEM: u64 = 1 << 40;
const USER: u64 = 2 << 40;
const ANSWER: u64 = 3 << 40;

/// All turns, in the order in which they are asked: of the open conversations a random one speaks next.
pub fn turns(talk: &Talk, seed: u64) -> Vec<Ask> {
    let mut chance = fastrand::Rng::with_seed(seed);
    let zipf = Zipf::new(talk.systems.max(1), talk.zipf);
    let mut open: Vec<Ask> = Vec::new();
    let mut begun = 0;
    let mut asks = Vec::with_capacity(talk.conversations * talk.turns);
    loop {
        while open.len() < talk.open.max(1) && begun < talk.conversations {
            open.push(opening(talk, begun, (&zipf, &mut chance), seed));
            begun += 1;
        }
        if open.is_empty() {
            return asks;
        }
        let at = chance.usize(..open.len());
        asks.push(open[at].clone());
        let turn = open[at]
            .messages
            .iter()
            .filter(|m| m.role == "user")
            .count();
        if turn >= talk.turns {
            open.swap_remove(at);
            continue;
        }
        let of = seed ^ ((open[at].conversation.unwrap_or(0) as u64) << 8 | turn as u64);
        let history = &mut open[at].messages;
        history.push(Message::of("assistant", ANSWER ^ of, talk.answer_tokens));
        history.push(user(talk, of, &mut chance));
    }
}

fn opening(
    talk: &Talk,
    conversation: usize,
    (zipf, chance): (&Zipf, &mut fastrand::Rng),
    seed: u64,
) -> Ask {
    let mut messages = Vec::new();
    if talk.systems > 0 {
        let system = zipf.draw(chance) as u64;
        messages.push(Message::of(
            "system",
            SYSTEM ^ seed ^ system,
            talk.system_words,
        ));
    }
    messages.push(user(talk, seed ^ ((conversation as u64) << 8), chance));
    Ask {
        conversation: Some(conversation),
        ..Ask::once(messages, talk.answer_tokens)
    }
}

fn user(talk: &Talk, of: u64, chance: &mut fastrand::Rng) -> Message {
    let count = talk.user_words / 2 + chance.usize(..=talk.user_words);
    Message::of("user", USER ^ of, count.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TALK: Talk = Talk {
        conversations: 30,
        turns: 4,
        open: 8,
        systems: 3,
        zipf: 1.0,
        system_words: 20,
        user_words: 10,
        answer_tokens: 5,
    };

    #[test]
    fn every_turn_repeats_the_one_before_and_goes_on() {
        let asks = turns(&TALK, 1);
        assert_eq!(asks.len(), 120);
        for conversation in 0..30 {
            let of: Vec<_> = asks
                .iter()
                .filter(|a| a.conversation == Some(conversation))
                .collect();
            assert_eq!(of.len(), 4);
            for (before, after) in of.iter().zip(&of[1..]) {
                assert_eq!(before.messages[..], after.messages[..before.messages.len()]);
                assert_eq!(after.messages.len(), before.messages.len() + 2);
            }
        }
    }

    #[test]
    fn conversations_share_system_prompts_and_nothing_else() {
        let asks = turns(&TALK, 1);
        let firsts = asks.iter().filter(|a| a.messages.len() == 2);
        let (mut systems, mut users): (Vec<_>, Vec<_>) = firsts
            .map(|a| (a.messages[0].text.clone(), a.messages[1].text.clone()))
            .unzip();
        systems.sort();
        systems.dedup();
        users.sort();
        users.dedup();
        assert_eq!((systems.len(), users.len()), (3, 30));
    }

    #[test]
    fn a_seed_gives_the_same_again() {
        assert_eq!(turns(&TALK, 5), turns(&TALK, 5));
        assert_ne!(turns(&TALK, 5), turns(&TALK, 6));
    }
}
