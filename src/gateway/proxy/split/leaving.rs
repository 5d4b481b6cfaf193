//! A hand-off whose client leaves. Where prefill holds blocks until decode has fetched them, it goes on: decode
//! must still be sent the request, and is cancelled when it has begun to answer. Elsewhere it is dropped, which
//! stops both legs.

use crate::telemetry::names;
use futures_util::future::LocalBoxFuture;
use metrics::counter;
use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

/// A prefill that has not answered so long after the client left is aborted: an engine frees what an aborted
/// request holds. One that was answering at that moment is waited for, since it holds blocks from then on.
const ANSWERING: Duration = Duration::from_millis(250);
/// For decode to have got the request: one that has it frees what prefill holds when it is cancelled.
const DELIVERED: Duration = Duration::from_secs(1);

/// Whether the decode leg is being sent already.
pub type Decoding = Rc<Cell<bool>>;

/// See the module.
pub struct OnLeave<O: 'static, E: 'static> {
    work: Option<LocalBoxFuture<'static, Result<O, E>>>,
    /// None where dropping is right.
    goes_on: Option<Decoding>,
}

impl<O, E> OnLeave<O, E> {
    /// Work that goes on for a moment, or is dropped.
    pub fn new(work: LocalBoxFuture<'static, Result<O, E>>, goes_on: Option<Decoding>) -> Self {
        OnLeave {
            work: Some(work),
            goes_on,
        }
    }
}

impl<O, E> Future for OnLeave<O, E> {
    type Output = Result<O, E>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(work) = &mut self.work else {
            return Poll::Pending; // it has ended
        };
        let done = std::task::ready!(work.as_mut().poll(cx));
        self.work = None;
        Poll::Ready(done)
    }
}

impl<O, E> Drop for OnLeave<O, E> {
    fn drop(&mut self) {
        let (Some(work), Some(decoding)) = (self.work.take(), self.goes_on.take()) else {
            return;
        };
        let was_sent = decoding.get();
        actix_web::rt::spawn(async move {
            let seen = decoding.clone();
            let over = async move {
                if !seen.get() {
                    tokio::time::sleep(ANSWERING).await;
                }
                if seen.get() {
                    tokio::time::sleep(DELIVERED).await;
                }
            };
            let ended = tokio::select! {
                ended = work => Some(ended), // dropping it cancels decode
                () = over => None,
            };
            if decoding.get() && !was_sent {
                // one that says nothing for so long has got the request
                let failed = matches!(ended, Some(Err(_)));
                let result = if failed { "failed" } else { "done" };
                counter!(names::SPLIT_RELEASES, "result" => result).increment(1);
            }
        });
    }
}
