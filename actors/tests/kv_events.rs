//! From an engine's frames to the index: order, gaps, restarts, bounds, panics.

#![allow(clippy::unwrap_used)] // all of this is a test

use actix::{Actor, Addr, Context, Handler};
use actors::index_shard::{
    ApplyEvents, DispatchEnded, Dispatched, Fate, FindOverlap, IndexShard, MESSAGES_MAX, Op,
    ShardGauges, SourceSpec,
};
use actors::kv_subscriber::{
    EventConnection, EventTransport, Frame, KvSubscriber, StreamState, SubscriberExited,
    Subscription,
};
use actors::support::bounded::Permits;
use actors::support::fault::Panic;
use actors::support::mailbox::Mailbox;
use actors::support::published::Published;
use actors::support::watch::Watch;
use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use routing::block::{BlockHash, Realm, chain};
use routing::event_stream::Recovery;
use routing::prefix_index::{HolderId, Limits, Run, Tier};
use routing::view::Memory;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use wire::kv_events::{Batch, KvEvent, Medium, Stored, from_json};

const ENGINE: HolderId = HolderId(1);
const READER: HolderId = HolderId(2);
const STORE: HolderId = HolderId(1000);
const REALM: Realm<'static> = Realm {
    model: "m",
    cache_salt: None,
    block_size: 2,
};

fn prompt(n: u32) -> Vec<u32> {
    (0..n).collect()
}

fn blocks(tokens: &[u32]) -> Arc<[BlockHash]> {
    chain(&REALM, tokens).into()
}

/// The `n`th block of the prompt, as an engine announces it.
fn stored(n: u64) -> KvEvent {
    KvEvent::Stored(Stored {
        hashes: vec![100 + n],
        parent: n.checked_sub(1).map(|n| 100 + n),
        tokens: vec![2 * n as u32, 2 * n as u32 + 1],
        block_size: 2,
        medium: Medium::Gpu,
        lora: None,
        cache_salt: None,
    })
}

fn batch(events: Vec<KvEvent>) -> Batch {
    Batch {
        seq: None,
        ts: 1.0,
        rank: Some(0),
        events,
    }
}

fn spec(writes: Option<HolderId>, assume_offload: bool) -> SourceSpec {
    SourceSpec {
        model: "m".into(),
        writes,
        assume_offload,
        storage: true,
    }
}

fn shard(specs: [(HolderId, SourceSpec); 2]) -> (Addr<IndexShard>, Published<ShardGauges>) {
    let gauges = Published::new(ShardGauges::default());
    let limits = Limits {
        max_entries: 100_000,
        ttl: 900,
    };
    (
        IndexShard::new(limits, specs.into(), gauges.clone()).start(),
        gauges,
    )
}

fn plain_shard() -> (Addr<IndexShard>, Published<ShardGauges>) {
    shard([(ENGINE, spec(None, false)), (READER, spec(None, false))])
}

async fn find(shard: &Addr<IndexShard>, tokens: u32) -> Vec<Run> {
    shard
        .send(FindOverlap {
            chains: vec![blocks(&prompt(tokens))],
            queued: Mailbox::IndexShard.enter(),
        })
        .await
        .unwrap()
        .remove(0)
}

async fn covered(shard: &Addr<IndexShard>, tokens: u32) -> u32 {
    let runs = find(shard, tokens).await;
    runs.iter()
        .find(|r| r.holder == ENGINE && r.from == 0)
        .map_or(0, |r| r.to)
}

async fn apply(shard: &Addr<IndexShard>, source: HolderId, epoch: u64, ops: Vec<Op>) {
    shard
        .send(ApplyEvents {
            source,
            epoch,
            ops,
            up_to: None,
            permit: None,
            queued: Mailbox::IndexShard.enter(),
        })
        .await
        .unwrap();
}

/// An engine: what it keeps for replay, and what it sends live over the present connection.
#[derive(Default)]
struct Engine {
    kept: VecDeque<(u64, Batch)>,
    live: Option<mpsc::UnboundedSender<Result<Frame, String>>>,
    replays: Vec<u64>,
    refuses: bool,
}

#[derive(Clone, Default)]
struct FakeTransport(Rc<RefCell<Engine>>);

struct FakeConnection {
    engine: Rc<RefCell<Engine>>,
    frames: mpsc::UnboundedReceiver<Result<Frame, String>>,
}

