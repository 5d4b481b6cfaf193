//! How engines hand keys and values to each other: one file per connector, behind the trait [`Connector`]. A connector acts before
//! the prompt is scheduled ([`Connector::load`]) and after its first token, when the prefill is done ([`Connector::save`]).
//!
//! No keys and values are moved: what moves is which prompt they belong to, so that a wrong hand-off is noticed, and the time that
//! they would travel.

mod depot;
pub mod flags;
pub mod leg;
mod mooncake;
mod nixl;
mod p2p_nccl;
pub mod peer;
mod settings;
mod sglang;
mod shared_storage;

pub use settings::{KvSharing, LoadFailurePolicy, StoreAt};
pub use shared_storage::offload;

use crate::config::{KvRole, SimConfig};
use crate::engine_client::{EngineClient, Pin};
use crate::kv_store::client::StoreClient;
use crate::kv_store::link::Link;
use crate::metrics::{Metrics, add};
use depot::{Depot, Parcel};
use futures_util::future::LocalBoxFuture;
use leg::Leg;
use serde_json::Value;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::time::{Instant, sleep, sleep_until};

/// Waits for other processes are not shorter: their packets and threads do not get faster with the time scale.
const PATIENCE_MIN: Duration = Duration::from_millis(500);

/// Prompt tokens whose keys and values came from elsewhere, and what they follow: `start` tokens that the engine has itself.
type Loaded = Range<usize>;

/// Why a hand-off failed.
#[derive(Debug)]
pub enum KvFault {
    /// The blocks are not to be had; [`LoadFailurePolicy`] decides what follows.
    Missing(String),
    /// The request cannot go on in any case.
    Fatal(String),
}

/// One way to hand over keys and values.
trait Connector: Send + Sync {
    /// Whether the prompt's blocks are to be kept after the first token.
    fn pins(&self, kv: &Kv, leg: &Leg) -> bool;

    /// Before the prompt is scheduled: waits for what comes from elsewhere.
    fn load<'a>(
        &'a self,
        kv: &'a Arc<Kv>,
        leg: &'a Leg,
    ) -> LocalBoxFuture<'a, Result<Loaded, KvFault>>;

    /// When the prefill is done: leaves keys and values for others. Answers the parameters that the client is to pass on.
    fn save<'a>(
        &'a self,
        kv: &'a Arc<Kv>,
        leg: &'a Leg,
        pin: Option<Pin>,
    ) -> LocalBoxFuture<'a, Option<Value>>;
}

/// What all connectors of one engine share.
#[derive(Debug)]
pub struct Kv {
    config: Arc<SimConfig>,
    role: KvRole,
    engine: EngineClient,
    metrics: Arc<Metrics>,
    store: Option<StoreClient>,
    /// The storage namespace with all that keeps blocks apart.
    namespace: String,
    load_failure: LoadFailurePolicy,
    depot: Depot,
    link: Mutex<Link>,
    engine_id: String,
    /// Where other engines reach this one.
    host: String,
    port: u16,
}

/// A request on its way through a connector.
pub struct Transfer {
    kv: Arc<Kv>,
    connector: &'static dyn Connector,
    leg: Leg,
}

impl Kv {
    /// None when the engine shares nothing. `port` is where other engines reach it.
    pub fn new(
        config: &Arc<SimConfig>,
        engine: &EngineClient,
        metrics: &Arc<Metrics>,
        port: u16,
    ) -> Option<Arc<Self>> {
        let transfer = config.kv_transfer.as_ref()?;
        let told = transfer.other.get("kv_load_failure_policy");
        let load_failure = match told.and_then(Value::as_str) {
            Some("recompute") => LoadFailurePolicy::Recompute,
            _ => config.kv_sharing.load_failure,
        };
        let wildcard = |host: &str| matches!(host, "0.0.0.0" | "::" | "[::]");
        let host = match &config.kv_sharing.advertise_host {
            Some(host) => host.clone(),
            None if wildcard(&config.host) => "127.0.0.1".to_owned(),
            None => config.host.clone(),
        };
        Some(Arc::new(Self {
            role: transfer.kv_role,
            load_failure,
            engine: engine.clone(),
            metrics: metrics.clone(),
            store: shared_storage::store_of(config),
            namespace: shared_storage::namespace_of(config),
            depot: Depot::default(),
            link: Mutex::new(Link::new(config.kv_sharing.link, config.time_scale)),
            engine_id: format!("sim-{:016x}", fastrand::u64(..)),
            host,
            port,
            config: config.clone(),
        }))
    }

