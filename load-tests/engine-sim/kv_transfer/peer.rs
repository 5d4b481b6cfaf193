//! Engines among themselves, over HTTP: `POST /sim/kv/take` fetches what an engine keeps for others, `POST /sim/kv/give` brings
//! what an engine is to have, and `GET /query` tells who it is, as Mooncake's bootstrap server does.

use super::depot::Parcel;
use super::leg::Leg;
use super::{Kv, KvFault, Loaded};
use crate::api::App;
use crate::http_client;
use actix_web::http::StatusCode;
use actix_web::{HttpResponse, web};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// Route that fetches.
pub const TAKE: &str = "/sim/kv/take";
/// Route that brings.
pub const GIVE: &str = "/sim/kv/give";
/// A question of an engine keeps its place no longer.
const WAIT_MAX: Duration = Duration::from_secs(600);

/// What one engine wants of another.
#[derive(Debug, Serialize, Deserialize)]
pub struct Take {
    /// Which hand-off.
    pub key: String,
    /// Whom it is meant for, if that is known.
    #[serde(default)]
    pub engine_id: Option<String>,
    /// Which blocks, if that is known.
    #[serde(default)]
    pub block_ids: Option<Vec<u64>>,
    /// Leading tokens that the asker has itself.
    #[serde(default)]
    pub from: usize,
    /// Wall milliseconds that it waits for blocks that are not there yet.
    #[serde(default)]
    pub wait_ms: u64,
}

/// What one engine brings another.
#[derive(Debug, Serialize, Deserialize)]
pub struct Given {
    /// Which hand-off.
    pub key: String,
    /// Which prompt.
    pub content: u64,
    /// Its tokens.
    pub tokens: usize,
}

/// Fetches a prompt's blocks from the engine at `address`, `http://` or not; answers what they are good for.
pub async fn fetch(kv: &Kv, leg: &Leg, address: &str, mut wanted: Take) -> Result<Loaded, KvFault> {
    wanted.from = kv.cached_tokens(leg).await;
    let from = wanted.from;
    let key = wanted.key.clone();
    let missing = |why: String| KvFault::Missing(format!("remote blocks of {key}: {why}"));
    let patience = kv.load_patience() + Duration::from_millis(wanted.wait_ms);
    let host = address.strip_prefix("http://").unwrap_or(address);
    let url = format!("http://{}{TAKE}", host.trim_end_matches('/'));
    let body = json!(wanted);
    let answer = timeout(patience, http_client::post(&url, &body)).await;
    match answer {
        Err(_) => Err(missing(format!("{host} gave no answer in time"))),
        Ok(Err(why)) => Err(missing(why)),
        Ok(Ok((200, parcel))) => checked(leg, from, &parcel).map_err(missing),
        Ok(Ok((status, told))) => {
            let why = told["error"].as_str().unwrap_or("refused");
            Err(missing(format!("{why} ({host} answered {status})")))
        }
    }
}

/// Whether these are this prompt's blocks.
fn checked(leg: &Leg, from: usize, parcel: &Value) -> Result<Loaded, String> {
    let content = parcel["content"].as_u64();
    let tokens = parcel["tokens"].as_u64().unwrap_or(0) as usize;
    match content == Some(leg.content()) && tokens == leg.prompt.len() {
        true => Ok(from..tokens),
        false => Err(format!(
            "they are those of another prompt, with {tokens} tokens where this one has {}",
            leg.prompt.len()
        )),
    }
}

/// The same for a parcel of this engine's own.
pub async fn own(kv: &Kv, leg: &Leg, key: &str) -> Result<Loaded, KvFault> {
    let missing = |why: String| KvFault::Missing(format!("blocks of {key}: {why}"));
    let parcel = match timeout(kv.load_patience(), kv.depot.take(key)).await {
        Err(_) => return Err(missing("never came".to_owned())),
        Ok(Err(why)) => return Err(missing(why.to_owned())),
        Ok(Ok(parcel)) => json!({"content": parcel.content, "tokens": parcel.tokens}),
    };
    let from = kv.cached_tokens(leg).await;
    checked(leg, from, &parcel).map_err(missing)
}

