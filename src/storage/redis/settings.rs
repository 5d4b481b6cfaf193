//! How Redis is reached: what an operator may set, checked once.

use super::fault::RedisError;
use crate::error::ErrorKind;
use deadpool_redis::redis::io::tcp::TcpSettings;
use deadpool_redis::redis::{
    Client, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, TlsCertificates,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// One server, or a cluster of which one node is named.
#[derive(Clone)]
pub struct RedisSettings {
    /// `redis://[user:password@]host:port[/db]`, or `rediss://` for TLS. A secret.
    pub url: String,
    /// The most connections; on a cluster each is one to every node.
    pub pool_size: usize,
    /// For getting a connection, from the pool or a new one.
    pub connect_timeout: Duration,
    /// For the answer to what is sent in one go.
    pub command_timeout: Duration,
    /// Older connections are replaced when they are next needed, so that the name of the host is looked up anew.
    pub connection_max_age: Duration,
    /// Certificates (PEM) of the only authorities that are trusted; none: the public ones.
    pub ca_file: Option<PathBuf>,
}

/// What connections are made with.
pub(super) struct Target {
    /// What the url names.
    pub(super) info: ConnectionInfo,
    /// The operator's own authorities.
    pub(super) certificates: Option<TlsCertificates>,
}

impl RedisSettings {
    pub(super) fn target(&self) -> Result<Target, RedisError> {
        let info = self.url.as_str().into_connection_info();
        // what the reason would name is a part of the url, of which any may be the password
        let info = info.map_err(|_| misconfigured("the url is none of Redis"))?;
        let nodelay = TcpSettings::default().set_nodelay(true);
        let info = info.set_tcp_settings(nodelay);
        if !matches!(info.addr(), ConnectionAddr::TcpTls { .. }) {
            return Ok(Target {
                info,
                certificates: None,
            });
        }
        // rustls takes the process's provider. Ours is the only one in the build, unless somebody adds another: then rustls
        // could not choose, and would panic at the first connection.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let Some(path) = &self.ca_file else {
            return Ok(Target {
                info,
                certificates: None,
            });
        };
        let certificates = TlsCertificates {
            client_tls: None,
            root_cert: Some(read_authorities(path)?),
        };
        let client = Client::build_with_tls(info, certificates.clone())
            .map_err(|_| of_ca_file(path, "has a certificate that is no authority's"))?;
        Ok(Target {
            info: client.get_connection_info().clone(),
            certificates: Some(certificates),
        })
    }
}

fn misconfigured(detail: impl Into<String>) -> RedisError {
    RedisError::new(ErrorKind::Misconfigured, detail)
}

fn of_ca_file(path: &Path, what: impl fmt::Display) -> RedisError {
    misconfigured(format!("CA file {}: {what}", path.display()))
}

fn read_authorities(path: &Path) -> Result<Vec<u8>, RedisError> {
    let pem = std::fs::read(path).map_err(|error| of_ca_file(path, error))?;
    let mut found = false;
    for certificate in CertificateDer::pem_slice_iter(&pem) {
        certificate.map_err(|error| of_ca_file(path, error))?;
        found = true;
    }
    if !found {
        return Err(of_ca_file(path, "has no certificate"));
    }
    Ok(pem)
}

impl fmt::Debug for RedisSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisSettings")
            .field("pool_size", &self.pool_size)
            .field("connect_timeout", &self.connect_timeout)
            .field("command_timeout", &self.command_timeout)
            .field("connection_max_age", &self.connection_max_age)
            .field("ca_file", &self.ca_file)
            .finish_non_exhaustive() // the url is a secret
    }
}
