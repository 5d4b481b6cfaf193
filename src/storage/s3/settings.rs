//! Where an object store is and who asks: checked once, before the first request.

use crate::error::{Act, ErrorKind, StoreError};
use crate::key::KEY_BYTES_MAX;
use http::Uri;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// The longest name that S3 takes for an object.
const OBJECT_NAME_BYTES_MAX: usize = 1024;
/// What that leaves for the prefix.
const PREFIX_BYTES_MAX: usize = OBJECT_NAME_BYTES_MAX - KEY_BYTES_MAX;

/// An object store.
#[derive(Debug, Clone)]
pub struct S3Settings {
    /// `http://` or `https://`, a host, and a port if it is not the scheme's own. No path: buckets are addressed by path.
    pub endpoint: String,
    /// The bucket. It must be there.
    pub bucket: String,
    /// Before every key. May be empty.
    pub key_prefix: String,
    /// The region that requests are signed for.
    pub region: String,
    /// Who asks.
    pub credentials: Credentials,
    /// Certificates (PEM) that are trusted in place of the public authorities.
    pub ca_file: Option<PathBuf>,
    /// For one connection, TLS included.
    pub connect_timeout: Duration,
    /// For one call, from its beginning to the last byte of the answer.
    pub request_timeout: Duration,
    /// The largest value, in bytes.
    pub value_bytes_max: usize,
    /// The most calls at a time; others wait, within their time.
    pub requests_max: usize,
}

/// Who asks. Its `Debug` shows no secret.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    pub(super) access_key: String,
    pub(super) secret_key: String,
    pub(super) session_token: Option<String>,
}

impl Credentials {
    /// A key and its secret.
    pub fn new(access_key: impl Into<String>, secret_key: impl Into<String>) -> Self {
        Credentials {
            access_key: access_key.into(),
            secret_key: secret_key.into(),
            session_token: None,
        }
    }

    /// `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, and `AWS_SESSION_TOKEN` if there is one, as the environment has them now.
    pub fn from_environment() -> Result<Self, StoreError> {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    /// The same from any source of variables.
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self, StoreError> {
        let given = |name| variable(name).filter(|value| !value.is_empty());
        let needed = |name| {
            let missing = format!("the environment has no {name}, and the settings have no keys");
            given(name).ok_or_else(|| misconfigured(missing))
        };
        Ok(Credentials {
            access_key: needed("AWS_ACCESS_KEY_ID")?,
            secret_key: needed("AWS_SECRET_ACCESS_KEY")?,
            session_token: given("AWS_SESSION_TOKEN"),
        })
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credentials(***)")
    }
}

pub(super) fn misconfigured(detail: impl Into<String>) -> StoreError {
    StoreError::new(Act::Open, ErrorKind::Misconfigured, detail)
}

impl S3Settings {
    /// The endpoint as `scheme://host[:port]`, once everything else was checked too.
    pub(super) fn checked_endpoint(&self) -> Result<String, StoreError> {
        self.check_names()?;
        let fault = |what: &str| misconfigured(format!("endpoint {what}"));
        let uri: Uri = self.endpoint.parse().map_err(|_| fault("is no URL"))?;
        let scheme = uri.scheme_str().unwrap_or_default();
        let authority = uri.authority().map_or("", |authority| authority.as_str());
        let host = uri.host().unwrap_or_default();
        if !["http", "https"].contains(&scheme) || host.is_empty() {
            return Err(fault("must begin with http:// or https:// and a host"));
        }
        if authority.contains('@') {
            return Err(fault("must not hold credentials"));
        }
        if host.starts_with(&format!("{}.", self.bucket)) {
            return Err(fault(&format!(
                "begins with the bucket {}: give the host alone, buckets are addressed by path",
                self.bucket
            )));
        }
        if !["", "/"].contains(&uri.path()) || uri.query().is_some() {
            return Err(fault(
                "must end after host and port: the bucket has a setting of its own",
            ));
        }
        Ok(format!("{scheme}://{authority}"))
    }

