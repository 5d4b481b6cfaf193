//! The errors that clients see, in vLLM's shapes. All statuses and wordings of refusals are here.

use actix_web::http::StatusCode;
use actix_web::{HttpResponse, ResponseError};
use bytes::Bytes;
use serde_json::json;
use std::fmt;
use wire::openai::{ErrorBody, ErrorDetail};

/// A refused request.
#[derive(Debug)]
pub struct ApiError {
    status: StatusCode,
    kind: String,
    message: String,
    param: Option<String>,
}

impl ApiError {
    /// The client's fault.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            kind: "BadRequestError".into(),
            message: message.into(),
            param: None,
        }
    }

    /// The client's fault, in one field.
    pub fn bad_field(param: &str, message: impl Into<String>) -> Self {
        Self {
            param: Some(param.to_owned()),
            ..Self::bad_request(message)
        }
    }

    /// A model that is not served here.
    pub fn unknown_model(model: &str) -> Self {
        Self {
            status: StatusCode::NOT_FOUND,
            kind: "NotFoundError".into(),
            message: format!("The model `{model}` does not exist."),
            param: Some("model".into()),
        }
    }

    /// A prompt that leaves no room for an answer.
    pub fn prompt_too_long(max_model_len: usize, prompt: usize) -> Self {
        Self::bad_request(format!(
            "This model's maximum context length is {max_model_len} tokens. However, your request has {prompt} input tokens. Please reduce \
             the length of the input messages."
        ))
    }

    /// A limit that prompt and answer together exceed.
    pub fn max_tokens_too_large(max_model_len: usize, prompt: usize, max_tokens: usize) -> Self {
        Self::bad_request(format!(
            "'max_tokens' or 'max_completion_tokens' is too large: {max_tokens}. This model's maximum context length is {max_model_len} tokens \
             and your request has {prompt} input tokens ({max_tokens} > {max_model_len} - {prompt})."
        ))
    }

    /// What FastAPI says where there is no route or the method is wrong, and what a refusing engine says.
    pub fn plain(status: StatusCode) -> Self {
        let phrase = status.canonical_reason().unwrap_or("Error");
        Self {
            status,
            kind: phrase.to_owned(),
            message: phrase.to_owned(),
            param: None,
        }
    }

    /// The engine's own fault.
    pub fn internal(message: impl Into<String>) -> Self {
        Self {
            status: StatusCode::INTERNAL_SERVER_ERROR,
            kind: "InternalServerError".into(),
            message: message.into(),
            param: None,
        }
    }

    /// Keys and values that should have come from elsewhere did not.
    pub fn kv_transfer(why: String) -> Self {
        Self {
            param: Some("kv_transfer_params".to_owned()),
            ..Self::internal(why)
        }
    }

    /// A failure that was asked for.
    pub fn injected(status: u16) -> Self {
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let kind = match status {
            StatusCode::INTERNAL_SERVER_ERROR => "InternalServerError".to_owned(),
            other => other.canonical_reason().unwrap_or("Error").to_owned(),
        };
        Self {
            status,
            kind,
            message: "injected failure".into(),
            param: None,
        }
    }

    /// The envelope as JSON text: the body of an answer, or an event in a stream.
    pub fn to_json(&self) -> Vec<u8> {
        let error = ErrorDetail {
            message: self.message.clone(),
            kind: self.kind.clone(),
            param: self.param.clone(),
            code: Some(json!(self.status.as_u16())),
        };
        serde_json::to_vec(&ErrorBody { error }).expect("strings and numbers serialise")
    }

    /// The envelope as the event that ends a stream early.
    pub fn to_event(&self) -> Bytes {
        wire::sse::data_event(&self.to_json())
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", self.status.as_u16(), self.message)
    }
}

impl ResponseError for ApiError {
    fn status_code(&self) -> StatusCode {
        self.status
    }

    fn error_response(&self) -> HttpResponse {
        HttpResponse::build(self.status)
            .content_type("application/json")
            .body(self.to_json())
    }
}

/// What vLLM's key check answers; it stands before the handlers and has a shape of its own.
pub fn unauthorized() -> HttpResponse {
    HttpResponse::Unauthorized().json(json!({"error": "Unauthorized"}))
}
