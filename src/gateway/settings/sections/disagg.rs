//! `disaggregated_serving`, and the storage that workers share.

use crate::settings::fault::Fault;
use crate::settings::reader::Section;
use actors::backend::{BackendSpec, Secret};
use routing::view::Role;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// The default of `min_prefill_tokens`; load-tests/budgets.md says why.
const MIN_PREFILL_TOKENS: u64 = 512;

/// Storage that workers share KV through.
#[derive(Debug, Clone, PartialEq)]
pub struct ExternalStorage {
    /// Where it is.
    pub endpoint: String,
    /// Which part of it.
    pub kv_namespace: String,
    /// How to get in; none for anonymous access.
    pub credentials: Option<Secret>,
    /// `kv_transfer_params` for legs that go to a worker of this storage: a JSON object.
    pub kv_transfer_params: Option<String>,
}

/// How KV goes from prefill to decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ConnectorKind {
    /// Through storage that both reach.
    SharedStorage,
    /// vLLM's NixlConnector.
    Nixl,
    /// vLLM's MooncakeConnector.
    Mooncake,
    /// vLLM's P2pNcclConnector.
    P2pNccl,
    /// SGLang's bootstrap.
    SgLang,
}

impl ConnectorKind {
    /// Whether its decode engines refuse, or spoil, what no prefill engine has computed, however short it is: they
    /// wait for the other leg.
    pub fn pairs_only(self) -> bool {
        matches!(self, ConnectorKind::P2pNccl | ConnectorKind::SgLang)
    }

    /// All of them, as the settings spell them.
    pub const ALL: [(&'static str, ConnectorKind); 5] = [
        ("shared_storage", ConnectorKind::SharedStorage),
        ("nixl", ConnectorKind::Nixl),
        ("mooncake", ConnectorKind::Mooncake),
        ("p2p_nccl", ConnectorKind::P2pNccl),
        ("sglang", ConnectorKind::SgLang),
    ];
}

/// How other engines reach a backend's engine.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct KvPeerSettings {
    /// Its connector, where that is not everybody's.
    pub connector: Option<ConnectorKind>,
    /// Its host; none: that of its url.
    pub host: Option<String>,
    /// `host:port` of its ZeroMQ socket.
    pub zmq_address: Option<String>,
    /// The port where engines meet.
    pub bootstrap_port: Option<u16>,
    /// Its engine id.
    pub engine_id: Option<String>,
}

impl KvPeerSettings {
    pub(in crate::settings) fn read(backend: &Section<'_>) -> Self {
        let connector = backend.choice_or_none(
            "connector",
            &ConnectorKind::ALL,
            "How its KV is handed over; default: disaggregated_serving.connector.",
        );
        let s = backend.section(
            "kv_peer",
            "How other engines reach this one, for connectors without storage in between.",
        );
        let port = s.int("bootstrap_port", (0, 0..=65_535), "Where engines meet: required for mooncake, 8998 where it is 0 for sglang. Prefill workers only.");
        KvPeerSettings {
            connector,
            host: s.text_or_none("host", "Its name or address; default: the host of its url."),
            zmq_address: s.text_or_none("zmq_address", "host:port of its ZeroMQ socket: required for p2p_nccl."),
            bootstrap_port: u16::try_from(port).ok().filter(|port| *port > 0),
            engine_id: s.text_or_none("engine_id", "Its engine id, for mooncake; default: GET /query at its bootstrap port is asked. Prefill workers only."),
        }
    }
}

const PARAMS_DOC: &str = "A map that is sent as kv_transfer_params with what goes to a worker of this storage (connector shared_storage), where its engine wants any. Printed as it is: no place for secrets.";

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
            s.object_or_none("kv_transfer_params", PARAMS_DOC);
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
            kv_transfer_params: s.object_or_none("kv_transfer_params", PARAMS_DOC),
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
    /// How KV is handed over, where a backend does not say otherwise.
    pub connector: ConnectorKind,
    /// Prompts with fewer uncached tokens are computed where the answer is made.
    pub min_prefill_tokens: u64,
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
            connector: s.choice(
                "connector",
                &ConnectorKind::ALL,
                "shared_storage",
                "How KV goes from prefill to decode: shared_storage (VAST, or any other that both reach), nixl, mooncake, p2p_nccl (vLLM), sglang.",
            ),
            min_prefill_tokens: s.int(
                "min_prefill_tokens",
                (MIN_PREFILL_TOKENS, 0..=u64::MAX),
                "A prompt with fewer tokens than this that the decode worker, or the storage that it reads, does not have yet is computed by the decode worker itself.",
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
        peers: &BTreeMap<Arc<str>, KvPeerSettings>,
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
        check_peers(self.connector, backends, peers, faults);
        if self.fallback_to_unified && !has(Role::Unified) {
            warnings.push(Fault::new(
                "disaggregated_serving.fallback_to_unified",
                "has no backend with role: unified to fall back to",
            ));
        }
    }
}

/// What a connector must be told of its workers.
fn check_peers(
    default: ConnectorKind,
    backends: &[BackendSpec],
    peers: &BTreeMap<Arc<str>, KvPeerSettings>,
    faults: &mut Vec<Fault>,
) {
    let none = KvPeerSettings::default();
    for (at, backend) in backends.iter().enumerate() {
        let peer = peers.get(&backend.name).unwrap_or(&none);
        let missing = match (peer.connector.unwrap_or(default), backend.role) {
            (ConnectorKind::P2pNccl, Role::Prefill | Role::Decode)
                if peer.zmq_address.is_none() =>
            {
                "zmq_address"
            }
            (ConnectorKind::Mooncake, Role::Prefill) if peer.bootstrap_port.is_none() => {
                "bootstrap_port"
            }
            _ => continue,
        };
        let path = format!("backends[{at}].kv_peer.{missing}");
        faults.push(Fault::new(path, "is required for this backend's connector"));
    }
}
