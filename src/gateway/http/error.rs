//! Which failure of ours is which status. Statuses that engines give are judged in
//! `proxy/verdict.rs`.

use crate::quotas::Exceeded;
use actix_web::HttpResponse;
use actix_web::http::StatusCode;
use actix_web::http::header::{CONNECTION, RETRY_AFTER, WWW_AUTHENTICATE};
use routing::access::{Denied, Scope as AccessScope};
use routing::choose::NoBackend;
use routing::disagg::Step;
use std::time::Duration;
use wire::openai::{ErrorBody, ErrorDetail};
use wire::request::BodyFault;

/// Who failed; a label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum By {
    /// The client.
    Client,
    /// An engine, or the way to it.
    Backend,
    /// The router, or the fleet as a whole.
    Router,
}

impl By {
    /// The word used in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            By::Client => "client",
            By::Backend => "backend",
            By::Router => "router",
        }
    }
}

/// What failed; a label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The request is wrong, by our word or the engine's.
    BadRequest,
    /// The body is too large.
    TooLarge,
    /// The client may not do this.
    Unauthorized,
    /// The body came too slowly.
    RequestTimeout,
    /// No connection to the backend.
    Connect,
    /// No first byte in time.
    FirstByteTimeout,
    /// Silence within an answer.
    IdleTimeout,
    /// The connection broke within or before an answer.
    StreamCut,
    /// An error event of the engine's within a stream.
    InStreamError,
    /// An answer that is not what it should be.
    BadBody,
    /// Nobody can serve the request now.
    NoBackend,
    /// Nobody serves the model.
    UnknownModel,
    /// Too much at one time, by our word or the engine's.
    Overloaded,
    /// More than this client may ask for.
    RateLimited,
    /// Something that should not happen, here or at the engine.
    Internal,
}

impl ErrorKind {
    /// The word used in metrics, logs and as `code` in the envelope.
    pub fn as_str(self) -> &'static str {
        match self {
            ErrorKind::BadRequest => "bad_request",
            ErrorKind::TooLarge => "too_large",
            ErrorKind::Unauthorized => "unauthorized",
            ErrorKind::RequestTimeout => "request_timeout",
            ErrorKind::Connect => "connect",
            ErrorKind::FirstByteTimeout => "first_byte_timeout",
            ErrorKind::IdleTimeout => "idle_timeout",
            ErrorKind::StreamCut => "stream_cut",
            ErrorKind::InStreamError => "in_stream_error",
            ErrorKind::BadBody => "bad_body",
            ErrorKind::NoBackend => "no_backend",
            ErrorKind::UnknownModel => "unknown_model",
            ErrorKind::Overloaded => "overloaded",
            ErrorKind::RateLimited => "rate_limited",
            ErrorKind::Internal => "internal",
        }
    }
}

/// When a client may ask again that nobody could serve.
pub const RETRY_LATER: Duration = Duration::from_secs(5);

/// An answer that the gateway gives in an engine's place.
#[derive(Debug, Clone)]
pub enum Refusal {
    /// The body cannot be routed.
    Body(BodyFault),
    /// The body is larger than the limit in bytes.
    TooLarge(usize),
    /// The body did not come within the limit.
    TooSlow(Duration),
    /// Too many bytes of bodies at one time.
    TooManyBytes,
    /// More than the client may ask for.
    Quota(Exceeded),
    /// More requests at one time than there may be.
    TooManyRequests,
    /// More requests wait already than may wait.
    QueueFull,
    /// It has waited for as long as it may.
    QueueTimeout,
    /// The process is ending.
    Draining,
    /// No backend for this model.
    NoBackend(NoBackend, String),
    /// Nobody can do this step of serving the model now.
    NoWorker(Step, String),
    /// A step of a split request failed, and nobody stands in.
    Step(Step, ErrorKind, String),
    /// Who pairs workers does not answer, and nobody stands in.
    NoCoordinator,
    /// The router actor is gone and could not be replaced.
    NoRouter,
    /// This machine has no socket left for a connection to a backend.
    NoSocket,
    /// A backend failed before it answered.
    Backend(ErrorKind, String),
    /// Not a path of ours.
    UnknownPath(String),
    /// Not a method of this path.
    WrongMethod(String),
    /// No such backend, asked for by name.
    NoSuchBackend(String),
    /// No such model, asked for by name.
    NoSuchModel(String),
    /// The key is missing, or does not open this.
    Denied(Denied),
    /// The key does not allow this model.
    ModelNotAllowed(String),
    /// Settings that were to be read again are faulty: these faults.
    FaultySettings(String),
    /// This gateway cannot read its settings again.
    NoReload,
    /// `/admin` without its token.
    NoAdminToken,
    /// `/admin` from another machine, with no token configured.
    AdminFromAfar,
}

