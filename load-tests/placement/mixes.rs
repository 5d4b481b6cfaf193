//! What is asked, in order, from a seed: mixes of prompts that differ in how they share their beginnings.

use crate::draw::{Zipf, log_within, normal, tokens, unit, within};
use crate::request::Request;
use routing::strategy::Chance;
use std::collections::VecDeque;
use std::ops::RangeInclusive;

/// A user reads before the next question: so many other requests come first.
const TURNS_APART: usize = 100;
/// Conversations that are open at one time.
const OPEN: usize = 160;

/// How prompts share their beginnings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mix {
    /// Many turns behind system prompts, few of them popular.
    Conversations,
    /// One system prompt for all, and nothing else in common.
    OneSystem,
    /// Nothing in common.
    NothingShared,
    /// System prompts of which few are popular; in the middle, most requests begin with a new one.
    Burst,
    /// As in Mooncake's trace of conversations, at a quarter of its size.
    Mooncake,
}

impl Mix {
    /// `count` requests.
    pub fn requests(self, count: usize, chance: &mut Chance) -> Vec<Request> {
        match self {
            Mix::Conversations => conversations(count, chance),
            Mix::OneSystem => one_system(count, chance),
            Mix::NothingShared => nothing_shared(count, chance),
            Mix::Burst => burst(count, chance),
            Mix::Mooncake => mooncake(count, chance),
        }
    }
}

struct Talk {
    said: Vec<u32>,
    system: usize,
    opening: usize,
    left: usize,
}

fn conversations(count: usize, chance: &mut Chance) -> Vec<Request> {
    let systems = systems(12, 500..=1500, chance);
    let popular = Zipf::new(systems.len());
    let mut open: VecDeque<Talk> = VecDeque::new();
    let mut requests = Vec::with_capacity(count);
    while requests.len() < count {
        while open.len() < OPEN {
            let system = &systems[popular.draw(chance)];
            open.push_back(Talk {
                said: system.clone(),
                system: system.len(),
                opening: 0,
                left: turns(chance),
            });
        }
        // who spoke lately stands at the end
        let at = within(chance, 0..=OPEN - TURNS_APART);
        let Some(mut talk) = open.remove(at) else {
            continue;
        };
        let words = within(chance, 100..=900);
        talk.said.extend(tokens(chance, words));
        talk.opening = if talk.opening == 0 {
            words
        } else {
            talk.opening
        };
        let answer_len = within(chance, 30..=150);
        let answer = tokens(chance, answer_len);
        let parts = (talk.system, talk.opening);
        requests.push(Request::new(talk.said.clone(), answer.clone(), parts));
        talk.said.extend(answer);
        talk.left -= 1;
        if talk.left > 0 {
            open.push_back(talk);
        }
    }
    requests
}

/// At least one, five on average.
fn turns(chance: &mut Chance) -> usize {
    let mut turns = 1;
    while turns < 20 && unit(chance) < 0.8 {
        turns += 1;
    }
    turns
}

fn systems(count: usize, length: RangeInclusive<usize>, chance: &mut Chance) -> Vec<Vec<u32>> {
    let system = |_| {
        let length = within(chance, length.clone());
        tokens(chance, length)
    };
    (0..count).map(system).collect()
}

fn single(system: &[u32], tail: usize, chance: &mut Chance) -> Request {
    let prompt = [system, &tokens(chance, tail)].concat();
    let answer = within(chance, 30..=120);
    Request::new(prompt, tokens(chance, answer), (system.len(), tail))
}

fn one_system(count: usize, chance: &mut Chance) -> Vec<Request> {
    let system = tokens(chance, 2000);
    let mut request = |_| {
        let tail = within(chance, 100..=900);
        single(&system, tail, chance)
    };
    (0..count).map(&mut request).collect()
}

