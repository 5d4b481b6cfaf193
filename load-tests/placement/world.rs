//! One run: a queue of events in virtual time, from the first arrival to the last token.

use crate::engine::Engine;
use crate::outcome::{Outcome, Trip};
use crate::request::Request;
use crate::router::{Attempt, Router};
use routing::ids::BackendId;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

/// `retry.max_attempts` by default.
const ATTEMPTS_MAX: usize = 2;
/// A shorter wait for the scheduler is a step that runs, not a queue.
const QUEUE_MIN: Duration = Duration::from_millis(50);

/// When requests come.
#[derive(Debug, Clone)]
pub enum Arrivals {
    /// At these times, whatever the fleet does.
    Open(Vec<Duration>),
    /// So many at the beginning, then one for each that has ended.
    Closed(usize),
}

/// A worker that is killed, and comes back with an empty cache.
#[derive(Debug, Clone, Copy)]
pub struct Loss {
    /// Which.
    pub worker: usize,
    /// When it is killed.
    pub from: Duration,
    /// When it is back.
    pub to: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrived(usize),
    Ready {
        worker: usize,
        life: u32,
        request: usize,
    },
    Stepped {
        worker: usize,
        life: u32,
    },
    Killed(usize),
    Returned(usize),
}

/// A request on its way.
#[derive(Debug, Default, Clone)]
struct Going {
    arrived: Duration,
    attempt: Option<Attempt>,
    tried: Vec<BackendId>,
    trip: Trip,
}

/// See the module.
pub struct World<'a> {
    requests: &'a [Request],
    engines: Vec<Engine>,
    router: Router,
    going: Vec<Going>,
    events: BinaryHeap<Reverse<(Duration, u64, Event)>>,
    sent: u64,
    /// Requests to come, in a closed loop.
    to_come: Option<usize>,
    now: Duration,
    /// Within which idle workers beside queues count.
    watched: (Duration, Duration),
    wasted: Duration,
    work: Vec<u64>,
}

impl<'a> World<'a> {
    /// Requests that come so to these engines, placed by this router.
    pub fn new(
        requests: &'a [Request],
        arrivals: &Arrivals,
        (engines, router): (Vec<Engine>, Router),
    ) -> Self {
        let mut world = World {
            work: vec![0; engines.len()],
            requests,
            engines,
            router,
            going: vec![Going::default(); requests.len()],
            events: BinaryHeap::new(),
            sent: 0,
            to_come: None,
            now: Duration::ZERO,
            watched: (Duration::ZERO, Duration::ZERO),
            wasted: Duration::ZERO,
        };
        match arrivals {
            Arrivals::Open(times) => {
                let measured = Outcome::first_measured(requests.len());
                let at = |index: usize| times.get(index).copied().unwrap_or_default();
                world.watched = (at(measured), at(requests.len() - 1));
                for (index, at) in times.iter().enumerate().take(requests.len()) {
                    world.push(*at, Event::Arrived(index));
                }
            }
            Arrivals::Closed(at_once) => {
                let first = requests.len().min(*at_once);
                (0..first).for_each(|index| world.push(Duration::ZERO, Event::Arrived(index)));
                world.to_come = Some(first);
            }
        }
        world
    }

    /// A worker is lost for a while.
    pub fn with_loss(mut self, loss: Loss) -> Self {
        self.push(loss.from, Event::Killed(loss.worker));
        self.push(loss.to, Event::Returned(loss.worker));
        self
    }

    /// Runs to the end; answers when that was, and what came of it.
    pub fn run(mut self) -> (Duration, Outcome) {
        while let Some(Reverse((at, _, event))) = self.events.pop() {
            self.watch(at);
            self.now = at;
            match event {
                Event::Arrived(request) => {
                    self.going[request].arrived = at;
                    self.place(request);
                }
                Event::Ready {
                    worker,
                    life,
                    request,
                } => {
                    if self.engines[worker].life == life {
                        self.engines[worker].ready(request as u64, &self.requests[request], at);
                        self.begin_step(worker);
                    }
                }
                Event::Stepped { worker, life } => {
                    if self.engines[worker].life == life {
                        self.end_step(worker);
                        self.begin_step(worker);
                    }
                }
                Event::Killed(worker) => self.kill(worker),
                Event::Returned(worker) => {
                    self.engines[worker].come_back();
                    self.router.set_alive(worker, true);
                }
            }
        }
        let (from, to) = self.watched;
        let watched = to.saturating_sub(from).as_secs_f64().max(1e-9);
        let wasted = self.wasted.as_secs_f64() / watched;
        let trips: Vec<Trip> = self.going.into_iter().map(|going| going.trip).collect();
        let distrusted = self.router.distrusted();
        let outcome = Outcome::of(&trips, self.requests, (&self.work, wasted, distrusted));
        (self.now, outcome)
    }

