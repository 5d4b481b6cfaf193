//! What is believed of memories that announce nothing, in the order of its use: an engine throws out what was used longest ago,
//! so that is given up first, when there is more of it than the engine turned out to hold.

use super::slab::Place;
use super::speculations::Mixed;
use super::{HolderId, Seconds};
use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasherDefault;

/// A prediction that was wrong takes one of so many blocks from what is believed.
const TAKEN_WHEN_WRONG: usize = 32;
/// One that was right, while no more is believed than there is room for, gives one of so many.
const GIVEN_WHEN_RIGHT: usize = 512;
/// So many blocks are believed in any case: 8,192 tokens, less than any engine holds.
const ROOM_MIN: usize = 64;
/// Uses that have been followed by later ones of the same blocks are let go beyond so many.
const STALE_USES_MAX: usize = 1024;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Guesses(HashMap<HolderId, Guessed>);

/// Of one memory.
#[derive(Debug)]
struct Guessed {
    /// By the record of a block, the number of its last use. A record that went for other reasons stays here until its turn
    /// has come: whoever asks for it finds it gone, or used anew under a later number.
    last: HashMap<Place, u32, BuildHasherDefault<Mixed>>,
    /// The oldest first; of a prompt, its end is older than its beginning.
    uses: VecDeque<Use>,
    number: u32,
    /// Blocks that it is believed to hold at most.
    room: usize,
}

#[derive(Debug, Clone, Copy)]
struct Use {
    record: Place,
    number: u32,
    at: Seconds,
}

impl Default for Guessed {
    fn default() -> Self {
        Guessed {
            last: HashMap::default(),
            uses: VecDeque::new(),
            number: 0,
            room: usize::MAX,
        }
    }
}

impl Guesses {
    /// A memory has used the blocks of a prompt, by its records of them from the beginning on.
    pub(super) fn used(&mut self, holder: HolderId, records: &[Place], now: Seconds) {
        let guessed = self.0.entry(holder).or_default();
        for record in records.iter().rev() {
            guessed.number = guessed.number.wrapping_add(1);
            guessed.last.insert(*record, guessed.number);
            guessed.uses.push_back(Use {
                record: *record,
                number: guessed.number,
                at: now,
            });
        }
        guessed.drop_stale();
    }

    /// The record of a block that is to be believed no longer, and whether that is for its age (`ttl`) and not because there are
    /// too many. Ask again until there is none.
    pub(super) fn excess(
        &mut self,
        holder: HolderId,
        (now, ttl): (Seconds, Seconds),
    ) -> Option<(Place, bool)> {
        let guessed = self.0.get_mut(&holder)?;
        loop {
            let first = *guessed.uses.front()?;
            let is_last = guessed.last.get(&first.record) == Some(&first.number);
            let is_old = now.saturating_sub(first.at) >= ttl;
            if is_last && !is_old && guessed.last.len() <= guessed.room {
                return None;
            }
            guessed.uses.pop_front();
            if is_last {
                guessed.last.remove(&first.record);
                return Some((first.record, is_old));
            }
        }
    }

    /// What a prompt was believed to find there was found, or not.
    pub(super) fn checked(&mut self, holder: HolderId, found: bool) {
        let Some(guessed) = self.0.get_mut(&holder) else {
            return;
        };
        let held = guessed.last.len();
        if !found {
            let most = guessed.room.min(held);
            guessed.room = (most - most / TAKEN_WHEN_WRONG).max(ROOM_MIN);
        } else if held >= guessed.room {
            guessed.room += guessed.room / GIVEN_WHEN_RIGHT + 1;
        }
    }

    /// It is another memory now.
    pub(super) fn forget(&mut self, holder: HolderId) {
        self.0.remove(&holder);
    }
}

