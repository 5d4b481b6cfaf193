//! The one way in which connections to engines are opened, encrypted where the url says so.

use super::SendError;
use crate::tls::Trust;
use actors::backend::BackendUrl;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

/// Linux: ENFILE, EMFILE, EADDRINUSE, EADDRNOTAVAIL, ENOBUFS, ENOMEM. Not the backend's fault.
const OUR_OWN_ERRORS: [i32; 6] = [23, 24, 98, 99, 105, 12];

/// A connection.
pub enum Stream {
    /// As it is.
    Plain(TcpStream),
    /// Within TLS.
    Encrypted(Box<TlsStream<TcpStream>>),
}

impl Stream {
    /// Connects. Nagle's algorithm is off: it would hold back small writes for 40 ms. How long that may take is the caller's.
    ///
    /// # Errors
    /// When nobody is there, or is not who it should be.
    pub async fn open(url: &BackendUrl, trust: &Trust) -> Result<Self, SendError> {
        let connect = async {
            let stream = TcpStream::connect((url.host(), url.port())).await?;
            stream.set_nodelay(true)?;
            Ok(stream)
        };
        let stream = connect
            .await
            .map_err(|error: io::Error| match error.raw_os_error() {
                Some(code) if OUR_OWN_ERRORS.contains(&code) => SendError::Local(error),
                _ => SendError::Connect(error),
            })?;
        if !url.is_encrypted() {
            return Ok(Stream::Plain(stream));
        }
        let encrypted = trust.handshake(url, stream).await;
        let encrypted = encrypted.map_err(SendError::Handshake)?;
        Ok(Stream::Encrypted(Box::new(encrypted)))
    }
}

macro_rules! either {
    ($self:ident, $stream:ident => $do:expr) => {
        match $self.get_mut() {
            Stream::Plain($stream) => $do,
            Stream::Encrypted($stream) => $do,
        }
    };
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_read(cx, buffer))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        either!(self, stream => Pin::new(stream).poll_write(cx, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        either!(self, stream => Pin::new(stream).poll_write_vectored(cx, slices))
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Stream::Plain(stream) => stream.is_write_vectored(),
            Stream::Encrypted(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_shutdown(cx))
    }
}
