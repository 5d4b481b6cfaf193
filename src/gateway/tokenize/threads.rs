//! Threads that encode and do nothing else: one for each core, shared by all HTTP workers. They stay,
//! since the encoder keeps what it has seen by thread.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::{Semaphore, oneshot};

type Job = Box<dyn FnOnce() + Send>;

/// See the module. Clones are the same threads; they end with the last clone.
#[derive(Clone)]
pub struct EncodingThreads {
    jobs: Sender<Job>,
    free: Arc<Semaphore>,
}

impl EncodingThreads {
    /// Starts `threads` of them.
    ///
    /// # Errors
    /// When the system gives no more threads.
    pub fn start(threads: usize) -> std::io::Result<Self> {
        let (jobs, inbox) = channel::<Job>();
        let inbox = Arc::new(Mutex::new(inbox));
        for number in 0..threads {
            let inbox = inbox.clone();
            let named = std::thread::Builder::new().name(format!("encode-{number}"));
            named.spawn(move || serve(&inbox))?;
        }
        Ok(EncodingThreads {
            jobs,
            free: Arc::new(Semaphore::new(threads)),
        })
    }

    /// Does it on the next free thread. A caller that leaves before its turn leaves no work behind;
    /// afterwards the work is done to its end. None when it panicked.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let turn = self.free.clone().acquire_owned().await.ok()?;
        let (answer, answered) = oneshot::channel();
        let job = move || {
            let done = work();
            drop(turn);
            let _ = answer.send(done); // nobody waits any more: what was encoded is kept all the same
        };
        self.jobs.send(Box::new(job)).ok()?;
        answered.await.ok()
    }
}

fn serve(inbox: &Mutex<Receiver<Job>>) {
    loop {
        let next = inbox.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(job) = next else { return };
        // whoever waits finds the answer's sender dropped
        let _ = catch_unwind(AssertUnwindSafe(job));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[actix_rt::test]
    async fn work_is_done_elsewhere_and_a_panic_costs_nothing_but_its_answer() {
        let threads = EncodingThreads::start(2).unwrap();
        let name = || std::thread::current().name().map(str::to_owned);
        let ran_on = threads.run(name).await.flatten().unwrap();
        assert!(ran_on.starts_with("encode-"), "{ran_on}");
        for _ in 0..10 {
            assert_eq!(threads.run(|| -> u32 { panic!("in a test") }).await, None);
        }
        assert_eq!(threads.run(|| 7).await, Some(7));
        assert_eq!(threads.free.available_permits(), 2, "every turn came back");
    }

    #[actix_rt::test]
    async fn who_leaves_before_its_turn_leaves_no_work_behind() {
        let threads = EncodingThreads::start(1).unwrap();
        let (release, held) = std::sync::mpsc::channel::<()>();
        let busy = threads.clone();
        let first = actix_rt::spawn(async move { busy.run(move || held.recv().is_ok()).await });
        while threads.free.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        let ran = Arc::new(Mutex::new(false));
        let seen = ran.clone();
        let late = threads.run(move || *seen.lock().unwrap() = true);
        let waited = tokio::time::timeout(std::time::Duration::from_millis(5), late).await;
        assert!(waited.is_err());
        release.send(()).unwrap();
        assert_eq!(first.await.unwrap(), Some(true));
        threads.run(|| ()).await.unwrap();
        assert!(!*ran.lock().unwrap());
    }
}
