//! Sockets of an engine: taken first, listened at when it is loaded, as a real engine does.

use crate::api::connection::remember;
use crate::api::{App, routes};
use actix_web::dev::ServerHandle;
use actix_web::{HttpServer, web};
use socket2::{Domain, Protocol, Socket, Type};
use std::io;
use std::net::{TcpListener, ToSocketAddrs};
use std::sync::Mutex;
use std::time::Duration;

/// uvicorn closes idle connections after this.
const KEEP_ALIVE: Duration = Duration::from_secs(5);
/// Connections that wait for `accept`; uvicorn's number.
const BACKLOG: i32 = 2048;
/// Threads for long prompts.
const BLOCKING_THREADS: usize = 2;

/// Takes an address without listening: connections to it are refused.
pub fn reserve(host: &str, port: u16) -> io::Result<Socket> {
    let addr = (host, port)
        .to_socket_addrs()?
        .next()
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the host has no address"))?;
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket
        .bind(&addr.into())
        .map_err(|fault| io::Error::new(fault.kind(), format!("listen on {addr}: {fault}")))?;
    Ok(socket)
}

/// The port that a socket got.
pub fn port_of(socket: &Socket) -> io::Result<u16> {
    let addr = socket.local_addr()?.as_socket();
    addr.map(|addr| addr.port())
        .ok_or_else(|| io::Error::other("the socket has no IP address"))
}

/// Serves the API at all of these sockets with one worker each; leaves the way to stop it in `handle`.
pub fn listen(
    sockets: [Option<Socket>; 2],
    app: web::Data<App>,
    handle: &Mutex<Option<ServerHandle>>,
) -> io::Result<actix_web::dev::Server> {
    let mut server = HttpServer::new(move || {
        actix_web::App::new()
            .app_data(app.clone())
            .configure(routes)
    })
    .on_connect(remember)
    .workers(1)
    .worker_max_blocking_threads(BLOCKING_THREADS)
    .keep_alive(KEEP_ALIVE)
    .client_request_timeout(Duration::ZERO)
    .h1_allow_half_closed(false)
    .tcp_nodelay(true)
    .disable_signals();
    for socket in sockets.into_iter().flatten() {
        socket.listen(BACKLOG)?;
        server = server.listen(TcpListener::from(socket))?;
    }
    let server = server.run();
    *handle.lock().expect("nobody panics with this lock") = Some(server.handle());
    Ok(server)
}

/// Logs a fault that ended a server.
pub fn report(ended: io::Result<()>) {
    if let Err(fault) = ended {
        tracing::error!(%fault, "engine's server ended");
    }
}
