//! The HTTP form of the KV events: `GET /v1/kv_events`, over WebSocket when the request asks for one, else as server-sent events.
//! Both start after what the client has seen, then go on live. A client that falls behind is disconnected and may resume.

use super::{App, error::ApiError};
use crate::event_log::EventBatch;
use crate::kv_events::feed::{Ended, Subscription};
use crate::kv_events::json;
use actix_web::http::header;
use actix_web::{HttpRequest, HttpResponse, web};
use actix_ws::{CloseCode, CloseReason, Message, MessageStream, Session};
use bytes::Bytes;
use futures_util::{Stream, stream};
use serde::Deserialize;
use std::convert::Infallible;
use std::time::Duration;
use tokio::time::timeout;

/// A sign of life when nothing happens.
const HEARTBEAT: Duration = Duration::from_secs(5);
/// How long one message may wait for a client that does not read.
const SEND_PATIENCE: Duration = Duration::from_secs(10);
/// Where a client resumes over server-sent events.
const LAST_EVENT_ID: &str = "last-event-id";

#[derive(Deserialize)]
struct Resume {
    since: Option<String>,
}

/// Both transports.
pub async fn serve(
    app: web::Data<App>,
    request: HttpRequest,
    payload: web::Payload,
) -> Result<HttpResponse, ApiError> {
    let subscription = app.feed.subscribe(last_seen(&request)?);
    if !asks_for_websocket(&request) {
        return Ok(HttpResponse::Ok()
            .content_type("text/event-stream; charset=utf-8")
            .insert_header((header::CACHE_CONTROL, "no-cache"))
            .streaming(server_sent(subscription)));
    }
    let (response, session, messages) = actix_ws::handle(&request, payload)
        .map_err(|fault| ApiError::bad_request(format!("WebSocket handshake: {fault}")))?;
    actix_web::rt::spawn(converse(session, messages, subscription));
    Ok(response)
}

fn asks_for_websocket(request: &HttpRequest) -> bool {
    request
        .headers()
        .get(header::UPGRADE)
        .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"websocket"))
}

/// The number of the last batch that the client has: `Last-Event-ID`, else `?since=`.
fn last_seen(request: &HttpRequest) -> Result<Option<u64>, ApiError> {
    let header = request
        .headers()
        .get(LAST_EVENT_ID)
        .map(|value| value.to_str().unwrap_or_default().to_owned());
    let query = || {
        web::Query::<Resume>::from_query(request.query_string())
            .ok()
            .and_then(|query| query.into_inner().since)
    };
    match header.or_else(query) {
        None => Ok(None),
        Some(text) => text.trim().parse().map(Some).map_err(|_| {
            ApiError::bad_request(format!("{text:?} is not the number of a batch of events"))
        }),
    }
}

fn server_sent(subscription: Subscription) -> impl Stream<Item = Result<Bytes, Infallible>> {
    stream::unfold(subscription, |mut subscription| async {
        let text = match timeout(HEARTBEAT, subscription.next()).await {
            Ok(Ok(batch)) => event(&batch),
            Ok(Err(_)) => return None,
            Err(_) => ": alive\n\n".to_owned(),
        };
        Some((Ok(text.into()), subscription))
    })
}

fn event(batch: &EventBatch) -> String {
    format!("id: {}\ndata: {}\n\n", batch.seq, json::encode(batch))
}

/// Sends batches, answers pings, and ends with the client or behind a client that does not read.
async fn converse(mut session: Session, mut messages: MessageStream, mut batches: Subscription) {
    loop {
        let sent = tokio::select! {
            message = messages.recv() => match message {
                Some(Ok(Message::Ping(data))) => timeout(SEND_PATIENCE, session.pong(&data)).await,
                Some(Ok(Message::Close(_)) | Err(_)) | None => break,
                Some(Ok(_)) => continue,
            },
            batch = timeout(HEARTBEAT, batches.next()) => match batch {
                Ok(Ok(batch)) => timeout(SEND_PATIENCE, session.text(json::encode(&batch))).await,
                Ok(Err(ended)) => {
                    let _ = timeout(SEND_PATIENCE, session.close(Some(reason(ended)))).await; // it may be gone
                    return;
                }
                Err(_) => timeout(SEND_PATIENCE, session.ping(b"")).await,
            },
        };
        if !matches!(sent, Ok(Ok(()))) {
            return;
        }
    }
    let _ = timeout(SEND_PATIENCE, session.close(None)).await; // it may be gone
}

fn reason(ended: Ended) -> CloseReason {
    match ended {
        Ended::Lagged => (CloseCode::Again, "too far behind; resume with ?since="),
        Ended::Stopped => (CloseCode::Away, "the engine stopped"),
    }
    .into()
}
