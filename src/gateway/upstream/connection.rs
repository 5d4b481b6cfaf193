//! One connection to a backend.

use super::stream::Stream;
use bytes::Bytes;
use http_body_util::Full;
use hyper::body::{Body, Incoming};
use hyper::client::conn::http1;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::Instant;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// What is sent in one piece.
pub type RequestBody = Full<Bytes>;

type Driver = http1::Connection<TokioIo<Socket>, RequestBody>;

/// A connection that makes progress only while somebody polls it.
pub struct Connection {
    sender: http1::SendRequest<RequestBody>,
    driver: Pin<Box<Driver>>,
    ended: bool,
    /// When it was opened.
    pub opened: Instant,
}

/// The largest answer head; engines send far less.
const HEAD_BYTES_MAX: usize = 64 * 1024;

impl Connection {
    /// Speaks HTTP over an open connection.
    pub async fn over(stream: Stream) -> io::Result<Self> {
        let (sender, driver) = http1::Builder::new()
            .max_buf_size(HEAD_BYTES_MAX)
            .handshake(TokioIo::new(Socket::new(stream)))
            .await
            .map_err(io::Error::other)?;
        Ok(Connection {
            sender,
            driver: Box::pin(driver),
            ended: false,
            opened: tokio::time::Instant::now().into_std(),
        })
    }

    fn drive(&mut self, cx: &mut Context<'_>) {
        if !self.ended && self.driver.as_mut().poll(cx).is_ready() {
            self.ended = true; // its error reaches whoever waits for an answer or a chunk
        }
    }

    /// Sends a request and waits for the head of its answer; interim 1xx answers are skipped.
    pub async fn send(
        &mut self,
        request: Request<RequestBody>,
    ) -> hyper::Result<Response<Incoming>> {
        let mut answer = pin!(self.sender.send_request(request));
        let (driver, ended) = (&mut self.driver, &mut self.ended);
        poll_fn(move |cx| {
            if !*ended && driver.as_mut().poll(cx).is_ready() {
                *ended = true;
            }
            answer.as_mut().poll(cx)
        })
        .await
    }

    /// The next chunk of an answer's body.
    pub fn poll_chunk(
        &mut self,
        body: &mut Incoming,
        cx: &mut Context<'_>,
    ) -> Poll<Option<hyper::Result<Bytes>>> {
        loop {
            // what was read already comes first; then read on
            let mut frame = Pin::new(&mut *body).poll_frame(cx);
            if frame.is_pending() {
                self.drive(cx);
                frame = Pin::new(&mut *body).poll_frame(cx);
            }
            return match frame {
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) if data.is_empty() => continue,
                    Ok(data) => Poll::Ready(Some(Ok(data))),
                    Err(_trailers) => continue,
                },
                Poll::Ready(Some(Err(error))) => Poll::Ready(Some(Err(error))),
                Poll::Ready(None) => Poll::Ready(None),
                Poll::Pending => Poll::Pending,
            };
        }
    }

    /// Whether another request can be sent: the last answer was read whole, and the backend has
    /// not closed the connection as far as can be seen without waiting.
    pub fn is_reusable(&mut self) -> bool {
        self.drive(&mut Context::from_waker(Waker::noop()));
        !self.ended && self.sender.is_ready()
    }
}

/// A socket on which a failed write is no news: the backend may have answered, and closed, before
/// it had read the whole request, and that answer can still be read. If there is none, reading
/// says so.
struct Socket {
    stream: Stream,
    deaf: bool,
}

impl Socket {
    fn new(stream: Stream) -> Self {
        let deaf = false;
        Socket { stream, deaf }
    }

    fn forgive(
        &mut self,
        wrote: Poll<io::Result<usize>>,
        length: usize,
    ) -> Poll<io::Result<usize>> {
        match wrote {
            Poll::Ready(Err(_)) => {
                self.deaf = true;
                Poll::Ready(Ok(length))
            }
            wrote => wrote,
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.deaf {
            return Poll::Ready(Ok(bytes.len()));
        }
        let wrote = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.forgive(wrote, bytes.len())
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let length = slices.iter().map(|slice| slice.len()).sum();
        if self.deaf {
            return Poll::Ready(Ok(length));
        }
        let wrote = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.forgive(wrote, length)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