impl EventTransport for FakeTransport {
    fn connect(&self) -> LocalBoxFuture<'static, Result<Box<dyn EventConnection>, String>> {
        let engine = self.0.clone();
        async move {
            if engine.borrow().refuses {
                return Err("refused".to_owned());
            }
            let (sender, frames) = mpsc::unbounded_channel();
            engine.borrow_mut().live = Some(sender);
            Ok(Box::new(FakeConnection { engine, frames }) as Box<dyn EventConnection>)
        }
        .boxed_local()
    }
    fn recovery(&self) -> Recovery {
        Recovery::Replay
    }
}

impl EventConnection for FakeConnection {
    fn next(&mut self) -> LocalBoxFuture<'_, Result<Frame, String>> {
        async move { self.frames.recv().await.unwrap_or(Err("closed".into())) }.boxed_local()
    }
    fn replay(&mut self, from: u64) -> LocalBoxFuture<'_, Result<(), String>> {
        let mut engine = self.engine.borrow_mut();
        engine.replays.push(from);
        let live = engine.live.clone().unwrap();
        for (seq, batch) in engine.kept.iter().filter(|(seq, _)| *seq >= from) {
            live.send(Ok(Frame::Replayed(*seq, Ok(batch.clone()))))
                .unwrap();
        }
        live.send(Ok(Frame::ReplayEnd)).unwrap();
        async { Ok(()) }.boxed_local()
    }
}

impl FakeTransport {
    /// The engine makes a batch; it is sent unless it gets lost.
    fn make(&self, seq: u64, event: KvEvent, lost: bool) {
        self.send_or_lose(seq, batch(vec![event]), lost);
    }

    fn send(&self, seq: u64, batch: Batch) {
        self.send_or_lose(seq, batch, false);
    }

    fn send_or_lose(&self, seq: u64, batch: Batch, lost: bool) {
        let mut engine = self.0.borrow_mut();
        engine.kept.push_back((seq, batch.clone()));
        if !lost && let Some(live) = &engine.live {
            let _ = live.send(Ok(Frame::Live(seq, Ok(batch))));
        }
    }

    fn restart(&self) {
        self.0.borrow_mut().kept.clear();
    }

    fn cut(&self) {
        self.0.borrow_mut().live = None;
    }
}

struct Parent(mpsc::UnboundedSender<Arc<str>>);
impl Actor for Parent {
    type Context = Context<Self>;
}
impl Handler<SubscriberExited> for Parent {
    type Result = ();
    fn handle(&mut self, exited: SubscriberExited, _: &mut Self::Context) {
        let _ = self.0.send(exited.source);
    }
}

struct Subscribed {
    engine: FakeTransport,
    shard: Addr<IndexShard>,
    gauges: Published<ShardGauges>,
    state: Published<StreamState>,
    permits: Permits,
    subscriber: Addr<KvSubscriber>,
    exits: mpsc::UnboundedReceiver<Arc<str>>,
    subscription: Subscription,
    parent: Addr<Parent>,
}

fn subscribe() -> Subscribed {
    subscribe_as(&[(None, ENGINE)], None)
}

/// A subscriber of an engine with these memories, on the stream of one rank or of all.
fn subscribe_as(memories: &[(Option<u32>, HolderId)], rank: Option<u32>) -> Subscribed {
    let memory = |(rank, holder): &(Option<u32>, HolderId)| Memory {
        rank: *rank,
        holder: *holder,
    };
    let (shard, gauges) = plain_shard();
    let engine = FakeTransport::default();
    let (state, permits) = (
        Published::new(StreamState::default()),
        Permits::new(MESSAGES_MAX),
    );
    let subscription = Subscription {
        backend: "a".into(),
        memories: memories.iter().map(memory).collect(),
        rank,
        standing: Arc::default(),
        reconnect: Duration::from_secs(5),
        transport: Rc::new(engine.clone()),
        shard: shard.clone().recipient(),
        permits: permits.clone(),
        state: state.clone(),
    };
    let (sender, exits) = mpsc::unbounded_channel();
    let parent = Parent(sender).start();
    let watch = Watch::new(
        parent.clone().recipient(),
        SubscriberExited { source: "e".into() },
    );
    let subscriber = KvSubscriber::new(subscription.clone(), watch).start();
    Subscribed {
        engine,
        shard,
        gauges,
        state,
        permits,
        subscriber,
        exits,
        subscription,
        parent,
    }
}