impl Guessed {
    /// Lets go of uses that later ones of the same blocks have followed, once they are many.
    fn drop_stale(&mut self) {
        if self.uses.len() > 2 * self.last.len() + STALE_USES_MAX {
            let last = &self.last;
            self.uses
                .retain(|of| last.get(&of.record) == Some(&of.number));
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::block::{BlockHash, Realm, chain};
    use crate::prefix_index::{HolderId, Limits, PrefixIndex, Seconds, StoredRun, Tier};
    use proptest::prelude::*;
    use std::collections::VecDeque;
    use std::sync::Arc;

    const ENGINE: HolderId = HolderId(1);
    const OTHER: HolderId = HolderId(2);
    const TTL: Seconds = 900;
    const REALM: Realm<'static> = Realm {
        model: "m",
        cache_salt: None,
        block_size: 1,
    };

    fn index() -> PrefixIndex {
        PrefixIndex::new(Limits {
            max_entries: 1_000_000,
            ttl: TTL,
        })
    }

    /// A prompt of so many blocks, unlike those of other names.
    fn prompt(name: u32, blocks: u32) -> Arc<[BlockHash]> {
        let tokens: Vec<u32> = (0..blocks).map(|at| name * 10_000 + at).collect();
        chain(&REALM, &tokens).into()
    }

    fn believed(index: &PrefixIndex, holder: HolderId, chain: &[BlockHash]) -> u32 {
        let runs = index.find_overlap(chain);
        let own = runs.iter().filter(|run| run.holder == holder);
        own.map(|run| run.to).max().unwrap_or(0)
    }

    fn is_wrong(index: &mut PrefixIndex, times: usize) {
        (0..times).for_each(|_| index.checked(ENGINE, false, 0));
    }

    /// An engine that keeps so many prompts, and throws out the one that was used longest ago.
    struct Engine(VecDeque<u32>, usize);

    impl Engine {
        /// Whether the prompt was there.
        fn serve(&mut self, name: u32) -> bool {
            let was_there = self.0.contains(&name);
            self.0.retain(|other| *other != name);
            self.0.push_back(name);
            if self.0.len() > self.1 {
                self.0.pop_front();
            }
            was_there
        }
    }

    #[test]
    fn a_cache_that_holds_less_than_was_sent_there_is_believed_to_hold_about_what_it_does() {
        const BLOCKS: u32 = 20;
        let wrong_at_the_end = |learns: bool| {
            let (mut index, mut engine) = (index(), Engine(VecDeque::new(), 40));
            let (mut wrong, mut sure) = (0, 0);
            for turn in 0..6000_u32 {
                // 60 prompts in no order
                let name = turn.wrapping_mul(2_654_435_761).rotate_left(11) % 60;
                let chain = prompt(name, BLOCKS);
                let hoped = believed(&index, ENGINE, &chain) > BLOCKS / 2;
                let found = engine.serve(name);
                if hoped && learns {
                    index.checked(ENGINE, found, 0);
                }
                index.believe(ENGINE, &chain, 0);
                if turn >= 3000 {
                    wrong += u32::from(hoped && !found);
                    sure += u32::from(hoped && found);
                }
            }
            (wrong, sure)
        };
        let (wrong, sure) = wrong_at_the_end(true);
        assert!(wrong * 10 < sure, "{wrong} wrong, {sure} right");
        assert!(sure > 1200, "and most of what is there is known: {sure}");
        let (wrong, sure) = wrong_at_the_end(false);
        assert!(wrong * 3 > sure, "{wrong} wrong, {sure} right");
    }

    #[test]
    fn what_was_used_longest_ago_is_given_up_first_and_of_a_prompt_its_end() {
        let mut index = index();
        let prompts: Vec<_> = (0..4).map(|name| prompt(name, 50)).collect();
        for chain in &prompts {
            index.believe(ENGINE, chain, 0);
        }
        index.believe(ENGINE, &prompts[0], 1);
        is_wrong(&mut index, 5);
        let left: Vec<u32> = prompts
            .iter()
            .map(|chain| believed(&index, ENGINE, chain))
            .collect();
        assert_eq!([left[0], left[2], left[3]], [50, 50, 50], "{left:?}");
        assert!((1..50).contains(&left[1]), "{left:?}");
        is_wrong(&mut index, 1000);
        let left: u32 = prompts.iter().map(|c| believed(&index, ENGINE, c)).sum();
        assert_eq!(left, 64, "some is believed in any case");
        assert_eq!(believed(&index, ENGINE, &prompts[0]), 50);
    }

    #[test]
    fn predictions_that_come_true_win_room_back_while_it_is_short() {
        let mut index = index();
        let prompts: Vec<_> = (0..20).map(|name| prompt(name, 50)).collect();
        let all = |index: &mut PrefixIndex| -> u32 {
            prompts.iter().for_each(|c| index.believe(ENGINE, c, 0));
            prompts.iter().map(|c| believed(index, ENGINE, c)).sum()
        };
        assert_eq!(all(&mut index), 1000);
        is_wrong(&mut index, 20);
        let least = all(&mut index);
        assert!(least < 600, "{least}");
        for _ in 0..2000 {
            index.checked(ENGINE, true, 0);
            all(&mut index);
        }
        assert_eq!(all(&mut index), 1000);
    }

    #[test]
    fn one_memory_says_nothing_of_another_and_what_a_memory_announced_is_no_guess() {
        let mut index = index();
        let (guessed, told) = (prompt(1, 300), [9, 8, 7]);
        index.believe(ENGINE, &guessed, 0);
        index.believe(OTHER, &guessed, 0);
        let run = StoredRun {
            realm: REALM,
            hashes: &told,
            parent: None,
            tokens: &[7, 8, 9],
            tier: Tier::Gpu,
        };
        index.store(ENGINE, &run, 0);
        is_wrong(&mut index, 1000);
        assert_eq!(believed(&index, ENGINE, &guessed), 64);
        assert_eq!(believed(&index, OTHER, &guessed), 300);
        assert_eq!(believed(&index, ENGINE, &chain(&REALM, &[7, 8, 9])), 3);
    }

    #[test]
    fn another_memory_in_its_place_is_believed_anew() {
        let mut index = index();
        index.believe(ENGINE, &prompt(1, 300), 0);
        is_wrong(&mut index, 1000);
        index.forget_assumed(ENGINE);
        assert_eq!(believed(&index, ENGINE, &prompt(1, 300)), 0);
        index.believe(ENGINE, &prompt(1, 300), 0);
        assert_eq!(believed(&index, ENGINE, &prompt(1, 300)), 300);
    }

    #[test]
    fn a_prompt_that_is_asked_again_and_again_takes_no_more_memory_each_time() {
        let mut index = index();
        for now in 0..10_000 {
            index.believe(ENGINE, &prompt(1, 100), now);
        }
        let guessed = &index.guesses.0[&ENGINE];
        assert_eq!(guessed.last.len(), 100);
        assert!(guessed.uses.len() <= 2 * 100 + super::STALE_USES_MAX);
    }

    #[test]
    fn what_expires_is_forgotten_here_as_well() {
        let mut index = index();
        for now in 0..5 * TTL {
            index.believe(ENGINE, &prompt(now, 10), now);
            index.sweep(now, 100);
        }
        let guessed = &index.guesses.0[&ENGINE];
        assert!(guessed.last.len() <= 10 * (TTL as usize + 1));
    }

    proptest! {
        #[test]
        fn the_index_stays_consistent_whatever_is_given_up(
            steps in prop::collection::vec((0..6_u8, 0..8_u32, 1..120_u32), 1..80),
        ) {
            let mut index = index();
            for (now, (what, name, blocks)) in steps.into_iter().enumerate() {
                let (now, chain) = (now as Seconds * 20, prompt(name, blocks));
                let holder = HolderId(name % 2);
                match what {
                    0 | 1 => index.believe(holder, &chain, now),
                    2 => (0..blocks).for_each(|_| index.checked(holder, false, now)),
                    3 => index.speculate(holder, &chain, (now, now + 30)),
                    4 => index.sweep(now, 200),
                    _ => index.forget_assumed(holder),
                }
                index.ledger.assert_consistent();
            }
        }
    }
}
