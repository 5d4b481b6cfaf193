//! Sends a request over a pooled or fresh connection and gives the connection back afterwards.

use super::connection::{Connection, RequestBody};
use super::stream::Stream;
use crate::tls::Trust;
use actors::backend::{BackendUrl, ConnectionCounts};
use bytes::Bytes;
use hyper::body::{Body, Incoming};
use hyper::{HeaderMap, Method, Request, StatusCode};
use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

/// How connections are kept.
#[derive(Debug, Clone, Copy)]
pub struct ClientSettings {
    /// For one TCP connection, name resolution included.
    pub connect_timeout: Duration,
    /// An idle connection is not used again after this.
    pub pool_idle_timeout: Duration,
    /// A connection of this age is not used again.
    pub connection_max_age: Duration,
    /// Idle connections per backend.
    pub max_idle_per_backend: usize,
}

/// A closed connection shows itself at the first write or read on it.
const STALE_SHOWS_WITHIN: Duration = Duration::from_secs(1);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// Refused, unreachable or unknown.
    #[error("connect")]
    Connect(#[source] std::io::Error),
    /// The backend does not speak TLS, or is not who it should be.
    #[error("TLS handshake")]
    Handshake(#[source] std::io::Error),
    /// This process or machine has run out of something.
    #[error("no socket")]
    Local(#[source] std::io::Error),
    /// No connection within the timeout.
    #[error("connect timed out")]
    ConnectTimeout,
    /// The connection broke before the head of an answer.
    #[error("connection closed before an answer")]
    Broken(#[source] hyper::Error),
    /// The answer is not HTTP.
    #[error("answer is not HTTP")]
    NotHttp(#[source] hyper::Error),
}

/// What is asked of a backend.
#[derive(Debug, Clone)]
pub struct Outgoing {
    /// GET or POST.
    pub method: Method,
    /// The path with the backend's own prefix.
    pub path: String,
    /// All headers but Host and Content-Length.
    pub headers: HeaderMap,
    /// The whole body.
    pub body: Bytes,
}

/// One worker thread's connections. Clones share them.
#[derive(Clone)]
pub struct Client(Rc<Inner>);

struct Inner {
    settings: ClientSettings,
    trust: Arc<Trust>,
    idle: RefCell<HashMap<BackendUrl, VecDeque<Idle>>>,
}

struct Idle {
    connection: Connection,
    since: Instant,
}

fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

impl Client {
    /// A client without connections, which trusts the public authorities.
    pub fn new(settings: ClientSettings) -> Self {
        Client::trusting(settings, Arc::new(Trust::public()))
    }

    /// A client without connections.
    pub fn trusting(settings: ClientSettings, trust: Arc<Trust>) -> Self {
        Client(Rc::new(Inner {
            settings,
            trust,
            idle: RefCell::default(),
        }))
    }

    /// [`Client::send_made`] of a request that is there already.
    pub async fn send(
        &self,
        url: &BackendUrl,
        outgoing: &Outgoing,
        counts: &ConnectionCounts,
    ) -> Result<Reply, SendError> {
        self.send_made(url, || outgoing.clone(), counts).await
    }

    /// Sends a request, as `outgoing` makes it, and waits for the head of the answer. A pooled connection that turns out
    /// to be closed costs one more try on a fresh one: engines close idle connections whenever
    /// they like, and no byte of an answer has been seen.
    pub async fn send_made(
        &self,
        url: &BackendUrl,
        outgoing: impl Fn() -> Outgoing,
        counts: &ConnectionCounts,
    ) -> Result<Reply, SendError> {
        if let Some(connection) = self.take_idle(url) {
            counts.reused.fetch_add(1, Relaxed);
            let sent = now();
            match self.send_over(connection, url, outgoing()).await {
                // later than that, the request itself may be what broke it
                Err(SendError::Broken(_)) if now() - sent < STALE_SHOWS_WITHIN => {
                    counts.stale.fetch_add(1, Relaxed)
                }
                settled => return settled,
            };
        }
        counts.new.fetch_add(1, Relaxed);
        let stream = Box::pin(self.open(url)).await?; // boxed: most requests find a connection
        let connection = Connection::over(stream).await;
        let connection = connection.map_err(SendError::Connect)?;
        self.send_over(connection, url, outgoing()).await
    }

    /// Opens a connection of its own, within TLS where the url says so.
    ///
    /// # Errors
    /// When there is none within the timeout, handshake included.
    pub async fn open(&self, url: &BackendUrl) -> Result<Stream, SendError> {
        let open = Stream::open(url, &self.0.trust);
        let opened = tokio::time::timeout(self.0.settings.connect_timeout, open).await;
        opened.map_err(|_| SendError::ConnectTimeout)?
    }

    async fn send_over(
        &self,
        mut connection: Connection,
        url: &BackendUrl,
        outgoing: Outgoing,
    ) -> Result<Reply, SendError> {
        let mut request = Request::new(RequestBody::from(outgoing.body));
        *request.method_mut() = outgoing.method;
        *request.uri_mut() = outgoing.path.try_into().map_err(|error| {
            SendError::Connect(std::io::Error::new(std::io::ErrorKind::InvalidInput, error))
        })?;
        *request.headers_mut() = outgoing.headers;
        let host = hyper::header::HeaderValue::from_str(&url.authority());
        if let Ok(host) = host {
            request.headers_mut().insert(hyper::header::HOST, host);
        }
        let answer = connection.send(request).await.map_err(|error| {
            if error.is_parse() {
                SendError::NotHttp(error)
            } else {
                SendError::Broken(error)
            }
        })?;
        let (head, incoming) = answer.into_parts();
        Ok(Reply {
            status: head.status,
            headers: head.headers,
            body: ReplyBody {
                length: incoming.size_hint().exact(),
                incoming,
                connection: Some(connection),
                client: self.clone(),
                url: url.clone(),
            },
        })
    }

    fn take_idle(&self, url: &BackendUrl) -> Option<Connection> {
        let now = now();
        loop {
            // the most recent first: it is the least likely to be stale
            let mut idle = {
                let mut pool = self.0.idle.borrow_mut();
                pool.get_mut(url)?.pop_back()?
            };
            if self.is_young(&idle, now) && idle.connection.is_reusable() {
                return Some(idle.connection);
            }
        }
    }

    fn is_young(&self, idle: &Idle, now: Instant) -> bool {
        let settings = &self.0.settings;
        now.saturating_duration_since(idle.since) < settings.pool_idle_timeout
            && now.saturating_duration_since(idle.connection.opened) < settings.connection_max_age
    }

    fn give_back(&self, url: &BackendUrl, mut connection: Connection) {
        if !connection.is_reusable() {
            return;
        }
        let idle = Idle {
            connection,
            since: now(),
        };
        if !self.is_young(&idle, idle.since) {
            return;
        }
        let mut pool = self.0.idle.borrow_mut();
        let queue = pool.entry(url.clone()).or_default();
        if queue.len() < self.0.settings.max_idle_per_backend {
            queue.push_back(idle);
        }
    }

    /// Closes connections that have been idle for too long. Called now and then.
    pub fn sweep(&self) {
        let now = now();
        let mut pool = self.0.idle.borrow_mut();
        for queue in pool.values_mut() {
            queue.retain(|idle| self.is_young(idle, now));
        }
        pool.retain(|_, queue| !queue.is_empty());
    }
}

/// The head of an answer, and its body to be read.
pub struct Reply {
    /// Its status.
    pub status: StatusCode,
    /// Its headers.
    pub headers: HeaderMap,
    /// Its body.
    pub body: ReplyBody,
}

/// Why an answer that was to be read whole was not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotWhole {
    /// The connection broke.
    BrokeOff,
    /// It is longer than the limit.
    TooLong,
}

/// An answer's body. Dropped before its end, it closes the connection.
pub struct ReplyBody {
    incoming: Incoming,
    connection: Option<Connection>,
    client: Client,
    url: BackendUrl,
    length: Option<u64>,
}

impl ReplyBody {
    /// The next chunk; none at the end, when the connection goes back to the pool.
    pub fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Option<hyper::Result<Bytes>>> {
        let Some(connection) = &mut self.connection else {
            return Poll::Ready(None);
        };
        let chunk = connection.poll_chunk(&mut self.incoming, cx);
        match &chunk {
            Poll::Ready(None) => {
                if let Some(connection) = self.connection.take() {
                    self.client.give_back(&self.url, connection);
                }
            }
            Poll::Ready(Some(Err(_))) => self.connection = None,
            Poll::Ready(Some(Ok(_))) | Poll::Pending => {}
        }
        chunk
    }

    /// The next chunk.
    pub async fn chunk(&mut self) -> Option<hyper::Result<Bytes>> {
        std::future::poll_fn(|cx| self.poll_chunk(cx)).await
    }

    /// All that is left of a short answer: no more than `limit` bytes of it are kept.
    pub async fn whole(&mut self, limit: usize) -> Result<Vec<u8>, NotWhole> {
        let mut whole = Vec::new();
        while let Some(chunk) = self.chunk().await {
            whole.extend_from_slice(&chunk.map_err(|_| NotWhole::BrokeOff)?);
            if whole.len() > limit {
                return Err(NotWhole::TooLong);
            }
        }
        Ok(whole)
    }

    /// The announced length in bytes; none when it is chunked or ends with the connection.
    pub fn length(&self) -> Option<u64> {
        self.length
    }
}

impl Outgoing {
    /// A GET without a body.
    pub fn get(path: String, headers: HeaderMap) -> Self {
        Outgoing {
            method: Method::GET,
            path,
            headers,
            body: Bytes::new(),
        }
    }
}
