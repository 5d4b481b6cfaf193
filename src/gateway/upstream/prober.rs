//! Asks backends how they are, over the same URLs and headers as requests.

use super::{Client, ClientSettings, NotWhole, Outgoing, Reply, SendError};
use crate::tls::Trust;
use actors::backend::{BackendSpec, ConnectionCounts};
use actors::health_checker::Prober;
use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use hyper::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use routing::health::Probe;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::error::Elapsed;
use tracing::warn;
use wire::openai::ModelList;

/// Bytes of `/v1/models` that are read.
const MODELS_BYTES_MAX: usize = 1 << 20;

/// Probes over a client of its own: requests and probes do not wait for each other.
pub struct HttpProber {
    client: Client,
    path: String,
    /// Backends whose last handshake failed, and of what.
    unproven: Rc<RefCell<HashMap<Arc<str>, String>>>,
    counts: Arc<ConnectionCounts>,
}

impl HttpProber {
    /// Probes `path`. Probe connections are not kept: a probe shall find out whether the backend
    /// accepts new ones.
    pub fn new(settings: ClientSettings, path: String, trust: Arc<Trust>) -> Self {
        let settings = ClientSettings {
            max_idle_per_backend: 0,
            ..settings
        };
        HttpProber {
            client: Client::trusting(settings, trust),
            unproven: Rc::default(),
            path,
            counts: Arc::default(),
        }
    }

    fn ask(&self, spec: &BackendSpec, path: &str) -> Outgoing {
        let mut headers = HeaderMap::new();
        if let Some(value) = bearer(spec) {
            headers.insert(AUTHORIZATION, value);
        }
        Outgoing::get(spec.url.path(path), headers)
    }
}

/// Says once why a backend cannot be proven to be who it should be: no request would ever get there.
fn tell_handshake(
    backend: &Arc<str>,
    answer: &Result<Result<Reply, SendError>, Elapsed>,
    unproven: &mut HashMap<Arc<str>, String>,
) {
    match answer {
        Ok(Err(SendError::Handshake(error))) => {
            let what = error.to_string();
            if unproven.get(backend) != Some(&what) {
                warn!(%backend, error = %what, "TLS handshake with a backend failed");
                unproven.insert(backend.clone(), what);
            }
        }
        Ok(Ok(_)) => {
            unproven.remove(backend);
        }
        _ => {}
    }
}

fn is_nobody_there(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionRefused | ConnectionReset)
}

/// The `Authorization` header for a backend that has a key of its own.
pub fn bearer(spec: &BackendSpec) -> Option<HeaderValue> {
    let key = spec.api_key.as_ref()?;
    let mut value = HeaderValue::from_str(&format!("Bearer {}", key.0)).ok()?;
    value.set_sensitive(true);
    Some(value)
}

impl Prober for HttpProber {
    fn probe(&self, spec: &BackendSpec, timeout: Duration) -> LocalBoxFuture<'static, Probe> {
        let (client, counts) = (self.client.clone(), self.counts.clone());
        let (url, outgoing) = (spec.url.clone(), self.ask(spec, &self.path));
        let (name, unproven) = (spec.name.clone(), self.unproven.clone());
        async move {
            let answer = tokio::time::timeout(timeout, client.send(&url, &outgoing, &counts)).await;
            tell_handshake(&name, &answer, &mut unproven.borrow_mut());
            match answer {
                Ok(Ok(reply)) if reply.status.is_success() => Probe::Ok,
                Ok(Ok(reply)) => Probe::BadStatus(reply.status.as_u16()),
                Ok(Err(SendError::Connect(error))) if is_nobody_there(&error) => Probe::Refused,
                Ok(Err(SendError::Broken(_) | SendError::NotHttp(_) | SendError::Handshake(_))) => {
                    Probe::Refused
                }
                // no name, no route, no socket, no time: the fault may be on this side
                Ok(Err(_)) | Err(_) => Probe::TimedOut,
            }
        }
        .boxed_local()
    }

    fn models(
        &self,
        spec: &BackendSpec,
        timeout: Duration,
    ) -> LocalBoxFuture<'static, Result<Vec<Arc<str>>, String>> {
        let (client, counts) = (self.client.clone(), self.counts.clone());
        let (url, outgoing) = (spec.url.clone(), self.ask(spec, "/v1/models"));
        let ask = async move {
            let sent = client.send(&url, &outgoing, &counts).await;
            let mut reply = sent.map_err(|error| error.to_string())?;
            if !reply.status.is_success() {
                return Err(format!("/v1/models answered {}", reply.status));
            }
            let body = reply.body.whole(MODELS_BYTES_MAX).await;
            let body = body.map_err(|why| match why {
                NotWhole::BrokeOff => "/v1/models broke off".to_owned(),
                NotWhole::TooLong => format!("/v1/models is longer than {MODELS_BYTES_MAX} bytes"),
            })?;
            let list: ModelList = serde_json::from_slice(&body)
                .map_err(|_| "/v1/models is not a list of models".to_owned())?;
            Ok(list.data.into_iter().map(|card| card.id.into()).collect())
        };
        let late = || "/v1/models did not answer in time".to_owned();
        async move {
            let answer = tokio::time::timeout(timeout, ask).await;
            answer.unwrap_or_else(|_| Err(late()))
        }
        .boxed_local()
    }
}
