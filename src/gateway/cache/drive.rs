//! The task of a flight: asks the tiers outside of this process, else makes the call, and keeps the
//! answer. It belongs to no client, and ends when nobody waits for it.

use super::flight::{End, Pilot};
use super::wish::Wish;
use super::{AnswerCache, judge};
use crate::gateway::Worker;
use crate::http::error::{By, ErrorKind};
use crate::proxy::{self, AnswerBody, Answered, Call, Flown, Opened, Told};
use crate::telemetry::report::Report;
use actix::Addr;
use actors::response_cache::{Clear, Find, Found, Release, ResponseCache, Scope};
use actors::support::mailbox::Mailbox;
use bytes::Bytes;
use hyper::header::SET_COOKIE;
use hyper::{HeaderMap, StatusCode};
use routing::cache_policy::Skip;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use std::time::Instant;
use wire::answer::Form;
use wire::cache_entry::Entry;

/// Calls that are made for one flight, over all its attempts.
pub const CALLS_MAX: u32 = 3;
/// How often a flight goes on for another waiter.
const HANDOVERS_MAX: u32 = 2;
/// Beyond the tiers' own budgets, before the cache counts as dead.
const ASK_SLACK: Duration = Duration::from_millis(100);
/// How long a flight stays for late comers while its answer is being kept.
const KEEP_LIMIT: Duration = Duration::from_secs(2);

/// What a flight needs.
pub struct Drive {
    /// Its side of the flight.
    pub pilot: Pilot,
    /// The call.
    pub call: Call,
    /// What is wanted of the cache.
    pub wish: Wish,
    /// The thread's things.
    pub worker: Rc<Worker>,
    /// Of the call.
    pub report: Report,
}

/// Gives the lock between gateways back, on whatever ending.
struct Locked(Addr<ResponseCache>, routing::cache_key::CacheKey);

impl Drop for Locked {
    fn drop(&mut self) {
        self.0.do_send(Release(self.1));
    }
}

/// What is to be kept once waiters have their answer.
enum Made {
    /// Nothing was made.
    Nothing,
    /// An answer of the backend.
    Answer(u16, HeaderMap, Form, Option<Bytes>),
}

/// Runs a flight to its end.
pub async fn drive(flown: Drive, cache: Arc<AnswerCache>) {
    let Drive {
        pilot,
        call,
        wish,
        worker,
        report,
    } = flown;
    let work = fetch(&pilot, &call, (&wish, &cache), &worker, report);
    let (made, locked) = tokio::select! {
        biased;
        made = work => made,
        // dropping the work gives up the call, its connection and its counts
        () = pilot.all_left() => return,
    };
    drop((call, worker));
    if let Made::Answer(status, headers, form, body) = made {
        keep(&pilot, (&wish, &cache), (status, &headers), (form, body)).await;
    }
    drop(locked);
}

/// Gets an answer from somewhere, and tells the waiters.
async fn fetch(
    pilot: &Pilot,
    call: &Call,
    (wish, cache): (&Wish, &Arc<AnswerCache>),
    worker: &Rc<Worker>,
    mut report: Report,
) -> (Made, Option<Locked>) {
    let mut locked = None;
    if wish.may_read && cache.tiers.is_tiered {
        let looking = call.span("cache_lookup");
        let (found, lock) = find(pilot, wish, cache, worker).await;
        drop(looking);
        locked = lock;
        if let Some((entry, tier)) = found {
            pilot.end(End::Stored(entry, tier));
            return (Made::Nothing, locked);
        }
    }
    let most = worker.gateway.settings.load().retry.max_attempts;
    let mut handovers = 0;
    loop {
        let calls = most.min(CALLS_MAX - report.attempts);
        let opened = match proxy::fly(call, worker, &mut report, calls).await {
            Flown::Opened(opened) => opened,
            Flown::Failed(failure, may_repeat) => {
                let failure = Arc::new(failure);
                let more = may_repeat && report.attempts < CALLS_MAX && handovers < HANDOVERS_MAX;
                if more && pilot.fail_one(&failure) {
                    handovers += 1;
                    cache.handovers.fetch_add(1, Relaxed);
                    proxy::pause(worker).await;
                    continue;
                }
                pilot.end(End::Failed(failure));
                cache.skip(Skip::Error);
                return (Made::Nothing, locked);
            }
        };
        return (hand_out(pilot, call, opened, report).await, locked);
    }
}

