//! Where clients and operators connect: the listener of the API, and that of `/admin` where it has one of its own.

use crate::gateway::{Gateway, Worker};
use crate::http;
use crate::settings::HostPort;
use crate::startup::worker;
use crate::tls::{Accepting, Certificate, accept};
use actix_web::dev::{Server, ServerHandle};
use actix_web::rt::net::TcpStream;
use actix_web::web::ServiceConfig;
use actix_web::{App, HttpServer};
use socket2::TcpKeepalive;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tracing::{debug, warn};

/// A silent client connection is probed by the kernel after this.
const CLIENT_PROBE_AFTER: Duration = Duration::from_secs(15);
/// For cut streams to send their last event, and for connections to close.
pub const CLOSING_TIME: Duration = Duration::from_secs(2);
/// Connections to the listener of `/admin`: operators, Prometheus and probes are few.
const ADMIN_CONNECTIONS_MAX: usize = 256;

/// What is served where.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Face {
    /// The API, and `/admin` unless it has a listener of its own.
    Main,
    /// `/admin` and the probes.
    Admin,
}

impl Face {
    fn configure(self, config: &mut ServiceConfig, worker: &Rc<Worker>) {
        match self {
            Face::Main => http::configure(config, worker),
            Face::Admin => http::configure_admin(config, worker),
        }
    }
}

/// A listener, and how it is called in settings.
struct Place<'a> {
    face: Face,
    host: &'a str,
    port: u16,
    workers: usize,
    max_connections: usize,
    key: &'static str,
    /// Its name in metrics.
    name: &'static str,
    certificate: Option<&'a Arc<Certificate>>,
}

/// The listeners of a gateway.
pub struct Listeners {
    /// Where the API is.
    pub address: SocketAddr,
    /// Where `/admin` is, when it has a listener of its own.
    pub admin_address: Option<SocketAddr>,
    closing: watch::Sender<bool>,
    main: ServerHandle,
    admin: Option<ServerHandle>,
}

impl Listeners {
    /// Binds what the settings name, and serves there.
    ///
    /// # Errors
    /// When an address cannot be bound; the message names it, and its key.
    pub fn open(gateway: &Arc<Gateway>) -> std::io::Result<Self> {
        let settings = gateway.settings();
        let (server, admin) = (&settings.server, &settings.admin);
        let place = Place {
            face: Face::Main,
            host: &server.host,
            port: server.port,
            workers: server.workers,
            max_connections: server.max_connections,
            key: "server.host, server.port",
            name: "server",
            certificate: gateway.tls.server.as_ref(),
        };
        let closing = watch::Sender::new(false);
        let (main, address) = listen(gateway, &place, &closing)?;
        let own = admin.listen.as_ref();
        let admin = own.map(|HostPort { host, port }| Place {
            face: Face::Admin,
            host,
            port: *port,
            workers: 1,
            max_connections: ADMIN_CONNECTIONS_MAX,
            key: "admin.listen",
            name: "admin",
            certificate: gateway.tls.admin.as_ref(),
        });
        let admin = admin.map(|place| listen(gateway, &place, &closing));
        let admin = admin.transpose()?;
        // only now, so that nothing is served when something cannot be
        let serve = |server: Server| {
            let handle = server.handle();
            actix_rt::spawn(server);
            handle
        };
        let (admin, admin_address) = admin.unzip();
        Ok(Listeners {
            address,
            admin_address,
            closing,
            main: serve(main),
            admin: admin.map(serve),
        })
    }

    /// Closes them and waits for connections, briefly. `/admin` goes last, since it can say why the rest still runs.
    pub async fn close(&self) {
        self.closing.send_replace(true);
        self.main.stop(true).await;
        if let Some(admin) = &self.admin {
            admin.stop(true).await;
        }
    }
}

fn listen(
    gateway: &Arc<Gateway>,
    place: &Place<'_>,
    closing: &watch::Sender<bool>,
) -> std::io::Result<(Server, SocketAddr)> {
    let bound = match place.certificate {
        None => plain(gateway, place),
        Some(certificate) => encrypted(gateway, place, certificate, closing),
    };
    bound.map_err(|error| {
        let (host, port, key) = (place.host, place.port, place.key);
        let what = format!("cannot listen on {host}:{port} ({key}): {error}");
        std::io::Error::new(error.kind(), what)
    })
}

fn plain(gateway: &Arc<Gateway>, place: &Place<'_>) -> std::io::Result<(Server, SocketAddr)> {
    let settings = gateway.settings().server.clone();
    let (shared, face) = (gateway.clone(), place.face);
    let write_timeout = settings.client_write_timeout;
    let server = HttpServer::new(move || {
        let worker = Rc::new(worker(&shared));
        App::new().configure(|config| face.configure(config, &worker))
    })
    .workers(place.workers)
    .max_connections(place.max_connections)
    .keep_alive(settings.keep_alive)
    .tcp_nodelay(true)
    // a client that closes its sending side has left: its request must not run on
    .h1_allow_half_closed(false)
    .disable_signals()
    .shutdown_timeout(CLOSING_TIME.as_secs())
    .on_connect(move |io, _| {
        if let Some(stream) = io.downcast_ref::<TcpStream>() {
            limit_unread(stream, write_timeout);
        }
    })
    .bind((place.host, place.port))?;
    let address = server.addrs().first().copied();
    let address = address.ok_or_else(|| std::io::Error::other("no address was bound"))?;
    Ok((server.run(), address))
}

fn encrypted(
    gateway: &Arc<Gateway>,
    place: &Place<'_>,
    certificate: &Arc<Certificate>,
    closing: &watch::Sender<bool>,
) -> std::io::Result<(Server, SocketAddr)> {
    let settings = gateway.settings().server.clone();
    let (shared, face) = (gateway.clone(), place.face);
    let write_timeout = settings.client_write_timeout;
    let accepting = Accepting {
        name: place.name,
        host: place.host.to_owned(),
        port: place.port,
        workers: place.workers,
        max_connections: place.max_connections,
        keep_alive: settings.keep_alive,
        shutdown_timeout: CLOSING_TIME,
        closing: closing.subscribe(),
        on_connect: move |stream: &TcpStream| {
            if let Err(error) = stream.set_nodelay(true) {
                debug!(%error, "cannot switch Nagle's algorithm off on a connection");
            }
            limit_unread(stream, write_timeout);
        },
    };
    let config = certificate.server_config();
    let config = config.map_err(std::io::Error::other)?;
    accept(accepting, config, move || {
        let worker = Rc::new(worker(&shared));
        App::new().configure(|config| face.configure(config, &worker))
    })
}

/// The kernel drops a connection whose peer takes nothing for this long; the write that fails
/// then drops the answer, and frees its backend slot.
fn limit_unread(stream: &TcpStream, timeout: Duration) {
    let socket = socket2::SockRef::from(stream);
    if let Err(error) = socket.set_tcp_user_timeout(Some(timeout)) {
        warn!(%error, "cannot set client_write_timeout on a connection");
    }
    // while nothing is being written, only this shows that a client has vanished without a word
    let keepalive = TcpKeepalive::new()
        .with_time(CLIENT_PROBE_AFTER)
        .with_interval(CLIENT_PROBE_AFTER);
    if let Err(error) = socket.set_tcp_keepalive(&keepalive) {
        warn!(%error, "cannot set keepalive on a connection");
    }
}