    /// The way that this request's keys and values take; none when it is served as by an engine alone.
    pub fn transfer(self: &Arc<Self>, leg: Leg) -> Option<Arc<Transfer>> {
        let connector: &'static dyn Connector = match self.connector_name() {
            _ if leg
                .wish
                .bootstrap_room
                .as_ref()
                .is_some_and(|room| !room.is_null()) =>
            {
                &sglang::Sglang
            }
            "SGLang" => return None,
            "NixlConnector" => &nixl::Nixl,
            "MooncakeConnector" => &mooncake::Mooncake,
            "P2pNcclConnector" => &p2p_nccl::P2pNccl,
            _ if self.store.is_some() => &shared_storage::SharedStorage,
            _ => return None,
        };
        Some(Arc::new(Transfer {
            kv: self.clone(),
            connector,
            leg,
        }))
    }

    fn connector_name(&self) -> &str {
        self.config
            .kv_transfer
            .as_ref()
            .map_or("", |transfer| &transfer.kv_connector)
    }

    fn reads(&self) -> bool {
        self.role != KvRole::KvProducer
    }

    fn writes(&self) -> bool {
        self.role != KvRole::KvConsumer
    }

    /// A simulated wait for somebody else, as wall time.
    fn patience(&self, wait: Duration) -> Duration {
        self.config.scaled(wait).max(PATIENCE_MIN)
    }

    fn load_patience(&self) -> Duration {
        self.patience(self.config.kv_sharing.load_timeout)
    }

    fn partner_patience(&self) -> Duration {
        self.patience(self.config.kv_sharing.partner_timeout)
    }

    /// Prompt tokens that the engine's own cache has at this moment, in full blocks.
    async fn cached_tokens(&self, leg: &Leg) -> usize {
        let hashes = leg.reusable(self.config.seed, self.config.block_size);
        self.engine.find(hashes).await * self.config.block_size
    }

    fn parcel(&self, leg: &Leg, block_ids: Vec<u64>, pin: Option<Pin>) -> Parcel {
        Parcel {
            content: leg.content(),
            tokens: leg.prompt.len(),
            block_ids,
            pin,
        }
    }

    /// Leaves a parcel for as long as a lease; false when the key was used before.
    fn offer(self: &Arc<Self>, key: String, parcel: Parcel) -> bool {
        if !self.depot.offer(&key, parcel) {
            tracing::warn!(key, "hand-off key was used before");
            add(&self.metrics.save_failures, 1);
            return false;
        }
        self.expire(key, self.patience(self.config.kv_sharing.lease));
        true
    }

    /// Ends a key after a while, whatever became of it.
    fn expire(self: &Arc<Self>, key: String, after: Duration) {
        let kv = Arc::downgrade(self);
        actix_rt::spawn(async move {
            sleep(after).await;
            if let Some(kv) = kv.upgrade()
                && kv.depot.withdraw(&key, "has expired")
            {
                add(&kv.metrics.expired_leases, 1);
            }
        });
    }

    /// Takes the time that tokens need to another engine.
    async fn travel(&self, tokens: usize) {
        let bytes = tokens as u64 * self.config.kv_bytes_per_token;
        let arrival = {
            let mut link = self.link.lock().expect("nobody panics with this lock");
            link.transfer(bytes, Instant::now())
        };
        sleep_until(arrival).await;
    }
}

impl Transfer {
    /// Whether the first token is to bring a [`Pin`].
    pub fn pins(&self) -> bool {
        self.connector.pins(&self.kv, &self.leg)
    }

    /// Waits for keys and values from elsewhere; answers which tokens they are.
    ///
    /// # Errors
    /// What to tell the client when the request fails for want of them.
    pub async fn load(&self) -> Result<Range<usize>, String> {
        let loading = self.kv.metrics.begin_loading();
        let loaded = self.connector.load(&self.kv, &self.leg).await;
        loading.end();
        let fault = match loaded {
            Ok(loaded) => return Ok(loaded),
            Err(fault) => fault,
        };
        add(&self.kv.metrics.load_failures, 1);
        match (fault, self.kv.load_failure) {
            (KvFault::Missing(why), LoadFailurePolicy::Recompute) => {
                tracing::warn!(why, "KV load failed, computing");
                Ok(0..0)
            }
            (KvFault::Missing(why) | KvFault::Fatal(why), _) => {
                Err(format!("KV transfer failed: {why}"))
            }
        }
    }

    /// Hands keys and values over after the prefill; answers what the client is to pass on.
    pub async fn save(self: Arc<Self>, pin: Option<Pin>) -> Option<Value> {
        self.connector.save(&self.kv, &self.leg, pin).await
    }
}
