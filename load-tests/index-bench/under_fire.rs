//! What a lookup waits while shards take in a fleet's events: a steady stream of them, and one engine
//! fleet's whole history as fast as the permits allow. Each shard is an actor on a thread of its own
//! and has its share of the workers; a lookup asks all of them at once.

use crate::fleet::Op;
use crate::ours::LIMITS;
use actix::{Actor, Addr};
use actix_rt::{Arbiter, System};
use actors::index_shard::{
    ApplyEvents, FindOverlap, IndexShard, MESSAGES_MAX, Op as Change, ShardGauges, SourceSpec,
};
use actors::support::bounded::Permits;
use actors::support::mailbox::Mailbox;
use actors::support::published::Published;
use routing::block::BlockHash;
use routing::prefix_index::{HolderId, Run};
use std::sync::Arc;
use std::time::{Duration, Instant};
use wire::kv_events::{KvEvent, Medium, Stored};

/// Blocks per second of the steady stream.
const STEADY: u64 = 200_000;
/// Lookups per second.
const LOOKUPS: u32 = 1_000;
/// How long one configuration is measured; the replay begins after a quarter of it.
const DURATION: Duration = Duration::from_secs(8);

#[derive(Clone)]
struct Shards {
    shards: Vec<(Addr<IndexShard>, Permits)>,
    workers: u32,
    block_size: u32,
}

impl Shards {
    fn start(count: usize, workers: u32, block_size: u32) -> (Self, Vec<Arbiter>) {
        let arbiters: Vec<Arbiter> = (0..count).map(|_| Arbiter::new()).collect();
        let shards = arbiters.iter().map(|arbiter| {
            let spec = SourceSpec {
                model: "m".into(),
                writes: None,
                assume_offload: false,
                storage: false,
            };
            // twice: those of the steady stream, and those of the replay
            let sources = (0..2 * workers).map(|worker| (HolderId(worker), spec.clone()));
            let sources = sources.collect();
            let gauges = Published::new(ShardGauges::default());
            let start = move |_: &mut _| IndexShard::new(LIMITS, sources, gauges);
            let shard = IndexShard::start_in_arbiter(&arbiter.handle(), start);
            (shard, Permits::new(MESSAGES_MAX))
        });
        let shards = Shards {
            shards: shards.collect(),
            workers,
            block_size,
        };
        (shards, arbiters)
    }

    /// Sends an event to the shard of its worker, when that has a permit.
    async fn apply(&self, op: &Op, second_fleet: bool) {
        let (worker, event) = match op {
            Op::Look { .. } => return,
            Op::Store {
                worker,
                hashes,
                parent,
                tokens,
            } => {
                let stored = Stored {
                    hashes: hashes.clone(),
                    parent: *parent,
                    tokens: tokens.clone(),
                    block_size: self.block_size,
                    medium: Medium::Gpu,
                    lora: None,
                    cache_salt: None,
                };
                (*worker, KvEvent::Stored(stored))
            }
            Op::Remove { worker, hashes } => {
                let (hashes, medium) = (hashes.clone(), Medium::Gpu);
                (*worker, KvEvent::Removed { hashes, medium })
            }
        };
        let (shard, permits) = &self.shards[worker as usize % self.shards.len()];
        let holder = worker + if second_fleet { self.workers } else { 0 };
        let permit = permits.acquire().await;
        shard.do_send(ApplyEvents {
            queued: Mailbox::IndexShard.enter(),
            source: HolderId(holder),
            epoch: 1,
            ops: vec![Change::Event(event)],
            up_to: None,
            permit: Some(permit),
        });
    }

    /// Asks all shards and puts their answers together.
    async fn find(&self, chain: &Arc<[BlockHash]>) -> Vec<Run> {
        let asked: Vec<_> = self
            .shards
            .iter()
            .map(|(shard, _)| {
                let chain = chain.clone();
                shard.send(FindOverlap {
                    queued: Mailbox::IndexShard.enter(),
                    chains: vec![chain],
                })
            })
            .collect();
        let mut runs = Vec::new();
        for answer in asked {
            runs.extend(answer.await.unwrap_or_default().into_iter().flatten());
        }
        runs
    }
}

/// Runs an async task on a thread of its own.
fn on_thread<T: Send + 'static>(
    task: impl Future<Output = T> + Send + 'static,
) -> std::thread::JoinHandle<T> {
    std::thread::spawn(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build();
        runtime.expect("a runtime with a clock").block_on(task)
    })
}

