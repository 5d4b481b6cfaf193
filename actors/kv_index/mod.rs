//! The tree of the KV index: one shard on a thread of its own, and a subscriber per event source.
//! A shard that dies has forgotten everything, so its subscribers start over with the fresh one.

use crate::index_shard::{
    IndexShard, MESSAGES_MAX, RetireShard, ShardExited, ShardGauges, SourceSpec,
};
use crate::kv_subscriber::{
    EventTransport, KvSubscriber, Retire, StreamState, SubscriberExited, Subscription,
};
use crate::support::bounded::Permits;
use crate::support::published::Published;
use crate::support::supervise::{Root, RootExited, supervise};
use crate::support::watch::{INTENSITY_WINDOW, Intensity, Watch};
mod judge;
mod reconcile;

pub use reconcile::ReconcileSources;

use crate::backend::Standing;
use actix::{Actor, Addr, AsyncContext, Context, Handler};
use actix_rt::Arbiter;
use judge::{JUDGE_INTERVAL, Judge};
use routing::prefix_index::{HolderId, Limits};
use routing::view::Memory;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tracing::{error, warn};

/// One event source.
#[derive(Clone)]
pub struct SourceSettings {
    /// Equal for sources that are the same in every respect.
    pub key: Arc<str>,
    /// The backend's name.
    pub backend: Arc<str>,
    /// Its memory in the index, by data-parallel rank; never empty.
    pub memories: Arc<[Memory]>,
    /// The rank whose stream this is, where each rank has its own.
    pub rank: Option<u32>,
    /// What is believed of it.
    pub standing: Arc<Standing>,
    /// Where its stream's state is seen.
    pub state: Published<StreamState>,
    /// What its events mean.
    pub spec: SourceSpec,
    /// Before the first reconnect.
    pub reconnect: Duration,
    /// How its events come.
    pub transport: Rc<dyn EventTransport>,
}

/// What the index is made of.
#[derive(Clone)]
pub struct KvIndexSettings {
    /// Room and time.
    pub limits: Limits,
    /// The engines that announce what they hold.
    pub sources: Vec<SourceSettings>,
    /// All backends, with what is believed of them.
    pub members: Vec<Member>,
    /// Where [`ReconcileSources`] finds what comes next.
    pub next: Next,
}

/// Settings on their way to a running index, beside the message: they do not leave its thread.
pub type Next = Rc<RefCell<Option<KvIndexSettings>>>;

impl KvIndexSettings {
    /// What each memory's events mean.
    fn specs(&self) -> HashMap<HolderId, SourceSpec> {
        let memories = self.sources.iter().flat_map(|source| {
            let holders = source.memories.iter().map(|memory| memory.holder);
            holders.map(|holder| (holder, source.spec.clone()))
        });
        memories.collect()
    }
}

/// A backend of which something may be believed.
#[derive(Debug, Clone)]
pub struct Member {
    /// Its name.
    pub backend: Arc<str>,
    /// Where its blocks stand.
    pub memories: Arc<[Memory]>,
    /// How far beliefs can be trusted.
    pub standing: Arc<Standing>,
}

/// What everybody may know of a source.
#[derive(Clone)]
pub struct SourceHandle {
    /// Its key.
    pub key: Arc<str>,
    /// The backend's name.
    pub backend: Arc<str>,
    /// The rank whose stream this is, where each rank has its own.
    pub rank: Option<u32>,
    /// How its stream is doing.
    pub state: Published<StreamState>,
}

/// The index as everybody sees it; clones are the same index.
#[derive(Clone)]
pub struct KvIndexHandle {
    /// Whom to ask. None between the death of a shard and the next.
    pub shard: Published<Option<Addr<IndexShard>>>,
    /// What it holds.
    pub gauges: Published<ShardGauges>,
    /// The streams that feed it.
    pub sources: Published<Vec<SourceHandle>>,
    /// All backends, with what is believed of them.
    pub members: Published<Vec<Member>>,
    /// Fresh starts of shards, of subscribers, and of the root.
    pub restarts: Arc<[AtomicU64; 3]>,
    /// Lookups by tokens in a row that found nothing at all.
    pub fruitless: Arc<AtomicU64>,
}

/// Lookups in a row without any overlap after which somebody should look why.
pub const FRUITLESS_LOOKUPS: u64 = 200;

impl KvIndexHandle {
    /// A prompt was looked up by its tokens; says so in the log when none of so many was found
    /// anywhere, though events come.
    pub fn looked_up(&self, found_any: bool) {
        if found_any {
            if self.fruitless.load(Relaxed) > 0 {
                self.fruitless.store(0, Relaxed);
            }
        } else if self.fruitless.fetch_add(1, Relaxed) + 1 == FRUITLESS_LOOKUPS {
            warn!(
                lookups = FRUITLESS_LOOKUPS,
                "events come, but no prompt was found anywhere: prompts may share nothing, or tokenizer, chat template or salt differ from the engines'"
            );
        }
    }
}

/// The root of the tree.
pub struct KvIndex {
    /// Outlives it.
    settings: Rc<RefCell<KvIndexSettings>>,
    handle: KvIndexHandle,
    arbiter: Rc<Arbiter>,
    permits: Permits,
    subscribers: HashMap<Arc<str>, Addr<KvSubscriber>>,
    deaths: HashMap<Option<Arc<str>>, Intensity>,
    judge: Judge,
    _watch: Watch<RootExited>,
}

