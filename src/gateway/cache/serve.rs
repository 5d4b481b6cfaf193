//! A client's side of the cache: an answer from memory at once, or a seat in the flight that gets it.

use super::AnswerCache;
use super::drive::{Drive, drive};
use super::flight::{End, Heard, Seat};
use super::judge::unix_ms;
use super::shape::{content_type, edited, formed};
use super::wish::Wish;
use crate::gateway::Worker;
use crate::http::error::{By, ErrorKind, Refusal};
use crate::http::refuse;
use crate::proxy::answer::{self, Taking};
use crate::proxy::{Answered, Call, Head};
use crate::telemetry::report::{CacheNote, Report};
use actix_web::HttpResponse;
use actix_web::body::{BodySize, MessageBody};
use bytes::Bytes;
use hyper::{HeaderMap, StatusCode};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use wire::answer::{Dialect, Form};
use wire::cache_entry::Entry;
use wire::openai::Usage;
use wire::splice::AnswerEdit;
use wire::sse::EventEditor;

/// The most of an answer that is held to bring it into another form.
const FORMED_MAX: usize = 64 << 20;
/// Events up to this are changed for one client; longer ones pass as they are.
const EDITED_EVENT_MAX: usize = 256 << 10;

/// What one client wants to see.
struct Caller {
    form: Form,
    dialect: Dialect,
    edit: AnswerEdit,
}

impl Caller {
    /// The form that it gets of an answer that is in this one: where one cannot be made of the other,
    /// the one that the engine chose.
    fn form_of(&self, is: Form) -> Form {
        if self.dialect.converts() {
            self.form
        } else {
            is
        }
    }
}

/// Serves a request whose answer may be cached.
pub async fn serve(
    (mut call, wish): (Call, Wish),
    worker: Rc<Worker>,
    cache: Arc<AnswerCache>,
    mut report: Report,
) -> HttpResponse {
    let caller = Caller {
        form: wish.form,
        dialect: wish.dialect,
        edit: AnswerEdit {
            model: call.edit.model.take(),
            strip_usage_chunk: !wish.wants_usage,
            cached: None,
        },
    };
    let looking = call.span("cache_lookup");
    if wish.may_read
        && let Some((step, kept)) = cache.tiers.in_memory(&wish.key)
    {
        worker.handles.cache_lookup(step);
        let usable = kept.filter(|kept| wish.is_served_by(&kept.entry));
        if let Some(kept) = usable {
            return stored((&kept.entry, "memory"), &caller, &worker, report);
        }
    }
    drop(looking);
    // the answer is passed to each client with that client's changes
    call.edit = AnswerEdit::default();
    let limit = match call.wants_stream {
        true => cache.rules.stream_max,
        false => cache.rules.response_max,
    };
    let key = (wish.key, !call.wants_stream || call.asks_usage);
    let (mut seat, pilot) = if wish.may_read {
        cache.flights.join(key, limit)
    } else {
        let (seat, pilot) = cache.flights.alone(key, limit);
        (seat, Some(pilot))
    };
    report.cache = Some(CacheNote::Joined);
    if let Some(pilot) = pilot {
        report.cache = Some(CacheNote::Miss);
        let drive = drive(
            Drive {
                pilot,
                call,
                wish,
                worker: worker.clone(),
                report: report.of_call(),
            },
            cache,
        );
        actix_web::rt::spawn(drive);
    } else {
        drop(call); // its body is not needed
        report.without_call();
    }
    match seat.heard().await {
        Heard::Head(head) => {
            let write_timeout = worker.gateway.settings.load().server.client_write_timeout;
            streamed((seat, write_timeout), &head, &caller, report).await
        }
        Heard::End(End::Whole(answered)) => whole(&answered, &caller, report),
        Heard::End(End::Stored(entry, tier)) => stored((&entry, tier), &caller, &worker, report),
        Heard::End(End::Failed(failure)) => {
            report.cache = Some(CacheNote::Miss);
            failure.response(report)
        }
        Heard::End(End::Streamed(_) | End::Cut(..) | End::Broken(..)) => {
            unreachable!("a stream begins with its head")
        }
    }
}

