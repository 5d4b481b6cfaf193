//! Sharing with other gateways: what a stream begins with, how gaps are closed, who leads, and what a
//! store that fails costs. The store is a map, time is paused.

#![allow(clippy::unwrap_used)] // all of this is a test

use actix::Actor;
use actors::directory::{Directory, Snapshot as ClusterSnapshot};
use actors::index_shard::{ApplyEvents, FindOverlap, IndexShard, Op, ShardGauges, SourceSpec};
use actors::kv_share::{
    KvShare, Load, SNAPSHOT_LAPSES, ShareSettings, SharedStore, SharedStream, SharedTransport,
};
use actors::kv_subscriber::{EventConnection, EventTransport, Frame, StreamState};
use actors::support::fault::Panic;
use actors::support::mailbox::Mailbox;
use actors::support::published::Published;
use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use routing::block::{Realm, chain};
use routing::event_stream::Recovery;
use routing::prefix_index::{HolderId, Limits};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::time::Instant;
use wire::kv_events::{Batch, KvEvent, Medium, Stored};
use wire::kv_snapshot::{Snapshot, SnapshotBlock};

const ENGINE: HolderId = HolderId(0);

/// What lies in the store, and how it behaves.
#[derive(Default)]
struct Shelf {
    snapshots: HashMap<String, (Vec<u8>, Instant)>,
    leader: Option<&'static str>,
    others: Vec<Load>,
    fails: bool,
    looks: usize,
    saved: usize,
}

#[derive(Clone, Default)]
struct Store(Rc<RefCell<Shelf>>);

impl Store {
    fn put(&self, seq: u64) {
        let entry = (snapshot(seq).to_bytes(), Instant::now());
        self.0.borrow_mut().snapshots.insert("s".into(), entry);
    }

    fn answer<T: 'static>(
        &self,
        with: impl FnOnce(&mut Shelf) -> T + 'static,
    ) -> LocalBoxFuture<'static, Result<T, String>> {
        let shelf = self.0.clone();
        async move {
            let mut shelf = shelf.borrow_mut();
            if shelf.fails {
                return Err("gone".into());
            }
            Ok(with(&mut shelf))
        }
        .boxed_local()
    }
}

impl SharedStore for Store {
    fn load(&self, stream: &str) -> LocalBoxFuture<'static, Result<Option<Vec<u8>>, String>> {
        let stream = stream.to_owned();
        self.answer(move |shelf| {
            let found = shelf.snapshots.get(&stream);
            found.map(|(bytes, _)| bytes.clone())
        })
    }
    fn age(&self, stream: &str) -> LocalBoxFuture<'static, Result<Option<Duration>, String>> {
        let stream = stream.to_owned();
        self.answer(move |shelf| {
            shelf.looks += 1;
            let found = shelf.snapshots.get(&stream);
            found.map(|(_, at)| at.elapsed())
        })
    }
    fn lead(&self, _: &str) -> LocalBoxFuture<'static, Result<bool, String>> {
        self.answer(|shelf| *shelf.leader.get_or_insert("me") == "me")
    }
    fn save(&self, stream: &str, bytes: Vec<u8>) -> LocalBoxFuture<'static, Result<(), String>> {
        let stream = stream.to_owned();
        self.answer(move |shelf| {
            shelf.saved += 1;
            shelf.snapshots.insert(stream, (bytes, Instant::now()));
        })
    }
    fn keep(&self, stream: &str) -> LocalBoxFuture<'static, Result<bool, String>> {
        let stream = stream.to_owned();
        self.answer(move |shelf| {
            let entry = shelf.snapshots.get_mut(&stream);
            entry.map(|entry| entry.1 = Instant::now()).is_some()
        })
    }
    fn exchange(&self, _: Vec<Load>) -> LocalBoxFuture<'static, Result<Vec<Load>, String>> {
        self.answer(|shelf| shelf.others.clone())
    }
}

fn snapshot(seq: u64) -> Snapshot {
    Snapshot {
        seq,
        ts: 100.0,
        block_size: 2,
        blocks: vec![SnapshotBlock {
            name: seq,
            own: 7,
            copies: [1, 0, 0],
            held: true,
            follows: false,
        }],
    }
}

/// An engine's stream: frames that come, and what it was asked for.
struct Engine {
    replays: bool,
    asked: Rc<RefCell<Vec<u64>>>,
    live: Vec<u64>,
}

struct EngineConnection {
    replays: bool,
    asked: Rc<RefCell<Vec<u64>>>,
    live: std::vec::IntoIter<u64>,
}

fn batch() -> Batch {
    Batch {
        seq: None,
        ts: 0.0,
        rank: None,
        events: Vec::new(),
    }
}

