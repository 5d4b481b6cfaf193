//! `dynamo-kv-router`: ConcurrentRadixTreeCompressed. It applies events on threads of its own, so it
//! is measured in two passes: all events queued up and applied on this thread, for their rate; and
//! events one by one on its thread, waiting for each, between the lookups.

use dynamo_kv_router::ConcurrentRadixTreeCompressed;
use dynamo_kv_router::indexer::{SyncIndexer, WorkerTask};
use dynamo_kv_router::protocols::{
    BlockHashOptions, ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData,
    KvCacheStoreData, KvCacheStoredBlockData, LocalBlockHash, RouterEvent,
    compute_block_hash_for_seq,
};
use index_bench::fleet::{Op, Shape};
use index_bench::replay::{Measured, Subject, replay};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

struct Peer {
    tree: Arc<ConcurrentRadixTreeCompressed>,
    // none when it is over
    tasks: Option<flume::Sender<WorkerTask>>,
    thread: Option<JoinHandle<()>>,
    block_size: u32,
}

impl Drop for Peer {
    fn drop(&mut self) {
        // what it holds is gone before the next one is measured
        self.tasks = None;
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join) {
            eprintln!("its thread has panicked");
        }
    }
}

enum Ready {
    Look(Vec<LocalBlockHash>),
    Event(RouterEvent),
}

fn hashed(tokens: &[u32], block_size: u32) -> Vec<LocalBlockHash> {
    compute_block_hash_for_seq(tokens, block_size, BlockHashOptions::default())
}

fn event(worker: u32, data: KvCacheEventData) -> RouterEvent {
    let event = KvCacheEvent {
        event_id: 0,
        data,
        dp_rank: 0,
    };
    RouterEvent::new(u64::from(worker), event)
}

fn ready(op: &Op, block_size: u32) -> Ready {
    match op {
        Op::Look { tokens, .. } => Ready::Look(hashed(tokens, block_size)),
        Op::Remove { worker, hashes } => {
            let hashes = hashes.iter().map(|hash| ExternalSequenceBlockHash(*hash));
            let removed = KvCacheRemoveData {
                block_hashes: hashes.collect(),
            };
            Ready::Event(event(*worker, KvCacheEventData::Removed(removed)))
        }
        Op::Store {
            worker,
            hashes,
            parent,
            tokens,
        } => {
            let blocks = hashes.iter().zip(hashed(tokens, block_size));
            let blocks = blocks.map(|(hash, tokens_hash)| KvCacheStoredBlockData {
                block_hash: ExternalSequenceBlockHash(*hash),
                tokens_hash,
                mm_extra_info: None,
            });
            let stored = KvCacheStoreData {
                parent_hash: parent.map(ExternalSequenceBlockHash),
                start_position: None,
                blocks: blocks.collect(),
            };
            Ready::Event(event(*worker, KvCacheEventData::Stored(stored)))
        }
    }
}

impl Subject for Peer {
    type Ready = Ready;
    const NAME: &'static str = "dynamo radix compressed";

    fn ready(&self, op: &Op) -> Ready {
        ready(op, self.block_size)
    }

    fn apply(&mut self, event: &Ready) {
        let Ready::Event(event) = event else { return };
        let (resp, applied) = tokio::sync::oneshot::channel();
        let event = event.clone();
        let task = WorkerTask::EventWithAck { event, resp };
        let tasks = self.tasks.as_ref().expect("open until the end");
        tasks.send(task).expect("its thread runs");
        let applied = applied.blocking_recv().expect("its thread answers");
        assert!(applied, "an event that the tree refuses");
    }

    fn look(&self, prompt: &Ready) -> u32 {
        let Ready::Look(hashes) = prompt else {
            return 0;
        };
        let overlap = self.tree.find_matches_impl(hashes, false);
        overlap.scores.values().copied().max().unwrap_or(0)
    }
}

/// Nanoseconds that all events take on this thread. Hashing of tokens is counted if `inside`.
fn events_ns(ops: &[Op], block_size: u32, inside: bool) -> u64 {
    let (tasks, queue) = flume::unbounded();
    let mut hashing_ns = 0;
    for op in ops {
        if let Op::Store { tokens, .. } = op {
            let start = Instant::now();
            std::hint::black_box(hashed(tokens, block_size));
            hashing_ns += start.elapsed().as_nanos() as u64;
        }
        if let Ready::Event(event) = ready(op, block_size) {
            tasks.send(WorkerTask::Event(event)).expect("it is open");
        }
    }
    drop(tasks);
    let tree = ConcurrentRadixTreeCompressed::new();
    let start = Instant::now();
    tree.worker(queue, None).expect("all events apply");
    let applying_ns = start.elapsed().as_nanos() as u64;
    applying_ns + if inside { hashing_ns } else { 0 }
}

/// Measures it.
pub fn measure(shape: Shape, ops: &[Op]) -> Measured {
    let block_size = shape.recorded_block_size();
    let event_ns = events_ns(ops, block_size, !shape.token_per_block);
    let new = || {
        let tree = Arc::new(ConcurrentRadixTreeCompressed::new());
        let (tasks, queue) = flume::unbounded();
        let its = tree.clone();
        let thread = std::thread::spawn(move || {
            its.worker(queue, None).expect("all events apply");
        });
        Peer {
            tree,
            tasks: Some(tasks),
            thread: Some(thread),
            block_size,
        }
    };
    let (measured, _) = replay(ops, new);
    Measured {
        event_ns,
        ..measured
    }
}
