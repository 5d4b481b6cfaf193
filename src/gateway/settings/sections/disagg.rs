//! `disaggregated_serving`, and the storage that workers share.

use crate::settings::fault::Fault;
use crate::settings::reader::Section;
use actors::backend::{BackendSpec, Secret};
use routing::view::Role;
use std::time::Duration;

/// Storage that workers share KV through.
#[derive(Debug, Clone, PartialEq)]
pub struct ExternalStorage {
    /// Where it is.
    pub endpoint: String,
    /// Which part of it.
    pub kv_namespace: String,
    /// How to get in; none for anonymous access.
    pub credentials: Option<Secret>,
}

impl ExternalStorage {
    pub(in crate::settings) fn read(s: &Section<'_>) -> Option<Self> {
        if !s.is_given() {
            // asked for so that they are known, not used
            s.url_or_none("endpoint", "Where it is.");
            s.text_or_none("kv_namespace", "Which part of it.");
            s.secret(
                "credentials",
                "How to get in, where access is not anonymous.",
            );
            return None;
        }
        let storage = ExternalStorage {
            endpoint: s
                .url_or_none("endpoint", "Where it is.")
                .unwrap_or_default(),
            kv_namespace: s
                .text_or_none("kv_namespace", "Which part of it.")
                .unwrap_or_default(),
            credentials: s
                .secret(
                    "credentials",
                    "How to get in, where access is not anonymous.",
                )
                .map(Secret),
        };
        for (key, value) in [
            ("endpoint", &storage.endpoint),
            ("kv_namespace", &storage.kv_namespace),
        ] {
            if value.is_empty() {
                s.fault(key, "is required");
            }
        }
        Some(storage)
    }
}

/// `disaggregated_serving`.
#[derive(Debug, Clone)]
pub struct DisaggSettings {
    /// Whether it is used.
    pub enabled: bool,
    /// For the prefill leg.
    pub prefill_timeout: Duration,
    /// From decode dispatch to the first content.
    pub kv_transfer_timeout: Duration,
    /// Whether unified backends stand in.
    pub fallback_to_unified: bool,
    /// For backends that name none of their own.
    pub default_external_storage: Option<ExternalStorage>,
}

impl DisaggSettings {
    pub(in crate::settings) fn read(s: &Section<'_>) -> Self {
        DisaggSettings {
            enabled: s.flag("enabled", false, "Whether serving is split."),
            prefill_timeout: s.duration("prefill_timeout", "60s", "For the prefill leg."),
            kv_transfer_timeout: s.duration(
                "kv_transfer_timeout",
                "15s",
                "From sending to the decode worker to its first token.",
            ),
            fallback_to_unified: s.flag(
                "fallback_to_unified",
                true,
                "Whether unified backends serve when a leg cannot be.",
            ),
            default_external_storage: ExternalStorage::read(&s.section(
                "default_external_storage",
                "For backends that name none of their own.",
            )),
        }
    }

    pub(in crate::settings) fn check(
        &self,
        backends: &[BackendSpec],
        faults: &mut Vec<Fault>,
        warnings: &mut Vec<Fault>,
    ) {
        if !self.enabled {
            return;
        }
        let has = |role| backends.iter().any(|b| b.role == role);
        for role in [Role::Prefill, Role::Decode] {
            if !has(role) {
                faults.push(Fault::new(
                    "disaggregated_serving.enabled",
                    format!("needs at least one backend with role: {role}"),
                ));
            }
        }
        if self.fallback_to_unified && !has(Role::Unified) {
            warnings.push(Fault::new(
                "disaggregated_serving.fallback_to_unified",
                "has no backend with role: unified to fall back to",
            ));
        }
    }
}
