//! The client's connection, for the one fault that HTTP cannot express: cutting it with a reset, as when an engine's host dies.

use actix_web::dev::Extensions;
use actix_web::rt::net::TcpStream;
use socket2::Socket;
use std::any::Any;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

/// A second handle to a connection's socket.
#[derive(Debug, Clone)]
pub struct Connection(Arc<Socket>);

impl Connection {
    /// From the next close on, the peer gets a reset instead of an end, and unsent bytes are dropped.
    pub fn reset_at_close(&self) {
        let _ = self.0.set_linger(Some(Duration::ZERO)); // a socket that is gone needs no reset
    }
}

/// Keeps a handle with each accepted connection.
pub fn remember(io: &dyn Any, data: &mut Extensions) {
    let socket = io
        .downcast_ref::<TcpStream>()
        .and_then(|stream| stream.as_fd().try_clone_to_owned().ok());
    if let Some(socket) = socket {
        data.insert(Connection(Arc::new(socket.into())));
    }
}