impl EventTransport for Engine {
    fn connect(&self) -> LocalBoxFuture<'static, Result<Box<dyn EventConnection>, String>> {
        let connection = EngineConnection {
            replays: self.replays,
            asked: self.asked.clone(),
            live: self.live.clone().into_iter(),
        };
        async { Ok(Box::new(connection) as Box<dyn EventConnection>) }.boxed_local()
    }
    fn recovery(&self) -> Recovery {
        if self.replays {
            Recovery::Replay
        } else {
            Recovery::None
        }
    }
}

impl EventConnection for EngineConnection {
    fn next(&mut self) -> LocalBoxFuture<'_, Result<Frame, String>> {
        let next = self.live.next().map(|seq| Frame::Live(seq, Ok(batch())));
        async move { next.ok_or("closed".to_owned()) }.boxed_local()
    }
    fn replay(&mut self, from: u64) -> LocalBoxFuture<'_, Result<(), String>> {
        assert!(self.replays, "it has nothing to replay");
        self.asked.borrow_mut().push(from);
        async { Ok(()) }.boxed_local()
    }
}

struct Opened {
    store: Store,
    asked: Rc<RefCell<Vec<u64>>>,
    connection: Box<dyn EventConnection>,
}

fn transport(inner: impl EventTransport + 'static, store: &Store, led: bool) -> SharedTransport {
    SharedTransport {
        inner: Rc::new(inner),
        store: Rc::new(store.clone()),
        stream: "s".into(),
        led: Rc::new(Cell::new(led)),
        misled: Rc::default(),
    }
}

async fn open(store: &Store, replays: bool, live: &[u64]) -> Opened {
    open_as(store, replays, live, false).await
}

async fn open_as(store: &Store, replays: bool, live: &[u64], led: bool) -> Opened {
    let asked = Rc::<RefCell<Vec<u64>>>::default();
    let engine = Engine {
        replays,
        asked: asked.clone(),
        live: live.to_vec(),
    };
    let transport = transport(engine, store, led);
    assert_eq!(transport.recovery(), Recovery::Replay);
    Opened {
        store: store.clone(),
        asked,
        connection: transport.connect().await.unwrap(),
    }
}

async fn next(opened: &mut Opened) -> String {
    match opened.connection.next().await {
        Ok(Frame::Snapshot(snapshot)) => format!("snapshot {}", snapshot.seq),
        Ok(Frame::Live(seq, _)) => format!("live {seq}"),
        Ok(Frame::ReplayEnd) => "end".into(),
        other => format!("{other:?}"),
    }
}

#[actix::test]
async fn a_stream_begins_with_a_snapshot_that_is_newer_than_its_connection() {
    tokio::time::pause();
    let store = Store::default();
    store.put(10);
    tokio::time::advance(Duration::from_millis(700)).await;
    let mut opened = open(&store, false, &[13]).await;
    let renewing = opened.store.clone();
    actix_rt::spawn(async move {
        tokio::time::sleep(Duration::from_millis(300)).await;
        renewing.put(12);
    });
    opened.connection.replay(0).await.unwrap();
    assert_eq!(
        next(&mut opened).await,
        "snapshot 12",
        "not the one from before"
    );
    assert_eq!(next(&mut opened).await, "end");
    assert_eq!(next(&mut opened).await, "live 13");
}

/// Says each half second that the snapshot is up to date, as whoever leads the stream does.
fn keep_fresh(store: &Store) {
    let store = store.clone();
    actix_rt::spawn(async move {
        loop {
            tokio::time::sleep(Duration::from_millis(500)).await;
            let _ = store.keep("s").await;
        }
    });
}

#[actix::test]
async fn an_engines_replay_goes_on_behind_the_snapshot() {
    tokio::time::pause();
    let store = Store::default();
    store.put(10);
    keep_fresh(&store);
    let mut opened = open(&store, true, &[]).await;
    opened.connection.replay(0).await.unwrap();
    assert_eq!(next(&mut opened).await, "snapshot 10");
    assert_eq!(*opened.asked.borrow(), [11]);
}

#[actix::test]
async fn a_snapshot_that_nobody_keeps_up_to_date_is_not_taken() {
    tokio::time::pause();
    let store = Store::default();
    store.put(10);
    tokio::time::advance(Duration::from_secs(2)).await;
    let mut opened = open(&store, true, &[]).await;
    let start = Instant::now();
    opened.connection.replay(0).await.unwrap();
    assert!(start.elapsed() < Duration::from_secs(7), "a bounded wait");
    assert_eq!(*opened.asked.borrow(), [0], "as if there were none");
    // and who leads the stream does not wait for itself
    let mut own = open_as(&store, true, &[], true).await;
    let start = Instant::now();
    own.connection.replay(0).await.unwrap();
    assert_eq!(
        (start.elapsed(), &own.asked.borrow()[..]),
        (Duration::ZERO, &[0][..])
    );
}