/// An answer out of a tier.
fn stored(
    (entry, tier): (&Entry, &'static str),
    caller: &Caller,
    worker: &Worker,
    mut report: Report,
) -> HttpResponse {
    let age_s = unix_ms().saturating_sub(entry.made_ms) / 1000;
    report.without_call();
    report.cache = Some(CacheNote::Hit(tier, age_s));
    worker.handles.decision("cache_hit");
    let (prompt_tokens, completion) = entry.tokens.unwrap_or_default();
    report.usage(Usage {
        prompt_tokens,
        completion_tokens: Some(completion),
        total_tokens: prompt_tokens.saturating_add(completion),
        prompt_tokens_details: None,
    });
    let kind = content_type(
        &entry.content_type,
        (entry.form, caller.form_of(entry.form)),
    );
    respond(
        (StatusCode::OK, &typed(&kind)),
        (entry.form, &entry.body),
        caller,
        report,
    )
}

fn typed(content_type: &str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    if let Ok(value) = content_type.parse() {
        headers.insert("content-type", value);
    }
    headers
}

/// An answer in one piece, from the backend.
fn whole(answered: &Answered, caller: &Caller, mut report: Report) -> HttpResponse {
    answered.told.tell(&mut report);
    if let Some(usage) = answered.usage {
        report.usage(usage);
    }
    if answered.gave_up {
        report.error(By::Backend, ErrorKind::InStreamError);
    }
    report.first_byte();
    let (status, body) = (answered.status, &answered.body);
    if caller.form_of(Form::Json) == Form::Json {
        return respond(
            (status, &answered.headers),
            (Form::Json, body),
            caller,
            report,
        );
    }
    let kind = content_type("", (Form::Json, caller.form));
    respond((status, &typed(&kind)), (Form::Json, body), caller, report)
}

/// A whole answer in the client's form.
fn respond(
    (status, headers): (StatusCode, &HeaderMap),
    (form, body): (Form, &Bytes),
    caller: &Caller,
    mut report: Report,
) -> HttpResponse {
    let wanted = caller.form_of(form);
    let Some(body) = formed(body, (form, wanted), caller.dialect) else {
        let what = "the answer cannot be given in the form that was asked for".to_owned();
        return refuse(Refusal::Backend(ErrorKind::BadBody, what), report);
    };
    let body = edited(body, wanted, &caller.edit);
    report.sent(body.len());
    report.complete();
    let mut response = match wanted {
        Form::Json => answer::head(status, headers, &mut report),
        Form::Events => answer::events_head(status, headers, &mut report),
    };
    response.body(body)
}

/// An answer that comes in chunks.
async fn streamed(
    (mut seat, write_timeout): (Seat, Duration),
    head: &Head,
    caller: &Caller,
    mut report: Report,
) -> HttpResponse {
    head.told.tell(&mut report);
    report.first_byte();
    let form = if head.is_events {
        Form::Events
    } else {
        Form::Json
    };
    if form == caller.form || !caller.dialect.converts() {
        let mut response = match form {
            Form::Json => answer::head(head.status, &head.headers, &mut report),
            Form::Events => answer::events_head(head.status, &head.headers, &mut report),
        };
        let edits = !caller.edit.is_none() && form == Form::Events;
        return response.body(SeatBody {
            seat: Some(seat),
            editor: edits.then(|| EventEditor::new(EDITED_EVENT_MAX)),
            rename: (!edits)
                .then(|| caller.edit.clone())
                .filter(|edit| edit.model.is_some()),
            length: head.length.filter(|_| caller.edit.is_none()),
            edit: caller.edit.clone(),
            report: Some(report),
            taking: Taking::within(write_timeout),
        });
    }
    let (chunks, end) = seat.collect(FORMED_MAX).await;
    drop(seat);
    match end {
        End::Streamed(usage) => {
            usage.into_iter().for_each(|usage| report.usage(usage));
            let kind = content_type("", (form, caller.form));
            let body = Bytes::from(chunks.concat());
            respond((head.status, &typed(&kind)), (form, &body), caller, report)
        }
        End::Cut(_, kind) | End::Broken(_, kind) => {
            let backend = head.told.backend.as_deref().unwrap_or_default();
            let what = format!("backend `{backend}` broke off within its answer");
            refuse(Refusal::Backend(kind, what), report)
        }
        End::Failed(failure) => failure.response(report),
        End::Whole(_) | End::Stored(..) => unreachable!("its head said that chunks follow"),
    }
}

/// Chunks of a flight on their way to one client, with that client's changes.
struct SeatBody {
    seat: Option<Seat>,
    editor: Option<EventEditor>,
    /// Changes the beginning of a long JSON answer.
    rename: Option<AnswerEdit>,
    edit: AnswerEdit,
    length: Option<u64>,
    report: Option<Report>,
    taking: Taking,
}

impl Drop for SeatBody {
    fn drop(&mut self) {
        self.taking.count_stall(self.report.is_some());
    }
}

/// Breaks the connection to the client off, so that a cut answer does not look whole.
#[derive(Debug, thiserror::Error)]
#[error("the answer broke off")]
struct BrokenOff;

impl SeatBody {
    fn settle(&mut self, error: Option<(By, ErrorKind)>) {
        self.seat = None;
        if let Some(mut report) = self.report.take() {
            if let Some((by, kind)) = error {
                report.error(by, kind);
            }
            report.complete();
        }
    }

    fn pass(&mut self, chunk: Bytes) -> Bytes {
        let out = match (&mut self.editor, self.rename.take()) {
            (Some(editor), _) => editor.feed(&chunk, |event| self.edit.event(event)),
            (None, Some(edit)) => edit.json_beginning(&chunk),
            (None, None) => chunk,
        };
        if let Some(report) = &mut self.report {
            report.sent(out.len());
        }
        out
    }
}

impl MessageBody for SeatBody {
    type Error = BrokenOff;

    fn size(&self) -> BodySize {
        self.length.map_or(BodySize::Stream, BodySize::Sized)
    }

    fn poll_next(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, Self::Error>>> {
        let this = &mut *self;
        let next = this.poll_bytes(cx);
        this.taking.note(&next);
        next
    }
}

impl SeatBody {
    fn poll_bytes(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, BrokenOff>>> {
        let this = self;
        loop {
            let Some(seat) = &mut this.seat else {
                return Poll::Ready(None);
            };
            match ready!(seat.poll_chunk(cx)) {
                Ok(chunk) => {
                    let out = this.pass(chunk);
                    if !out.is_empty() {
                        return Poll::Ready(Some(Ok(out)));
                    }
                }
                Err(End::Broken(by, kind)) => {
                    this.settle(Some((by, kind)));
                    return Poll::Ready(Some(Err(BrokenOff)));
                }
                Err(end) => {
                    let rest = this.editor.as_mut().map(EventEditor::finish);
                    match end {
                        End::Cut(by, kind) => this.settle(Some((by, kind))),
                        End::Failed(_) => {
                            // the flight was given up in mid-stream
                            this.settle(Some((By::Router, ErrorKind::Internal)));
                            return Poll::Ready(Some(Err(BrokenOff)));
                        }
                        End::Streamed(usage) => {
                            let report = this.report.as_mut();
                            report
                                .zip(usage)
                                .into_iter()
                                .for_each(|(r, usage)| r.usage(usage));
                            this.settle(None);
                        }
                        _ => this.settle(None),
                    }
                    let rest = rest.filter(|rest| !rest.is_empty());
                    return Poll::Ready(rest.map(Ok));
                }
            }
        }
    }
}
