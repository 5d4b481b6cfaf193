//! The object store over https: whom it trusts, and what it offers.

use crate::support::{key, s3_settings, value};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use s3_server::{Config, Server};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use storage::{ErrorKind, S3Settings, S3Store, Store};
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};

/// TLS in front of an S3 server, with a certificate of an authority of its own.
struct Encrypted {
    port: u16,
    ca_file: PathBuf,
    /// What was agreed on instead of HTTP/1.1, per connection.
    protocols: Arc<Mutex<Vec<Option<Vec<u8>>>>>,
    _server: Server,
    _directory: TempDir,
}

impl Encrypted {
    async fn start(host: &str) -> Self {
        let server = Server::start(Config::default()).await.unwrap();
        let directory = tempfile::tempdir().unwrap();
        let (ca_pem, acceptor) = authority_and_acceptor(host);
        let ca_file = directory.path().join("ca.pem");
        std::fs::write(&ca_file, ca_pem).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let protocols = Arc::default();
        tokio::spawn(forward(
            listener,
            acceptor,
            server.address(),
            Arc::clone(&protocols),
        ));
        Encrypted {
            port,
            ca_file,
            protocols,
            _server: server,
            _directory: directory,
        }
    }

    fn settings(&self, host: &str) -> S3Settings {
        let endpoint = format!("https://{host}:{}", self.port);
        S3Settings {
            ca_file: Some(self.ca_file.clone()),
            ..s3_settings(&endpoint)
        }
    }
}

fn authority_and_acceptor(host: &str) -> (String, TlsAcceptor) {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new([host.to_owned()]).unwrap();
    let certificate = params.signed_by(&key, &authority).unwrap();
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(
            vec![CertificateDer::from(certificate)],
            PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
        )
        .unwrap();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    (authority.pem(), TlsAcceptor::from(Arc::new(config)))
}

async fn forward(
    listener: TcpListener,
    acceptor: TlsAcceptor,
    to: std::net::SocketAddr,
    protocols: Arc<Mutex<Vec<Option<Vec<u8>>>>>,
) {
    while let Ok((stream, _)) = listener.accept().await {
        let Ok(mut encrypted) = acceptor.accept(stream).await else {
            continue;
        };
        let agreed = encrypted.get_ref().1.alpn_protocol().map(<[u8]>::to_vec);
        protocols.lock().unwrap().push(agreed);
        let mut plain = TcpStream::connect(to).await.unwrap();
        tokio::spawn(
            async move { tokio::io::copy_bidirectional(&mut encrypted, &mut plain).await },
        );
    }
}

#[tokio::test]
async fn values_pass_over_https_with_an_authority_from_a_file() {
    for host in ["localhost", "127.0.0.1"] {
        let encrypted = Encrypted::start(host).await;
        let store = S3Store::open(encrypted.settings(host)).unwrap();
        let large = value(vec![3; 2 << 20]);
        store.put(&key("a b+é/c"), large.clone()).await.unwrap();
        assert!(
            store.get(&key("a b+é/c")).await.unwrap() == Some(large),
            "{host}"
        );
        assert_eq!(store.get(&key("absent")).await.unwrap(), None);
    }
}

#[tokio::test]
async fn http_2_is_not_spoken_though_the_server_would() {
    let encrypted = Encrypted::start("localhost").await;
    let store = S3Store::open(encrypted.settings("localhost")).unwrap();
    store.put(&key("a"), value("x")).await.unwrap();
    assert_eq!(*encrypted.protocols.lock().unwrap(), [None]);
}

#[tokio::test]
async fn a_certificate_of_an_unknown_authority_is_a_fault_of_the_settings() {
    let encrypted = Encrypted::start("localhost").await;
    let other = Encrypted::start("localhost").await;
    let ca_files = [None, Some(other.ca_file.clone())]; // the public ones, and another of the operator's
    for ca_file in ca_files {
        let settings = S3Settings {
            ca_file,
            ..encrypted.settings("localhost")
        };
        let error = S3Store::open(settings)
            .unwrap()
            .get(&key("a"))
            .await
            .unwrap_err();
        assert_eq!(error.kind, ErrorKind::Misconfigured, "{error}");
        assert!(error.detail.contains("certificate"), "{error}");
    }
}

#[tokio::test]
async fn a_certificate_for_another_host_is_not_trusted() {
    let encrypted = Encrypted::start("store.example").await;
    let store = S3Store::open(encrypted.settings("localhost")).unwrap();
    let error = store.get(&key("a")).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Misconfigured, "{error}");
}

#[tokio::test]
async fn https_to_a_server_without_tls_is_unavailable() {
    let server = Server::start(Config::default()).await.unwrap();
    let endpoint = format!("https://{}", server.address());
    let store = S3Store::open(s3_settings(&endpoint)).unwrap();
    assert_eq!(
        store.get(&key("a")).await.unwrap_err().kind,
        ErrorKind::Unavailable
    );
}

#[tokio::test]
async fn a_file_without_certificates_is_told_when_the_store_is_opened() {
    let directory = tempfile::tempdir().unwrap();
    let (absent, empty) = (
        directory.path().join("absent.pem"),
        directory.path().join("empty.pem"),
    );
    std::fs::write(&empty, "nothing here\n").unwrap();
    for path in [absent, empty] {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let settings = S3Settings {
            ca_file: Some(path),
            ..s3_settings("https://localhost")
        };
        let error = S3Store::open(settings).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Misconfigured);
        assert!(error.detail.contains(&name), "{error}");
    }
}