async fn steady(shards: Shards, ops: Arc<[Op]>, start: Instant) -> u64 {
    let mut blocks = 0;
    for op in ops.iter() {
        let due = start + Duration::from_micros(blocks * 1_000_000 / STEADY);
        tokio::time::sleep_until(due.into()).await;
        if start.elapsed() >= DURATION {
            break;
        }
        shards.apply(op, false).await;
        blocks += op.blocks() as u64;
    }
    blocks
}

async fn replay(shards: Shards, ops: Arc<[Op]>, start: Instant) -> (u64, Duration) {
    tokio::time::sleep_until((start + DURATION / 4).into()).await;
    let begun = Instant::now();
    let mut blocks = 0;
    for op in ops.iter().take_while(|_| start.elapsed() < DURATION) {
        shards.apply(op, true).await;
        blocks += op.blocks() as u64;
    }
    (blocks, begun.elapsed())
}

/// Each lookup's begin and microseconds.
async fn look(shards: Shards, ops: Arc<[Op]>, start: Instant) -> Vec<(Instant, f64)> {
    let chains = ops.iter().filter_map(|op| match op {
        Op::Look { chain, .. } => Some(Arc::from(&chain[..])),
        _ => None,
    });
    let chains: Vec<Arc<[BlockHash]>> = chains.collect();
    let mut taken = Vec::new();
    for (n, chain) in (0u32..).zip(chains.iter().cycle()) {
        let due = start + Duration::from_secs(1) * n / LOOKUPS;
        tokio::time::sleep_until(due.into()).await;
        let asked = Instant::now();
        if asked.duration_since(start) >= DURATION {
            break;
        }
        std::hint::black_box(shards.find(chain).await);
        taken.push((asked, asked.elapsed().as_nanos() as f64 / 1e3));
    }
    taken
}

/// CPU seconds of this process.
fn cpu_seconds() -> f64 {
    const TICKS_PER_SECOND: f64 = 100.0; // what Linux tells programs, whatever its own are
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let behind_name = stat.rsplit(')').next().unwrap_or("");
    let fields = behind_name.split_whitespace().skip(11).take(2);
    let ticks: f64 = fields.filter_map(|field| field.parse::<f64>().ok()).sum();
    ticks / TICKS_PER_SECOND
}

fn quantiles(mut us: Vec<f64>) -> String {
    us.sort_by(f64::total_cmp);
    let at = |share: f64| {
        let at = (us.len().max(1) - 1) as f64 * share;
        us.get(at as usize).copied().unwrap_or(0.0)
    };
    let (p50, p99, max) = (at(0.5), at(0.99), at(1.0));
    format!(
        "p50 {p50:.0} us, p99 {p99:.0}, max {max:.0} ({} lookups)",
        us.len()
    )
}

/// Measures 1, 2 and 4 shards.
pub fn run(workers: u32, block_size: u32, ops: Vec<Op>) {
    let ops: Arc<[Op]> = ops.into();
    for count in [1, 2, 4] {
        let system = System::new();
        system.block_on(async {
            let (shards, arbiters) = Shards::start(count, workers, block_size);
            let (start, cpu) = (Instant::now(), cpu_seconds());
            let fed = on_thread(steady(shards.clone(), ops.clone(), start));
            let replayed = on_thread(replay(shards.clone(), ops.clone(), start));
            let looked = on_thread(look(shards, ops.clone(), start));
            tokio::time::sleep(DURATION).await;
            let taken = looked.join().expect("the client ends by itself");
            let (blocks, lasted) = replayed.join().expect("the replay ends by itself");
            let fed = fed.join().expect("the stream ends by itself");
            let cpu = cpu_seconds() - cpu;
            let replaying = start + DURATION / 4..start + DURATION / 4 + lasted;
            let (during, else_): (Vec<_>, Vec<_>) =
                taken.into_iter().partition(|(at, _)| replaying.contains(at));
            let us = |taken: Vec<(Instant, f64)>| quantiles(taken.into_iter().map(|t| t.1).collect());
            println!("{count} shards: {:.0} blocks/s steady, and {blocks} replayed in {:.2} s; {:.0} % of a CPU",
                fed as f64 / DURATION.as_secs_f64(), lasted.as_secs_f64(), 100.0 * cpu / DURATION.as_secs_f64());
            println!("    lookups during the replay: {}", us(during));
            println!("    lookups else:              {}", us(else_));
            for arbiter in arbiters {
                arbiter.stop();
                let _ = arbiter.join();
            }
        });
    }
}
