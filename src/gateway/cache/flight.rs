//! One upstream call for many equal requests. A flight is the meeting place: its task (`drive`) puts
//! in what the backend says, and each request that waits takes it out at its own pace. On whatever
//! ending, waiters are told; the task is ended when nobody waits any more.

use crate::http::error::{By, ErrorKind};
use crate::proxy::{Answered, Failure, Head};
use bytes::Bytes;
use routing::cache_key::CacheKey;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use wire::cache_entry::Entry;
use wire::openai::Usage;

/// Once an answer has grown too large to be kept, so much of it waits for the slowest reader.
const LIVE_WINDOW: usize = 256 << 10;
/// Bytes that all flights together hold for later comers; beyond it they pass their answers on
/// without keeping them.
const HELD_BYTES_MAX: usize = 256 << 20;
/// Parts of the table, so that threads rarely wait for each other.
const SHARDS: usize = 16;

/// What is equal in requests that share a call: the key, and whether token counts are asked for.
pub type FlightKey = (CacheKey, bool);

/// All flights of the process.
#[derive(Debug, Default)]
pub struct Flights {
    shards: [Mutex<HashMap<FlightKey, Arc<Flight>>>; SHARDS],
    running: AtomicUsize,
    held: AtomicUsize,
    purges: AtomicU64,
}

/// See the module.
#[derive(Debug)]
pub struct Flight {
    key: FlightKey,
    limit: usize,
    state: Mutex<State>,
    flights: Arc<Flights>,
    /// Purges that had been asked for when it began.
    purges: u64,
}

#[derive(Debug, Default)]
struct State {
    waiters: Vec<Option<Waiter>>,
    /// Waiters that have neither left nor been failed.
    live: usize,
    head: Option<Arc<Head>>,
    chunks: VecDeque<Bytes>,
    /// Chunks that have been let go.
    gone: usize,
    /// Bytes of `chunks`.
    bytes: usize,
    /// Whether beginnings have been let go, so that nobody can join.
    overflowed: bool,
    end: Option<End>,
    driver: Option<Waker>,
}

#[derive(Debug, Default)]
struct Waiter {
    /// The next chunk to take.
    next: usize,
    failure: Option<Arc<Failure>>,
    waker: Option<Waker>,
}

/// How a flight ended.
#[derive(Debug, Clone)]
pub enum End {
    /// With an answer in one piece.
    Whole(Arc<Answered>),
    /// A tier had the answer.
    Stored(Arc<Entry>, &'static str),
    /// Without an answer.
    Failed(Arc<Failure>),
    /// After its last chunk; with what the engine counted.
    Streamed(Option<Usage>),
    /// After an error event, which is its last chunk.
    Cut(By, ErrorKind),
    /// Within its body, which has no way to say so.
    Broken(By, ErrorKind),
}

/// What a waiter learns first.
#[derive(Debug)]
pub enum Heard {
    /// Chunks follow.
    Head(Arc<Head>),
    /// All of it.
    End(End),
}

impl Flights {
    /// How many run.
    pub fn running(&self) -> usize {
        self.running.load(Relaxed)
    }

    /// Bytes that they hold.
    pub fn held(&self) -> usize {
        self.held.load(Relaxed)
    }

    /// Joins the flight of an equal request, or begins one; whoever begins it runs it.
    pub fn join(self: &Arc<Self>, key: FlightKey, limit: usize) -> (Seat, Option<Pilot>) {
        let mut shard = self.shard(&key);
        // a call that counts tokens serves those as well who did not ask for them
        for key in [(key.0, true), key] {
            if let Some(flight) = shard.get(&key)
                && let Some(seat) = Flight::sit(flight)
            {
                return (seat, None);
            }
        }
        let flight = self.begin(key, limit);
        let seat = Flight::sit(&flight).expect("nobody else knows of it yet");
        shard.insert(key, flight.clone());
        (seat, Some(Pilot(flight)))
    }

    /// Begins a flight that nobody joins.
    pub fn alone(self: &Arc<Self>, key: FlightKey, limit: usize) -> (Seat, Pilot) {
        let flight = self.begin(key, limit);
        let seat = Flight::sit(&flight).expect("it has just begun");
        (seat, Pilot(flight))
    }

    /// Nobody joins the flights that run now, and none of their answers is kept.
    pub fn purge(&self) {
        self.purges.fetch_add(1, Relaxed);
        for shard in &self.shards {
            lock(shard).clear();
        }
    }

    fn begin(self: &Arc<Self>, key: FlightKey, limit: usize) -> Arc<Flight> {
        self.running.fetch_add(1, Relaxed);
        Arc::new(Flight {
            key,
            limit,
            state: Mutex::default(),
            flights: self.clone(),
            purges: self.purges.load(Relaxed),
        })
    }

