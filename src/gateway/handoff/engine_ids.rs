//! What engines say their ids are: asked once, and again after a hand-off has failed, since an engine that was
//! started anew has another one.

use crate::gateway::Worker;
use crate::upstream::Outgoing;
use actors::backend::{BackendUrl, ConnectionCounts};
use bytes::Bytes;
use hyper::{HeaderMap, Method};
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;
use wire::handoff::Peer;

/// For an engine to say its id.
const QUERY_TIMEOUT: Duration = Duration::from_secs(2);
/// The largest answer that is read.
const ANSWER_BYTES_MAX: usize = 1 << 20;

/// An engine that did not say it is not asked again for so long.
const ASK_AGAIN: Duration = Duration::from_secs(2);

/// See the module; one entry per backend.
#[derive(Debug, Default)]
pub struct EngineIds(Mutex<HashMap<Arc<str>, Said>>);

/// What an engine said, or when it did not.
#[derive(Debug)]
enum Said {
    Id(String),
    Nothing(Instant),
}

impl EngineIds {
    fn known(&self) -> MutexGuard<'_, HashMap<Arc<str>, Said>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The id of a backend's engine, by `GET /query` at its bootstrap port; none when it does not say.
    pub async fn of(&self, worker: &Worker, backend: &Arc<str>, peer: &Peer) -> Option<String> {
        match self.known().get(backend) {
            Some(Said::Id(id)) => return Some(id.clone()),
            Some(Said::Nothing(at)) if at.elapsed() < ASK_AGAIN => return None,
            _ => {}
        }
        let url = format!("http://{}:{}", peer.host, peer.bootstrap_port?);
        let url = BackendUrl::parse(&url).ok()?;
        let asked = tokio::time::timeout(QUERY_TIMEOUT, ask(worker, &url)).await;
        let id = asked.ok().flatten();
        let said = id
            .clone()
            .map_or_else(|| Said::Nothing(Instant::now()), Said::Id);
        self.known().insert(backend.clone(), said);
        id
    }

    /// It may be another engine by now.
    pub fn forget(&self, backend: &str) {
        self.known().remove(backend);
    }
}

async fn ask(worker: &Worker, url: &BackendUrl) -> Option<String> {
    #[derive(Deserialize)]
    struct Rank {
        engine_id: String,
    }
    let outgoing = Outgoing {
        method: Method::GET,
        path: url.path("/query"),
        headers: HeaderMap::new(),
        body: Bytes::new(),
    };
    let counts = ConnectionCounts::default();
    let mut reply = worker.client.send(url, &outgoing, &counts).await.ok()?;
    if !reply.status.is_success() {
        return None;
    }
    let body = reply.body.whole(ANSWER_BYTES_MAX).await.ok()?;
    let ranks: BTreeMap<String, Rank> = serde_json::from_slice(&body).ok()?;
    ranks.into_values().next().map(|rank| rank.engine_id)
}
