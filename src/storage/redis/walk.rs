//! A walk over keys, page by page. Redis has no order of keys, and each node of a cluster only knows its own: so a walk is a scan of
//! one node after another, and where it goes on is a node, its cursor, and what it had too much of.
//!
//! Keys that are there all the time are met. One that comes or goes meanwhile may or may not be, and one may be met twice. Should a
//! node stop being a master, its rest is left out.

use super::Redis;
use super::fault::RedisError;
use super::topology::Node;
use crate::error::ErrorKind;
use crate::key::Key;
use crate::store::Cursor;
use deadpool_redis::redis::{FromRedisValue, cmd};
use std::collections::{HashSet, VecDeque};
use std::time::Duration;
use tokio::time::Instant;

/// The fewest keys that a node looks at for one command, so that a walk with a rare prefix takes few of them.
const SCAN_KEYS_MIN: usize = 100;
/// A page ends after this part of the time for a command, even if it is not full.
const PAGE_TIME_PARTS: u32 = 2;

/// Where a walk is.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    node: Node,
    /// Of the server; `0` is the beginning of a node.
    scan: u64,
    /// Found, and not yet given.
    left: VecDeque<Key>,
}

/// What a page has found, and where to go on.
pub(super) struct Found {
    pub(super) keys: Vec<Key>,
    pub(super) next: Option<Cursor>,
}

impl Redis {
    /// Up to `limit` keys whose names in Redis begin with `key_prefix` and `prefix`.
    pub(super) async fn walk(
        &self,
        (key_prefix, prefix): (&str, &str),
        after: Option<Cursor>,
        limit: usize,
    ) -> Result<Found, RedisError> {
        let ends = Instant::now() + self.page_time();
        let pattern = format!("{}*", escaped(&format!("{key_prefix}{prefix}")));
        let mut place = match after {
            Some(cursor) => Some(self.place_of(&cursor).await?),
            None => self.node_after(None).await?.map(Place::beginning),
        };
        let mut keys = Vec::new();
        let mut met = HashSet::new();
        while let Some(at) = &mut place {
            while keys.len() < limit
                && let Some(key) = at.left.pop_front()
            {
                if met.insert(key.clone()) {
                    keys.push(key);
                }
            }
            if !at.left.is_empty() {
                break;
            }
            // a beginning that was read is an end
            let at_end = at.scan == Place::END;
            if at_end {
                place = self.node_after(Some(&at.node)).await?.map(Place::beginning);
                continue;
            }
            if keys.len() >= limit || Instant::now() >= ends {
                break;
            }
            self.scan(at, key_prefix, &pattern, limit).await?;
        }
        let next = place.map(|place| place.written());
        Ok(Found { keys, next })
    }

    async fn place_of(&self, cursor: &Cursor) -> Result<Place, RedisError> {
        let mut place = Place::read(cursor)?;
        if !self.masters().await?.contains(&place.node) {
            place.scan = Place::END; // nobody else knows what its cursor means
        }
        Ok(place)
    }

    fn page_time(&self) -> Duration {
        self.command_timeout / PAGE_TIME_PARTS
    }

    async fn scan(
        &self,
        place: &mut Place,
        key_prefix: &str,
        pattern: &str,
        limit: usize,
    ) -> Result<(), RedisError> {
        let mut scan = cmd("SCAN");
        scan.arg(place.scan).arg("MATCH").arg(pattern);
        scan.arg("COUNT").arg(limit.max(SCAN_KEYS_MIN));
        let answer = self.at(place.node.clone(), scan).await?;
        let answer = <(u64, Vec<Vec<u8>>)>::from_redis_value(answer);
        let (next, names) = answer.map_err(|error| RedisError::of(&error.into()))?;
        place.scan = match next {
            0 => Place::END,
            next => next,
        };
        // what is no key is not ours
        let key = |name: Vec<u8>| {
            let name = String::from_utf8(name).ok()?;
            Key::new(name.strip_prefix(key_prefix)?).ok()
        };
        place.left.extend(names.into_iter().filter_map(key));
        Ok(())
    }

    async fn node_after(&self, node: Option<&Node>) -> Result<Option<Node>, RedisError> {
        let masters = self.masters().await?.into_iter();
        Ok(masters.into_iter().find(|master| Some(master) > node))
    }
}

impl Place {
    /// Of a node that was read to its end. No server gives it: cursors have as many bits as tables have.
    const END: u64 = u64::MAX;

    fn beginning(node: Node) -> Self {
        let (scan, left) = (0, VecDeque::new());
        Place { node, scan, left }
    }

    /// No host and no key has an end of line in it.
    fn written(&self) -> Cursor {
        let Node { host, port } = &self.node;
        let mut text = format!("{} {port} {host}", self.scan);
        for key in &self.left {
            text.push('\n');
            text.push_str(key.as_str());
        }
        Cursor(text)
    }

    fn read(cursor: &Cursor) -> Result<Self, RedisError> {
        Place::parsed(&cursor.0).ok_or_else(|| {
            let detail = "this is not where a page of this store ended";
            RedisError::new(ErrorKind::Misconfigured, detail)
        })
    }

    fn parsed(text: &str) -> Option<Self> {
        let mut lines = text.split('\n');
        let mut words = lines.next()?.splitn(3, ' ');
        let scan = words.next()?.parse().ok()?;
        let port = words.next()?.parse().ok()?;
        let host = words.next()?.to_owned();
        let left = lines.map(Key::new).collect::<Result<_, _>>().ok()?;
        let node = Node { host, port };
        Some(Place { node, scan, left })
    }
}

/// A text as a pattern that means itself.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        if matches!(character, '*' | '?' | '[' | ']' | '^' | '-' | '\\') {
            escaped.push('\\');
        }
        escaped.push(character);
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_is_a_pattern_to_redis_means_itself() {
        assert_eq!(escaped(r"a*b?[c]^-\é"), r"a\*b\?\[c\]\^\-\\é");
    }

    proptest! {
        #[test]
        fn a_place_is_read_as_it_was_written(
            scan: u64, port: u16, host in "[a-z0-9.:-]{0,20}", names in prop::collection::vec("[a-z +é]{1,9}", 0..5),
        ) {
            let left = names.into_iter().map(|name| Key::new(name).unwrap()).collect();
            let place = Place { node: Node { host, port }, scan, left };
            prop_assert_eq!(Place::read(&place.written()).unwrap(), place);
        }

        #[test]
        fn no_cursor_makes_it_panic(text in "[0-9 a\n]{0,30}") {
            let _ = Place::read(&Cursor(text));
        }
    }
}
