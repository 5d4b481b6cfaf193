//! Answers and failures in a form that several clients can be given.

use super::setback::Setback;
use crate::http::error::{ErrorKind, Refusal};
use crate::telemetry::report::Report;
use actix_web::HttpResponse;
use bytes::Bytes;
use hyper::{HeaderMap, StatusCode};
use routing::disagg::Path;
use std::sync::Arc;
use wire::openai::Usage;

/// How an answer came about, for headers and log lines.
#[derive(Debug, Clone, Default)]
pub struct Told {
    /// Who served it.
    pub backend: Option<Arc<str>>,
    /// How the backend was chosen.
    pub decision: &'static str,
    /// Blocks of the prompt that the backend was known to have, and all of them.
    pub overlap: Option<(u32, u32)>,
    /// Calls that were made.
    pub attempts: u32,
    /// How it was served, where serving is split.
    pub path: Option<Path>,
    /// Who computed the prompt, where that is not the one who answers.
    pub prefill_backend: Option<Arc<str>>,
}

impl Told {
    /// What a report of the call says.
    pub fn of(report: &Report) -> Self {
        Told {
            backend: report.backend.clone(),
            decision: report.decision,
            overlap: report.overlap,
            attempts: report.attempts,
            path: report.path,
            prefill_backend: report.prefill_backend.clone(),
        }
    }

    /// Puts it into the report of a client.
    pub fn tell(&self, report: &mut Report) {
        report.backend.clone_from(&self.backend);
        report.decision = self.decision;
        report.overlap = self.overlap;
        report.attempts = self.attempts;
        report.path = self.path;
        report.prefill_backend.clone_from(&self.prefill_backend);
    }
}

/// The beginning of an answer that comes in chunks.
#[derive(Debug)]
pub struct Head {
    /// Its status.
    pub status: StatusCode,
    /// The backend's headers.
    pub headers: HeaderMap,
    /// Whether it is made of events.
    pub is_events: bool,
    /// Its length, where the backend said it.
    pub length: Option<u64>,
    /// How it came about.
    pub told: Told,
}

/// An answer in one piece, as the backend gave it.
#[derive(Debug)]
pub struct Answered {
    /// Its status.
    pub status: StatusCode,
    /// The backend's headers.
    pub headers: HeaderMap,
    /// Its body.
    pub body: Bytes,
    /// What the engine counted.
    pub usage: Option<Usage>,
    /// Whether the engine says in it that it gave up.
    pub gave_up: bool,
    /// How it came about.
    pub told: Told,
}

/// Why there is no answer.
#[derive(Debug)]
pub struct Failure {
    said: Said,
    told: Told,
}

#[derive(Debug)]
enum Said {
    ByBackend(Setback),
    Ours(Refusal),
}

impl Failure {
    pub(super) fn of_backend(setback: Setback, report: &Report) -> Self {
        Failure {
            said: Said::ByBackend(setback),
            told: Told::of(report),
        }
    }

    /// Refused by us.
    pub fn ours(refusal: Refusal, report: &Report) -> Self {
        Failure {
            said: Said::Ours(refusal),
            told: Told::of(report),
        }
    }

    /// The call was given up for reasons of our own.
    pub fn internal() -> Self {
        let what = "the call that this request waited for was given up".into();
        Failure {
            said: Said::Ours(Refusal::Backend(ErrorKind::Internal, what)),
            told: Told {
                decision: "none",
                ..Told::default()
            },
        }
    }

    /// The answer that a client gets.
    pub fn response(&self, mut report: Report) -> HttpResponse {
        self.told.tell(&mut report);
        match &self.said {
            Said::ByBackend(setback) => setback.response(report),
            Said::Ours(refusal) => crate::http::refuse(refusal.clone(), report),
        }
    }
}