impl KvIndex {
    /// Starts an index that is kept alive, and what everybody may know of it.
    pub fn supervised(settings: KvIndexSettings) -> (Root<Self>, KvIndexHandle) {
        let handle = KvIndexHandle {
            shard: Published::new(None),
            gauges: Published::new(ShardGauges::default()),
            sources: Published::new(reconcile::seen(&settings.sources)),
            members: Published::new(settings.members.clone()),
            restarts: Arc::default(),
            fruitless: Arc::default(),
        };
        let settings = Rc::new(RefCell::new(settings));
        let arbiter = Rc::new(Arbiter::new());
        let (seen, restarts) = (handle.clone(), handle.restarts.clone());
        let root = supervise(
            "kv_index",
            move |warden| {
                let index = KvIndex {
                    settings: settings.clone(),
                    handle: seen.clone(),
                    arbiter: arbiter.clone(),
                    permits: Permits::new(MESSAGES_MAX),
                    subscribers: HashMap::new(),
                    deaths: HashMap::new(),
                    judge: Judge::default(),
                    _watch: Watch::new(warden.recipient(), RootExited),
                };
                index.start()
            },
            move || {
                restarts[2].fetch_add(1, Relaxed);
            },
        );
        (root, handle)
    }

    /// A fresh shard, and fresh subscribers that feed it from the start.
    fn start_shard(&mut self, ctx: &mut Context<Self>) {
        for (_, subscriber) in self.subscribers.drain() {
            subscriber.do_send(Retire);
        }
        let (sources, limits) = {
            let settings = self.settings.borrow();
            (settings.specs(), settings.limits)
        };
        let gauges = self.handle.gauges.clone();
        let watch = Watch::new(ctx.address().recipient(), ShardExited);
        let shard = IndexShard::start_in_arbiter(&self.arbiter.handle(), move |_| {
            IndexShard::new(limits, sources, gauges).watched(watch)
        });
        self.handle.shard.publish(Some(shard));
        // permits of messages that the old shard never handled came back with their drop
        self.permits = Permits::new(MESSAGES_MAX);
        let settings = self.settings.borrow();
        let keys: Vec<Arc<str>> = settings.sources.iter().map(|of| of.key.clone()).collect();
        drop(settings);
        for key in keys {
            self.start_subscriber(&key, ctx);
        }
    }

    /// Nothing, where the source is gone.
    fn start_subscriber(&mut self, key: &Arc<str>, ctx: &mut Context<Self>) {
        let shard = self.handle.shard.load();
        let Some(shard) = &*shard else {
            return;
        };
        let settings = self.settings.borrow();
        let Some(source) = settings.sources.iter().find(|of| of.key == *key) else {
            return;
        };
        let subscription = Subscription {
            backend: source.backend.clone(),
            memories: source.memories.clone(),
            rank: source.rank,
            standing: source.standing.clone(),
            reconnect: source.reconnect,
            transport: source.transport.clone(),
            shard: shard.clone().recipient(),
            permits: self.permits.clone(),
            state: source.state.clone(),
        };
        drop(settings);
        let exited = SubscriberExited {
            source: key.clone(),
        };
        let watch = Watch::new(ctx.address().recipient(), exited);
        let subscriber = KvSubscriber::new(subscription, watch).start();
        self.subscribers.insert(key.clone(), subscriber);
    }

    /// How long to wait before a fresh start. One that keeps dying is left for a while.
    fn wait(&mut self, who: Option<Arc<str>>, actor: &str) -> Duration {
        let now = tokio::time::Instant::now().into_std();
        let wait = self.deaths.entry(who).or_default().next_start(now);
        match wait {
            Some(wait) => {
                warn!(
                    actor,
                    wait_ms = wait.as_millis() as u64,
                    "actor died, starting a fresh one"
                );
                wait
            }
            None => {
                error!(actor, "actor keeps dying, not starting it again for now");
                INTENSITY_WINDOW
            }
        }
    }
}

impl Actor for KvIndex {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        self.start_shard(ctx);
        ctx.run_interval(JUDGE_INTERVAL, |this, _| {
            let (members, sources) = (this.handle.members.load(), this.handle.sources.load());
            let ttl = Duration::from_secs(u64::from(this.settings.borrow().limits.ttl));
            this.judge.turn(&members, &sources, ttl);
        });
    }
}

impl Handler<ShardExited> for KvIndex {
    type Result = ();

    fn handle(&mut self, _: ShardExited, ctx: &mut Self::Context) {
        self.handle.shard.publish(None);
        self.handle.restarts[0].fetch_add(1, Relaxed);
        let wait = self.wait(None, "index_shard");
        ctx.run_later(wait, Self::start_shard);
    }
}

impl Handler<SubscriberExited> for KvIndex {
    type Result = ();

    fn handle(&mut self, exited: SubscriberExited, ctx: &mut Self::Context) {
        let present = self.subscribers.get(&exited.source);
        if present.is_none_or(|subscriber| subscriber.connected()) {
            return; // retired, and replaced already
        }
        self.subscribers.remove(&exited.source);
        self.handle.restarts[1].fetch_add(1, Relaxed);
        let wait = self.wait(Some(exited.source.clone()), "kv_subscriber");
        ctx.run_later(wait, move |this, ctx| {
            if !this.subscribers.contains_key(&exited.source) {
                this.start_subscriber(&exited.source, ctx);
            }
        });
    }
}

crate::support::fault::panics_on_request!(KvIndex);

impl Drop for KvIndex {
    /// Also while a panic unwinds: the successor starts subscribers of its own.
    fn drop(&mut self) {
        for subscriber in self.subscribers.values() {
            subscriber.do_send(Retire);
        }
        if let Some(shard) = self.handle.shard.load().as_ref() {
            shard.do_send(RetireShard);
        }
    }
}