fn nothing_shared(count: usize, chance: &mut Chance) -> Vec<Request> {
    let mut request = |_| {
        let length = log_within(chance, (200.0, 4000.0));
        single(&[], length, chance)
    };
    (0..count).map(&mut request).collect()
}

fn burst(count: usize, chance: &mut Chance) -> Vec<Request> {
    let systems = systems(60, 400..=1600, chance);
    let popular = Zipf::new(systems.len());
    let new = tokens(chance, 4000);
    let mut request = |index: usize| {
        let in_burst = index >= count * 2 / 5 && index < count * 3 / 5;
        let system = match in_burst && unit(chance) < 0.7 {
            true => &new,
            false => &systems[popular.draw(chance)],
        };
        let tail = within(chance, 100..=500);
        single(system, tail, chance)
    };
    (0..count).map(&mut request).collect()
}

/// The trace's statistics: all prompts begin with the same block of 512 tokens; six of ten share nothing else; the others
/// go on where an earlier one ended, by two blocks at the median and by many at times; prompts of 7,000 tokens at the
/// median and 12,000 on average, answers of 350. All at a quarter.
fn mooncake(count: usize, chance: &mut Chance) -> Vec<Request> {
    const NEW: f64 = 0.61;
    let first = tokens(chance, 128);
    let mut recent: VecDeque<(Vec<u32>, usize)> = VecDeque::new();
    let mut requests = Vec::with_capacity(count);
    while requests.len() < count {
        let fresh = recent.len() < TURNS_APART || unit(chance) < NEW;
        let (mut said, opening) = match fresh {
            true => (first.clone(), None),
            false => {
                let at = within(chance, 0..=recent.len() - TURNS_APART);
                let Some((said, opening)) = recent.remove(at) else {
                    continue;
                };
                (said, Some(opening))
            }
        };
        let median: f64 = if fresh { 1400.0 } else { 350.0 };
        let added = (median * (1.2 * normal(chance)).exp()).clamp(32.0, 24_000.0) as usize;
        said.extend(tokens(chance, added));
        said.truncate(30_000);
        let opening = opening.unwrap_or(added);
        let answer_len = (85.0 * (0.6 * normal(chance)).exp()).clamp(3.0, 500.0) as usize;
        let answer = tokens(chance, answer_len);
        requests.push(Request::new(
            said.clone(),
            answer.clone(),
            (0, 128 + opening),
        ));
        said.extend(answer);
        recent.push_back((said, opening));
        if recent.len() > 3 * TURNS_APART {
            recent.pop_front();
        }
    }
    requests
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// The share of tokens that an endless cache of all requests before would have.
    fn shared(mix: Mix) -> f64 {
        let (mut seen, mut found, mut all) = (HashSet::new(), 0, 0);
        for request in mix.requests(600, &mut Chance(1)) {
            found += request
                .names
                .iter()
                .take_while(|name| seen.contains(*name))
                .count();
            all += request.names.len();
            seen.extend(request.names);
        }
        found as f64 / all as f64
    }

    #[test]
    fn mixes_share_as_much_as_they_say() {
        assert!(shared(Mix::Conversations) > 0.6);
        assert!((0.7..0.9).contains(&shared(Mix::OneSystem)));
        assert_eq!(shared(Mix::NothingShared), 0.0);
        assert!(shared(Mix::Burst) > 0.6);
        let mooncake = shared(Mix::Mooncake);
        assert!(
            (0.25..0.5).contains(&mooncake),
            "0.37 in the trace, {mooncake} here"
        );
    }

    #[test]
    fn a_seed_repeats_a_mix_and_another_one_does_not() {
        let of = |seed| Mix::Conversations.requests(50, &mut Chance(seed));
        let names = |requests: Vec<Request>| -> Vec<_> {
            requests.into_iter().map(|request| request.names).collect()
        };
        assert_eq!(names(of(3)), names(of(3)));
        assert_ne!(names(of(3)), names(of(4)));
    }
}
