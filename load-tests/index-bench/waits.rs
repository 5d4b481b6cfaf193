//! How long a processor waits for memory from anywhere in so many bytes: what no structure of that size can be faster than.

use std::hint::black_box;
use std::time::Instant;

/// What is fetched at one time.
const LINE_BYTES: usize = 64;
/// Waits that are measured, one after the other.
const WAITS: u32 = 200_000;

/// A line of memory that says which one is next.
#[repr(align(64))]
#[derive(Clone, Copy)]
struct Line(u32);

/// The mean time of one read whose place only the read before it tells, in a memory of so many bytes, in nanoseconds.
pub fn wait_ns(bytes: usize) -> f64 {
    let lines = one_ring((bytes / LINE_BYTES).max(2));
    let mut at = 0;
    let walk = |at: &mut u32| (0..WAITS).for_each(|_| *at = lines[*at as usize].0);
    walk(&mut at); // what is small enough comes into the caches
    let start = Instant::now();
    walk(&mut at);
    black_box(at);
    start.elapsed().as_nanos() as f64 / f64::from(WAITS)
}

/// Lines in one ring that leads through all of them, in no order (Sattolo's shuffle).
fn one_ring(count: usize) -> Vec<Line> {
    let mut next: Vec<Line> = (0..count as u32).map(Line).collect();
    let mut chance = fastrand::Rng::with_seed(7);
    for last in (1..count).rev() {
        next.swap(last, chance.usize(..last));
    }
    next
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ring_leads_through_all_lines() {
        let ring = one_ring(1000);
        let mut at = 0;
        let back = (1..).find(|_| {
            at = ring[at].0 as usize;
            at == 0
        });
        assert_eq!(back, Some(1000));
    }
}
