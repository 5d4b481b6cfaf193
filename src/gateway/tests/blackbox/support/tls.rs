//! Authorities and certificates made by the test that needs them, and TLS in front of a scripted engine.

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

/// Signs certificates.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    directory: TempDir,
}

/// A certificate and its key, as PEM.
pub struct Pair {
    pub certificate: String,
    pub key: String,
}

impl Authority {
    pub fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let issuer = CertifiedIssuer::self_signed(params, key).unwrap();
        Authority {
            issuer,
            directory: tempfile::tempdir().unwrap(),
        }
    }

    /// A certificate for these names.
    pub fn sign(&self, names: &[&str]) -> Pair {
        let key = KeyPair::generate().unwrap();
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let params = CertificateParams::new(names).unwrap();
        Pair {
            certificate: params.signed_by(&key, &self.issuer).unwrap().pem(),
            key: key.serialize_pem(),
        }
    }

    /// Its own certificate, as PEM.
    pub fn pem(&self) -> String {
        self.issuer.pem()
    }

    /// A file with its own certificate.
    pub fn file(&self) -> PathBuf {
        let path = self.directory.path().join("ca.pem");
        std::fs::write(&path, self.pem()).unwrap();
        path
    }

    /// A client that trusts it alone and wants to reach `name`, by these protocols.
    pub fn client(&self, name: &str, protocols: &[&str]) -> ClientConnection {
        let mut roots = RootCertStore::empty();
        roots.add(self.issuer.der().clone()).unwrap();
        let mut config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = protocols.iter().map(|p| p.as_bytes().to_vec()).collect();
        let name = ServerName::try_from(name.to_owned()).unwrap();
        ClientConnection::new(Arc::new(config), name).unwrap()
    }
}

/// A certificate in files that can be replaced.
pub struct Files {
    directory: TempDir,
}

impl Files {
    pub fn new(pair: &Pair) -> Self {
        let files = Files {
            directory: tempfile::tempdir().unwrap(),
        };
        files.replace(pair);
        files
    }

    pub fn replace(&self, pair: &Pair) {
        std::fs::write(self.certificate(), &pair.certificate).unwrap();
        std::fs::write(self.key(), &pair.key).unwrap();
    }

    pub fn certificate(&self) -> PathBuf {
        self.directory.path().join("cert.pem")
    }

    pub fn key(&self) -> PathBuf {
        self.directory.path().join("key.pem")
    }

    /// As a section of the settings.
    pub fn yaml(&self) -> String {
        let (certificate, key) = (self.certificate(), self.key());
        format!(
            "{{ cert_file: '{}', key_file: '{}' }}",
            certificate.display(),
            key.display()
        )
    }
}

/// TLS in front of an engine, until the process of the test ends.
pub fn front(engine: SocketAddr, pair: &Pair) -> SocketAddr {
    let chain = CertificateDer::pem_slice_iter(pair.certificate.as_bytes());
    let chain = chain.collect::<Result<Vec<_>, _>>().unwrap();
    let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).unwrap();
    let mut config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    // as servers do that prefer HTTP/2: it must not be agreed on
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().build().unwrap();
        let local = tokio::task::LocalSet::new();
        local.block_on(&runtime, async move {
            let listener = TcpListener::from_std(listener).unwrap();
            while let Ok((stream, _)) = listener.accept().await {
                let acceptor = acceptor.clone();
                tokio::task::spawn_local(async move {
                    let Ok(mut encrypted) = acceptor.accept(stream).await else {
                        return;
                    };
                    let mut plain = TcpStream::connect(engine).await.unwrap();
                    let _ = tokio::io::copy_bidirectional(&mut encrypted, &mut plain).await;
                });
            }
        });
    });
    address
}

/// A path in a settings file.
pub fn shown(path: &Path) -> String {
    format!("'{}'", path.display())
}
