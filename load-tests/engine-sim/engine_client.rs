//! The way into the engine's thread and back: a request goes in whole, its tokens come out one by one, and dropping what brings
//! them aborts it.

use crate::event_log::CacheEvent;
use crate::kv_cache::BlockHash;
use crate::sequence::SequenceId;
use std::ops::Range;
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

/// One token of one choice, or its end.
#[derive(Debug)]
pub struct Token {
    /// Which of the request's answers.
    pub choice: usize,
    /// The choice is complete.
    pub last: bool,
    /// Prompt tokens that came from the prefix cache.
    pub cached: usize,
    /// With the first token: the prompt's blocks, if they are to be kept.
    pub pin: Option<Pin>,
}

/// Blocks that are kept for another engine. They are free when this is dropped.
#[derive(Debug)]
pub struct Pin {
    id: SequenceId,
    blocks: Vec<u32>,
    commands: mpsc::UnboundedSender<Command>,
}

impl Pin {
    /// Keeps what the scheduler pinned for `id`.
    pub fn new(id: SequenceId, blocks: Vec<u32>, commands: mpsc::UnboundedSender<Command>) -> Self {
        Self {
            id,
            blocks,
            commands,
        }
    }

    /// Where they lie in the pool.
    pub fn blocks(&self) -> &[u32] {
        &self.blocks
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        let _ = self.commands.send(Command::Unpin(self.id)); // a stopped engine keeps nothing
    }
}

/// One prompt and the answer that is to come out, token by token.
#[derive(Debug, Clone)]
pub struct Work {
    /// At least one token.
    pub prompt: Arc<[u32]>,
    /// Empty for embeddings.
    pub answer: Arc<[u32]>,
    /// Counts the end as a limit reached instead of a stop.
    pub ends_by_length: bool,
    /// Prompt tokens whose keys and values came from elsewhere.
    pub loaded: Range<usize>,
    /// Keep the prompt's blocks: the first token brings a [`Pin`].
    pub pin: bool,
}

/// What the engine's thread is told.
#[derive(Debug)]
pub enum Command {
    /// A new request.
    Submit {
        works: Vec<Work>,
        salt: String,
        arrived: Instant,
        reply: mpsc::UnboundedSender<Token>,
    },
    /// How many of these leading blocks are cached.
    Find {
        hashes: Vec<BlockHash>,
        reply: oneshot::Sender<usize>,
    },
    /// Free what was kept for another engine.
    Unpin(SequenceId),
    /// Publish an event.
    Announce {
        event: CacheEvent,
        done: oneshot::Sender<()>,
    },
    /// Forget cached blocks.
    ClearCache(oneshot::Sender<bool>),
    /// Forget the cache and count its events from 0.
    RestartEvents(oneshot::Sender<()>),
    /// A client left: look at once, even when idle.
    Wake,
}

/// The way to a running engine. The engine stops when the last clone is gone.
#[derive(Debug, Clone)]
pub struct EngineClient {
    commands: mpsc::UnboundedSender<Command>,
}

impl EngineClient {
    /// To the engine that reads `commands`.
    pub fn new(commands: mpsc::UnboundedSender<Command>) -> Self {
        Self { commands }
    }

    /// Queues a request of one or more choices. Dropping the receiver aborts it. `salt` keeps equal prompts of different tenants
    /// apart in the cache.
    /// `arrived` is when the client asked, which may be earlier than now.
    pub fn submit(&self, works: Vec<Work>, salt: String, arrived: Instant) -> Tokens {
        let (reply, tokens) = mpsc::unbounded_channel();
        // A stopped engine drops the command and with it `reply`: the receiver then ends without a last token.
        let _ = self.commands.send(Command::Submit {
            works,
            salt,
            arrived,
            reply,
        });
        Tokens {
            tokens,
            commands: self.commands.clone(),
        }
    }

    /// How many of these leading blocks are cached at this moment.
    pub async fn find(&self, hashes: Vec<BlockHash>) -> usize {
        let (reply, answer) = oneshot::channel();
        let _ = self.commands.send(Command::Find { hashes, reply });
        answer.await.unwrap_or(0)
    }

    /// Publishes an event about blocks outside of the pool. Returns when listeners can see it.
    pub async fn announce(&self, event: CacheEvent) {
        let (done, announced) = oneshot::channel();
        let _ = self.commands.send(Command::Announce { event, done });
        let _ = announced.await; // a stopped engine has no listeners
    }

    /// Forgets all cached blocks; false while any is in use.
    pub async fn clear_cache(&self) -> bool {
        let (reply, answer) = oneshot::channel();
        let _ = self.commands.send(Command::ClearCache(reply));
        answer.await.unwrap_or(false)
    }

    /// Forgets the cache without announcing it and counts its events from 0 again.
    pub async fn restart_events(&self) {
        let (reply, done) = oneshot::channel();
        let _ = self.commands.send(Command::RestartEvents(reply));
        let _ = done.await; // a stopped engine has no events to restart
    }
}

/// The tokens of one request, all choices together. Dropping it aborts the request.
#[derive(Debug)]
pub struct Tokens {
    tokens: mpsc::UnboundedReceiver<Token>,
    commands: mpsc::UnboundedSender<Command>,
}

impl Tokens {
    /// The next one; none when the engine is gone, or after the last one of each choice.
    pub async fn next(&mut self) -> Option<Token> {
        self.tokens.recv().await
    }
}

impl Drop for Tokens {
    fn drop(&mut self) {
        self.tokens.close();
        let _ = self.commands.send(Command::Wake); // a stopped engine needs no waking
    }
}
