//! Stands in for the crate `hyper-tls`, which would bring OpenSSL. rusoto_core names this one type of it, for a client that is
//! never made: its requests go through `storage`'s own transport.

use hyper::Uri;
use hyper::client::HttpConnector;
use hyper::service::Service;
use std::task::{Context, Poll};

/// A connector that speaks no TLS: an `https` address is refused as hyper's own connector refuses it.
#[derive(Debug, Clone)]
pub struct HttpsConnector<T>(T);

impl HttpsConnector<HttpConnector> {
    /// The connector over hyper's own.
    #[allow(clippy::new_without_default)] // the one name that is called
    pub fn new() -> Self {
        HttpsConnector(HttpConnector::new())
    }
}

impl<T: Service<Uri>> Service<Uri> for HttpsConnector<T> {
    type Response = T::Response;
    type Error = T::Error;
    type Future = T::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), T::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, uri: Uri) -> T::Future {
        self.0.call(uri)
    }
}
