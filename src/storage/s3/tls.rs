//! Connections to an object store: TCP, and TLS for `https`. HTTP/2 is never offered.

use super::settings::misconfigured;
use crate::error::StoreError;
use crate::trust::client_config_of;
use futures_util::future::BoxFuture;
use http::Uri;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tower_service::Service;

/// What hyper's pool connects with.
#[derive(Clone)]
pub(super) struct Connector {
    tls: TlsConnector,
    timeout: Duration,
}

/// A connection, encrypted or not.
pub(super) trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl Stream for TcpStream {}
impl Stream for tokio_rustls::client::TlsStream<TcpStream> {}

impl Connection for Box<dyn Stream> {
    fn connected(&self) -> Connected {
        Connected::new() // no protocol was negotiated: HTTP/1.1
    }
}

impl Connector {
    /// Trusts the certificates of `ca_file` alone, or the public authorities if there is none.
    pub(super) fn new(ca_file: Option<&Path>, timeout: Duration) -> Result<Self, StoreError> {
        let config = client_config_of(ca_file).map_err(misconfigured)?;
        let tls = TlsConnector::from(Arc::new(config));
        Ok(Connector { tls, timeout })
    }

    async fn connect(self, to: Uri) -> io::Result<Box<dyn Stream>> {
        let encrypted = to.scheme_str() == Some("https");
        // an IPv6 address stands in brackets in a URL only
        let host = to.host().unwrap_or_default();
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let port = to.port_u16().unwrap_or(if encrypted { 443 } else { 80 });
        let tcp = TcpStream::connect((host, port)).await?;
        tcp.set_nodelay(true)?;
        if !encrypted {
            return Ok(Box::new(tcp));
        }
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        Ok(Box::new(self.tls.connect(name, tcp).await?))
    }
}

impl Service<Uri> for Connector {
    type Response = TokioIo<Box<dyn Stream>>;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, to: Uri) -> Self::Future {
        let connector = self.clone();
        Box::pin(async move {
            let timeout = connector.timeout;
            match tokio::time::timeout(timeout, connector.connect(to)).await {
                Ok(connected) => connected.map(TokioIo::new),
                Err(_) => Err(io::ErrorKind::TimedOut.into()),
            }
        })
    }
}
