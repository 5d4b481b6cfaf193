//! What is sent live, what is kept, and what a listener gets, by settings.

use super::*;
use crate::kv_cache::BlockHash;
use tokio::sync::broadcast::error::TryRecvError;

const BLOCK: usize = 2;

fn feed(quirks: KvEventQuirks) -> Feed {
    Feed::new(&KvEvents::default(), quirks, BLOCK)
}

fn stored(hash: u64) -> CacheEvent {
    CacheEvent::Stored {
        hashes: vec![BlockHash(hash)],
        parent: None,
        tokens: vec![1, 2],
        block_size: BLOCK,
        cache_salt: None,
    }
}

fn removed(hash: u64) -> CacheEvent {
    CacheEvent::Removed {
        hashes: vec![BlockHash(hash)],
    }
}

/// Publishes `count` batches and gives the numbers that a listener from the start saw live.
fn live_of(feed: &Feed, count: u64) -> Vec<u64> {
    let mut listener = feed.subscribe(None);
    for hash in 0..count {
        feed.publish(0.0, vec![stored(hash)]);
    }
    let mut seen = Vec::new();
    loop {
        match listener.live.try_recv() {
            Ok(batch) => seen.push(batch.seq),
            Err(TryRecvError::Empty) => return seen,
            Err(fault) => panic!("{fault}"),
        }
    }
}

fn kept(feed: &Feed) -> Vec<u64> {
    feed.since(0).iter().map(|batch| batch.seq).collect()
}

#[test]
fn a_step_without_events_makes_no_batch() {
    let feed = feed(KvEventQuirks::default());
    feed.publish(0.0, Vec::new());
    assert_eq!(live_of(&feed, 2), [0, 1]);
    assert_eq!(kept(&feed), [0, 1]);
}

#[test]
fn a_dropped_batch_is_kept_and_a_lost_one_is_not() {
    let feed = feed(KvEventQuirks {
        drop_every: Some(3),
        lose_seq: Some(4),
        ..KvEventQuirks::default()
    });
    assert_eq!(live_of(&feed, 7), [0, 1, 3, 6]);
    assert_eq!(kept(&feed), [0, 1, 2, 3, 5, 6]);
}

#[test]
fn a_reordered_batch_follows_its_successor() {
    let feed = feed(KvEventQuirks {
        reorder_every: Some(2),
        ..KvEventQuirks::default()
    });
    assert_eq!(live_of(&feed, 6), [0, 2, 1, 4, 3]);
    assert_eq!(kept(&feed), [0, 1, 2, 3, 4, 5]);
}

#[test]
fn reordering_each_batch_swaps_pairs() {
    let feed = feed(KvEventQuirks {
        reorder_every: Some(1),
        ..KvEventQuirks::default()
    });
    assert_eq!(live_of(&feed, 4), [1, 0, 3, 2]);
}

#[test]
fn a_restart_is_asked_for_once_and_counts_from_zero() {
    let feed = feed(KvEventQuirks {
        restart_after: Some(2),
        ..KvEventQuirks::default()
    });
    assert!(!feed.publish(0.0, vec![stored(1)]));
    assert!(feed.publish(0.0, vec![stored(2)]));
    feed.restart();
    assert!(!feed.publish(0.0, vec![stored(3)]) && !feed.publish(0.0, vec![stored(4)]));
    assert_eq!(kept(&feed), [0, 1]);
}

#[test]
fn offload_and_copies_change_what_is_said() {
    let feed = feed(KvEventQuirks {
        offload: true,
        duplicate: true,
        ..KvEventQuirks::default()
    });
    feed.publish(0.0, vec![stored(1), removed(1), CacheEvent::Cleared]);
    let moved = CacheEvent::Offloaded {
        hashes: vec![BlockHash(1)],
        block_size: BLOCK,
    };
    assert_eq!(
        feed.since(0)[0].events,
        [
            stored(1),
            stored(1),
            moved.clone(),
            moved,
            CacheEvent::Cleared
        ]
    );
}

#[actix_web::test]
async fn a_listener_resumes_after_what_it_has_seen() {
    let feed = feed(KvEventQuirks::default());
    for hash in 0..3 {
        feed.publish(0.0, vec![stored(hash)]);
    }
    let mut resumed = feed.subscribe(Some(1));
    let mut ahead = feed.subscribe(Some(77));
    let mut up_to_date = feed.subscribe(Some(2));
    feed.publish(0.0, vec![stored(3)]);
    assert_eq!(resumed.next().await.unwrap().seq, 2);
    assert_eq!(resumed.next().await.unwrap().seq, 3);
    assert_eq!(up_to_date.next().await.unwrap().seq, 3);
    assert_eq!(
        ahead.next().await.unwrap().seq,
        0,
        "the engine has started over"
    );
}

#[actix_web::test]
async fn a_listener_that_is_too_slow_is_told_to_go() {
    let feed = feed(KvEventQuirks::default());
    let mut slow = feed.subscribe(None);
    for hash in 0..=LAG_MAX as u64 {
        feed.publish(0.0, vec![stored(hash)]);
    }
    assert_eq!(slow.next().await, Err(Ended::Lagged));
}

#[test]
fn a_full_queue_loses_only_the_live_copy() {
    let feed = feed(KvEventQuirks::default());
    let mut queue = feed.attach_publisher(1);
    for hash in 0..2 {
        feed.publish(0.0, vec![stored(hash)]);
    }
    assert_eq!(queue.try_recv().unwrap().seq, 0);
    assert!(queue.try_recv().is_err());
    assert_eq!(kept(&feed), [0, 1]);
}