    fn check_names(&self) -> Result<(), StoreError> {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        if self.bucket.is_empty() || !self.bucket.chars().all(plain) || self.bucket.starts_with('.')
        {
            return Err(misconfigured(
                "bucket must be letters, digits, dots and hyphens",
            ));
        }
        let prefix = &self.key_prefix;
        let folded = prefix
            .split('/')
            .any(|segment| [".", ".."].contains(&segment));
        let odd = prefix.starts_with('/') || prefix.contains("//") || folded;
        if prefix.len() > PREFIX_BYTES_MAX || prefix.contains(char::is_control) || odd {
            return Err(misconfigured(format!(
                "key_prefix has at most {PREFIX_BYTES_MAX} bytes and no control characters, and is no path with /, //, . or .. in front or within"
            )));
        }
        if self.region.is_empty() || !self.region.chars().all(plain) {
            return Err(misconfigured("region must be letters, digits and hyphens"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(endpoint: &str, bucket: &str) -> S3Settings {
        S3Settings {
            endpoint: endpoint.into(),
            bucket: bucket.into(),
            key_prefix: "response-cache/".into(),
            region: "us-east-1".into(),
            credentials: Credentials::new("AKIDEXAMPLE", "hush-hush"),
            ca_file: None,
            connect_timeout: Duration::from_secs(1),
            request_timeout: Duration::from_secs(1),
            value_bytes_max: 1 << 20,
            requests_max: 8,
        }
    }

    #[test]
    fn an_endpoint_is_a_scheme_a_host_and_a_port() {
        for endpoint in [
            "http://minio:9000",
            "https://s3.example",
            "http://[::1]:9000",
            "http://10.0.0.1:80/",
        ] {
            let checked = settings(endpoint, "cache.team.x")
                .checked_endpoint()
                .unwrap();
            assert_eq!(checked, endpoint.trim_end_matches('/'));
        }
    }

    #[test]
    fn an_endpoint_that_names_the_bucket_already_is_refused() {
        for endpoint in [
            "https://b1.store.example",
            "https://store.example/b1",
            "https://store.example/b1/",
        ] {
            let error = settings(endpoint, "b1").checked_endpoint().unwrap_err();
            assert_eq!(error.kind, ErrorKind::Misconfigured);
            assert!(error.detail.contains("bucket"), "{error}");
        }
    }

    #[test]
    fn an_endpoint_that_is_no_plain_address_is_refused() {
        for endpoint in [
            "",
            "minio:9000",
            "ftp://minio",
            "http://",
            "http://key:hush@minio",
            "http://minio?a=b",
        ] {
            let error = settings(endpoint, "b1").checked_endpoint().unwrap_err();
            assert!(!error.to_string().contains("hush"), "{error}");
        }
    }

    #[test]
    fn names_that_would_lead_elsewhere_are_refused() {
        for bucket in ["", "a/b", "..", "a b"] {
            assert!(
                settings("http://minio", bucket).checked_endpoint().is_err(),
                "{bucket:?}"
            );
        }
        for prefix in [
            "/a",
            "a//b",
            "../",
            "a\n",
            &"x".repeat(PREFIX_BYTES_MAX + 1),
        ] {
            let settings = S3Settings {
                key_prefix: prefix.into(),
                ..settings("http://minio", "b1")
            };
            assert!(settings.checked_endpoint().is_err(), "{prefix:?}");
        }
    }

    #[test]
    fn the_environment_gives_keys_or_says_what_is_missing() {
        let both = |name: &str| (name != "AWS_SESSION_TOKEN").then(|| format!("value of {name}"));
        let found = Credentials::from_variables(both).unwrap();
        let expected = Credentials::new(
            "value of AWS_ACCESS_KEY_ID",
            "value of AWS_SECRET_ACCESS_KEY",
        );
        assert_eq!(found, expected);
        let error =
            Credentials::from_variables(|name| (name == "AWS_ACCESS_KEY_ID").then(|| "x".into()))
                .unwrap_err();
        assert!(error.detail.contains("AWS_SECRET_ACCESS_KEY"), "{error}");
    }

    #[test]
    fn settings_can_be_logged_without_their_secret() {
        let shown = format!("{:?}", settings("http://minio", "b1"));
        assert!(
            !shown.contains("hush") && !shown.contains("AKID"),
            "{shown}"
        );
    }
}