    fn shard(&self, key: &FlightKey) -> MutexGuard<'_, HashMap<FlightKey, Arc<Flight>>> {
        // both flights of a key are in one shard
        lock(&self.shards[key.0.first_byte() as usize % SHARDS])
    }
}

/// A panic elsewhere must not keep others from their answers: what the lock guards is whole between
/// any two statements.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Flight {
    fn sit(flight: &Arc<Self>) -> Option<Seat> {
        let mut state = lock(&flight.state);
        let is_over = state.live == 0 && !state.waiters.is_empty() && state.end.is_none();
        if state.overflowed || is_over {
            return None;
        }
        state.live += 1;
        state.waiters.push(Some(Waiter::default()));
        Some(Seat {
            flight: flight.clone(),
            at: state.waiters.len() - 1,
        })
    }

    fn leave_table(&self) {
        let mut shard = self.flights.shard(&self.key);
        if shard
            .get(&self.key)
            .is_some_and(|flight| std::ptr::eq(&**flight, self))
        {
            shard.remove(&self.key);
        }
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.flights.running.fetch_sub(1, Relaxed);
        let held = lock(&self.state).bytes;
        self.flights.held.fetch_sub(held, Relaxed);
    }
}

impl State {
    /// Wakers of all who wait, to be woken once the lock is free.
    fn wake_waiters(&mut self) -> Vec<Waker> {
        let waiters = self.waiters.iter_mut().flatten();
        waiters.filter_map(|waiter| waiter.waker.take()).collect()
    }

    /// Lets go of what everybody has taken; answers how many bytes.
    fn trim(&mut self) -> usize {
        let slowest = self
            .waiters
            .iter()
            .flatten()
            .map(|waiter| waiter.next)
            .min();
        let slowest = slowest.unwrap_or(self.gone + self.chunks.len());
        let before = self.bytes;
        while self.gone < slowest
            && let Some(chunk) = self.chunks.pop_front()
        {
            self.gone += 1;
            self.bytes -= chunk.len();
        }
        before - self.bytes
    }
}

/// The task's side of a flight. Dropping it ends the flight: with an error, if nothing else was said.
#[derive(Debug)]
pub struct Pilot(Arc<Flight>);

