//! Flights against a plain model: whoever sits from the start gets every chunk once and in order,
//! whatever others do, and nothing stays behind.

use super::*;
use proptest::prelude::*;
use routing::cache_key::KeyParts;
use std::task::Waker;

fn key(body: &[u8]) -> FlightKey {
    let parts = KeyParts {
        route: "chat",
        model: "m",
        key_version: 1,
        tenant: "t",
        body,
    };
    (parts.key(), true)
}

#[derive(Debug, Clone)]
enum Op {
    Join,
    Leave(usize),
    Read(usize),
    Push(usize),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        Just(Op::Join),
        (0..8usize).prop_map(Op::Leave),
        (0..8usize).prop_map(Op::Read),
        (0..8usize).prop_map(Op::Read),
        (1..400usize).prop_map(Op::Push),
        (1..400usize).prop_map(Op::Push),
    ];
    proptest::collection::vec(op, 0..80)
}

fn take(seat: &mut Seat, got: &mut Vec<u8>) -> Option<End> {
    let mut cx = Context::from_waker(Waker::noop());
    match seat.poll_chunk(&mut cx) {
        Poll::Ready(Ok(chunk)) => {
            got.extend_from_slice(&chunk);
            None
        }
        Poll::Ready(Err(end)) => Some(end),
        Poll::Pending => None,
    }
}

proptest! {
    #[test]
    fn every_seat_reads_all_of_the_answer_and_nothing_is_held_afterwards(ops in ops(), limit in 1..3000usize) {
        let flights = Arc::<Flights>::default();
        let (first, pilot) = flights.join(key(b"a"), limit);
        let pilot = pilot.expect("the first one runs it");
        let mut seats = vec![(first, Vec::new())];
        let (mut sent, mut overflowed) = (Vec::new(), false);
        for op in ops {
            match op {
                Op::Join => {
                    let (seat, other) = flights.join(key(b"a"), limit);
                    // a flight that nobody sits in, or that has let go of its beginning, is not joined
                    prop_assert_eq!(other.is_some(), overflowed || seats.is_empty());
                    if other.is_none() {
                        seats.push((seat, Vec::new()));
                    }
                }
                Op::Leave(at) if at < seats.len() => drop(seats.swap_remove(at)),
                Op::Read(at) if at < seats.len() => {
                    let (seat, got) = &mut seats[at];
                    prop_assert!(take(seat, got).is_none());
                    prop_assert!(sent.starts_with(got));
                }
                Op::Push(length) => {
                    let chunk: Vec<u8> = (0..length).map(|n| (sent.len() + n) as u8).collect();
                    sent.extend_from_slice(&chunk);
                    pilot.push(chunk.into());
                    overflowed |= sent.len() > limit;
                    let held = flights.held();
                    prop_assert!(overflowed || held == sent.len(), "{held}");
                }
                _ => {}
            }
        }
        prop_assert_eq!(pilot.chunks().map(|chunks| chunks.concat()), (!overflowed).then_some(sent.clone()));
        pilot.end(End::Streamed(None));
        for (seat, got) in &mut seats {
            let end = (0..200).find_map(|_| take(seat, got));
            prop_assert!(matches!(end, Some(End::Streamed(_))));
            prop_assert_eq!(&*got, &sent);
        }
        drop((seats, pilot));
        prop_assert_eq!((flights.running(), flights.held()), (0, 0));
        let (_, next) = flights.join(key(b"a"), limit);
        prop_assert!(next.is_some(), "it has left the table");
    }
}

#[tokio::test]
async fn a_pilot_that_is_dropped_fails_all_who_wait() {
    let flights = Arc::<Flights>::default();
    let (mut seat, pilot) = flights.join(key(b"a"), 100);
    let (mut other, none) = flights.join(key(b"a"), 100);
    assert!(none.is_none());
    drop(pilot);
    for seat in [&mut seat, &mut other] {
        assert!(matches!(seat.heard().await, Heard::End(End::Failed(_))));
    }
    let (_, next) = flights.join(key(b"a"), 100);
    assert!(next.is_some(), "a failure is not for those who come later");
}

#[tokio::test]
async fn a_failure_goes_to_the_oldest_waiter_only_while_another_waits() {
    let flights = Arc::<Flights>::default();
    let (mut first, pilot) = flights.join(key(b"a"), 100);
    let pilot = pilot.expect("it is the first");
    let failure = Arc::new(Failure::internal());
    assert!(!pilot.fail_one(&failure), "it is the only one");
    let (mut second, _) = flights.join(key(b"a"), 100);
    assert!(pilot.fail_one(&failure));
    assert!(matches!(first.heard().await, Heard::End(End::Failed(_))));
    assert!(!pilot.fail_one(&failure), "the other is the only one now");
    drop(first);
    pilot.push(Bytes::from_static(b"x"));
    pilot.end(End::Streamed(None));
    let (chunks, end) = second.collect(10).await;
    assert!(chunks.len() == 1 && matches!(end, End::Streamed(_)));
}

#[tokio::test]
async fn who_wants_no_counts_joins_a_call_that_has_them_and_not_the_other_way_round() {
    let flights = Arc::<Flights>::default();
    let (with, without) = (key(b"a"), (key(b"a").0, false));
    let (_seat, first) = flights.join(without, 100);
    assert!(first.is_some());
    let (_seat, second) = flights.join(with, 100);
    assert!(second.is_some(), "that call has no counts");
    let (_seat, third) = flights.join(without, 100);
    assert!(third.is_none());
    flights.purge();
    let (_seat, fresh) = flights.join(with, 100);
    assert!(fresh.is_some_and(|pilot| !pilot.was_purged()));
    assert!(second.is_some_and(|pilot| pilot.was_purged()));
}
