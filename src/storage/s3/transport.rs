//! Sends one signed request over HTTP/1.1 and reads its whole answer, within bounds. Knows nothing of S3.

use super::tls::Connector;
use bytes::{Bytes, BytesMut};
use http::{Request, Response, header};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::{Client, Error};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use std::error::Error as StdError;
use std::io;
use std::time::Duration;
use tokio::sync::Semaphore;

/// How long an unused connection is kept. Shorter than servers keep theirs, so that few requests meet a closing one.
const IDLE_MAX: Duration = Duration::from_secs(4);
/// The largest answer head; S3 sends a few hundred bytes, and at most 2 KiB of metadata.
const HEAD_BYTES_MAX: usize = 64 * 1024;
/// The largest answer that is no object: a page of a thousand long keys, escaped.
const DOCUMENT_BYTES_MAX: usize = 4 << 20;

/// Connections to one object store. They belong to the tokio runtime that first used them.
pub(super) struct Transport {
    client: Client<Connector, Full<Bytes>>,
    answer_bytes_max: usize,
    permits: Semaphore,
}

/// Why there is no whole answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Failure {
    /// No connection in time.
    ConnectTimeout,
    /// No connection.
    Connection(String),
    /// The connection ended before an answer began.
    Closed(String),
    /// The server's certificate is not trusted.
    Certificate(String),
    /// An answer that is not HTTP.
    Broken(String),
    /// An answer whose body ended early.
    CutShort(String),
    /// An answer beyond the bound.
    TooLarge(usize),
}

impl Transport {
    pub(super) fn new(connector: Connector, object_bytes_max: usize, requests_max: usize) -> Self {
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_MAX)
            .pool_max_idle_per_host(requests_max)
            .http1_max_buf_size(HEAD_BYTES_MAX)
            .build(connector);
        Transport {
            client,
            answer_bytes_max: object_bytes_max.max(DOCUMENT_BYTES_MAX),
            permits: Semaphore::new(requests_max.max(1)),
        }
    }

    /// Sends a request and reads the whole answer.
    ///
    /// A connection that ends before an answer begins is replaced once: mostly it was an idle one that the server closed just
    /// then. So a request may arrive twice; every request of a store can.
    pub(super) async fn send(
        &self,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<Bytes>, Failure> {
        let permit = self.permits.acquire().await;
        let _permit = permit.map_err(|_| Failure::Connection("shutting down".into()))?;
        match self.exchange(request.clone()).await {
            Err(Failure::Closed(_)) => self.exchange(request).await,
            done => done,
        }
    }

    async fn exchange(&self, request: Request<Full<Bytes>>) -> Result<Response<Bytes>, Failure> {
        let answer = self.client.request(request).await;
        let (head, body) = answer.map_err(|error| describe(&error))?.into_parts();
        let announced = head.headers.get(header::CONTENT_LENGTH);
        let announced = announced.and_then(|value| value.to_str().ok()?.parse().ok());
        let body = self.read(body, announced.unwrap_or(0)).await?;
        Ok(Response::from_parts(head, body))
    }

    async fn read(&self, mut body: Incoming, announced: usize) -> Result<Bytes, Failure> {
        let bytes_max = self.answer_bytes_max;
        if announced > bytes_max {
            return Err(Failure::TooLarge(bytes_max));
        }
        let mut read = BytesMut::new();
        while let Some(frame) = body.frame().await {
            // hyper says so when a body is shorter than announced
            let frame = frame.map_err(|error| {
                Failure::CutShort(format!("the answer's body: {}", chain(&error)))
            })?;
            let Ok(chunk) = frame.into_data() else {
                continue;
            };
            if chunk.len() > bytes_max - read.len() {
                return Err(Failure::TooLarge(bytes_max));
            }
            if read.is_empty() && chunk.len() == announced {
                return Ok(chunk); // the whole of a small body: no copy
            }
            if read.is_empty() {
                read.reserve(announced);
            }
            read.extend_from_slice(&chunk);
        }
        Ok(read.freeze())
    }
}

fn describe(error: &Error) -> Failure {
    if let Some(io) = find::<io::Error>(error) {
        if error.is_connect() && io.kind() == io::ErrorKind::TimedOut {
            return Failure::ConnectTimeout;
        }
        // the io::Error of a failed handshake wraps what rustls says
        let tls = io
            .get_ref()
            .and_then(|inner| inner.downcast_ref::<rustls::Error>());
        if let Some(rustls::Error::InvalidCertificate(why)) = tls {
            return Failure::Certificate(why.to_string());
        }
    }
    match find::<hyper::Error>(error) {
        Some(hyper) if hyper.is_parse() => Failure::Broken(chain(error)),
        _ if error.is_connect() => Failure::Connection(chain(error)),
        _ => Failure::Closed(chain(error)),
    }
}

fn find<'a, E: StdError + 'static>(error: &'a (dyn StdError + 'static)) -> Option<&'a E> {
    causes(error).find_map(|cause| cause.downcast_ref())
}

/// An error and what caused it, in one line.
fn chain(error: &(dyn StdError + 'static)) -> String {
    let mut said: Vec<String> = causes(error).map(ToString::to_string).collect();
    said.dedup();
    said.join(": ")
}

/// An error, its cause, the cause of that.
fn causes<'a>(
    error: &'a (dyn StdError + 'static),
) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    std::iter::successors(Some(error), |&error| error.source())
}
