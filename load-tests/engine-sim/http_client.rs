//! Questions of engines to each other and to the store: JSON there, JSON back, one connection each. How long one may take is the
//! caller's; dropping the future closes the connection.

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;

/// Larger answers are no engine's.
const ANSWER_BYTES_MAX: usize = 32 << 20;

/// Posts JSON to an `http://` URL. Answers the status and the body, null when that is no JSON.
///
/// # Errors
/// One sentence that names the URL, when there is no complete answer.
pub async fn post(url: &str, body: &Value) -> Result<(u16, Value), String> {
    let exchanged = exchange(url, body).await;
    exchanged.map_err(|fault| format!("ask {url}: {fault}"))
}

async fn exchange(
    url: &str,
    body: &Value,
) -> Result<(u16, Value), Box<dyn std::error::Error + Send + Sync>> {
    let rest = url
        .strip_prefix("http://")
        .ok_or("only http:// is spoken")?;
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let stream = match authority.contains(':') {
        true => TcpStream::connect(authority).await?,
        false => TcpStream::connect((authority, 80)).await?,
    };
    stream.set_nodelay(true)?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let request = Request::builder()
        .method(Method::POST)
        .uri(if path.is_empty() { "/" } else { path })
        .header(HOST, authority)
        .header(CONTENT_TYPE, "application/json")
        .body(Full::new(Bytes::from(body.to_string())))?;
    let mut answered = std::pin::pin!(async move {
        let response = sender.send_request(request).await?;
        let status = response.status().as_u16();
        let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX);
        let bytes = body.collect().await?.to_bytes();
        Ok((
            status,
            serde_json::from_slice(&bytes).unwrap_or(Value::Null),
        ))
    });
    tokio::select! {
        answer = &mut answered => return answer,
        _ = connection => {} // its end shows in the answer, or in what is missing of it
    }
    answered.await
}
