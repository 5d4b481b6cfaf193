//! Whom backends behind `https://` must prove to be: the authorities of `upstream.tls`, those of a backend's own `tls`, or the
//! public ones.

use super::{Looked, digest};
use crate::settings::Settings;
use actors::backend::BackendUrl;
use arc_swap::ArcSwap;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use storage::client_config;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// What engines are asked for by ALPN.
const PROTOCOL: &[u8] = b"http/1.1";

/// A backend with rules of its own.
#[derive(Debug, Clone)]
struct Own {
    /// The key that says so.
    key: String,
    /// In place of those of all.
    ca_file: Option<String>,
    /// In place of the host in the url.
    name: Option<ServerName<'static>>,
}

/// What connections are made by.
struct Rules {
    all: Arc<ClientConfig>,
    own: HashMap<String, (Arc<ClientConfig>, Option<ServerName<'static>>)>,
}

/// See the module.
pub struct Trust {
    ca_file: Option<String>,
    /// By host and port.
    own: ArcSwap<HashMap<String, Own>>,
    rules: ArcSwap<Rules>,
    /// The contents that were read last, usable or not.
    read: Mutex<u128>,
}

impl Trust {
    /// The public authorities, for every backend.
    pub fn public() -> Self {
        let rules = Rules::make(&Contents::default(), &HashMap::new());
        Trust {
            ca_file: None,
            own: ArcSwap::default(),
            rules: ArcSwap::from_pointee(rules.expect("the public authorities can be used")),
            read: Mutex::default(),
        }
    }

    /// As the settings say.
    ///
    /// # Errors
    /// Which key names a file that cannot be used, and why.
    pub fn load(settings: &Settings) -> Result<Self, String> {
        let mut own = HashMap::new();
        for (i, backend) in settings.backends.iter().enumerate() {
            let Some(tls) = settings.backend_extras.tls.get(&backend.name) else {
                continue;
            };
            let name = tls.server_name.as_deref().map(ServerName::try_from);
            let name = name.transpose().map_err(|_| {
                format!("backends[{i}].tls.server_name: must be a host name or an address")
            })?;
            let of = Own {
                key: format!("backends[{i}].tls.ca_file"),
                ca_file: tls.ca_file.clone(),
                name: name.map(|name| name.to_owned()),
            };
            own.insert(backend.url.authority(), of);
        }
        let ca_file = settings.upstream.ca_file.clone();
        let contents = Contents::read(ca_file.as_deref(), &own)?;
        Ok(Trust {
            rules: ArcSwap::from_pointee(Rules::make(&contents, &own)?),
            read: Mutex::new(contents.digest()),
            ca_file,
            own: ArcSwap::from_pointee(own),
        })
    }

    /// Goes by what another one was made of: backends have come, or changed.
    pub fn follow(&self, other: Trust) {
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        *read = other
            .read
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        self.own.store(other.own.into_inner());
        self.rules.store(other.rules.into_inner());
    }

    /// Reads the files again; says whether new connections go by something new.
    pub(super) fn reload(&self) -> Looked {
        let own = self.own.load_full();
        let contents = Contents::read(self.ca_file.as_deref(), &own);
        let found = match &contents {
            Ok(contents) => contents.digest(),
            Err(error) => digest(&[error.as_bytes()]),
        };
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        if !Arc::ptr_eq(&own, &self.own.load()) {
            return Ok(false); // other settings came while files were read: the next look is of theirs
        }
        if std::mem::replace(&mut *read, found) == found {
            return Ok(false);
        }
        let rules = Rules::make(&contents?, &own)?;
        self.rules.store(Arc::new(rules));
        Ok(true)
    }

    /// Encrypts a connection to this backend.
    ///
    /// # Errors
    /// When the other end does not prove to be that backend, or does not speak TLS.
    pub async fn handshake(
        &self,
        url: &BackendUrl,
        stream: TcpStream,
    ) -> io::Result<TlsStream<TcpStream>> {
        let (config, name) = {
            let rules = self.rules.load();
            match rules.own.get(&url.authority()) {
                Some((config, name)) => (config.clone(), name.clone()),
                None => (rules.all.clone(), None),
            }
        };
        let name = match name {
            Some(name) => name,
            None => ServerName::try_from(url.host().to_owned()).map_err(io::Error::other)?,
        };
        TlsConnector::from(config).connect(name, stream).await
    }
}

/// What the files hold.
#[derive(Default)]
struct Contents {
    all: Option<Vec<u8>>,
    own: Vec<(String, Vec<u8>)>,
}

impl Contents {
    fn read(ca_file: Option<&str>, own: &HashMap<String, Own>) -> Result<Self, String> {
        let read = |key: &str, path: &str| {
            std::fs::read(path).map_err(|error| format!("{key}: {path}: {error}"))
        };
        let all = ca_file.map(|path| read("upstream.tls.ca_file", path));
        let mut contents = Contents {
            all: all.transpose()?,
            own: Vec::new(),
        };
        for (authority, of) in own {
            if let Some(path) = &of.ca_file {
                contents.own.push((authority.clone(), read(&of.key, path)?));
            }
        }
        contents.own.sort();
        Ok(contents)
    }

    fn digest(&self) -> u128 {
        let all = self.all.as_deref().unwrap_or_default();
        let own = self.own.iter().flat_map(|(of, pem)| [of.as_bytes(), pem]);
        digest(&std::iter::once(all).chain(own).collect::<Vec<&[u8]>>())
    }
}

impl Rules {
    fn make(contents: &Contents, own: &HashMap<String, Own>) -> Result<Self, String> {
        let config = |key: &str, pem: Option<&[u8]>| {
            let mut config = client_config(pem).map_err(|what| format!("{key}: {what}"))?;
            config.alpn_protocols = vec![PROTOCOL.to_vec()];
            Ok::<_, String>(Arc::new(config))
        };
        let all = config("upstream.tls.ca_file", contents.all.as_deref())?;
        let mut rules = HashMap::new();
        for (authority, of) in own {
            let pem = contents.own.iter().find(|(at, _)| at == authority);
            let config = match pem {
                Some((_, pem)) => config(&of.key, Some(pem))?,
                None => all.clone(),
            };
            rules.insert(authority.clone(), (config, of.name.clone()));
        }
        Ok(Rules { all, own: rules })
    }
}
