//! Permits of requests that run, and the queue of those that wait: the arithmetic is `routing::quota`'s, here
//! are the lock around it and the waking.

use routing::quota::{Admission, Full, Need, Priority, Scope, Ticket};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;

/// See the module.
#[derive(Debug, Default)]
pub struct Permits(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    admission: Admission,
    sleepers: HashMap<Ticket, oneshot::Sender<()>>,
}

/// Why a request may not run.
#[derive(Debug, PartialEq, Eq)]
pub enum NoPermit {
    /// This limit is full, and nobody waits here.
    NoQueue(Need),
    /// A limit of this scope is full, and so is the queue.
    QueueFull(Scope),
    /// It has waited for so long as it may.
    TimedOut(Scope),
}

impl Permits {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes places for a request, or waits for them; says whether it has waited.
    ///
    /// # Errors
    /// Why there are none.
    pub async fn take(
        self: &Arc<Self>,
        (tenant, priority): (&Arc<str>, Priority),
        needs: Vec<Need>,
        (room, timeout): (usize, Duration),
    ) -> Result<(Permit, bool), NoPermit> {
        let (sleeper, scope) = {
            let mut state = self.state();
            let wanted = |needs| Wanted {
                permits: self.clone(),
                tenant: tenant.clone(),
                needs,
            };
            let scope = match state.admission.enter(tenant, &needs) {
                Ok(()) => return Ok((wanted(needs).given(), false)),
                Err(full) if room == 0 => return Err(NoPermit::NoQueue(full.clone())),
                Err(full) => full.scope,
            };
            let waits = state
                .admission
                .wait((tenant, priority), needs.clone(), room);
            let ticket = waits.map_err(|Full| NoPermit::QueueFull(scope))?;
            let (wake, woken) = oneshot::channel();
            state.sleepers.insert(ticket, wake);
            let sleeper = Sleeper {
                ticket,
                wanted: Some(wanted(needs)),
                woken,
            };
            (sleeper, scope)
        };
        match tokio::time::timeout(timeout, sleeper.wait()).await {
            Ok(permit) => Ok((permit, true)),
            Err(_) => Err(NoPermit::TimedOut(scope)),
        }
    }

    /// Requests that run, and that wait.
    pub fn counts(&self) -> (u32, usize) {
        let state = self.state();
        (state.admission.running(), state.admission.waiting())
    }
}

/// Places that a request has.
#[derive(Debug)]
pub struct Permit {
    permits: Arc<Permits>,
    tenant: Arc<str>,
    needs: Vec<Need>,
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = self.permits.state();
        for ticket in state.admission.leave(&self.tenant, &self.needs) {
            if let Some(wake) = state.sleepers.remove(&ticket) {
                let _ = wake.send(()); // one that left meanwhile gives its places back itself
            }
        }
    }
}

/// A request that waits. Dropped before it is woken, it leaves the queue, or the places that it has just
/// been given.
struct Sleeper {
    ticket: Ticket,
    wanted: Option<Wanted>,
    woken: oneshot::Receiver<()>,
}

/// What it waits for.
struct Wanted {
    permits: Arc<Permits>,
    tenant: Arc<str>,
    needs: Vec<Need>,
}

impl Wanted {
    /// It was given all of it.
    fn given(self) -> Permit {
        Permit {
            permits: self.permits,
            tenant: self.tenant,
            needs: self.needs,
        }
    }
}

impl Sleeper {
    async fn wait(mut self) -> Permit {
        // the sender is dropped with the queue alone, which what is wanted keeps alive
        let _ = (&mut self.woken).await;
        let wanted = self.wanted.take();
        wanted.expect("taken here alone, and when dropped").given()
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let Some(wanted) = self.wanted.take() else {
            return;
        };
        let waited = {
            let mut state = wanted.permits.state();
            state.sleepers.remove(&self.ticket);
            state.admission.give_up(self.ticket)
        };
        if !waited {
            drop(wanted.given());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn one() -> Vec<Need> {
        vec![Need {
            scope: Scope::Key,
            name: "k".into(),
            limit: 1,
        }]
    }

    async fn take(
        permits: &Arc<Permits>,
        room: usize,
        timeout: Duration,
    ) -> Result<Permit, NoPermit> {
        let tenant: Arc<str> = "t".into();
        let taken = permits.take((&tenant, Priority::Normal), one(), (room, timeout));
        taken.await.map(|(permit, _)| permit)
    }

    #[actix_web::test]
    async fn whoever_waits_is_woken_when_a_place_comes_back_at_that_very_moment() {
        let permits = Arc::<Permits>::default();
        for _ in 0..10_000 {
            let first = take(&permits, 1, LONG).await.unwrap();
            let waits = take(&permits, 1, LONG);
            tokio::pin!(waits);
            // half of the time it waits already when the place comes back
            if fastrand::bool() {
                let poll = std::future::poll_fn(|cx| {
                    std::task::Poll::Ready(waits.as_mut().poll(cx).is_pending())
                });
                assert!(poll.await);
            }
            drop(first);
            let second = tokio::time::timeout(LONG, waits).await.unwrap();
            assert_eq!(permits.counts(), (1, 0));
            drop(second);
        }
        assert_eq!(permits.counts(), (0, 0));
    }

    #[actix_web::test]
    async fn waiters_on_other_threads_lose_no_wake_up_and_leave_nothing() {
        let permits = Arc::<Permits>::default();
        let threads = (0..4).map(|_| {
            let permits = permits.clone();
            std::thread::spawn(move || {
                actix_rt::System::new().block_on(async move {
                    for turn in 0..500 {
                        let short = Duration::from_micros(fastrand::u64(0..200));
                        let timeout = if turn % 3 == 0 { short } else { LONG };
                        let permit = take(&permits, 8, timeout).await;
                        assert!(permit.is_ok() || turn % 3 == 0);
                    }
                });
            })
        });
        for thread in threads.collect::<Vec<_>>() {
            thread.join().unwrap();
        }
        assert_eq!(permits.counts(), (0, 0));
        assert!(permits.state().sleepers.is_empty());
        assert_eq!(permits.state().admission.entries(), 0);
    }

    #[actix_web::test]
    async fn a_waiter_that_leaves_after_it_was_given_a_place_gives_it_back() {
        let permits = Arc::<Permits>::default();
        let first = take(&permits, 4, LONG).await.unwrap();
        let mut waits = Box::pin(take(&permits, 4, LONG));
        std::future::poll_fn(|cx| std::task::Poll::Ready(waits.as_mut().poll(cx).is_pending()))
            .await;
        drop(first); // the place is the waiter's now, who does not know it yet
        assert_eq!(permits.counts(), (1, 0));
        drop(waits);
        assert_eq!(permits.counts(), (0, 0));
    }

    #[actix_web::test]
    async fn without_a_queue_or_a_place_in_it_the_reason_is_said() {
        let permits = Arc::<Permits>::default();
        let _first = take(&permits, 0, LONG).await.unwrap();
        assert_eq!(
            take(&permits, 0, LONG).await.unwrap_err(),
            NoPermit::NoQueue(one().remove(0))
        );
        let soon = Duration::from_millis(1);
        assert_eq!(
            take(&permits, 1, soon).await.unwrap_err(),
            NoPermit::TimedOut(Scope::Key)
        );
        let mut waits = Box::pin(take(&permits, 1, LONG));
        std::future::poll_fn(|cx| std::task::Poll::Ready(waits.as_mut().poll(cx).is_pending()))
            .await;
        assert_eq!(
            take(&permits, 1, LONG).await.unwrap_err(),
            NoPermit::QueueFull(Scope::Key)
        );
    }
}