async fn find(
    pilot: &Pilot,
    wish: &Wish,
    cache: &Arc<AnswerCache>,
    worker: &Rc<Worker>,
) -> (Option<(Arc<Entry>, &'static str)>, Option<Locked>) {
    let address = cache.tiers.address.load();
    let Some(address) = address.as_ref() else {
        return (None, None);
    };
    let find = Find {
        key: pilot.key(),
        path: wish.path(),
        leads: true,
        queued: Mailbox::ResponseCache.enter(),
    };
    let start = Instant::now();
    let settings = worker.gateway.settings();
    let settings = &settings.response_cache;
    let budget = settings.l1_lookup_budget + settings.l2.lookup_budget;
    let limit = budget + settings.other_gateway_wait * 2 + ASK_SLACK;
    let asked = tokio::time::timeout(limit, address.send(find)).await;
    let seconds = start.elapsed().as_secs_f64();
    worker
        .handles
        .asked(Mailbox::ResponseCache.as_str(), seconds);
    let Ok(Ok(Found {
        entry,
        steps,
        waited,
        locked,
    })) = asked
    else {
        return (None, None);
    };
    for step in steps {
        worker.handles.cache_lookup(step);
    }
    if let Some(came) = waited {
        cache.waits[usize::from(!came)].fetch_add(1, Relaxed);
    }
    let locked = locked.then(|| Locked(address.clone(), pilot.key()));
    // an entry without token counts is none for who wants them
    let usable = entry.filter(|(entry, _)| {
        wish.is_served_by(entry)
            && (entry.tokens.is_some() || !pilot.counts_tokens() || entry.form == Form::Json)
    });
    (usable, locked)
}

/// Gives the answer to the waiters, as it comes.
async fn hand_out(pilot: &Pilot, call: &Call, opened: Opened, mut report: Report) -> Made {
    match opened {
        Opened::Whole {
            status,
            mut headers,
            body,
            usage,
            gave_up,
        } => {
            if let Some(usage) = usage {
                report.usage(usage);
            }
            report.complete();
            headers.remove(SET_COOKIE); // one client's
            let answered = Answered {
                status,
                headers: headers.clone(),
                body: body.clone(),
                usage,
                gave_up,
                told: Told::of(&report),
            };
            pilot.end(End::Whole(Arc::new(answered)));
            Made::Answer(status.as_u16(), headers, Form::Json, Some(body))
        }
        Opened::Stream(mut parts) => {
            parts.headers.remove(SET_COOKIE);
            let (head, mut body) = parts.shared(call, report);
            let form = if head.is_events {
                Form::Events
            } else {
                Form::Json
            };
            let (status, headers) = (head.status, head.headers.clone());
            pilot.head(head);
            let whole = pump(pilot, &mut body).await;
            kept_of(pilot, (status, headers, form), whole)
        }
    }
}

/// Passes chunks on; answers whether all of them came.
async fn pump(pilot: &Pilot, body: &mut AnswerBody) -> bool {
    loop {
        match body.next().await {
            Some(Ok(chunk)) => {
                if chunk.is_empty() {
                    continue;
                }
                pilot.push(chunk);
                pilot.room().await;
            }
            Some(Err(_)) => {
                let (by, kind) = fault(body);
                pilot.end(End::Broken(by, kind));
                return false;
            }
            None => {
                return match body.ended() {
                    Some(Err((by, kind))) => {
                        pilot.end(End::Cut(by, kind));
                        false
                    }
                    _ => {
                        pilot.end(End::Streamed(body.usage()));
                        true
                    }
                };
            }
        }
    }
}

/// Whose fault it was that the body broke off.
fn fault(body: &AnswerBody) -> (By, ErrorKind) {
    match body.ended() {
        Some(Err(fault)) => fault,
        _ => (By::Backend, ErrorKind::StreamCut),
    }
}

fn kept_of(
    pilot: &Pilot,
    (status, headers, form): (StatusCode, HeaderMap, Form),
    whole: bool,
) -> Made {
    let joined = |chunks: Vec<Bytes>| match <[Bytes; 1]>::try_from(chunks) {
        Ok([only]) => only,
        Err(chunks) => chunks.concat().into(),
    };
    let body = match (whole, pilot.chunks()) {
        (true, chunks) => chunks.map(joined),
        // judged as what it is: an answer without its end
        (false, _) => Some(Bytes::new()),
    };
    Made::Answer(status.as_u16(), headers, form, body)
}

/// Keeps the answer, if it is one to keep. Waiters have it already.
async fn keep(
    pilot: &Pilot,
    (wish, cache): (&Wish, &Arc<AnswerCache>),
    head: (u16, &HeaderMap),
    (form, body): (Form, Option<Bytes>),
) {
    let judged = match body {
        None => Err(Skip::TooLarge),
        Some(body) if body.is_empty() => Err(Skip::Incomplete),
        Some(body) => judge::entry(&cache.rules, wish, head, (form, body)),
    };
    let judged = judged.and_then(|entry| {
        if pilot.was_purged() {
            Err(Skip::Purged)
        } else {
            Ok(entry)
        }
    });
    let entry = match judged {
        Ok(entry) => entry,
        Err(why) => return cache.skip(why),
    };
    // late comers are served from here until L1 has it
    let path = wish.path();
    let kept = cache.tiers.keep(pilot.key(), &path, Arc::new(entry));
    let _ = tokio::time::timeout(KEEP_LIMIT, kept).await;
    if pilot.was_purged() {
        // in the meantime: what was just kept must not outlive it
        cache.skip(Skip::Purged);
        let address = cache.tiers.address.load();
        if let Some(address) = address.as_ref() {
            address.do_send(Clear(Scope::Key(path)));
        }
    }
}