impl Subscribed {
    async fn until_covered(&self, blocks: u32) {
        for _ in 0..200_000 {
            if covered(&self.shard, 200).await == blocks {
                return;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        panic!(
            "never covered {blocks} blocks; state {:?}",
            self.state.load()
        );
    }
}

#[actix::test]
async fn live_frames_reach_the_index_and_a_lost_one_is_replayed() {
    tokio::time::pause();
    let s = subscribe();
    s.engine.make(0, stored(0), false); // before the connection stands: kept for replay
    s.until_covered(1).await;
    s.engine.make(1, stored(1), false);
    s.until_covered(2).await;
    s.engine.make(2, stored(2), true);
    s.engine.make(3, stored(3), false);
    s.until_covered(4).await;
    assert_eq!(s.engine.0.borrow().replays, [0, 2]);
    let state = s.state.load();
    assert_eq!(
        (state.connected, state.last_seq, state.block_size),
        (true, Some(3), Some(2))
    );
    assert_eq!((state.tally.gaps, state.tally.lost), (1, 0));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!((s.gauges.load().entries, s.gauges.load().applied), (4, 4));
}

#[actix::test]
async fn a_new_process_behind_the_stream_voids_what_the_old_one_said() {
    tokio::time::pause();
    let s = subscribe();
    for n in 0..5 {
        s.engine.make(n, stored(n), false);
    }
    s.until_covered(5).await;
    s.engine.restart();
    s.engine.make(0, stored(0), false);
    s.until_covered(1).await;
    assert_eq!(s.state.load().tally.restarts, 1);
}

#[actix::test]
async fn a_lost_connection_is_made_again_with_growing_patience_and_starts_over() {
    tokio::time::pause();
    let s = subscribe();
    s.engine.make(0, stored(0), false);
    s.until_covered(1).await;
    s.engine.0.borrow_mut().refuses = true;
    s.engine.cut();
    tokio::time::sleep(Duration::from_secs(600)).await; // an outage of minutes
    assert!(!s.state.load().connected);
    assert_eq!(
        covered(&s.shard, 200).await,
        1,
        "what is known stays until more is known"
    );
    s.engine.restart(); // and behind it another process, whose numbers overtake
    for n in 0..3 {
        s.engine.make(n, stored(n), false);
    }
    s.engine.0.borrow_mut().refuses = false;
    s.until_covered(3).await;
    assert_eq!(s.state.load().connections, 2);
}

#[actix::test]
async fn a_stream_that_hears_nothing_of_what_is_served_there_is_made_anew_and_a_quiet_one_is_not() {
    tokio::time::pause();
    let s = subscribe();
    s.engine.make(0, stored(0), false);
    s.until_covered(1).await;
    tokio::time::sleep(Duration::from_secs(900)).await;
    assert_eq!(
        s.state.load().connections,
        1,
        "nothing was served, so nothing is missed"
    );
    for _ in 0..50 {
        s.subscription.standing.count_served();
    }
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(s.state.load().connections, 2);
    for _ in 0..50 {
        s.subscription.standing.count_served();
    }
    s.engine.make(1, stored(1), false);
    s.until_covered(2).await;
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert_eq!(s.state.load().connections, 2, "it was heard");
}

#[actix::test]
async fn a_frame_that_cannot_be_read_voids_what_is_known() {
    tokio::time::pause();
    let s = subscribe();
    s.engine.make(0, stored(0), false);
    s.until_covered(1).await;
    let live = s.engine.0.borrow().live.clone().unwrap();
    live.send(Ok(Frame::Live(1, Err(from_json(b"{}").unwrap_err()))))
        .unwrap();
    s.until_covered(0).await;
    assert_eq!(s.state.load().undecodable, 1);
    s.engine.make(2, stored(0), false);
    s.until_covered(1).await;
}

#[actix::test]
async fn a_subscriber_that_panics_tells_its_parent_and_a_fresh_one_learns_everything_again() {
    tokio::time::pause();
    let mut s = subscribe();
    for _ in 0..3 {
        // connections before: the fresh subscriber must not begin below their epochs
        s.until_covered(0).await;
        tokio::time::sleep(Duration::from_secs(10)).await;
        s.engine.cut();
    }
    tokio::time::sleep(Duration::from_secs(10)).await;
    for n in 0..3 {
        s.engine.make(n, stored(n), false);
    }
    s.until_covered(3).await;
    s.subscriber.do_send(Panic);
    assert_eq!(s.exits.recv().await.as_deref(), Some("e"));
    let watch = Watch::new(
        s.parent.clone().recipient(),
        SubscriberExited { source: "e".into() },
    );
    let _fresh = KvSubscriber::new(s.subscription.clone(), watch).start();
    s.engine.make(3, stored(3), false);
    s.until_covered(4).await;
}

/// Who holds how many blocks of a prompt of `tokens` tokens.
async fn coverage(shard: &Addr<IndexShard>, tokens: u32) -> Vec<(HolderId, u32)> {
    let runs = find(shard, tokens).await;
    let mut held: Vec<_> = runs.iter().map(|run| (run.holder, run.to)).collect();
    held.sort_unstable();
    held
}

async fn until_held(s: &Subscribed, expected: &[(HolderId, u32)]) {
    for _ in 0..200_000 {
        if coverage(&s.shard, 200).await == expected {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("never held so; state {:?}", s.state.load());
}

#[actix::test]
async fn ranks_behind_one_stream_keep_apart_and_none_stands_for_an_unknown_one() {
    tokio::time::pause();
    let (first, unknown) = (ENGINE, READER); // what the shard of these tests knows
    let s = subscribe_as(&[(None, unknown), (Some(0), first)], None);
    let ranked = |rank, event| Batch {
        rank,
        ..batch(vec![event])
    };
    s.engine.send(0, ranked(Some(0), stored(0)));
    s.engine.send(1, ranked(None, stored(0)));
    s.engine.send(2, ranked(None, stored(1)));
    until_held(&s, &[(first, 1), (unknown, 2)]).await;
    s.engine.send(3, ranked(None, KvEvent::Cleared));
    until_held(&s, &[(first, 1)]).await;
    s.engine.restart();
    s.engine.send(0, ranked(None, stored(0)));
    until_held(&s, &[(unknown, 1)]).await;
    assert_eq!(*s.state.load().ranks, [0]);
}

#[actix::test]
async fn a_stream_of_one_rank_tells_of_that_rank_and_voids_no_other() {
    tokio::time::pause();
    let s = subscribe_as(
        &[(None, STORE), (Some(0), ENGINE), (Some(1), READER)],
        Some(1),
    );
    apply(&s.shard, ENGINE, 1, vec![Op::Event(stored(0))]).await;
    let silent = Batch {
        rank: None,
        ..batch(vec![stored(0)])
    };
    s.engine.send(0, silent.clone());
    s.engine.send(1, silent);
    until_held(&s, &[(ENGINE, 1), (READER, 1)]).await;
    s.engine.restart();
    s.engine.send(
        0,
        Batch {
            rank: Some(1),
            ..batch(vec![KvEvent::Cleared])
        },
    );
    until_held(&s, &[(ENGINE, 1)]).await;
}

#[actix::test]
async fn while_the_shard_is_busy_no_more_than_its_messages_are_on_their_way() {
    tokio::time::pause();
    let s = subscribe();
    let mut held = vec![];
    for _ in 0..MESSAGES_MAX {
        held.push(s.permits.acquire().await);
    }
    for n in 0..50 {
        s.engine.make(n, stored(n), false);
    }
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(
        covered(&s.shard, 200).await,
        0,
        "nothing is sent without a permit"
    );
    held.clear();
    s.until_covered(50).await;
    assert_eq!(s.permits.free(), MESSAGES_MAX, "every permit came back");
}

#[actix::test]
async fn changes_of_an_older_epoch_are_dropped() {
    let (shard, gauges) = plain_shard();
    apply(&shard, ENGINE, 2, vec![Op::Event(stored(0))]).await;
    apply(&shard, ENGINE, 1, vec![Op::Event(stored(1)), Op::Forget]).await;
    assert_eq!(covered(&shard, 200).await, 1);
    tokio::time::sleep(Duration::from_millis(250)).await;
    assert_eq!(gauges.load().stale, 1);
}

#[actix::test]
async fn an_eviction_is_taken_for_an_offload_only_where_the_settings_say_so() {
    let removed = |n: u64| {
        Op::Event(KvEvent::Removed {
            hashes: vec![100 + n],
            medium: Medium::Gpu,
        })
    };
    let fill = || (0..3).map(|n| Op::Event(stored(n))).collect::<Vec<_>>();
    // a writer: into its namespace, which outlives it
    let (shard, _) = shard([
        (ENGINE, spec(Some(STORE), true)),
        (READER, spec(None, true)),
    ]);
    apply(&shard, ENGINE, 1, fill()).await;
    apply(&shard, ENGINE, 1, vec![removed(2)]).await;
    let assumed = Run {
        holder: STORE,
        tier: Tier::Assumed,
        from: 2,
        to: 3,
    };
    assert!(find(&shard, 6).await.contains(&assumed));
    apply(&shard, ENGINE, 2, vec![Op::Forget]).await;
    apply(&shard, READER, 1, fill()).await;
    assert!(
        find(&shard, 6).await.contains(&assumed),
        "a namespace keeps what it has"
    );
    // one that writes nowhere: a copy that only itself can reach
    apply(&shard, READER, 1, vec![removed(2)]).await;
    assert!(find(&shard, 6).await.contains(&Run {
        holder: READER,
        ..assumed
    }));
    // an engine that announces offloads means its evictions
    let said = Op::Event(KvEvent::Offloaded { hashes: vec![100] });
    apply(&shard, ENGINE, 3, fill()).await;
    apply(&shard, ENGINE, 3, vec![said, removed(1)]).await;
    let runs = find(&shard, 6).await;
    assert!(
        runs.contains(&Run {
            holder: STORE,
            tier: Tier::Storage,
            from: 0,
            to: 1
        }),
        "{runs:?}"
    );
    let second = |r: &&Run| r.holder == STORE && r.from <= 1 && 1 < r.to;
    assert!(!runs.iter().any(|r| second(&r)), "{runs:?}");
}

#[actix::test]
async fn a_copy_announced_in_storage_is_in_the_namespace_until_it_is_removed_there() {
    let (shard, _) = shard([
        (ENGINE, spec(Some(STORE), true)),
        (READER, spec(None, false)),
    ]);
    apply(
        &shard,
        ENGINE,
        1,
        vec![Op::Event(stored(0)), Op::Event(stored(1))],
    )
    .await;
    let copy = KvEvent::Stored(Stored {
        hashes: vec![100],
        parent: None,
        tokens: vec![],
        block_size: 2,
        medium: Medium::Storage,
        lora: None,
        cache_salt: None,
    });
    let removed = |n: u64, medium| {
        Op::Event(KvEvent::Removed {
            hashes: vec![100 + n],
            medium,
        })
    };
    apply(
        &shard,
        ENGINE,
        1,
        vec![
            Op::Event(copy),
            removed(0, Medium::Gpu),
            removed(1, Medium::Gpu),
        ],
    )
    .await;
    let runs = find(&shard, 6).await;
    let stored = Run {
        holder: STORE,
        tier: Tier::Storage,
        from: 0,
        to: 1,
    };
    assert!(runs.contains(&stored), "{runs:?}");
    assert!(
        runs.iter().all(|r| r.to <= 1),
        "its evictions are evictions: {runs:?}"
    );
    apply(&shard, ENGINE, 1, vec![removed(0, Medium::Storage)]).await;
    assert_eq!(find(&shard, 6).await, []);
}

#[actix::test]
async fn a_dispatch_counts_until_it_ends_one_way_or_the_other() {
    tokio::time::pause();
    let (shard, _) = plain_shard();
    let chain = blocks(&prompt(4));
    let sent = Dispatched {
        holder: ENGINE,
        chain: chain.clone(),
        hold: Duration::from_secs(10),
        queued: Mailbox::IndexShard.enter(),
    };
    shard.send(sent.clone()).await.unwrap();
    assert_eq!(covered(&shard, 4).await, 2);
    let ended = |fate| DispatchEnded {
        holder: ENGINE,
        chain: chain.clone(),
        fate,
    };
    shard.send(ended(Fate::Withdrawn)).await.unwrap();
    assert_eq!(covered(&shard, 4).await, 0);
    shard.send(sent).await.unwrap();
    shard.send(ended(Fate::Served)).await.unwrap();
    assert_eq!(covered(&shard, 4).await, 2);
    tokio::time::sleep(Duration::from_secs(12)).await;
    assert_eq!(covered(&shard, 4).await, 0, "no event came");
}

#[actix::test]
async fn a_shard_that_panics_closes_its_address_and_asks_fail_at_once() {
    let (shard, _) = plain_shard();
    assert!(shard.send(Panic).await.is_err());
    assert!(
        shard
            .send(FindOverlap {
                chains: vec![blocks(&prompt(4))],
                queued: Mailbox::IndexShard.enter(),
            })
            .await
            .is_err()
    );
}