/// Brings a prompt's blocks to the engine at `address`.
///
/// # Errors
/// One sentence about why it does not have them.
pub async fn bring(kv: &Kv, leg: &Leg, address: &str, key: String) -> Result<(), String> {
    kv.travel(leg.prompt.len()).await;
    let given = json!(Given {
        key,
        content: leg.content(),
        tokens: leg.prompt.len(),
    });
    let url = format!("http://{address}{GIVE}");
    match timeout(kv.load_patience(), http_client::post(&url, &given)).await {
        Ok(Ok((204, _))) => Ok(()),
        Ok(Ok((status, _))) => Err(format!("{address} answered {status}")),
        Ok(Err(why)) => Err(why),
        Err(_) => Err(format!("{address} gave no answer in time")),
    }
}

/// `POST /sim/kv/take`.
pub async fn take(app: web::Data<App>, wanted: web::Json<Take>) -> HttpResponse {
    let Some(kv) = &app.kv else {
        return refused(StatusCode::NOT_FOUND, "this engine shares nothing");
    };
    if wanted
        .engine_id
        .as_ref()
        .is_some_and(|id| *id != kv.engine_id)
    {
        return refused(StatusCode::NOT_FOUND, "they belong to another engine");
    }
    let others = |parcel: &Parcel| wanted.block_ids.as_ref() != Some(&parcel.block_ids);
    if wanted.block_ids.is_some() && kv.depot.peek(&wanted.key, others) == Some(true) {
        return refused(StatusCode::NOT_FOUND, "the block ids are wrong");
    }
    let wait = Duration::from_millis(wanted.wait_ms).min(WAIT_MAX);
    match timeout(wait, kv.depot.take(&wanted.key)).await {
        Err(_) if wanted.wait_ms > 0 => refused(StatusCode::REQUEST_TIMEOUT, "never came"),
        Err(_) => refused(StatusCode::NOT_FOUND, "unknown"),
        Ok(Err(why)) => refused(StatusCode::GONE, why),
        Ok(Ok(parcel)) => {
            kv.travel(parcel.tokens.saturating_sub(wanted.from)).await;
            drop(parcel.pin); // they have been read
            HttpResponse::Ok().json(json!({"content": parcel.content, "tokens": parcel.tokens}))
        }
    }
}

/// `POST /sim/kv/give`.
pub async fn give(app: web::Data<App>, given: web::Json<Given>) -> HttpResponse {
    let Some(kv) = &app.kv else {
        return refused(StatusCode::NOT_FOUND, "this engine shares nothing");
    };
    let given = given.into_inner();
    let parcel = Parcel {
        content: given.content,
        tokens: given.tokens,
        block_ids: Vec::new(),
        pin: None,
    };
    match kv.offer(given.key, parcel) {
        true => HttpResponse::NoContent().finish(),
        false => refused(StatusCode::GONE, "was used before"),
    }
}

/// `GET /query`: the engine of each data-parallel rank, and the address of each of its workers.
pub async fn query(app: web::Data<App>) -> HttpResponse {
    let Some(kv) = &app.kv else {
        return refused(StatusCode::NOT_FOUND, "this engine shares nothing");
    };
    let worker = format!("{}:{}", kv.host, kv.port);
    HttpResponse::Ok()
        .json(json!({"0": {"engine_id": kv.engine_id, "worker_addr": {"0": {"0": worker}}}}))
}

fn refused(status: StatusCode, why: &str) -> HttpResponse {
    HttpResponse::build(status).json(json!({"error": why}))
}

/// Announces blocks under a key. Whatever becomes of the leg that makes them, nobody waits for them for ever.
pub fn promise(kv: &Arc<Kv>, key: &str) -> Result<(), KvFault> {
    let promised = kv.depot.promise(key);
    promised.map_err(|why| KvFault::Fatal(format!("{key} {why}")))?;
    let sharing = &kv.config.kv_sharing;
    let after = kv.partner_patience() + kv.patience(sharing.lease + sharing.load_timeout);
    kv.expire(key.to_owned(), after);
    Ok(())
}
