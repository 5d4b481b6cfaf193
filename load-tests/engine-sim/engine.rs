//! The engine's loop: the thin shell around the scheduler. One task on a thread of its own, so that neither JSON nor tokenizing
//! nor the caller's runtime delays a step. Requests come in over a channel, tokens go out over one channel per request, and a
//! request whose receiver is gone is aborted before the next step.

use crate::config::SimConfig;
use crate::engine_client::{Command, EngineClient, Pin, Token, Work};
use crate::event_log::CacheEvent;
use crate::kv_cache::{BlockHash, KvCache, chain_seed};
use crate::kv_events::feed::Feed;
use crate::metrics::{Metrics, add, set};
use crate::scheduler::{Limits, Output, State, StepReport, step};
use crate::sequence::{NewSequence, SequenceId};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc;
use tokio::time::{Duration, Instant, sleep_until, timeout_at};

/// How far the engine may lag behind its own timetable before it gives the lost time up. Timers wake about 1 ms late, so short
/// steps (a small time scale) keep their average only by catching up.
const CATCH_UP_MAX: Duration = Duration::from_millis(20);

struct Request {
    reply: mpsc::UnboundedSender<Token>,
    choice: usize,
    by_length: bool,
    prompt_len: usize,
    arrived: Instant,
    seen_token: bool,
}

struct Engine {
    config: Arc<SimConfig>,
    metrics: Arc<Metrics>,
    feed: Arc<Feed>,
    state: State,
    /// Arrived, but still in the front end (`overhead_ms`); in order, as the overhead is the same for all.
    arriving: VecDeque<(Instant, NewSequence)>,
    requests: HashMap<SequenceId, Request>,
    next_id: u64,
    /// Takes blocks that leave the GPU for shared storage.
    offloads: Option<mpsc::Sender<Vec<BlockHash>>>,
    /// For what pinned blocks have to say; weak, as the engine ends with the last one who may ask it.
    commands: mpsc::WeakUnboundedSender<Command>,
}

/// Starts the engine's thread.
///
/// # Errors
/// When the system gives no thread or no timer.
pub fn start(
    config: Arc<SimConfig>,
    metrics: Arc<Metrics>,
    feed: Arc<Feed>,
    offloads: Option<mpsc::Sender<Vec<BlockHash>>>,
) -> io::Result<EngineClient> {
    let (commands, inbox) = mpsc::unbounded_channel();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()?;
    let limits = Limits {
        batched_tokens_max: config.max_num_batched_tokens,
        sequences_max: config.max_num_seqs,
    };
    let cache = KvCache::new(config.num_blocks, config.block_size, config.prefix_caching);
    let engine = Engine {
        state: State::new(limits, cache),
        config,
        metrics,
        feed,
        arriving: VecDeque::new(),
        requests: HashMap::new(),
        next_id: 0,
        offloads,
        commands: commands.downgrade(),
    };
    std::thread::Builder::new()
        .name("sim-engine".into())
        .spawn(move || runtime.block_on(engine.run(inbox)))?;
    Ok(EngineClient::new(commands))
}

impl Engine {
    async fn run(mut self, mut inbox: mpsc::UnboundedReceiver<Command>) {
        let mut due = Instant::now();
        loop {
            while let Ok(command) = inbox.try_recv() {
                self.on(command);
            }
            self.abort_abandoned();
            let now = Instant::now();
            while self
                .arriving
                .front()
                .is_some_and(|(ready, _)| *ready <= now)
            {
                if let Some((_, sequence)) = self.arriving.pop_front() {
                    self.state.add(sequence);
                }
            }
            if self.state.is_idle() {
                self.publish_gauges();
                let command = match self.arriving.front() {
                    Some((ready, _)) => timeout_at(*ready, inbox.recv()).await,
                    None => Ok(inbox.recv().await),
                };
                due = Instant::now();
                match command {
                    Ok(Some(command)) => self.on(command),
                    Ok(None) => return,
                    Err(_) => {} // the first one arriving is ready
                }
                continue;
            }
            let report = step(&mut self.state);
            self.publish_events();
            self.publish_gauges();
            let base = due.max(now.checked_sub(CATCH_UP_MAX).unwrap_or(now));
            due = base + self.config.scaled(self.config.speed.step(&report));
            if due > Instant::now() {
                sleep_until(due).await;
            } else {
                tokio::task::yield_now().await;
            }
            self.deliver(report);
            if inbox.is_closed() {
                return;
            }
        }
    }