impl Pilot {
    /// The answer has begun.
    pub fn head(&self, head: Head) {
        let wakers = {
            let mut state = lock(&self.0.state);
            state.head = Some(Arc::new(head));
            state.wake_waiters()
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    /// More of the answer. Answers whether all of it is still held.
    pub fn push(&self, chunk: Bytes) -> bool {
        let held = self.0.flights.held.fetch_add(chunk.len(), Relaxed) + chunk.len();
        let mut overflows = false;
        let (wakers, let_go) = {
            let mut state = lock(&self.0.state);
            state.bytes += chunk.len();
            state.chunks.push_back(chunk);
            if !state.overflowed && (state.bytes > self.0.limit || held > HELD_BYTES_MAX) {
                state.overflowed = true;
                overflows = true;
            }
            let let_go = if state.overflowed { state.trim() } else { 0 };
            (state.wake_waiters(), let_go)
        };
        self.0.flights.held.fetch_sub(let_go, Relaxed);
        if overflows {
            self.0.leave_table();
        }
        wakers.into_iter().for_each(Waker::wake);
        !overflows
    }

    /// Waits until there is room for another chunk: always, as long as all of the answer is held.
    pub async fn room(&self) {
        std::future::poll_fn(|cx| {
            let mut state = lock(&self.0.state);
            if !state.overflowed || state.bytes <= LIVE_WINDOW {
                return Poll::Ready(());
            }
            state.driver = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Waits until nobody waits any more.
    pub async fn all_left(&self) {
        std::future::poll_fn(|cx| {
            let mut state = lock(&self.0.state);
            if state.live == 0 {
                return Poll::Ready(());
            }
            state.driver = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// All chunks, if none was let go.
    pub fn chunks(&self) -> Option<Vec<Bytes>> {
        let state = lock(&self.0.state);
        (!state.overflowed).then(|| state.chunks.iter().cloned().collect())
    }

    /// The failure goes to whoever waits longest, when somebody else waits too; answers whether.
    pub fn fail_one(&self, failure: &Arc<Failure>) -> bool {
        let waker = {
            let mut state = lock(&self.0.state);
            if state.live < 2 {
                return false;
            }
            state.live -= 1;
            let mut waiters = state.waiters.iter_mut().flatten();
            let waiter = waiters.find(|waiter| waiter.failure.is_none());
            let waiter = waiter.expect("two are live");
            waiter.failure = Some(failure.clone());
            waiter.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
        true
    }

    /// Says how it ended. Who comes later still gets the answer, until the flight is dropped; unless
    /// it is a failure, which is nobody's but theirs who waited for it.
    pub fn end(&self, end: End) {
        if matches!(end, End::Failed(_) | End::Cut(..) | End::Broken(..)) {
            self.0.leave_table();
        }
        let wakers = {
            let mut state = lock(&self.0.state);
            state.end.get_or_insert(end);
            state.wake_waiters()
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Whether what was kept has been removed since it began.
    pub fn was_purged(&self) -> bool {
        self.0.flights.purges.load(Relaxed) != self.0.purges
    }

    /// Whether somebody who joins may look for token counts.
    pub fn counts_tokens(&self) -> bool {
        self.0.key.1
    }

    /// The key.
    pub fn key(&self) -> CacheKey {
        self.0.key.0
    }
}

impl Drop for Pilot {
    fn drop(&mut self) {
        // the task panicked, or was given up: waiters, if there are any, must not wait for ever
        self.end(End::Failed(Arc::new(Failure::internal())));
        self.0.leave_table();
    }
}

/// A waiter's side of a flight; leaving it is dropping it.
#[derive(Debug)]
pub struct Seat {
    flight: Arc<Flight>,
    at: usize,
}

impl Seat {
    /// Waits for the beginning of the answer, or for its end, whatever comes first.
    pub async fn heard(&mut self) -> Heard {
        std::future::poll_fn(|cx| {
            let mut state = lock(&self.flight.state);
            let (head, end) = (state.head.clone(), state.end.clone());
            let waiter = state.waiters[self.at].as_mut().expect("sits until dropped");
            if let Some(failure) = waiter.failure.clone() {
                return Poll::Ready(Heard::End(End::Failed(failure)));
            }
            if let Some(head) = head {
                return Poll::Ready(Heard::Head(head));
            }
            if let Some(end) = end {
                return Poll::Ready(Heard::End(end));
            }
            waiter.waker = Some(cx.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// The next chunk, or how it ended.
    pub fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Result<Bytes, End>> {
        let (polled, driver, let_go) = {
            let mut state = lock(&self.flight.state);
            let gone = state.gone;
            let next = state.waiters[self.at]
                .as_ref()
                .expect("sits until dropped")
                .next;
            match state.chunks.get(next - gone).cloned() {
                Some(chunk) => {
                    self.waiter(&mut state).next = next + 1;
                    let let_go = if state.overflowed { state.trim() } else { 0 };
                    let driver = (let_go > 0).then(|| state.driver.take()).flatten();
                    (Poll::Ready(Ok(chunk)), driver, let_go)
                }
                None => match state.end.clone() {
                    Some(end) => (Poll::Ready(Err(end)), None, 0),
                    None => {
                        self.waiter(&mut state).waker = Some(cx.waker().clone());
                        (Poll::Pending, None, 0)
                    }
                },
            }
        };
        self.flight.flights.held.fetch_sub(let_go, Relaxed);
        if let Some(driver) = driver {
            driver.wake();
        }
        polled
    }

    fn waiter<'a>(&self, state: &'a mut State) -> &'a mut Waiter {
        state.waiters[self.at].as_mut().expect("sits until dropped")
    }

    /// All chunks to the end, and how it ended; broken off when they are more than so many bytes.
    pub async fn collect(&mut self, limit: usize) -> (Vec<Bytes>, End) {
        let (mut chunks, mut bytes) = (Vec::new(), 0);
        loop {
            match std::future::poll_fn(|cx| self.poll_chunk(cx)).await {
                Ok(chunk) => {
                    bytes += chunk.len();
                    chunks.push(chunk);
                    if bytes > limit {
                        return (chunks, End::Broken(By::Router, ErrorKind::BadBody));
                    }
                }
                Err(end) => return (chunks, end),
            }
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let driver = {
            let mut state = lock(&self.flight.state);
            let left = state.waiters[self.at].take();
            if left.is_some_and(|waiter| waiter.failure.is_none()) {
                state.live -= 1;
            }
            // it may have been the slowest, or the last
            if state.overflowed || state.live == 0 {
                let let_go = if state.overflowed { state.trim() } else { 0 };
                self.flight.flights.held.fetch_sub(let_go, Relaxed);
                state.driver.take()
            } else {
                None
            }
        };
        if let Some(driver) = driver {
            driver.wake();
        }
    }
}

#[cfg(test)]
#[path = "flight_test.rs"]
mod tests;
