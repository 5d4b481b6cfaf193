//! The `backends` list.

use super::fault::Fault;
use super::reader::Section;
use super::sections::{BackendTls, ExternalStorage, KvPeerSettings};
use actors::backend::{BackendSpec, BackendUrl, KvSeat, Secret};
use routing::view::{HandOffGroup, Role};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A label of metrics and a value of headers: long names help nobody.
const NAME_LENGTH_MAX: usize = 128;

/// What backends say of themselves, beyond what the cluster needs; by their names.
#[derive(Debug, Clone, Default)]
pub struct BackendExtras {
    /// Storage of their own.
    pub storage: BTreeMap<Arc<str>, ExternalStorage>,
    /// How other engines reach them.
    pub peers: BTreeMap<Arc<str>, KvPeerSettings>,
    /// How those behind `https://` prove who they are.
    pub tls: BTreeMap<Arc<str>, BackendTls>,
}

pub(super) fn read(root: &Section<'_>) -> (Vec<BackendSpec>, BackendExtras) {
    let mut specs = Vec::new();
    let mut extras = BackendExtras::default();
    for item in root.list("backends", "The engines. At least one.") {
        let (spec, own, peer) = backend(&item);
        if let Some(own) = own {
            extras.storage.insert(spec.name.clone(), own);
        }
        if let Some(tls) = BackendTls::read(&item.section(
            "tls",
            "How a backend behind https:// proves who it is, where that is not as for all.",
        )) {
            extras.tls.insert(spec.name.clone(), tls);
        }
        extras.peers.insert(spec.name.clone(), peer);
        specs.push(spec);
    }
    (specs, extras)
}

fn backend(s: &Section<'_>) -> (BackendSpec, Option<ExternalStorage>, KvPeerSettings) {
    let name = s.required(
        "name",
        "Unique; appears in logs, metrics and the x-tidegate-backend header.",
    );
    let visible = |b: u8| b.is_ascii_graphic();
    if name.len() > NAME_LENGTH_MAX || !name.bytes().all(visible) {
        s.fault(
            "name",
            format!("must be at most {NAME_LENGTH_MAX} visible ASCII characters without spaces"),
        );
    }
    let text = s.required(
        "url",
        "http://host:port, or https:// for TLS; a path before /v1 is kept, a trailing / or /v1 is not needed.",
    );
    let url = BackendUrl::parse(&text).unwrap_or_else(|fault| {
        if !text.is_empty() {
            s.fault("url", fault.to_string());
        }
        BackendUrl::parse("http://invalid").expect("is well formed")
    });
    let roles = [
        ("unified", Role::Unified),
        ("prefill", Role::Prefill),
        ("decode", Role::Decode),
    ];
    let spec = BackendSpec {
        name: name.into(),
        url,
        role: s.choice(
            "role",
            &roles,
            "unified",
            "unified, prefill or decode, for disaggregated_serving.",
        ),
        weight: s.int("weight", (1, 1..=1000), "Its share relative to others.") as u32,
        models: s.texts(
            "models",
            "The models it serves; empty: its /v1/models is asked.",
        ),
        // both are given at startup, where all storage is known
        kv: KvSeat::default(),
        group: HandOffGroup::default(),
        api_key: s
            .secret(
                "api_key",
                "Sent to this backend as `Authorization: Bearer`, in place of the client's.",
            )
            .map(Secret),
    };
    let storage = ExternalStorage::read(&s.section("external_storage", "Storage that it shares KV through; default: disaggregated_serving.default_external_storage."));
    (spec, storage, KvPeerSettings::read(s))
}

pub(super) fn check(backends: &[BackendSpec], faults: &mut Vec<Fault>) {
    if backends.is_empty() {
        faults.push(Fault::new(
            "backends",
            "needs at least one backend with a name and a url",
        ));
    }
    for (i, backend) in backends.iter().enumerate() {
        let earlier = || backends[..i].iter().enumerate();
        if let Some((j, _)) = earlier().find(|(_, e)| e.name == backend.name && !e.name.is_empty())
        {
            faults.push(Fault::new(
                format!("backends[{i}].name"),
                format!("`{}` is also the name of backends[{j}]", backend.name),
            ));
        }
        if let Some((j, _)) =
            earlier().find(|(_, e)| e.url == backend.url && e.url.host() != "invalid")
        {
            faults.push(Fault::new(
                format!("backends[{i}].url"),
                format!("is the same backend as backends[{j}]"),
            ));
        }
    }
}
