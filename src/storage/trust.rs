//! Whom a TLS client of ours trusts: the authorities of a file, or the public ones.

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use std::path::Path;
use std::sync::Arc;

/// For clients that trust these authorities (PEM) alone; without them, the public ones.
///
/// # Errors
/// What is wrong with the certificates.
pub fn client_config(authorities: Option<&[u8]>) -> Result<ClientConfig, String> {
    let roots = match authorities {
        Some(pem) => roots(pem)?,
        None => webpki_roots::TLS_SERVER_ROOTS.iter().cloned().collect(),
    };
    let ring = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(ring)
        .with_safe_default_protocol_versions()
        .map_err(|error| format!("TLS: {error}"))?;
    Ok(config.with_root_certificates(roots).with_no_client_auth())
}

/// The same for authorities in a file, which the error names.
pub(crate) fn client_config_of(ca_file: Option<&Path>) -> Result<ClientConfig, String> {
    let Some(path) = ca_file else {
        return client_config(None);
    };
    let pem = std::fs::read(path).map_err(|error| error.to_string());
    let config = pem.and_then(|pem| client_config(Some(&pem)));
    config.map_err(|what| format!("CA file {}: {what}", path.display()))
}

fn roots(pem: &[u8]) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(pem) {
        let certificate = certificate.map_err(|error| error.to_string())?;
        roots.add(certificate).map_err(|error| error.to_string())?;
    }
    if roots.is_empty() {
        return Err("has no certificate".into());
    }
    Ok(roots)
}
