//! A listener behind TLS: the same HTTP/1.1 server as without, behind a handshake.
//!
//! actix-web's own TLS listeners offer HTTP/2 by ALPN and cannot be told not to; so the service is put together here, of the
//! parts that they consist of.

use crate::telemetry::names;
use actix_http::HttpService;
use actix_http::body::MessageBody;
use actix_server::{Server, ServerBuilder};
use actix_service::{IntoServiceFactory, ServiceFactory, ServiceFactoryExt, map_config};
use actix_tls::accept::rustls_0_23::{Acceptor, TlsStream};
use actix_tls::accept::{TlsError, max_concurrent_tls_connect};
use actix_web::dev::{AppConfig, ServiceRequest, ServiceResponse};
use actix_web::rt::net::TcpStream;
use actix_web::{App, Error};
use metrics::counter;
use rustls::ServerConfig;
use socket2::{Domain, Socket, Type};
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::watch;
use tracing::debug;

/// For one handshake; a client that stalls in it is dropped, and holds up nobody else meanwhile.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Connections that the kernel holds until they are accepted; as many as without TLS.
const BACKLOG: i32 = 2048;

/// What a listener behind TLS is.
pub struct Accepting<L> {
    /// Its name in metrics.
    pub name: &'static str,
    /// Where it listens.
    pub host: String,
    /// 0 lets the system choose.
    pub port: u16,
    /// Threads.
    pub workers: usize,
    /// Connections per thread, those in their handshake included.
    pub max_connections: usize,
    /// How long an idle connection is kept.
    pub keep_alive: Duration,
    /// For connections to close.
    pub shutdown_timeout: Duration,
    /// Turns true when it closes.
    pub closing: watch::Receiver<bool>,
    /// Called with every connection.
    pub on_connect: L,
}

/// Binds, and serves `app` there once the answer is polled.
///
/// # Errors
/// When no address of the host can be bound.
pub fn accept<L, A, T, B>(
    of: Accepting<L>,
    config: ServerConfig,
    app: A,
) -> io::Result<(Server, SocketAddr)>
where
    L: Fn(&TcpStream) + Send + Clone + 'static,
    A: Fn() -> App<T> + Send + Clone + 'static,
    T: ServiceFactory<
            ServiceRequest,
            Config = (),
            Response = ServiceResponse<B>,
            Error = Error,
            InitError = (),
        > + 'static,
    T::Future: 'static,
    B: MessageBody + 'static,
{
    // of each thread: else some clients that stall could keep all others out. One number for the process: the largest
    // that any listener asks for
    static MOST: AtomicUsize = AtomicUsize::new(0);
    let before = MOST.fetch_max(of.max_connections, Relaxed);
    max_concurrent_tls_connect(before.max(of.max_connections));
    let mut acceptor = Acceptor::new(config);
    acceptor.set_handshake_timeout(HANDSHAKE_TIMEOUT);
    let mut builder: ServerBuilder = Server::build()
        .workers(of.workers)
        .max_concurrent_connections(of.max_connections)
        .shutdown_timeout(of.shutdown_timeout.as_secs())
        .disable_signals();
    let listeners = bind((&of.host, of.port))?;
    let address = listeners[0].local_addr()?;
    for listener in listeners {
        let at = listener.local_addr()?;
        let (acceptor, app, on_connect) = (acceptor.clone(), app.clone(), of.on_connect.clone());
        let (name, keep_alive, closing) = (of.name, of.keep_alive, of.closing.clone());
        builder = builder.listen(format!("{name}-{at}"), listener, move || {
            let closing = closing.clone();
            let http = HttpService::build()
                .graceful_shutdown_signal(move || {
                    let mut closing = closing.clone();
                    async move {
                        let _ = closing.wait_for(|closing| *closing).await;
                    }
                })
                .keep_alive(keep_alive)
                .h1_allow_half_closed(false)
                .local_addr(at);
            let app = app().into_factory().map_err(|error| error.error_response());
            let http = http.h1(map_config(app, |_| AppConfig::default()));
            let on_connect = on_connect.clone();
            acceptor
                .clone()
                .map_err(move |error| {
                    counter!(names::TLS_HANDSHAKE_FAILURES, "listener" => name).increment(1);
                    debug!(listener = name, %error, "no TLS handshake with a client");
                    TlsError::into_service_error(error)
                })
                .map(move |io: TlsStream<TcpStream>| {
                    let tcp = io.get_ref().0;
                    on_connect(tcp);
                    let peer = tcp.peer_addr().ok();
                    (io, peer)
                })
                .and_then(http.map_err(TlsError::Service))
        })?;
    }
    Ok((builder.run(), address))
}

/// All addresses of a host that can be bound; one at least.
fn bind(place: (&str, u16)) -> io::Result<Vec<TcpListener>> {
    let mut bound = Vec::new();
    let mut failure = None;
    for address in place.to_socket_addrs()? {
        match listen(address) {
            Ok(listener) => bound.push(listener),
            Err(error) => failure = Some(error),
        }
    }
    match failure {
        Some(error) if bound.is_empty() => Err(error),
        None if bound.is_empty() => Err(io::Error::other("the host has no address")),
        _ => Ok(bound),
    }
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}
