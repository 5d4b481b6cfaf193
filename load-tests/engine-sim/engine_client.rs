//! The way into the engine's thread and back: a request goes in whole, its tokens come out one by one, and dropping what brings
//! them aborts it.

use std::sync::Arc;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

/// One token of one choice, or its end.
#[derive(Debug, Clone, Copy)]
pub struct Token {
    /// Which of the request's answers.
    pub choice: usize,
    /// The choice is complete.
    pub last: bool,
    /// Prompt tokens that came from the prefix cache.
    pub cached: usize,
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
}

/// What the engine's thread is told.
pub enum Command {
    /// A new request.
    Submit {
        works: Vec<Work>,
        salt: String,
        arrived: Instant,
        reply: mpsc::UnboundedSender<Token>,
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
    pub fn submit(&self, works: Vec<Work>, salt: String) -> Tokens {
        let (reply, tokens) = mpsc::unbounded_channel();
        // A stopped engine drops the command and with it `reply`: the receiver then ends without a last token.
        let _ = self.commands.send(Command::Submit {
            works,
            salt,
            arrived: Instant::now(),
            reply,
        });
        Tokens {
            tokens,
            commands: self.commands.clone(),
        }
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
