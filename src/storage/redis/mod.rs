//! Redis: one server, or a cluster. Commands over a bounded pool, and a store and a lock made of them.

mod fault;
mod link;
mod settings;
mod store;
mod topology;
mod walk;

pub use fault::RedisError;
pub use settings::RedisSettings;
pub use store::RedisStore;

use crate::error::ErrorKind;
use deadpool::Runtime;
use deadpool::managed::{Object, Pool, PoolConfig, PoolError, QueueMode, Timeouts};
use deadpool_redis::redis::{Cmd, FromRedisValue, Pipeline, RedisError as Failure, Value};
use fault::{is_dropped, is_of_a_cluster};
use link::{Link, Links, timed_out};
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::time::Duration;
use tokio::time::timeout;
use topology::Node;

/// Connections to one Redis server or to a Redis Cluster, whichever it turns out to be. Clones share them.
///
/// Connects when it is needed, and again after the server was away: opening asks nothing. Nothing waits for a Redis that does not
/// answer: every call ends within twice the sum of the two limits of time in the settings, and mostly within one of them.
///
/// Connections belong to the tokio runtime that made them: one that ends takes its own with it, and others are made.
///
/// A connection that was closed while nobody used it costs one silent repetition. So a command may be executed twice, if the
/// connection breaks between its execution and its answer.
#[derive(Clone)]
pub struct Redis {
    pool: Pool<Links>,
    connect_timeout: Duration,
    command_timeout: Duration,
}

/// Something to ask over a connection, perhaps twice.
trait Question: Sync {
    type Answer: Send;

    fn ask(&self, link: &mut Link) -> impl Future<Output = Result<Self::Answer, Failure>> + Send;
}

impl Redis {
    /// Checks the settings and reads the CA file. Asks nothing of the server, which may be away.
    ///
    /// # Errors
    /// When the url is none, or the CA file cannot be used.
    pub fn open(settings: &RedisSettings) -> Result<Self, RedisError> {
        let (connect, command) = (settings.connect_timeout, settings.command_timeout);
        let links = Links::new(
            settings.target()?,
            connect,
            command,
            settings.connection_max_age,
        );
        let config = PoolConfig {
            max_size: settings.pool_size.max(1),
            timeouts: Timeouts {
                // a connection that does not answer leaves time to make another
                recycle: Some(command.min(connect / 2)),
                ..Timeouts::default()
            },
            queue_mode: QueueMode::Lifo, // what is used often stays in use, and is not asked whether it lives
        };
        let pool = Pool::builder(links)
            .config(config)
            .runtime(Runtime::Tokio1)
            .build()
            .map_err(|error| RedisError::new(ErrorKind::Misconfigured, error.to_string()))?;
        Ok(Redis {
            pool,
            connect_timeout: connect,
            command_timeout: command,
        })
    }

    /// Sends commands in one go and reads their answers. On a cluster, all their keys must be in one slot.
    ///
    /// # Errors
    /// When Redis cannot be reached, does not answer in time, or not as it should.
    pub async fn run<T: FromRedisValue + Send>(&self, commands: Pipeline) -> Result<T, RedisError> {
        self.ask(&Piped(commands, PhantomData)).await
    }

    /// Sends commands whose keys may be anywhere. What the server refuses stands in its place.
    async fn each(&self, commands: Vec<Cmd>) -> Result<Vec<Value>, RedisError> {
        if commands.is_empty() {
            return Ok(Vec::new());
        }
        self.ask(&Each(commands)).await
    }

    /// One command to one node.
    async fn at(&self, node: Node, command: Cmd) -> Result<Value, RedisError> {
        self.ask(&At(node, command)).await
    }

    /// The nodes that have keys, in an order that stays.
    async fn masters(&self) -> Result<Vec<Node>, RedisError> {
        self.ask(&Masters).await
    }

