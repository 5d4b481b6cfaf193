//! `server.cors`.

use crate::settings::reader::Section;
use std::sync::Arc;

/// Stands for every page.
pub const ANY_ORIGIN: &str = "*";

/// `server.cors`.
#[derive(Debug, Clone, Default)]
pub struct CorsSettings {
    /// Origins of pages that may call; empty: none.
    pub allowed_origins: Vec<Arc<str>>,
}

impl CorsSettings {
    pub(super) fn read(s: &Section<'_>) -> Self {
        let allowed_origins = s.texts("allowed_origins", "Origins of web pages that may call the API from a browser, such as https://chat.example.com; \"*\" stands for all. Empty: none.");
        for origin in &allowed_origins {
            if !is_origin(origin) {
                s.fault("allowed_origins", format!("`{origin}` is no origin: it must be \"*\", or scheme://host or scheme://host:port in lower case, without a path"));
            }
        }
        CorsSettings { allowed_origins }
    }
}

/// As browsers write it.
fn is_origin(text: &str) -> bool {
    if text == ANY_ORIGIN {
        return true;
    }
    let Some((scheme, rest)) = text.split_once("://") else {
        return false;
    };
    let letters = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || b"+-.".contains(&c);
    let host = |c: u8| letters(c) || b"_:[]".contains(&c);
    !scheme.is_empty() && scheme.bytes().all(letters) && !rest.is_empty() && rest.bytes().all(host)
}
