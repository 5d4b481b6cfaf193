//! Consistent hashing with bounded loads: equal keys meet on one backend until it has more than
//! its share, then on the next one clockwise.
//! Source: Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads" (2016).

use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Points on a circle of 2^64; each member has `virtual_nodes` points per unit of weight.
#[derive(Debug)]
pub struct Ring {
    points: Vec<(u64, u32)>,
    members: Vec<(Arc<str>, u32)>,
    virtual_nodes: u32,
}

impl Ring {
    /// `members` are names with weights, in the order in which their indices are answered.
    pub fn new(members: Vec<(Arc<str>, u32)>, virtual_nodes: u32) -> Self {
        let mut points = Vec::new();
        for (index, (name, weight)) in members.iter().enumerate() {
            for node in 0..u64::from(virtual_nodes) * u64::from(*weight) {
                points.push((xxh3_64_with_seed(name.as_bytes(), node), index as u32));
            }
        }
        // two equal points must fall the same way whatever the order of registration
        points.sort_unstable_by(|a, b| {
            (a.0, &members[a.1 as usize].0).cmp(&(b.0, &members[b.1 as usize].0))
        });
        Ring {
            points,
            members,
            virtual_nodes,
        }
    }

    /// Whether this ring was built from exactly these members.
    pub fn is_for(&self, members: &[(Arc<str>, u32)], virtual_nodes: u32) -> bool {
        self.virtual_nodes == virtual_nodes && self.members == members
    }

    /// Members clockwise from `key`, each once; the first is the key's home.
    pub fn walk(&self, key: u64) -> Walk<'_> {
        let start = self.points.partition_point(|point| point.0 < key);
        Walk {
            ring: self,
            start,
            step: 0,
            seen: Seen::default(),
            found: 0,
        }
    }
}

/// See [`Ring::walk`].
pub struct Walk<'a> {
    ring: &'a Ring,
    start: usize,
    step: usize,
    seen: Seen,
    found: usize,
}

/// A set of member indices: a word for small pools, a vector beyond.
#[derive(Default)]
struct Seen {
    low: u64,
    high: Vec<u32>,
}

impl Seen {
    fn insert(&mut self, index: u32) -> bool {
        if index < 64 {
            let bit = 1u64 << index;
            let fresh = self.low & bit == 0;
            self.low |= bit;
            return fresh;
        }
        match self.high.binary_search(&index) {
            Ok(_) => false,
            Err(at) => {
                self.high.insert(at, index);
                true
            }
        }
    }
}

impl Iterator for Walk<'_> {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let points = &self.ring.points;
        while self.step < points.len() && self.found < self.ring.members.len() {
            let (_, member) = points[(self.start + self.step) % points.len()];
            self.step += 1;
            if self.seen.insert(member) {
                self.found += 1;
                return Some(member as usize);
            }
        }
        None
    }
}

/// The most requests a backend may hold, the new one included, before its keys move on:
/// its weight's share of all requests, plus `epsilon`.
pub fn load_bound(total_in_flight: u64, weight: u32, total_weight: u64, epsilon: f64) -> u64 {
    let share = (total_in_flight + 1) as f64 * f64::from(weight) / total_weight.max(1) as f64;
    (share * (1.0 + epsilon)).ceil() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn members(n: usize) -> Vec<(Arc<str>, u32)> {
        (0..n)
            .map(|i| (Arc::from(format!("worker-{i}")), 1))
            .collect()
    }

    fn home(ring: &Ring, key: u64) -> &str {
        let index = ring.walk(key).next().unwrap();
        &ring.members[index].0
    }

    fn keys(n: u64, seed: u64) -> impl Iterator<Item = u64> {
        (0..n).map(move |k| xxh3_64_with_seed(&k.to_le_bytes(), seed))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn a_leaving_worker_moves_only_its_own_keys(n in 3usize..12, gone in 0usize..12, seed: u64) {
            let gone = gone % n;
            let all = Ring::new(members(n), 200);
            let mut rest = members(n);
            let name = rest.remove(gone).0;
            let rest = Ring::new(rest, 200);
            let mut moved = 0usize;
            for key in keys(2000, seed) {
                if home(&all, key) == &*name {
                    moved += 1;
                } else {
                    prop_assert_eq!(home(&all, key), home(&rest, key));
                }
            }
            // 200 virtual nodes spread a share by about 7 %; half again is far outside of that
            prop_assert!(moved as f64 <= 1.5 * 2000.0 / n as f64, "{} of 2000 keys moved with {} workers", moved, n);
        }

        #[test]
        fn the_order_of_registration_does_not_matter(n in 2usize..9, rotate in 0usize..9, seed: u64) {
            let mut other = members(n);
            other.rotate_left(rotate % n);
            let (a, b) = (Ring::new(members(n), 50), Ring::new(other, 50));
            for key in keys(200, seed) {
                let walk = |r: &Ring| r.walk(key).map(|i| r.members[i].0.to_string()).collect::<Vec<_>>();
                prop_assert_eq!(walk(&a), walk(&b));
            }
        }

        #[test]
        fn a_walk_visits_every_member_once(n in 1usize..150, key: u64) {
            let ring = Ring::new(members(n), 20);
            let mut seen: Vec<usize> = ring.walk(key).collect();
            prop_assert_eq!(seen.len(), n);
            seen.sort_unstable();
            seen.dedup();
            prop_assert_eq!(seen.len(), n);
        }
    }

    #[test]
    fn weight_widens_a_members_share() {
        let ring = Ring::new(vec![("a".into(), 3), ("b".into(), 1)], 200);
        let a = keys(4000, 1).filter(|k| home(&ring, *k) == "a").count();
        assert!(
            (2600..3400).contains(&a),
            "a has weight 3 of 4 but {a} of 4000 keys"
        );
    }

    #[test]
    fn the_bound_is_the_weighted_share_with_slack() {
        assert_eq!(load_bound(0, 1, 4, 0.2), 1, "an idle pool takes a request");
        assert_eq!(load_bound(99, 1, 4, 0.2), 30);
        assert_eq!(load_bound(99, 2, 4, 0.2), 60);
    }
}
