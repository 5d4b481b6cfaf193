//! Blocks that the running requests of each worker use, those in common counted once.

use crate::request::Request;
use routing::block::BlockHash;
use std::collections::HashMap;

/// See the module.
#[derive(Debug, Default)]
pub struct ActiveBlocks(HashMap<(usize, BlockHash), u32>, HashMap<usize, usize>);

impl ActiveBlocks {
    /// A request runs there.
    pub fn enter(&mut self, worker: usize, request: &Request) {
        for own in request.by_tokens.iter() {
            let users = self.0.entry((worker, *own)).or_default();
            *users += 1;
            if *users == 1 {
                *self.1.entry(worker).or_default() += 1;
            }
        }
    }

    /// It does no longer.
    pub fn leave(&mut self, worker: usize, request: &Request) {
        for own in request.by_tokens.iter() {
            let key = (worker, *own);
            let Some(users) = self.0.get_mut(&key) else {
                continue;
            };
            *users -= 1;
            if *users == 0 {
                self.0.remove(&key);
                *self.1.entry(worker).or_default() -= 1;
            }
        }
    }

    /// Leading blocks of a prompt that running requests use.
    pub fn shared(&self, worker: usize, request: &Request) -> usize {
        let blocks = request.by_tokens.iter();
        blocks
            .take_while(|own| self.0.contains_key(&(worker, **own)))
            .count()
    }

    /// Blocks in use if a request ran there, too.
    pub fn with(&self, worker: usize, request: &Request) -> usize {
        let own = request.by_tokens.len() - self.shared(worker, request);
        self.1.get(&worker).copied().unwrap_or(0) + own
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_in_common_count_once_until_the_last_request_has_left() {
        let request = |to| Request::new((0..to).collect(), vec![1], (0, 0));
        let mut active = ActiveBlocks::default();
        active.enter(0, &request(160));
        active.enter(0, &request(320));
        assert_eq!(active.with(0, &request(480)), 30);
        active.leave(0, &request(320));
        assert_eq!(active.shared(0, &request(480)), 10);
        active.leave(0, &request(160));
        assert_eq!(active.with(0, &request(160)), 10);
    }
}
