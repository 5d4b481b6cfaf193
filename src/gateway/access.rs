//! Who a request is of, by the key that it brings.

use crate::cache::wish;
use crate::gateway::Gateway;
use crate::http::error::Refusal;
use crate::settings::{self, ApiKeySettings};
use actix_web::http::header::HeaderMap;
use routing::access::{ApiKey, KeyRing, Scope};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// The keys of the settings and of the file that they name; none when none are asked for.
///
/// # Errors
/// When the file cannot be read, or what is wrong with it. Keys are not repeated.
pub fn ring(settings: &ApiKeySettings) -> Result<Option<KeyRing>, String> {
    if !settings.is_on() {
        return Ok(None);
    }
    let mut keys = settings.keys.clone();
    if let Some(file) = &settings.file {
        let text = std::fs::read_to_string(file);
        let text = text.map_err(|error| format!("api_keys.file: {file}: {error}"))?;
        let more = settings::keys_of(file, &text, &keys);
        keys.extend(more.map_err(|faults| format!("api_keys.file: {file}: {faults}"))?);
    }
    Ok(Some(KeyRing::new(settings.mode, keys)))
}

/// The key that a request brings: as `Authorization: Bearer`, or as `x-api-key`.
pub fn given(headers: &HeaderMap) -> Option<&[u8]> {
    let header = |name: &str| headers.get(name).map(|value| value.as_bytes());
    let bearer = header("authorization").and_then(|value| match value.split_at_checked(7) {
        Some((scheme, key)) if scheme.eq_ignore_ascii_case(b"bearer ") => Some(key.trim_ascii()),
        _ => None,
    });
    bearer.or_else(|| header("x-api-key"))
}

/// Whose request it is; nobody's where keys are not asked for.
///
/// # Errors
/// Why it is refused.
pub fn admit(
    gateway: &Gateway,
    headers: &HeaderMap,
    scope: Scope,
) -> Result<Option<Arc<ApiKey>>, Refusal> {
    let keys = gateway.keys.load();
    let Some(ring) = keys.as_ref() else {
        return Ok(None);
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.unwrap_or_default().as_secs();
    let admitted = ring.admit(given(headers), scope, now);
    admitted.map_err(Refusal::Denied)
}

/// Whose cached answers a request may see.
pub fn tenant(key: Option<&ApiKey>, headers: &HeaderMap) -> String {
    match key {
        Some(key) => format!("tenant {}", key.tenant), // no digest of credentials looks like that
        None => wish::tenant(headers),
    }
}
