//! One request over one connection, and what its client saw of it.

use crate::workload::Leave;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderMap};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use std::cell::RefCell;
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use wire::openai::Usage;
use wire::sse::{Event, EventScanner, data_of};

/// Events longer than this are counted, not read.
const EVENT_BYTES_MAX: usize = 256 << 10;

/// Whom to ask.
#[derive(Debug, Clone)]
pub struct Target {
    /// Host and port.
    pub authority: String,
    /// The path of the API, `/v1/chat/completions`.
    pub path: String,
    /// Keys of the tenants, one each; without any nobody shows a key.
    pub keys: Vec<String>,
}

/// What is sent.
pub struct Sent {
    /// The JSON.
    pub body: Bytes,
    /// Whose key is shown.
    pub tenant: usize,
    /// When the client leaves early.
    pub leaves: Option<Leave>,
    /// When the request was due: latencies count from there.
    pub due: Instant,
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum End {
    /// The whole answer came.
    Whole,
    /// Its client left, as it was to.
    Left,
    /// An answer of another status than 200.
    Status(u16),
    /// An error within a stream.
    ErrorEvent,
    /// A stream that ended without `[DONE]`.
    Cut,
    /// The connection broke, or there was none.
    Broken,
    /// No end within the limit.
    TimedOut,
}

impl End {
    /// Whether its client got what it asked for.
    pub fn is_good(self) -> bool {
        matches!(self, End::Whole | End::Left)
    }

    /// The word used in reports.
    pub fn word(self) -> String {
        match self {
            End::Whole => "whole".into(),
            End::Left => "left".into(),
            End::Status(status) => format!("status_{status}"),
            End::ErrorEvent => "error_event".into(),
            End::Cut => "cut".into(),
            End::Broken => "broken".into(),
            End::TimedOut => "timed_out".into(),
        }
    }
}

/// What a client saw.
#[derive(Debug, Clone)]
pub struct Seen {
    /// When it was due.
    pub due: Instant,
    /// When it was sent.
    pub sent: Instant,
    /// When the first token came; of JSON answers, the whole answer.
    pub first: Option<Instant>,
    /// When it ended.
    pub done: Instant,
    /// Between events.
    pub gaps: Vec<Duration>,
    /// How it ended.
    pub end: End,
    /// What the engine counted.
    pub usage: Option<Usage>,
    /// Who served it, as the router says.
    pub backend: Option<String>,
    /// The share of the prompt's blocks that the router believed to be cached there, if it says so.
    pub believed: Option<f64>,
    /// Whether the answer came from the response cache.
    pub is_hit: bool,
}

impl Seen {
    fn at(due: Instant) -> Self {
        let now = Instant::now();
        Seen {
            due,
            sent: now,
            first: None,
            done: now,
            gaps: Vec::new(),
            end: End::Broken,
            usage: None,
            backend: None,
            believed: None,
            is_hit: false,
        }
    }

    fn head(&mut self, headers: &HeaderMap) {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        self.backend = text("x-tidegate-backend").map(str::to_owned);
        self.is_hit = text("x-cache") == Some("HIT");
        self.believed = text("x-tidegate-overlap").and_then(|overlap| {
            let (blocks, all) = overlap.split_once('/')?;
            let (blocks, all): (f64, f64) = (blocks.parse().ok()?, all.parse().ok()?);
            (all > 0.0).then_some(blocks / all)
        });
    }
}

/// Connections to one target, reused one request after the other.
pub struct Client {
    target: Target,
    idle: RefCell<Vec<SendRequest<Full<Bytes>>>>,
    limit: Duration,
}

type Fault = Box<dyn std::error::Error>;

impl Client {
    /// Without connections; no request lasts longer than the limit.
    pub fn new(target: Target, limit: Duration) -> Self {
        let idle = RefCell::default();
        Client {
            target,
            idle,
            limit,
        }
    }

    /// Asks, and reads to the end.
    pub async fn ask(&self, sent: Sent) -> Seen {
        let mut seen = Seen::at(sent.due);
        let limit = match sent.leaves {
            Some(Leave::Before(after)) => after.min(self.limit),
            _ => self.limit,
        };
        let asked = tokio::time::timeout(limit, self.exchange(&sent, &mut seen)).await;
        seen.end = match asked {
            Ok(Ok(end)) => end,
            Ok(Err(_)) => End::Broken,
            Err(_) if limit < self.limit => End::Left,
            Err(_) => End::TimedOut,
        };
        seen.done = Instant::now();
        seen
    }

