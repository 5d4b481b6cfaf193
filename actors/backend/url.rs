//! One way from the configured URL to the paths that are really asked, for requests, probes and
//! the settings check alike.

use std::fmt;
use std::sync::Arc;

/// Where a backend listens: `http://host:port`, or `https://` for TLS, and an optional path before `/v1`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct BackendUrl {
    encrypted: bool,
    host: Arc<str>,
    port: u16,
    base: Arc<str>,
}

/// Why a URL cannot be a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UrlFault {
    /// Neither `http://…` nor `https://…`.
    NotHttp,
    /// No host.
    NoHost,
    /// Not a port number.
    BadPort,
    /// `user:password@`: keys belong in `api_key`.
    Credentials,
    /// `?query` or `#fragment`.
    QueryOrFragment,
    /// Spaces, control or non-ASCII characters.
    BadCharacter,
}

impl fmt::Display for UrlFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            UrlFault::NotHttp => {
                "must begin with http:// or https://, for example http://vllm-1:8000"
            }
            UrlFault::NoHost => "has no host",
            UrlFault::BadPort => "has a port that is not a number from 1 to 65535",
            UrlFault::Credentials => "must not hold a user or password; use api_key",
            UrlFault::QueryOrFragment => "must not hold a query or fragment",
            UrlFault::BadCharacter => "holds a space, a control or a non-ASCII character",
        })
    }
}

impl BackendUrl {
    /// Parses a URL. Trailing slashes and one trailing `/v1` are dropped, the host is lower-cased:
    /// different spellings of one backend are equal.
    pub fn parse(text: &str) -> Result<Self, UrlFault> {
        if text.bytes().any(|b| b <= b' ' || b >= 0x7f) {
            return Err(UrlFault::BadCharacter);
        }
        let lower = text.to_ascii_lowercase();
        let encrypted = lower.starts_with("https://");
        if !encrypted && !lower.starts_with("http://") {
            return Err(UrlFault::NotHttp);
        }
        let scheme = if encrypted { "https://" } else { "http://" };
        let rest = &text[scheme.len()..];
        if rest.contains(['?', '#']) {
            return Err(UrlFault::QueryOrFragment);
        }
        let (authority, path) = match rest.find('/') {
            Some(slash) => rest.split_at(slash),
            None => (rest, ""),
        };
        if authority.contains('@') {
            return Err(UrlFault::Credentials);
        }
        let (host, port) = split_port(authority, if encrypted { 443 } else { 80 })?;
        if host.is_empty() {
            return Err(UrlFault::NoHost);
        }
        let path = path.trim_end_matches('/');
        let base = path
            .strip_suffix("/v1")
            .unwrap_or(path)
            .trim_end_matches('/');
        Ok(BackendUrl {
            encrypted,
            host: host.to_ascii_lowercase().into(),
            port,
            base: base.into(),
        })
    }

    /// The host without brackets, for name resolution.
    pub fn host(&self) -> &str {
        self.host.trim_start_matches('[').trim_end_matches(']')
    }

    /// Whether it is reached within TLS.
    pub fn is_encrypted(&self) -> bool {
        self.encrypted
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// For the `Host` header.
    pub fn authority(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }

    /// The path to ask for a path of the API, such as `/v1/chat/completions` or `/health`.
    pub fn path(&self, api_path: &str) -> String {
        format!("{}{api_path}", self.base)
    }
}

impl fmt::Display for BackendUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.encrypted { "https" } else { "http" };
        write!(f, "{scheme}://{}:{}{}", self.host, self.port, self.base)
    }
}

fn split_port(authority: &str, default: u16) -> Result<(&str, u16), UrlFault> {
    let colon = match authority.rfind(']') {
        Some(bracket) => authority[bracket..].find(':').map(|at| bracket + at),
        None => authority.rfind(':'),
    };
    let Some(colon) = colon else {
        return Ok((authority, default));
    };
    let port: u16 = authority[colon + 1..]
        .parse()
        .map_err(|_| UrlFault::BadPort)?;
    if port == 0 {
        return Err(UrlFault::BadPort);
    }
    Ok((&authority[..colon], port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_of_a_backend_asks_the_same_paths() {
        for text in [
            "http://w:8000",
            "http://w:8000/",
            "http://w:8000//",
            "http://W:8000/v1",
            "HTTP://w:8000/v1/",
        ] {
            let url = BackendUrl::parse(text).unwrap();
            assert_eq!(
                url.path("/v1/chat/completions"),
                "/v1/chat/completions",
                "{text}"
            );
            assert_eq!(url, BackendUrl::parse("http://w:8000").unwrap(), "{text}");
        }
    }

    #[test]
    fn a_prefix_that_is_not_v1_is_kept() {
        let url = BackendUrl::parse("http://w:8000/prefix/v1beta").unwrap();
        assert_eq!(url.path("/v1/models"), "/prefix/v1beta/v1/models");
        let url = BackendUrl::parse("http://w/a/v1").unwrap();
        assert_eq!((url.path("/health"), url.port()), ("/a/health".into(), 80));
    }

    #[test]
    fn https_has_a_port_of_its_own_and_is_another_backend() {
        let url = BackendUrl::parse("HTTPS://W/v1").unwrap();
        assert_eq!((url.port(), url.is_encrypted()), (443, true));
        assert_eq!(url.to_string(), "https://w:443");
        assert_ne!(url, BackendUrl::parse("http://w:443").unwrap());
    }

    #[test]
    fn ipv6_hosts_lose_their_brackets_only_for_resolution() {
        let url = BackendUrl::parse("http://[::1]:8000").unwrap();
        assert_eq!((url.host(), url.authority()), ("::1", "[::1]:8000".into()));
        assert_eq!(BackendUrl::parse("http://[::1]").unwrap().port(), 80);
    }

    #[test]
    fn what_cannot_be_a_backend_says_why() {
        use UrlFault::*;
        for (text, fault) in [
            ("w:8000", NotHttp),
            ("ftp://w", NotHttp),
            ("http://", NoHost),
            ("http://:80", NoHost),
            ("http://w:99999", BadPort),
            ("http://w:0", BadPort),
            ("http://user:pw@w", Credentials),
            ("http://w?key=1", QueryOrFragment),
            ("http://w w", BadCharacter),
        ] {
            assert_eq!(BackendUrl::parse(text), Err(fault), "{text}");
        }
    }
}
