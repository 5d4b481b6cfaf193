//! The store over HTTP, for engines of several processes: `/v1/blocks/{contains,get,put}`, and `/admin` to disturb it.

use super::{Blocks, NamespaceStore, StoreFault};
use actix_web::dev::ServerHandle;
use actix_web::http::StatusCode;
use actix_web::{HttpResponse, HttpServer, web};
use serde_json::json;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::task::JoinHandle;

/// Names of a million tokens' blocks of one token each, in JSON.
const BODY_MAX: usize = 32 << 20;

type Store = web::Data<NamespaceStore>;

/// A store that listens. It stops when this is dropped.
#[derive(Debug)]
pub struct StoreHandle {
    addr: SocketAddr,
    store: Arc<NamespaceStore>,
    server: ServerHandle,
    listening: JoinHandle<()>,
}

/// Listens at `host` and `port`; 0 takes a free one. Call it inside an actix system.
///
/// # Errors
/// An address that is not free.
pub fn start(store: Arc<NamespaceStore>, host: &str, port: u16) -> io::Result<StoreHandle> {
    let socket = crate::listening::reserve(host, port)?;
    let addr = socket.local_addr()?.as_socket();
    let addr = addr.ok_or_else(|| io::Error::other("the socket has no IP address"))?;
    socket.listen(1024)?;
    let data = web::Data::from(store.clone());
    let server = HttpServer::new(move || {
        actix_web::App::new()
            .app_data(data.clone())
            .app_data(web::JsonConfig::default().limit(BODY_MAX))
            .configure(routes)
    })
    .workers(1)
    .h1_allow_half_closed(false)
    .tcp_nodelay(true)
    .disable_signals()
    .listen(socket.into())?
    .run();
    let handle = server.handle();
    let listening = actix_rt::spawn(async move {
        if let Err(fault) = server.await {
            tracing::error!(%fault, "store's server ended");
        }
    });
    Ok(StoreHandle {
        addr,
        store,
        server: handle,
        listening,
    })
}

impl StoreHandle {
    /// `http://host:port`, without a slash at the end.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// What it serves.
    pub fn store(&self) -> &NamespaceStore {
        &self.store
    }

    /// Returns when the server has ended by itself, which it does only on a fault.
    pub async fn ended(&mut self) {
        let _ = (&mut self.listening).await; // a panic there was reported
    }

    /// Stops at once. Returns when the port is free.
    pub async fn stop(mut self) {
        self.server.stop(false).await;
        let _ = (&mut self.listening).await; // ends with the server
    }
}

impl Drop for StoreHandle {
    fn drop(&mut self) {
        drop(self.server.stop(false)); // the command is sent at the call; nobody waits for the answer
    }
}

fn routes(services: &mut web::ServiceConfig) {
    services
        .route("/health", web::get().to(HttpResponse::Ok))
        .route("/stats", web::get().to(stats))
        .route("/v1/blocks/contains", web::post().to(contains))
        .route("/v1/blocks/get", web::post().to(get))
        .route("/v1/blocks/put", web::post().to(put))
        .route("/admin/fault", web::post().to(set_fault))
        .route("/admin/clear", web::post().to(clear));
}

async fn stats(store: Store) -> HttpResponse {
    HttpResponse::Ok().json(store.stats())
}

async fn contains(store: Store, blocks: web::Json<Blocks>) -> HttpResponse {
    answer("leading", store.contains(&blocks).await)
}

async fn get(store: Store, blocks: web::Json<Blocks>) -> HttpResponse {
    answer("leading", store.get(&blocks).await)
}

async fn put(store: Store, blocks: web::Json<Blocks>) -> HttpResponse {
    answer("written", store.put(&blocks).await)
}

async fn set_fault(store: Store, fault: web::Json<StoreFault>) -> HttpResponse {
    store.set_fault(*fault);
    HttpResponse::NoContent().finish()
}

async fn clear(store: Store) -> HttpResponse {
    store.clear();
    HttpResponse::NoContent().finish()
}

fn answer(what: &str, blocks: Result<usize, u16>) -> HttpResponse {
    match blocks {
        Ok(blocks) => HttpResponse::Ok().json(json!({what: blocks})),
        Err(status) => HttpResponse::build(
            StatusCode::from_u16(status).unwrap_or(StatusCode::SERVICE_UNAVAILABLE),
        )
        .finish(),
    }
}