    async fn ask<Q: Question>(&self, question: &Q) -> Result<Q::Answer, RedisError> {
        let (link, reused) = self.link().await?;
        match self.ask_over(link, question).await? {
            Ok(answer) => Ok(answer),
            // of those that lay in the pool, any may lead to what is no more: not so a new one
            Err(lost) if reused => {
                self.pool.manager().abandon(lost.generation);
                let (link, _) = self.link().await?;
                let again = self.ask_over(link, question).await?;
                again.map_err(|lost| RedisError::of(&lost.failure))
            }
            Err(lost) => Err(RedisError::of(&lost.failure)),
        }
    }

    /// Connections that were made before this are not used again.
    pub(super) fn begin_anew(&self) {
        self.pool.manager().abandon_all();
    }

    /// A connection, and whether it was used before.
    async fn link(&self) -> Result<(Object<Links>, bool), RedisError> {
        let limit = self.connect_timeout;
        match timeout(limit, self.pool.get()).await {
            Ok(Ok(link)) => {
                let reused = Object::metrics(&link).recycle_count > 0;
                Ok((link, reused))
            }
            Ok(Err(PoolError::Backend(failure))) => Err(RedisError::of(&failure)),
            Ok(Err(error)) => Err(RedisError::new(ErrorKind::Unavailable, error.to_string())),
            Err(_) => Err(self.no_link(limit)),
        }
    }

    fn no_link(&self, limit: Duration) -> RedisError {
        let status = self.pool.status();
        let detail = match status.size >= status.max_size && status.available == 0 {
            true => format!(
                "all {} connections are in use for {limit:?}: raise pool_size, or find out why commands take so long",
                status.max_size
            ),
            false => format!(
                "no connection within {limit:?}: the server hangs, or the network drops packets to its host and port"
            ),
        };
        RedisError::new(ErrorKind::TooSlow, detail)
    }

    async fn ask_over<Q: Question>(
        &self,
        mut link: Object<Links>,
        question: &Q,
    ) -> Result<Result<Q::Answer, Lost>, RedisError> {
        let limit = self.command_timeout;
        let failure = match timeout(limit, question.ask(&mut link)).await {
            Ok(Ok(answer)) => return Ok(Ok(answer)),
            Ok(Err(failure)) => failure,
            Err(_) => timed_out(),
        };
        let silent = failure.is_timeout();
        let lost = silent || is_dropped(&failure) || is_of_a_cluster(&failure);
        if lost && !link.outlives_failure(Object::metrics(&link).age()) {
            let generation = link.generation;
            drop(Object::take(link));
            if !silent {
                return Ok(Err(Lost {
                    generation,
                    failure,
                }));
            }
        }
        if silent {
            return Err(RedisError::too_slow(limit));
        }
        Err(RedisError::of(&failure))
    }
}

/// A connection that can be used no more.
struct Lost {
    generation: u64,
    failure: Failure,
}

struct Piped<T>(Pipeline, PhantomData<fn() -> T>);
struct Each(Vec<Cmd>);
struct At(Node, Cmd);
struct Masters;

impl<T: FromRedisValue + Send> Question for Piped<T> {
    type Answer = T;

    async fn ask(&self, link: &mut Link) -> Result<T, Failure> {
        self.0.query_async(link).await
    }
}

impl Question for Each {
    type Answer = Vec<Value>;

    async fn ask(&self, link: &mut Link) -> Result<Vec<Value>, Failure> {
        link.each(&self.0).await
    }
}

impl Question for At {
    type Answer = Value;

    async fn ask(&self, link: &mut Link) -> Result<Value, Failure> {
        link.at(&self.0, &self.1).await?.extract_error()
    }
}

impl Question for Masters {
    type Answer = Vec<Node>;

    async fn ask(&self, link: &mut Link) -> Result<Vec<Node>, Failure> {
        link.masters().await
    }
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let status = self.pool.status();
        f.debug_struct("Redis")
            .field("connections", &status.size)
            .finish_non_exhaustive() // the url is a secret
    }
}
