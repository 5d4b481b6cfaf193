//! Keeps the root of the tree alive: the one actor that has no parent is watched by a task.

use crate::support::watch::{INTENSITY_WINDOW, Intensity};
use actix::{Actor, Addr, Context, Handler, Message};
use std::cell::RefCell;
use std::rc::Rc;
use tokio::sync::mpsc;
use tracing::{error, warn};

/// The root actor has ended.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct RootExited;

/// Receives the root's last message and wakes the task that waits for it.
pub struct Warden {
    exits: mpsc::UnboundedSender<()>, // bounded by the restart intensity
}

impl Actor for Warden {
    type Context = Context<Self>;
}

impl Handler<RootExited> for Warden {
    type Result = ();
    fn handle(&mut self, _: RootExited, _: &mut Self::Context) {
        // a closed channel means that the task is gone because the process is ending
        let _ = self.exits.send(());
    }
}

/// The present root; follows restarts.
pub struct Root<A: Actor>(Rc<RefCell<Addr<A>>>);

impl<A: Actor> Clone for Root<A> {
    fn clone(&self) -> Self {
        Root(self.0.clone())
    }
}

impl<A: Actor> Root<A> {
    /// The address of this moment.
    pub fn addr(&self) -> Addr<A> {
        self.0.borrow().clone()
    }
}

/// Starts a root actor with `start`, which gets the warden to watch it with, and starts a fresh
/// one each time it ends, within the restart intensity. `on_restart` is told of each.
pub fn supervise<A: Actor>(
    name: &'static str,
    mut start: impl FnMut(Addr<Warden>) -> Addr<A> + 'static,
    on_restart: impl Fn() + 'static,
) -> Root<A> {
    let (exits, mut exited) = mpsc::unbounded_channel();
    let warden = Warden { exits }.start();
    let root = Root(Rc::new(RefCell::new(start(warden.clone()))));
    let present = root.clone();
    actix_rt::spawn(async move {
        let mut intensity = Intensity::default();
        while exited.recv().await.is_some() {
            let now = tokio::time::Instant::now().into_std();
            let wait = intensity.next_start(now).unwrap_or_else(|| {
                error!(
                    actor = name,
                    "actor keeps dying, what it published stays as it is for now"
                );
                INTENSITY_WINDOW
            });
            warn!(
                actor = name,
                wait_ms = wait.as_millis() as u64,
                "actor died, starting a fresh one"
            );
            tokio::time::sleep(wait).await;
            on_restart();
            let fresh = start(warden.clone());
            *present.0.borrow_mut() = fresh;
        }
    });
    root
}