    fn on(&mut self, command: Command) {
        match command {
            Command::Submit {
                works,
                salt,
                arrived,
                reply,
            } => {
                let chain = chain_seed(self.config.seed, &salt);
                let salt = (!salt.is_empty()).then(|| Arc::from(salt));
                for (choice, work) in works.into_iter().enumerate() {
                    let request = Request {
                        reply: reply.clone(),
                        choice,
                        by_length: work.ends_by_length,
                        prompt_len: work.prompt.len(),
                        arrived,
                        seen_token: false,
                    };
                    self.accept(request, work, chain, salt.clone());
                }
            }
            Command::Wake => {} // the loop looks for abandoned requests anyway
            Command::ClearCache(reply) => {
                let cleared = self.state.cache_mut().clear();
                self.publish_events();
                let _ = reply.send(cleared); // the asker may have left
            }
            Command::Find { hashes, reply } => {
                let _ = reply.send(self.state.cache().find(&hashes).len()); // the asker may have left
            }
            Command::Unpin(id) => {
                self.state.unpin(id);
                self.publish_gauges();
            }
            Command::Announce { event, done } => {
                self.state.cache_mut().announce(event);
                self.publish_events();
                let _ = done.send(()); // the asker may have left
            }
            Command::RestartEvents(reply) => {
                self.restart_events();
                let _ = reply.send(()); // the asker may have left
            }
        }
    }

    fn accept(&mut self, request: Request, work: Work, chain: BlockHash, salt: Option<Arc<str>>) {
        let id = SequenceId(self.next_id);
        self.next_id += 1;
        let ready = Instant::now() + self.config.scaled(self.config.speed.overhead());
        let sequence = NewSequence {
            id,
            prompt: work.prompt,
            answer: work.answer,
            chain,
            salt,
            loaded: work.loaded,
            pin: work.pin,
        };
        self.requests.insert(id, request);
        self.arriving.push_back((ready, sequence));
    }

    /// A client that left has dropped its receiver.
    fn abort_abandoned(&mut self) {
        let gone: Vec<SequenceId> = self
            .requests
            .iter()
            .filter(|(_, request)| request.reply.is_closed())
            .map(|(id, _)| *id)
            .collect();
        for id in gone {
            self.requests.remove(&id);
            if !self.state.abort(id) {
                self.arriving.retain(|(_, sequence)| sequence.id != id);
            }
            add(&self.metrics.aborted, 1);
        }
    }

    fn deliver(&mut self, report: StepReport) {
        add(&self.metrics.preemptions, report.preempted);
        for output in report.outputs {
            self.deliver_one(output);
        }
    }

    fn deliver_one(&mut self, output: Output) {
        let Some(request) = self.requests.get_mut(&output.id) else {
            self.state.unpin(output.id);
            return;
        };
        let waited = request.arrived.elapsed();
        let first = !request.seen_token;
        if first {
            request.seen_token = true;
            self.metrics.time_to_first_token.record(waited);
            add(&self.metrics.prompt_tokens, request.prompt_len);
            add(&self.metrics.cached_tokens, output.cached);
        }
        add(
            &self.metrics.generation_tokens,
            usize::from(output.token.is_some()),
        );
        let token = Token {
            choice: request.choice,
            last: output.last,
            cached: output.cached,
            pin: match first {
                true => pin(&self.state, output.id, &self.commands),
                false => None,
            },
        };
        // Counted before it is sent: who has the answer finds it in the counters.
        if output.last {
            match (request.reply.is_closed(), request.by_length) {
                (true, _) => add(&self.metrics.aborted, 1),
                (false, true) => add(&self.metrics.finished_length, 1),
                (false, false) => add(&self.metrics.finished_stop, 1),
            }
            self.metrics.request_latency.record(waited);
        }
        let _ = request.reply.send(token); // a client that left is noticed before the next step
        if output.last {
            self.requests.remove(&output.id);
        }
    }

    fn publish_gauges(&self) {
        set(&self.metrics.running, self.state.running());
        set(
            &self.metrics.waiting,
            self.state.waiting() + self.arriving.len(),
        );
        set(&self.metrics.blocks_used, self.state.cache().used());
        set(&self.metrics.blocks_pinned, self.state.pinned_blocks());
        self.metrics
            .loaded_tokens
            .store(self.state.loaded_tokens(), Relaxed);
        let (queried, hit) = self.state.prefix_counts();
        self.metrics.prefix_queries.store(queried, Relaxed);
        self.metrics.prefix_hits.store(hit, Relaxed);
    }

    fn publish_events(&mut self) {
        let events = self.state.cache_mut().take_events();
        self.offload(&events);
        let ts = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_secs_f64();
        if self.feed.publish(ts, events) {
            self.restart_events();
        }
    }

    /// Blocks that do not find room on their way to storage are lost, as they would be by an engine whose buffer is full.
    fn offload(&self, events: &[CacheEvent]) {
        let Some(offloads) = &self.offloads else {
            return;
        };
        for event in events {
            if let CacheEvent::Removed { hashes } = event {
                let _ = offloads.try_send(hashes.clone());
            }
        }
    }

    /// Cache and numbers are those of a new process.
    fn restart_events(&mut self) {
        self.state.restart_cache();
        self.feed.restart();
    }
}

/// The guard of what the scheduler kept of a sequence.
fn pin(
    state: &State,
    id: SequenceId,
    commands: &mpsc::WeakUnboundedSender<Command>,
) -> Option<Pin> {
    let blocks = state.pinned(id)?.iter().map(|block| block.number());
    Some(Pin::new(id, blocks.collect(), commands.upgrade()?))
}
