//! Which model serves in place of one that nobody can serve now.

use crate::gateway::Gateway;
use crate::settings::Settings;
use routing::access::ApiKey;
use std::sync::Arc;

/// The first model of the chain that somebody can serve and the key allows; none while somebody can serve
/// the model itself, and where the chain has nobody either.
pub fn instead_of(
    model: &Arc<str>,
    gateway: &Gateway,
    settings: &Settings,
    key: Option<&ApiKey>,
) -> Option<Arc<str>> {
    let chain = settings.fallback_chains.get(model)?;
    let snapshot = gateway.directory.load();
    let is_split = settings.disaggregated_serving.enabled;
    if snapshot.view.has_server(model, is_split) {
        return None;
    }
    let able = chain.iter().find(|other| {
        let allowed = key.is_none_or(|key| key.allows([other, other]));
        allowed && snapshot.view.has_server(other, is_split)
    });
    able.cloned()
}