impl Refusal {
    /// Who failed, and of what.
    pub fn blame(&self) -> (By, ErrorKind) {
        match self {
            Refusal::Body(_)
            | Refusal::WrongMethod(_)
            | Refusal::NoSuchBackend(_)
            | Refusal::FaultySettings(_)
            | Refusal::NoReload
            | Refusal::UnknownPath(_) => (By::Client, ErrorKind::BadRequest),
            Refusal::Denied(_)
            | Refusal::ModelNotAllowed(_)
            | Refusal::NoAdminToken
            | Refusal::AdminFromAfar => (By::Client, ErrorKind::Unauthorized),
            Refusal::TooLarge(_) => (By::Client, ErrorKind::TooLarge),
            Refusal::TooSlow(_) => (By::Client, ErrorKind::RequestTimeout),
            Refusal::Quota(_) => (By::Client, ErrorKind::RateLimited),
            Refusal::TooManyBytes
            | Refusal::TooManyRequests
            | Refusal::QueueFull
            | Refusal::QueueTimeout
            | Refusal::Draining => (By::Router, ErrorKind::Overloaded),
            Refusal::NoSuchModel(_) | Refusal::NoBackend(NoBackend::UnknownModel, _) => {
                (By::Client, ErrorKind::UnknownModel)
            }
            Refusal::NoBackend(..) | Refusal::NoWorker(..) => (By::Router, ErrorKind::NoBackend),
            Refusal::Step(_, kind, _) => (By::Backend, *kind),
            Refusal::NoCoordinator | Refusal::NoRouter | Refusal::NoSocket => {
                (By::Router, ErrorKind::Internal)
            }
            Refusal::Backend(kind, _) => (By::Backend, *kind),
        }
    }

    /// The status.
    pub fn status(&self) -> StatusCode {
        match self {
            Refusal::Body(_) | Refusal::FaultySettings(_) => StatusCode::BAD_REQUEST,
            Refusal::NoReload => StatusCode::CONFLICT,
            Refusal::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Refusal::TooSlow(_) => StatusCode::REQUEST_TIMEOUT,
            // it is there, and does not do what it should
            Refusal::Step(_, ErrorKind::BadBody, _) => StatusCode::BAD_GATEWAY,
            Refusal::Step(_, ErrorKind::FirstByteTimeout | ErrorKind::IdleTimeout, _) => {
                StatusCode::GATEWAY_TIMEOUT
            }
            Refusal::Quota(_) => StatusCode::TOO_MANY_REQUESTS,
            Refusal::TooManyBytes
            | Refusal::TooManyRequests
            | Refusal::QueueFull
            | Refusal::QueueTimeout
            | Refusal::Draining
            | Refusal::NoWorker(..)
            | Refusal::Step(..)
            | Refusal::NoCoordinator
            | Refusal::NoRouter
            | Refusal::NoSocket => StatusCode::SERVICE_UNAVAILABLE,
            Refusal::NoBackend(NoBackend::UnknownModel, _)
            | Refusal::NoSuchModel(_)
            | Refusal::NoSuchBackend(_)
            | Refusal::UnknownPath(_) => StatusCode::NOT_FOUND,
            Refusal::NoBackend(..) => StatusCode::SERVICE_UNAVAILABLE,
            Refusal::Backend(ErrorKind::FirstByteTimeout | ErrorKind::IdleTimeout, _) => {
                StatusCode::GATEWAY_TIMEOUT
            }
            Refusal::Backend(..) => StatusCode::BAD_GATEWAY,
            Refusal::WrongMethod(_) => StatusCode::METHOD_NOT_ALLOWED,
            Refusal::Denied(Denied::Scope(_)) | Refusal::ModelNotAllowed(_) => {
                StatusCode::FORBIDDEN
            }
            Refusal::Denied(_) | Refusal::NoAdminToken => StatusCode::UNAUTHORIZED,
            Refusal::AdminFromAfar => StatusCode::FORBIDDEN,
        }
    }

