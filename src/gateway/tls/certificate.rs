//! A certificate with its key, from two files, as it is shown to those who connect.

use super::{Looked, digest};
use crate::settings::CertificateFiles;
use arc_swap::ArcSwap;
use rustls::ServerConfig;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// What is agreed on by ALPN. HTTP/2 is not offered: its server would not notice that a client has left a stream that is
/// still silent.
const PROTOCOL: &[u8] = b"http/1.1";

/// See the module.
pub struct Certificate {
    key: &'static str,
    files: CertificateFiles,
    shown: ArcSwap<CertifiedKey>,
    /// The contents that were read last, usable or not.
    read: Mutex<u128>,
}

impl fmt::Debug for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificate").finish_non_exhaustive()
    }
}

impl Certificate {
    /// Reads the files of the settings at `key`.
    ///
    /// # Errors
    /// Which file cannot be used, and why. Says nothing of what a key file holds.
    pub fn load(key: &'static str, files: &CertificateFiles) -> Result<Self, String> {
        let (certificate, private) = read(key, files)?;
        let shown = parse(key, files, &certificate, &private)?;
        Ok(Certificate {
            key,
            files: files.clone(),
            shown: ArcSwap::from_pointee(shown),
            read: Mutex::new(digest(&[&certificate, &private])),
        })
    }

    /// Reads the files again; says whether something new is shown.
    pub(super) fn reload(&self) -> Looked {
        let contents = read(self.key, &self.files);
        let found = match &contents {
            Ok((certificate, private)) => digest(&[certificate, private]),
            Err(error) => digest(&[error.as_bytes()]),
        };
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut *read, found) == found {
            return Ok(false);
        }
        let (certificate, private) = contents?;
        let shown = parse(self.key, &self.files, &certificate, &private)?;
        self.shown.store(Arc::new(shown));
        Ok(true)
    }

    /// For a listener.
    ///
    /// # Errors
    /// When the versions of TLS and the cryptography do not fit.
    pub fn server_config(self: &Arc<Self>) -> Result<ServerConfig, rustls::Error> {
        let mut config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_cert_resolver(self.clone());
        config.alpn_protocols = vec![PROTOCOL.to_vec()];
        Ok(config)
    }
}

impl ResolvesServerCert for Certificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.shown.load_full())
    }
}

fn read(key: &str, files: &CertificateFiles) -> Result<(Vec<u8>, Vec<u8>), String> {
    let read = |name: &str, path: &str| {
        std::fs::read(path).map_err(|error| format!("{key}.{name}: {path}: {error}"))
    };
    let certificate = read("cert_file", &files.cert_file)?;
    Ok((certificate, read("key_file", &files.key_file)?))
}

fn parse(
    key: &str,
    files: &CertificateFiles,
    certificate: &[u8],
    private: &[u8],
) -> Result<CertifiedKey, String> {
    let of_certificate = |what: String| format!("{key}.cert_file: {}: {what}", files.cert_file);
    let of_key = |what: &str| format!("{key}.key_file: {}: {what}", files.key_file);
    let chain = CertificateDer::pem_slice_iter(certificate).collect::<Result<Vec<_>, _>>();
    let chain = chain.map_err(|error| of_certificate(error.to_string()))?;
    if chain.is_empty() {
        return Err(of_certificate("has no certificate in PEM form".into()));
    }
    // what a reader of PEM says of a key might repeat a part of it
    let private = PrivateKeyDer::from_pem_slice(private)
        .map_err(|_| of_key("has no private key in PEM form"))?;
    let pair = CertifiedKey::from_der(chain, private, &default_provider());
    pair.map_err(|error| match error {
        rustls::Error::InconsistentKeys(_) => of_key("is not the key of the certificate"),
        rustls::Error::InvalidCertificate(_) => of_certificate(error.to_string()),
        _ => of_key("is no key that can be used"),
    })
}
