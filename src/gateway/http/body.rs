//! Reads request bodies: bounded in bytes and time, for one request and for all together.

use super::error::Refusal;
use crate::gateway::{Buffered, BufferedBytes, Gateway};
use actix_web::HttpRequest;
use actix_web::error::PayloadError;
use actix_web::http::header::CONTENT_LENGTH;
use actix_web::web::Payload;
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use std::time::Duration;
use wire::request::BodyFault;

/// The most that is reserved before bytes have come: a length is only a claim.
const RESERVE_MAX: usize = 1 << 20;
/// What a refused body may still send, so that its sender gets to read the refusal.
const DRAIN_BYTES_MAX: usize = 64 << 20;
const DRAIN_TIME_MAX: Duration = Duration::from_secs(2);

/// The limits of one body.
#[derive(Debug, Clone, Copy)]
struct BodyLimits {
    /// Bytes.
    bytes: usize,
    /// From the head to the last byte.
    time: Duration,
}

/// A body in memory.
pub struct ReadBody {
    /// Its bytes.
    pub bytes: Bytes,
    /// Holds their place in the limit over all bodies.
    pub held: BufferedBytes,
}

/// Reads the whole body, or says why not. None when the client broke off.
async fn read(
    request: &HttpRequest,
    mut payload: Payload,
    limits: BodyLimits,
    buffered: &Buffered,
) -> Option<Result<ReadBody, Refusal>> {
    let reading = tokio::time::timeout(
        limits.time,
        collect(request, &mut payload, limits, buffered),
    );
    let read = match reading.await {
        Ok(read) => read?,
        Err(_) => Err(Refusal::TooSlow(limits.time)),
    };
    if let Err(Refusal::TooLarge(_) | Refusal::TooManyBytes) = &read {
        let _ = tokio::time::timeout(DRAIN_TIME_MAX, drain(payload)).await;
    }
    Some(read)
}

/// Reads the whole body within the settings' limits. None when the client broke off.
///
/// # Errors
/// Why it is refused.
pub async fn read_all(
    request: &HttpRequest,
    payload: Payload,
    gateway: &Gateway,
) -> Result<Option<ReadBody>, Refusal> {
    let limits = {
        let settings = gateway.settings.load();
        BodyLimits {
            bytes: settings.server.max_request_body,
            time: settings.server.request_body_timeout,
        }
    };
    read(request, payload, limits, &gateway.buffered)
        .await
        .transpose()
}

async fn collect(
    request: &HttpRequest,
    payload: &mut Payload,
    limits: BodyLimits,
    buffered: &Buffered,
) -> Option<Result<ReadBody, Refusal>> {
    let announced = request.headers().get(CONTENT_LENGTH);
    let announced: Option<usize> = announced.and_then(|v| v.to_str().ok()?.parse().ok());
    if announced.is_some_and(|length| length > limits.bytes) {
        return Some(Err(Refusal::TooLarge(limits.bytes)));
    }
    let mut held = buffered.start();
    let mut body = Body::None;
    while let Some(chunk) = payload.next().await {
        let chunk = match chunk {
            Ok(chunk) => chunk,
            Err(PayloadError::EncodingCorrupted | PayloadError::UnknownLength) => {
                return Some(Err(Refusal::Body(BodyFault {
                    param: None,
                    message: "the request body is not framed as its headers say".into(),
                })));
            }
            Err(_) => return None, // the client is gone
        };
        if body.len() + chunk.len() > limits.bytes {
            return Some(Err(Refusal::TooLarge(limits.bytes)));
        }
        if !held.grow(chunk.len()) {
            return Some(Err(Refusal::TooManyBytes));
        }
        body = body.and(chunk, announced.unwrap_or(0));
    }
    let bytes = body.freeze();
    Some(Ok(ReadBody { bytes, held }))
}

/// Most bodies come in one chunk, which is then not copied.
enum Body {
    None,
    One(Bytes),
    Many(BytesMut),
}

impl Body {
    fn len(&self) -> usize {
        match self {
            Body::None => 0,
            Body::One(bytes) => bytes.len(),
            Body::Many(bytes) => bytes.len(),
        }
    }

    fn and(self, chunk: Bytes, announced: usize) -> Self {
        match self {
            Body::None => Body::One(chunk),
            Body::One(first) => {
                let capacity = announced.min(RESERVE_MAX).max(first.len() + chunk.len());
                let mut all = BytesMut::with_capacity(capacity);
                all.extend_from_slice(&first);
                all.extend_from_slice(&chunk);
                Body::Many(all)
            }
            Body::Many(mut all) => {
                all.extend_from_slice(&chunk);
                Body::Many(all)
            }
        }
    }

    fn freeze(self) -> Bytes {
        match self {
            Body::None => Bytes::new(),
            Body::One(bytes) => bytes,
            Body::Many(bytes) => bytes.freeze(),
        }
    }
}

async fn drain(mut payload: Payload) {
    let mut seen = 0;
    while let Some(Ok(chunk)) = payload.next().await {
        seen += chunk.len();
        if seen > DRAIN_BYTES_MAX {
            return;
        }
    }
}