#[actix::test]
async fn live_frames_that_the_snapshot_has_are_left_out_and_those_of_another_process_break_it_off()
{
    tokio::time::pause();
    let store = Store::default();
    store.put(10);
    keep_fresh(&store);
    let mut opened = open(&store, false, &[8, 9, 10, 11]).await;
    opened.connection.replay(0).await.unwrap();
    assert_eq!(next(&mut opened).await, "snapshot 10");
    assert_eq!(next(&mut opened).await, "end");
    assert_eq!(next(&mut opened).await, "live 11");
    // of a process that began after the snapshot's last event
    let late = Rc::<RefCell<Vec<u64>>>::default();
    let engine = Engine {
        replays: true,
        asked: late.clone(),
        live: vec![2],
    };
    let transport = transport(LateClock(engine), &store, false);
    let mut connection = transport.connect().await.unwrap();
    connection.replay(0).await.unwrap();
    assert!(matches!(connection.next().await, Ok(Frame::Snapshot(_))));
    assert!(connection.next().await.unwrap_err().contains("another one"));
    let mut again = transport.connect().await.unwrap();
    again.replay(0).await.unwrap();
    assert_eq!(
        *late.borrow(),
        [11, 0],
        "the snapshot is not believed again"
    );
}

/// An engine whose frames are made after the snapshot's.
struct LateClock(Engine);

struct LateConnection(Box<dyn EventConnection>);

impl EventTransport for LateClock {
    fn connect(&self) -> LocalBoxFuture<'static, Result<Box<dyn EventConnection>, String>> {
        let inner = self.0.connect();
        async { Ok(Box::new(LateConnection(inner.await?)) as Box<dyn EventConnection>) }
            .boxed_local()
    }
    fn recovery(&self) -> Recovery {
        self.0.recovery()
    }
}

impl EventConnection for LateConnection {
    fn next(&mut self) -> LocalBoxFuture<'_, Result<Frame, String>> {
        async {
            Ok(match self.0.next().await? {
                Frame::Live(seq, Ok(batch)) => Frame::Live(seq, Ok(Batch { ts: 200.0, ..batch })),
                other => other,
            })
        }
        .boxed_local()
    }
    fn replay(&mut self, from: u64) -> LocalBoxFuture<'_, Result<(), String>> {
        self.0.replay(from)
    }
}

#[actix::test]
async fn without_a_snapshot_or_a_store_a_stream_begins_as_it_would_alone() {
    tokio::time::pause();
    let store = Store::default();
    for fails in [false, true] {
        store.0.borrow_mut().fails = fails;
        let start = Instant::now();
        let mut silent = open(&store, false, &[5]).await;
        silent.connection.replay(0).await.unwrap();
        assert_eq!(next(&mut silent).await, "end");
        let mut keeping = open(&store, true, &[5]).await;
        keeping.connection.replay(0).await.unwrap();
        assert_eq!(*keeping.asked.borrow(), [0]);
        assert_eq!(start.elapsed(), Duration::ZERO, "nothing was waited for");
    }
}

#[actix::test]
async fn a_gap_that_the_engine_cannot_close_is_closed_by_what_another_has_heard() {
    tokio::time::pause();
    let store = Store::default();
    let mut opened = open(&store, false, &[3, 7]).await;
    opened.connection.replay(0).await.unwrap();
    assert_eq!(next(&mut opened).await, "end");
    assert_eq!(next(&mut opened).await, "live 3");
    assert_eq!(next(&mut opened).await, "live 7"); // 4, 5 and 6 are missing
    store.put(5);
    let later = store.clone();
    actix_rt::spawn(async move {
        tokio::time::sleep(Duration::from_millis(800)).await;
        later.put(8);
    });
    opened.connection.replay(4).await.unwrap();
    assert_eq!(
        next(&mut opened).await,
        "snapshot 8",
        "5 does not reach up to 7"
    );
    assert_eq!(next(&mut opened).await, "end");
}

#[actix::test]
async fn an_engine_that_started_anew_is_not_told_of_by_those_who_heard_the_old_one() {
    tokio::time::pause();
    let store = Store::default();
    store.put(90);
    keep_fresh(&store);
    let mut opened = open(&store, false, &[0]).await;
    opened.connection.replay(0).await.unwrap();
    let loads = store.0.borrow().looks;
    opened.connection.replay(0).await.unwrap(); // the numbers fell back
    assert_eq!(store.0.borrow().looks, loads);
}