    fn push(&mut self, at: Duration, event: Event) {
        self.sent += 1;
        self.events.push(Reverse((at, self.sent, event)));
    }

    /// Adds the time up to `until` in which one worker is idle while requests wait at another.
    fn watch(&mut self, until: Duration) {
        let (from, to) = (self.now.max(self.watched.0), until.min(self.watched.1));
        if from >= to || !self.engines.iter().any(Engine::is_idle) {
            return;
        }
        let waits = self.engines.iter().filter_map(Engine::waits_since);
        if let Some(since) = waits.min() {
            self.wasted += to.saturating_sub(from.max(since + QUEUE_MIN));
        }
    }

    fn place(&mut self, index: usize) {
        let request = &self.requests[index];
        let going = &mut self.going[index];
        let at = (&self.engines[..], self.now);
        let Some(attempt) = self.router.place(request, &going.tried, at) else {
            going.trip.failed = true;
            self.ended();
            return;
        };
        let worker = attempt.worker;
        going.trip.predicted = attempt.reach.filter(|found| found.of_blocks > 0);
        going.attempt = Some(attempt);
        let ready = self.engines[worker].arrive(self.now);
        let life = self.engines[worker].life;
        let event = Event::Ready {
            worker,
            life,
            request: index,
        };
        self.push(ready, event);
    }

    fn begin_step(&mut self, worker: usize) {
        if let Some(takes) = self.engines[worker].begin_step() {
            let life = self.engines[worker].life;
            self.push(self.now + takes, Event::Stepped { worker, life });
        }
    }

    fn end_step(&mut self, worker: usize) {
        let stepped = self.engines[worker].end_step();
        self.router.heard(worker, &stepped.events, self.now);
        for output in stepped.outputs {
            let index = output.id.0 as usize;
            let request = &self.requests[index];
            let going = &mut self.going[index];
            let Some(attempt) = &mut going.attempt else {
                continue;
            };
            if going.trip.ttft.is_none() {
                going.trip.ttft = Some(self.now - going.arrived);
                going.trip.cached = output.cached as u64;
                self.router.first_token(attempt, request, self.now);
            }
            if output.last {
                let cached = output.cached as u64;
                self.router.served(attempt, request, (cached, self.now));
                going.attempt = None;
                going.trip.ended = Some(self.now);
                let computed = request.prompt.len() as u64 - cached;
                self.work[worker] += computed + request.answer.len() as u64;
                self.ended();
            }
        }
    }

    /// In a closed loop, the next one comes.
    fn ended(&mut self) {
        if let Some(next) = self.to_come.filter(|next| *next < self.requests.len()) {
            self.to_come = Some(next + 1);
            self.push(self.now, Event::Arrived(next));
        }
    }

    /// Requests that had no byte yet are tried elsewhere; clients of the others see an error.
    fn kill(&mut self, worker: usize) {
        self.engines[worker].kill();
        self.router.set_alive(worker, false);
        for index in 0..self.going.len() {
            let going = &mut self.going[index];
            let Some(attempt) = going.attempt.take_if(|attempt| attempt.worker == worker) else {
                continue;
            };
            self.router
                .failed(&attempt, &self.requests[index], self.now);
            going.tried.push(BackendId(worker as u32));
            if going.trip.ttft.is_none() && going.tried.len() < ATTEMPTS_MAX {
                self.place(index);
            } else {
                going.trip.failed = true;
                self.ended();
            }
        }
    }
}

#[cfg(test)]
#[path = "world_test.rs"]
mod test;