    async fn connection(&self) -> Result<SendRequest<Full<Bytes>>, Fault> {
        while let Some(idle) = { self.idle.borrow_mut().pop() } {
            if idle.is_ready() {
                return Ok(idle);
            }
        }
        let stream = TcpStream::connect(&self.target.authority).await?;
        stream.set_nodelay(true)?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        tokio::task::spawn_local(connection); // ends when the sender and the answer are dropped
        Ok(sender)
    }

    fn request(&self, sent: &Sent) -> Result<Request<Full<Bytes>>, Fault> {
        let mut request = Request::post(&self.target.path)
            .header(HOST, &self.target.authority)
            .header(CONTENT_TYPE, "application/json");
        let keys = &self.target.keys;
        if !keys.is_empty() {
            let key = &keys[sent.tenant % keys.len()];
            request = request.header(AUTHORIZATION, format!("Bearer {key}"));
        }
        Ok(request.body(Full::new(sent.body.clone()))?)
    }

    async fn exchange(&self, sent: &Sent, seen: &mut Seen) -> Result<End, Fault> {
        let mut connection = self.connection().await?;
        let answer = connection.send_request(self.request(sent)?).await?;
        seen.head(answer.headers());
        let status = answer.status().as_u16();
        let kind = answer
            .headers()
            .get(CONTENT_TYPE)
            .map(|kind| kind.as_bytes());
        let is_stream = kind.is_some_and(|kind| kind.starts_with(b"text/event-stream"));
        let end = match is_stream && status == 200 {
            true => read_events(answer, sent.leaves, seen).await?,
            false => read_whole(answer, seen).await?,
        };
        if end != End::Left && connection.ready().await.is_ok() {
            self.idle.borrow_mut().push(connection);
        }
        Ok(end)
    }
}

#[derive(Deserialize)]
struct Counted {
    usage: Option<Usage>,
}

fn usage(json: &[u8]) -> Option<Usage> {
    let counted: Option<Counted> = serde_json::from_slice(json).ok();
    counted?.usage
}

async fn read_whole(answer: Response<Incoming>, seen: &mut Seen) -> Result<End, Fault> {
    let status = answer.status().as_u16();
    let body = answer.into_body().collect().await?.to_bytes();
    seen.first = Some(Instant::now());
    seen.usage = usage(&body);
    Ok(match status {
        200 => End::Whole,
        other => End::Status(other),
    })
}

async fn read_events(
    answer: Response<Incoming>,
    leaves: Option<Leave>,
    seen: &mut Seen,
) -> Result<End, Fault> {
    let mut body = answer.into_body();
    let mut scanner = EventScanner::new(EVENT_BYTES_MAX);
    let (mut events, mut last) = (0, None);
    let (mut done, mut failed) = (false, false);
    while let Some(frame) = body.frame().await {
        let Ok(chunk) = frame?.into_data() else {
            continue;
        };
        let now = Instant::now();
        scanner.feed(&chunk, |event| {
            let data = match event {
                Event::Whole(bytes) => data_of(bytes),
                Event::TooLong => Some(b"".into()),
            };
            let Some(data) = data else { return };
            done |= *data == *b"[DONE]";
            failed |= data.starts_with(b"{\"error\"");
            if data.windows(8).any(|part| part == b"\"usage\":") {
                seen.usage = usage(&data).or(seen.usage);
            }
            if done || failed {
                return;
            }
            events += 1;
            seen.first.get_or_insert(now);
            if let Some(last) = last.replace(now) {
                seen.gaps.push(now - last);
            }
        });
        if leaves.is_some_and(|leave| matches!(leave, Leave::After(count) if events >= count))
            && !done
        {
            return Ok(End::Left);
        }
    }
    Ok(match (failed, done) {
        (true, _) => End::ErrorEvent,
        (false, true) => End::Whole,
        (false, false) => End::Cut,
    })
}
