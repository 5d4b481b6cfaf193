//! When requests are sent: at times that do not depend on answers (open loop), or one after the other on a number of
//! connections (closed loop).

use crate::client::{Client, Seen, Sent};
use crate::progress::Progress;
use crate::workload::Ask;
use bytes::Bytes;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Duration, Instant};
use tokio::sync::{Mutex, Semaphore};
use tokio::task::spawn_local;

/// How the load is paced.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pace {
    /// So many requests a second, at random times (Poisson), whatever the answers do.
    Rate(f64),
    /// When the workload says.
    Recorded,
    /// So many clients, each asks when it has its answer.
    Closed(usize),
}

impl Pace {
    /// Whether latencies can count from the moment at which a request was due.
    pub fn is_open(self) -> bool {
        !matches!(self, Pace::Closed(_))
    }
}

/// Bounds of a run.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// No request is begun after this.
    pub lasts: Duration,
    /// Requests at one time; what is due beyond waits, and its wait counts.
    pub in_flight: usize,
}

/// What happened.
#[derive(Debug)]
pub struct Ran {
    /// When it began.
    pub began: Instant,
    /// What clients saw, in the order in which they ended.
    pub seen: Vec<Seen>,
    /// Requests that were due in time and were not begun.
    pub unsent: usize,
}

/// Makes the body of a request.
pub type Bodies = Box<dyn Fn(&Ask) -> Bytes>;

struct Shared {
    client: Client,
    body: Bodies,
    places: Semaphore,
    conversations: RefCell<HashMap<usize, Rc<Mutex<()>>>>,
    seen: RefCell<Vec<Seen>>,
    unsent: Cell<usize>,
    ends: Instant,
    progress: Progress,
}

impl Shared {
    /// Asks, after the turn before and when there is a place; not any more after the end.
    async fn ask(&self, ask: &Ask, due: Instant) {
        let turns = ask.conversation.map(|conversation| {
            let mut all = self.conversations.borrow_mut();
            all.entry(conversation).or_default().clone()
        });
        let before = match &turns {
            Some(turns) => Some(turns.lock().await),
            None => None,
        };
        let place = self.places.acquire().await.expect("never closed");
        if Instant::now() >= self.ends {
            self.unsent.set(self.unsent.get() + 1);
            return;
        }
        let sent = Sent {
            body: (self.body)(ask),
            tenant: ask.tenant,
            leaves: ask.leaves,
            due,
        };
        self.progress.began();
        let seen = self.client.ask(sent).await;
        self.progress.ended(seen.end.is_good());
        self.seen.borrow_mut().push(seen);
        drop((place, before));
    }
}

/// Runs the load on this thread.
pub async fn run(
    (client, body): (Client, Bodies),
    asks: Vec<Ask>,
    (pace, bounds, seed): (Pace, Bounds, u64),
) -> Ran {
    let began = Instant::now();
    let shared = Rc::new(Shared {
        client,
        body,
        places: Semaphore::new(bounds.in_flight),
        conversations: RefCell::default(),
        seen: RefCell::default(),
        unsent: Cell::new(0),
        ends: began + bounds.lasts,
        progress: Progress::new(asks.len(), bounds.lasts),
    });
    let ticking = spawn_local({
        let shared = shared.clone();
        async move { shared.progress.tick().await }
    });
    match pace {
        Pace::Closed(clients) => closed(&shared, asks, clients).await,
        Pace::Rate(rate) => open(&shared, poisson(asks, rate, seed), began).await,
        Pace::Recorded => open(&shared, recorded(asks), began).await,
    }
    ticking.abort();
    shared.progress.finish();
    Ran {
        began,
        seen: shared.seen.take(),
        unsent: shared.unsent.get(),
    }
}

/// Every request with the time at which it is due.
pub type Schedule = Vec<(Duration, Ask)>;

/// Random times of a steady rate.
pub fn poisson(asks: Vec<Ask>, rate: f64, seed: u64) -> Schedule {
    let mut chance = fastrand::Rng::with_seed(seed ^ 0x9ace);
    let mut at = 0.0;
    let next = |ask| {
        at += -chance.f64().max(f64::MIN_POSITIVE).ln() / rate;
        (Duration::from_secs_f64(at), ask)
    };
    asks.into_iter().map(next).collect()
}

/// The times of the workload.
pub fn recorded(asks: Vec<Ask>) -> Schedule {
    asks.into_iter()
        .map(|ask| (ask.due.unwrap_or_default(), ask))
        .collect()
}

async fn open(shared: &Rc<Shared>, schedule: Schedule, began: Instant) {
    let mut running = Vec::new();
    for (at, ask) in schedule {
        let due = began + at;
        if due >= shared.ends {
            break;
        }
        tokio::time::sleep_until(due.into()).await;
        let shared = shared.clone();
        running.push(spawn_local(async move { shared.ask(&ask, due).await }));
    }
    for request in running {
        let _ = request.await;
    }
}

async fn closed(shared: &Rc<Shared>, asks: Vec<Ask>, clients: usize) {
    let asks = Rc::new(RefCell::new(asks.into_iter()));
    let clients: Vec<_> = (0..clients)
        .map(|_| {
            let (shared, asks) = (shared.clone(), asks.clone());
            spawn_local(async move {
                while Instant::now() < shared.ends {
                    let next = asks.borrow_mut().next();
                    let Some(ask) = next else { return };
                    shared.ask(&ask, Instant::now()).await;
                }
            })
        })
        .collect();
    for client in clients {
        let _ = client.await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::Message;

    fn asks(count: usize) -> Vec<Ask> {
        vec![Ask::once(vec![Message::of("user", 1, 1)], 1); count]
    }

    #[test]
    fn random_times_come_at_the_rate_and_do_not_go_back() {
        let schedule = poisson(asks(5000), 100.0, 3);
        let last = schedule.last().unwrap().0.as_secs_f64();
        assert!((last / 50.0 - 1.0).abs() < 0.06, "{last}");
        assert!(schedule.windows(2).all(|two| two[0].0 <= two[1].0));
        let short = schedule
            .windows(2)
            .filter(|two| two[1].0 - two[0].0 < Duration::from_millis(10));
        let share = short.count() as f64 / 5000.0;
        assert!((share - 0.632).abs() < 0.04, "exponential gaps: {share}");
    }
}
