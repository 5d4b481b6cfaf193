//! Brings other settings to everybody who goes by them, in an order in which nobody meets what is not
//! ready: places in the index and in split serving before the backends that need them.

use crate::gateway::Gateway;
use crate::handoff;
use crate::kv::{share, wiring};
use crate::settings::Settings;
use crate::startup;
use crate::telemetry::log;
use crate::upstream::Client;
use actors::cluster::{Cluster, Reconcile, Reconciled};
use actors::disagg_coordinator::GroupSpec;
use actors::kv_index::{KvIndex, KvIndexSettings, Next, ReconcileSources};
use actors::kv_share::ShareSettings;
use actors::support::supervise::Root;
use routing::access::KeyRing;
use std::sync::Arc;

/// What backends were given at the start or by an earlier reload, and keep.
#[derive(Default)]
pub struct Wiring {
    seats: wiring::Seats,
    groups: handoff::wiring::Groups,
}

impl Wiring {
    /// Gives every backend its places; answers what the index and its groups are made of.
    pub fn wire(
        &mut self,
        settings: &mut Settings,
        client: &Client,
    ) -> (Option<KvIndexSettings>, Arc<[GroupSpec]>) {
        let index = wiring::wire(settings, client, &mut self.seats);
        (index, handoff::wiring::group(settings, &mut self.groups))
    }
}

/// The roots of the actors that follow the settings.
pub struct Parts {
    /// What backends keep.
    pub wiring: Wiring,
    /// For event streams over HTTP.
    pub client: Client,
    /// The backends.
    pub cluster: Root<Cluster>,
    /// The index, where it is on.
    pub index: Option<(Root<KvIndex>, Next)>,
    /// What is shared of it, where it is.
    pub sharing: Option<ShareSettings>,
}

impl Parts {
    /// Takes over settings that are valid; what is read at the start alone is as it was. None when an actor that
    /// must follow them was gone at that moment.
    pub async fn apply(
        &mut self,
        gateway: &Gateway,
        mut settings: Settings,
        keys: Option<KeyRing>,
    ) -> Option<Reconciled> {
        let (index, groups) = self.wiring.wire(&mut settings, &self.client);
        if let (Some((root, next)), Some(mut index)) = (&self.index, index) {
            self.share(gateway, &settings, &mut index);
            next.replace(Some(index));
            root.addr().send(ReconcileSources).await.ok()?;
        }
        let rules = startup::choice_rules(&settings);
        if let (Some(split), Some(present)) = (&gateway.split, gateway.splitting()) {
            let follows = handoff::wiring::follow(&present, &settings, groups, rules);
            split.store(Arc::new(follows));
        }
        log::set_level(&settings.logging.level);
        gateway.router.set_rules(rules);
        gateway.keys.store(keys.map(Arc::new));
        let cluster = startup::cluster_settings(&settings);
        gateway.settings.store(Arc::new(settings));
        let reconciled = self.cluster.addr().send(Reconcile(cluster)).await;
        let reconciled = reconciled.ok()?;
        gateway.gone.follow(&reconciled);
        Some(reconciled)
    }

    /// Streams that did not change are shared as before.
    fn share(&self, gateway: &Gateway, settings: &Settings, index: &mut KvIndexSettings) {
        let (Some(sharing), Some(kv)) = (&self.sharing, &gateway.kv) else {
            return;
        };
        let present = kv.sources.load();
        let kept: Vec<Arc<str>> = present.iter().map(|source| source.key.clone()).collect();
        share::follow(sharing, settings, index, &kept);
    }
}
