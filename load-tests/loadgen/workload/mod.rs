//! What is asked: a list of requests, made from a seed before anything is sent, so that every router is asked the same.

pub mod burst;
pub mod conversations;
pub mod mooncake;
pub mod words;

use crate::zipf::Zipf;
use std::time::Duration;

/// One request of a workload.
#[derive(Debug, Clone, PartialEq)]
pub struct Ask {
    /// When it is due, where the workload says so (a trace does).
    pub due: Option<Duration>,
    /// The conversation that it belongs to: its turns are asked one after the other.
    pub conversation: Option<usize>,
    /// System prompt, user, assistant, user and so on.
    pub messages: Vec<Message>,
    /// Tokens of answer that are asked for.
    pub answer_tokens: usize,
    /// Which of the tenants asks.
    pub tenant: usize,
    /// When its client leaves before the end, if it does.
    pub leaves: Option<Leave>,
}

/// One message; equal texts are shared.
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: &'static str,
    /// What it says.
    pub text: std::rc::Rc<str>,
}

impl Message {
    /// A message of so many words that follow from a number.
    pub fn of(role: &'static str, number: u64, count: usize) -> Self {
        let text = words::words(number, count).into();
        Message { role, text }
    }
}

/// When a client leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leave {
    /// Before anything came, after this time.
    Before(Duration),
    /// After so many events of the answer.
    After(usize),
}

/// The longest that a client waits who leaves before the first byte.
const LEAVES_BEFORE_MAX: Duration = Duration::from_millis(200);
/// The most events that a client has read who leaves in the middle.
const LEAVES_AFTER_MAX: usize = 20;

impl Ask {
    /// A request of no conversation.
    pub fn once(messages: Vec<Message>, answer_tokens: usize) -> Self {
        Ask {
            due: None,
            conversation: None,
            messages,
            answer_tokens,
            tenant: 0,
            leaves: None,
        }
    }
}

/// Gives every request a tenant (the first asks most), and lets a share of the clients leave.
pub fn people(asks: &mut [Ask], (tenants, exponent): (usize, f64), leave_share: f64, seed: u64) {
    let mut chance = fastrand::Rng::with_seed(seed ^ 0x7e57);
    let zipf = Zipf::new(tenants.max(1), exponent);
    for ask in asks {
        ask.tenant = zipf.draw(&mut chance);
        if chance.f64() < leave_share {
            ask.leaves = Some(match chance.bool() {
                true => Leave::Before(LEAVES_BEFORE_MAX.mul_f64(chance.f64())),
                false => Leave::After(chance.usize(1..=LEAVES_AFTER_MAX)),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asks(count: usize) -> Vec<Ask> {
        vec![Ask::once(vec![Message::of("user", 1, 3)], 4); count]
    }

    #[test]
    fn the_first_tenant_asks_most_and_the_share_that_leaves_is_as_asked_for() {
        let mut all = asks(4000);
        people(&mut all, (5, 1.0), 0.1, 7);
        let of = |tenant| all.iter().filter(|ask| ask.tenant == tenant).count();
        assert!(
            of(0) > of(1) && of(1) > of(4),
            "{} {} {}",
            of(0),
            of(1),
            of(4)
        );
        assert_eq!((0..5).map(of).sum::<usize>(), 4000);
        let leave = all.iter().filter(|ask| ask.leaves.is_some()).count();
        assert!((320..480).contains(&leave), "{leave}");
    }

    #[test]
    fn a_seed_gives_the_same_people_again() {
        let (mut one, mut other) = (asks(50), asks(50));
        people(&mut one, (3, 1.0), 0.5, 9);
        people(&mut other, (3, 1.0), 0.5, 9);
        assert_eq!(one, other);
    }
}
