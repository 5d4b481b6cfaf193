//! One engine's event stream: connects, keeps the frames in order, asks for what was missed, and
//! hands changes to the engine's shard. An unreachable engine is a normal state.

mod subscription;

use crate::support::watch::Watch;
use actix::{Actor, ActorContext, AsyncContext, Context, Handler, Message, WrapFuture};
use futures_util::future::LocalBoxFuture;
use routing::event_stream::{Recovery, Tally};
use std::sync::Arc;
pub use subscription::Subscription;
use wire::kv_events::{Batch, Undecodable};
use wire::kv_snapshot::Snapshot;

/// What comes from an engine.
#[derive(Debug)]
pub enum Frame {
    /// A live frame and its number.
    Live(u64, Result<Batch, Undecodable>),
    /// A replayed one.
    Replayed(u64, Result<Batch, Undecodable>),
    /// In place of a replay's beginning: all that the engine holds.
    Snapshot(Snapshot),
    /// The end of a replay.
    ReplayEnd,
}

/// An open stream.
pub trait EventConnection {
    /// The next frame; an error when the connection is gone. Dropping the future loses nothing.
    fn next(&mut self) -> LocalBoxFuture<'_, Result<Frame, String>>;
    /// Asks for all frames from this number on.
    fn replay(&mut self, from: u64) -> LocalBoxFuture<'_, Result<(), String>>;
}

/// Opens streams. The gateway has one for each scheme of `event_sources[].endpoint`.
pub trait EventTransport {
    /// Connects; must end by itself in bounded time.
    fn connect(&self) -> LocalBoxFuture<'static, Result<Box<dyn EventConnection>, String>>;
    /// How what was missed can be had again.
    fn recovery(&self) -> Recovery;
}

/// Data-parallel ranks that are told apart, per stream.
pub const RANKS_MAX: usize = 256;

/// How a stream is doing, for metrics and for routing by mode.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StreamState {
    /// Whether frames come.
    pub connected: bool,
    /// Whether frames are taken in as they come, and no replay is waited for.
    pub live: bool,
    /// The number of the last applied frame.
    pub last_seq: Option<u64>,
    /// When the engine made it, in Unix seconds.
    pub last_ts: f64,
    /// Tokens per block, as the engine announces them.
    pub block_size: Option<u32>,
    /// Adapters of which blocks were announced: their names, as requests use them for models.
    pub adapters: Arc<[Arc<str>]>,
    /// Connections so far.
    pub connections: u64,
    /// How often what the engine announced was made void, to be learned anew.
    pub resyncs: u64,
    /// How long after the engine made it the last frame was taken in, in seconds, by both clocks.
    pub lag: f64,
    /// Replays that were asked for.
    pub replays: u64,
    /// How often what another gateway had left was taken over.
    pub snapshots: u64,
    /// Data-parallel ranks that frames named.
    pub ranks: Arc<[u32]>,
    /// Frames that could not be read.
    pub undecodable: u64,
    /// What the ordering saw.
    pub tally: Tally,
}

/// The subscriber of this source has ended, by a panic.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct SubscriberExited {
    /// Its key.
    pub source: Arc<str>,
}

/// See the module. Holds one future, which does the waiting.
pub struct KvSubscriber {
    subscription: Option<Subscription>,
    _watch: Watch<SubscriberExited>,
}

impl KvSubscriber {
    /// A subscriber that begins when it is started.
    pub fn new(subscription: Subscription, watch: Watch<SubscriberExited>) -> Self {
        KvSubscriber {
            subscription: Some(subscription),
            _watch: watch,
        }
    }
}

/// Ends a subscriber whose shard is gone: a fresh one feeds the fresh shard from the start.
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "()")]
pub struct Retire;

impl Handler<Retire> for KvSubscriber {
    type Result = ();
    fn handle(&mut self, _: Retire, ctx: &mut Self::Context) {
        ctx.stop();
    }
}

impl Actor for KvSubscriber {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        if let Some(subscription) = self.subscription.take() {
            ctx.spawn(subscription.run().into_actor(self));
        }
    }
}

crate::support::fault::panics_on_request!(KvSubscriber);