    /// One sentence for the client.
    pub fn message(&self) -> String {
        match self {
            Refusal::Body(fault) => fault.message.clone(),
            Refusal::TooLarge(limit) => format!("the request body is larger than {limit} bytes"),
            Refusal::TooSlow(limit) => format!(
                "the request body did not arrive within {} s",
                limit.as_secs_f64()
            ),
            Refusal::TooManyBytes => {
                "the gateway holds too many request bodies, try again later".into()
            }
            Refusal::Quota(exceeded) => exceeded.message(),
            Refusal::TooManyRequests => "the gateway serves as many requests as it may".into(),
            Refusal::QueueFull => {
                "as many requests wait for the gateway as may wait, try again later".into()
            }
            Refusal::QueueTimeout => {
                "the request has waited for its turn for as long as it may".into()
            }
            Refusal::Draining => "the gateway is shutting down".into(),
            Refusal::NoBackend(NoBackend::UnknownModel, model) | Refusal::NoSuchModel(model) => {
                format!("the model `{model}` does not exist")
            }
            Refusal::NoBackend(NoBackend::ModelsNotKnownYet, model) => {
                format!(
                    "no backend is known to serve `{model}` yet, and some have not said what they serve"
                )
            }
            Refusal::NoBackend(NoBackend::NoneServing, model) => {
                format!("no backend for `{model}` can take requests now")
            }
            Refusal::NoWorker(step, model) => {
                let step = step.as_str();
                format!("no {step} worker for `{model}` can take requests now")
            }
            Refusal::Step(step, _, what) => format!("the {} step failed: {what}", step.as_str()),
            Refusal::NoCoordinator => "the coordinator of split serving is restarting".into(),
            Refusal::NoRouter => "the router is restarting".into(),
            Refusal::NoSocket => {
                "the gateway has no socket left for a connection to a backend".into()
            }
            Refusal::Backend(_, message) => message.clone(),
            Refusal::NoSuchBackend(name) => format!("there is no backend `{name}`"),
            Refusal::UnknownPath(path) => format!("there is nothing at `{path}`"),
            Refusal::WrongMethod(method) => format!("`{method}` is not allowed here"),
            Refusal::Denied(Denied::NoKey) => {
                "an API key is needed: send it as `Authorization: Bearer KEY`".into()
            }
            Refusal::Denied(Denied::UnknownKey) => "the API key is not valid".into(),
            Refusal::Denied(Denied::Expired) => "the API key has expired".into(),
            Refusal::Denied(Denied::Scope(scope)) => {
                let what = match scope {
                    AccessScope::Inference => "requests to models",
                    AccessScope::Models => "the list of models",
                    AccessScope::Admin => "/admin",
                };
                format!("the API key does not open {what}")
            }
            Refusal::ModelNotAllowed(model) => {
                format!("the API key does not allow the model `{model}`")
            }
            Refusal::FaultySettings(faults) => {
                format!("the settings are faulty, those of before stay in effect: {faults}")
            }
            Refusal::NoReload => {
                "this gateway was not started from settings that can be read again".into()
            }
            Refusal::NoAdminToken => {
                "the admin token is missing or wrong: send it as `Authorization: Bearer TOKEN`"
                    .into()
            }
            Refusal::AdminFromAfar => {
                "/admin answers only to this machine while `admin.token` is not set".into()
            }
        }
    }

