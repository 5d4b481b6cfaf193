//! `server.tls`, `admin.tls`, and the `tls` of backends.

use crate::settings::reader::Section;

/// Where a certificate and its key are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateFiles {
    /// The certificate and those that lead to its authority (PEM).
    pub cert_file: String,
    /// Its private key (PEM).
    pub key_file: String,
}

impl CertificateFiles {
    pub(super) fn read(s: &Section<'_>) -> Option<Self> {
        let cert_file = s.text_or_none("cert_file", "The certificate, and those between it and its authority (PEM). A changed file is taken over without a restart.");
        let key_file = s.text_or_none("key_file", "Its private key (PEM).");
        match (cert_file, key_file) {
            (Some(cert_file), Some(key_file)) => Some(CertificateFiles {
                cert_file,
                key_file,
            }),
            (None, None) => None,
            (cert_file, _) => {
                let missing = match cert_file {
                    Some(_) => "key_file",
                    None => "cert_file",
                };
                s.fault(missing, "is required: TLS needs both files");
                None
            }
        }
    }
}

/// `backends[].tls`.
#[derive(Debug, Clone, Default)]
pub struct BackendTls {
    /// Authorities that are trusted for this backend.
    pub ca_file: Option<String>,
    /// What its certificate is for, where that is not the host of its url.
    pub server_name: Option<String>,
}

impl BackendTls {
    pub(in crate::settings) fn read(s: &Section<'_>) -> Option<Self> {
        let tls = BackendTls {
            ca_file: s.text_or_none("ca_file", "Certificates (PEM) of the authorities that are trusted for this backend; default: upstream.tls.ca_file."),
            server_name: s.text_or_none(
                "server_name",
                "The name that its certificate is for; default: the host of its url.",
            ),
        };
        s.is_given().then_some(tls)
    }
}
