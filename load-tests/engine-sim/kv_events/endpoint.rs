//! ZeroMQ addresses as vLLM takes them: which ones are bound and which connected, and taking the bound ones. Taken with plain
//! sockets, so that a port that is not free stops the engine's start and the real port is known at once.

use crate::listening::reserve;
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};

/// Connections that wait for `accept`; libzmq's number.
const BACKLOG: i32 = 100;

/// One side of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// We listen.
    Bind {
        /// Name or address.
        host: String,
        /// 0 takes a free one.
        port: u16,
    },
    /// They listen, at this address.
    Connect {
        /// Name or address.
        host: String,
        /// Theirs.
        port: u16,
    },
}

impl Endpoint {
    /// Reads `tcp://HOST:PORT`. As in vLLM an address with `*` or `::` in it is bound and any other one connected, except port 0,
    /// which nobody can connect to.
    ///
    /// # Errors
    /// One sentence about what is wrong with it.
    pub fn parse(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text} is not an endpoint of the form tcp://HOST:PORT");
        let address = text.strip_prefix("tcp://").ok_or_else(|| {
            format!("{text} is not a tcp:// endpoint, and the simulator has no other transport")
        })?;
        let (host, port) = address.rsplit_once(':').ok_or_else(wrong)?;
        let port = match port {
            "*" => 0,
            port => port.parse().map_err(|_| wrong())?,
        };
        let host = match host.trim_start_matches('[').trim_end_matches(']') {
            "" => return Err(wrong()),
            "*" => "0.0.0.0".to_owned(),
            host => host.to_owned(),
        };
        match text.contains('*') || text.contains("::") || port == 0 {
            true => Ok(Self::Bind { host, port }),
            false => Ok(Self::Connect { host, port }),
        }
    }

    /// The same address, for a socket that vLLM binds whatever its form.
    pub fn bound(self) -> Self {
        match self {
            Self::Bind { host, port } | Self::Connect { host, port } => Self::Bind { host, port },
        }
    }

    /// Takes the address if it is to be bound.
    ///
    /// # Errors
    /// When it is not free or not ours.
    pub fn listen(&self) -> io::Result<Option<TcpListener>> {
        let Self::Bind { host, port } = self else {
            return Ok(None);
        };
        let socket = reserve(host, *port)?;
        socket.listen(BACKLOG)?;
        Ok(Some(socket.into()))
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Bind { host, port } | Self::Connect { host, port }) = self;
        match host.contains(':') {
            true => write!(formatter, "tcp://[{host}]:{port}"),
            false => write!(formatter, "tcp://{host}:{port}"),
        }
    }
}

/// Where a process on this machine reaches `listener`: the loopback address when it listens on all of them.
///
/// # Errors
/// When the system does not know the address.
pub fn reachable(listener: &TcpListener) -> io::Result<String> {
    let bound = listener.local_addr()?;
    let ip = match bound.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    Ok(format!("tcp://{}", SocketAddr::new(ip, bound.port())))
}

#[cfg(test)]
mod test {
    use super::*;

    fn bind(host: &str, port: u16) -> Result<Endpoint, String> {
        let host = host.to_owned();
        Ok(Endpoint::Bind { host, port })
    }

    #[test]
    fn wildcards_are_bound_and_plain_addresses_connected() {
        assert_eq!(Endpoint::parse("tcp://*:5557"), bind("0.0.0.0", 5557));
        assert_eq!(Endpoint::parse("tcp://127.0.0.1:*"), bind("127.0.0.1", 0));
        assert_eq!(Endpoint::parse("tcp://127.0.0.1:0"), bind("127.0.0.1", 0));
        assert_eq!(Endpoint::parse("tcp://[::]:5557"), bind("::", 5557));
        let router = Endpoint::parse("tcp://router:5557").unwrap();
        assert!(matches!(router, Endpoint::Connect { .. }));
        assert_eq!(router.to_string(), "tcp://router:5557");
        assert_eq!(Ok(router.bound()), bind("router", 5557));
    }

    #[test]
    fn what_is_not_an_endpoint_is_refused() {
        for text in [
            "ipc:///tmp/kv",
            "tcp://host",
            "tcp://:1",
            "tcp://host:http",
            "5557",
        ] {
            assert!(Endpoint::parse(text).is_err(), "{text}");
        }
    }
}