    fn kind(&self) -> &'static str {
        if let Refusal::Quota(exceeded) = self {
            return exceeded.limited.as_str();
        }
        match self.status() {
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            status if status.is_client_error() => "invalid_request_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            _ => "api_error",
        }
    }

    /// The body of the answer, and of an error event.
    pub fn body(&self) -> ErrorBody {
        let param = match self {
            Refusal::Body(fault) => fault.param.map(str::to_owned),
            Refusal::NoBackend(..)
            | Refusal::NoWorker(..)
            | Refusal::ModelNotAllowed(_)
            | Refusal::NoSuchModel(_) => Some("model".to_owned()),
            _ => None,
        };
        let code = match self {
            Refusal::NoBackend(NoBackend::UnknownModel, _) | Refusal::NoSuchModel(_) => {
                "model_not_found"
            }
            Refusal::Denied(Denied::Scope(_)) => "scope_not_allowed",
            Refusal::Denied(Denied::Expired) => "expired_api_key",
            Refusal::Denied(_) => "invalid_api_key",
            Refusal::ModelNotAllowed(_) => "model_not_allowed",
            Refusal::Quota(_) => "rate_limit_exceeded",
            Refusal::TooManyRequests => "too_many_requests",
            Refusal::QueueFull => "queue_full",
            Refusal::QueueTimeout => "queue_timeout",
            Refusal::FaultySettings(_) => "invalid_settings",
            Refusal::NoReload => "no_reload",
            Refusal::NoWorker(step, _) => match step {
                Step::Prefill => "no_prefill_worker",
                Step::Decode => "no_decode_worker",
                Step::Unified => "no_unified_worker",
            },
            Refusal::Step(step, ..) => {
                let timed_out = self.status() == StatusCode::GATEWAY_TIMEOUT;
                match (step, timed_out) {
                    (Step::Prefill, false) => "prefill_failed",
                    (Step::Prefill, true) => "prefill_timeout",
                    (Step::Decode, false) => "decode_failed",
                    (Step::Decode, true) => "decode_timeout",
                    (Step::Unified, false) => "unified_failed",
                    (Step::Unified, true) => "unified_timeout",
                }
            }
            _ => self.blame().1.as_str(),
        };
        ErrorBody {
            error: ErrorDetail {
                message: self.message(),
                kind: self.kind().to_owned(),
                param,
                code: Some(code.into()),
            },
        }
    }

    /// The whole answer.
    pub fn response(&self, request_id: &str) -> HttpResponse {
        let mut response = HttpResponse::build(self.status());
        response.insert_header(("x-request-id", request_id));
        if self.status() == StatusCode::SERVICE_UNAVAILABLE {
            response.insert_header((RETRY_AFTER, RETRY_LATER.as_secs()));
        }
        if let Refusal::Quota(exceeded) = self {
            response.insert_header((RETRY_AFTER, exceeded.weighed.retry_seconds()));
            exceeded.note().tell(|name, value| {
                response.insert_header((name, value));
            });
        }
        if self.status() == StatusCode::UNAUTHORIZED {
            response.insert_header((WWW_AUTHENTICATE, "Bearer"));
        }
        if matches!(
            self,
            Refusal::Draining | Refusal::Denied(_) | Refusal::TooLarge(_) | Refusal::TooSlow(_)
        ) {
            response.insert_header((CONNECTION, "close"));
        }
        response.json(self.body())
    }
}