fn shard() -> Published<Option<actix::Addr<IndexShard>>> {
    let limits = Limits {
        max_entries: 1000,
        ttl: 900,
    };
    let spec = SourceSpec {
        model: "m".into(),
        writes: None,
        assume_offload: false,
        storage: true,
    };
    let gauges = Published::new(ShardGauges::default());
    let shard = IndexShard::new(limits, [(ENGINE, spec)].into(), gauges).start();
    Published::new(Some(shard))
}

fn stored(tokens: &[u32]) -> Op {
    Op::Event(KvEvent::Stored(Stored {
        hashes: (0..tokens.len() as u64 / 2).collect(),
        parent: None,
        tokens: tokens.to_vec(),
        block_size: 2,
        medium: Medium::Gpu,
        lora: None,
        cache_salt: None,
    }))
}

fn settings(store: &Store) -> ShareSettings {
    ShareSettings {
        store: Rc::new(store.clone()),
        streams: Rc::new(std::cell::RefCell::new(vec![SharedStream {
            name: "s".into(),
            holder: ENGINE,
            standing: Arc::default(),
            state: open_stream(),
            led: Rc::default(),
        }])),
    }
}

fn open_stream() -> Published<StreamState> {
    Published::new(StreamState {
        connected: true,
        ..StreamState::default()
    })
}

async fn apply(shard: &Published<Option<actix::Addr<IndexShard>>>, op: Op, up_to: Option<u64>) {
    let shard = shard.load().as_ref().clone().unwrap();
    let events = ApplyEvents {
        source: ENGINE,
        epoch: 1,
        ops: vec![op],
        up_to,
        permit: None,
        queued: Mailbox::IndexShard.enter(),
    };
    shard.send(events).await.unwrap();
}

#[actix::test]
async fn whoever_leads_leaves_what_it_knows_and_another_index_goes_on_from_there() {
    tokio::time::pause();
    let (store, shard) = (Store::default(), shard());
    apply(&shard, stored(&[1, 2, 3, 4]), None).await;
    let directory = Directory::new(ClusterSnapshot::default());
    let (root, state) = KvShare::supervised(settings(&store), shard.clone(), directory);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(store.0.borrow().saved, 0, "in the middle of a frame");
    apply(&shard, stored(&[1, 2, 3, 4, 5, 6]), Some(41)).await;
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!(store.0.borrow().saved, 1, "nothing has changed since");
    let (bytes, at) = store.0.borrow().snapshots["s"].clone();
    assert!(at.elapsed() < SNAPSHOT_LAPSES, "kept alive");
    let left = Snapshot::from_bytes(&bytes).unwrap();
    assert_eq!((left.seq, left.blocks.len()), (41, 3));
    let other = self::shard();
    apply(&other, Op::TakeOver(left), Some(41)).await;
    let realm = Realm {
        model: "m",
        cache_salt: None,
        block_size: 2,
    };
    let chains = vec![chain(&realm, &[1, 2, 3, 4, 5, 6]).into()];
    let addr = other.load().as_ref().clone().unwrap();
    let runs = addr
        .send(FindOverlap {
            chains,
            queued: Mailbox::IndexShard.enter(),
        })
        .await
        .unwrap();
    assert_eq!((runs[0][0].from, runs[0][0].to), (0, 3));
    // it is replaced when it dies, and goes on
    root.addr().do_send(Panic);
    apply(&shard, Op::Forget, Some(42)).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(state.restarts.load(Relaxed), 1);
    assert_eq!(store.0.borrow().saved, 2);
}

#[actix::test]
async fn who_does_not_lead_leaves_nothing_and_a_store_that_fails_is_counted() {
    tokio::time::pause();
    let (store, shard) = (Store::default(), shard());
    store.0.borrow_mut().leader = Some("another");
    apply(&shard, stored(&[1, 2]), Some(1)).await;
    let directory = Directory::new(ClusterSnapshot::default());
    let (_root, state) = KvShare::supervised(settings(&store), shard, directory);
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!((store.0.borrow().saved, state.leads.load(Relaxed)), (0, 0));
    assert_eq!(state.connected.load(Relaxed), 1);
    store.0.borrow_mut().fails = true;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(state.connected.load(Relaxed), 0);
    assert!(state.failures.load(Relaxed) > 0);
    *store.0.borrow_mut() = Shelf::default();
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(
        (state.connected.load(Relaxed), store.0.borrow().saved),
        (1, 1)
    );
}
