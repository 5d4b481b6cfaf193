//! The guard of one attempt: counts it while it lasts and tells the breaker how it ended, on
//! every ending. It moves into the response body, so that a stream counts to its last byte.

use super::Backend;
use crate::circuit_breaker::{ProbeSucceeded, RequestFailed};
use actix::Recipient;
use routing::breaker::Era;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How an attempt ended, as the breaker and the metrics see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Answered in full.
    Success,
    /// The engine refused the request for a fault of the client's: it works.
    ClientError,
    /// The engine asked for patience (429, or a 503 that says so).
    Backpressure,
    /// The client left, or the gateway dropped the attempt for a reason of its own.
    Cancelled,
    /// The backend's fault.
    Failure,
}

impl Outcome {
    /// All of them, in order.
    pub const ALL: [Outcome; 5] = [
        Outcome::Success,
        Outcome::ClientError,
        Outcome::Backpressure,
        Outcome::Cancelled,
        Outcome::Failure,
    ];

    /// The word used in metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Outcome::Success => "success",
            Outcome::ClientError => "client_error",
            Outcome::Backpressure => "backpressure",
            Outcome::Cancelled => "cancelled",
            Outcome::Failure => "failure",
        }
    }
}

/// The permission to try a half-open backend: one per era, taken once, put back when the attempt
/// ended without saying anything about the backend.
#[derive(Debug, Default)]
pub struct ProbeTicket(AtomicBool);

impl ProbeTicket {
    /// Whether it can be taken.
    pub fn is_free(&self) -> bool {
        !self.0.load(Ordering::Acquire)
    }

    /// Takes it; false when another was faster.
    pub fn take(&self) -> bool {
        !self.0.swap(true, Ordering::AcqRel)
    }

    fn put_back(&self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Whom to tell how an attempt ended.
#[derive(Clone)]
pub struct BreakerLink {
    /// Told of failures.
    pub failed: Recipient<RequestFailed>,
    /// Told of half-open probes that went well.
    pub succeeded: Recipient<ProbeSucceeded>,
}

/// See the module.
pub struct InFlight {
    backend: Arc<Backend>,
    era: Era,
    ticket: Option<Arc<ProbeTicket>>,
    breaker: Option<BreakerLink>,
    outcome: Outcome,
    queued_tokens: u64,
    held_tokens: u64,
}

impl InFlight {
    pub(crate) fn enter(
        backend: Arc<Backend>,
        era: Era,
        ticket: Option<Arc<ProbeTicket>>,
        breaker: Option<BreakerLink>,
    ) -> Self {
        backend.live.enter();
        InFlight {
            backend,
            era,
            ticket,
            breaker,
            outcome: Outcome::Cancelled,
            queued_tokens: 0,
            held_tokens: 0,
        }
    }

    /// Whether it tries a half-open backend, and has not shown yet that that one works.
    pub fn is_probe(&self) -> bool {
        self.ticket.is_some()
    }

    /// The backend that serves this attempt.
    pub fn backend(&self) -> &Arc<Backend> {
        &self.backend
    }

    /// The backend has so many tokens of this prompt to compute before its first byte.
    pub(crate) fn will_compute(&mut self, tokens: u64) {
        self.backend.live.queue_tokens(tokens);
        self.queued_tokens += tokens;
        let work = i64::try_from(tokens).unwrap_or(i64::MAX);
        self.backend.live.add_work(work);
    }

    /// The backend holds the KV of so many tokens until this attempt has ended.
    pub(crate) fn hold_tokens(&mut self, tokens: u64) {
        self.backend.live.hold_tokens(tokens);
        self.held_tokens += tokens;
    }

    fn unqueue_tokens(&mut self) {
        let tokens = std::mem::take(&mut self.queued_tokens);
        self.backend.live.unqueue_tokens(tokens);
    }

    /// The first byte of a good answer came, `ttft` after the request was sent when it is a
    /// stream. A half-open probe has told enough by then.
    pub fn first_byte(&mut self, ttft: Option<Duration>) {
        if let Some(ttft) = ttft {
            self.backend.live.record_ttft(ttft);
        }
        self.unqueue_tokens();
        self.resolve_probe();
    }

    /// An answer chunk came.
    pub fn progress(&self) {
        self.backend.live.record_progress();
    }

    /// Says how the attempt ended; without this it counts as cancelled.
    pub fn finish(mut self, outcome: Outcome) {
        self.outcome = outcome;
    }

    fn resolve_probe(&mut self) {
        if let (Some(_), Some(breaker)) = (self.ticket.take(), &self.breaker) {
            // bounded: one ticket per era
            breaker.succeeded.do_send(ProbeSucceeded { era: self.era });
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.backend.live.leave();
        self.backend.live.let_go_of_tokens(self.held_tokens);
        self.unqueue_tokens();
        match self.outcome {
            Outcome::Success | Outcome::ClientError => {
                self.backend.live.count_success();
                self.resolve_probe();
            }
            Outcome::Failure => {
                self.backend.live.count_failure();
                if let Some(breaker) = &self.breaker {
                    // bounded by the requests in flight
                    breaker.failed.do_send(RequestFailed {
                        era: self.era,
                        successes: self.backend.live.successes(),
                    });
                }
            }
            Outcome::Backpressure | Outcome::Cancelled => {
                if let Some(ticket) = &self.ticket {
                    ticket.put_back();
                }
            }
        }
    }
}
