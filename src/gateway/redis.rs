//! The connection to Redis, for everything that gateways keep there: one bounded pool, and a limit
//! of time on every command. Nothing waits for a Redis that does not answer.

use crate::settings::RedisSettings;
use deadpool_redis::redis::{FromRedisValue, Pipeline};
use deadpool_redis::{Config, Pool, PoolConfig, Runtime, Timeouts};
use std::time::Duration;

/// See the module. Clones share the pool.
#[derive(Clone)]
pub struct Redis {
    pool: Pool,
    prefix: String,
    command_timeout: Duration,
}

impl Redis {
    /// For the settings of `response_cache.redis`; connects when it is needed.
    ///
    /// # Errors
    /// When the URL is none; it may hold a password, so the message does not repeat it.
    pub fn new(settings: &RedisSettings) -> Result<Self, String> {
        let url = settings
            .url
            .as_ref()
            .ok_or("response_cache.redis.url is not set")?;
        if url.0.starts_with("rediss://") {
            return Err("response_cache.redis.url: TLS is not supported yet, use redis://".into());
        }
        let mut config = Config::from_url(&*url.0);
        config.pool = Some(PoolConfig {
            max_size: settings.pool_size,
            timeouts: Timeouts {
                wait: Some(settings.command_timeout),
                create: Some(settings.connect_timeout),
                recycle: Some(settings.command_timeout),
            },
            ..PoolConfig::default()
        });
        let pool = config.create_pool(Some(Runtime::Tokio1));
        Ok(Redis {
            pool: pool.map_err(|_| "response_cache.redis.url cannot be used".to_owned())?,
            prefix: settings.key_prefix.clone(),
            command_timeout: settings.command_timeout,
        })
    }

    /// A key of the KV index: beside those of answers, whose prefix mostly ends in `resp:`.
    pub fn kv_key(&self, name: &str) -> String {
        let prefix = self.prefix.strip_suffix("resp:").unwrap_or(&self.prefix);
        format!("{prefix}kv:{name}")
    }

    /// Sends commands in one go and reads their answers.
    ///
    /// # Errors
    /// When Redis does not answer in time, or not as it should. Names no key and no secret.
    pub async fn run<T: FromRedisValue>(&self, commands: Pipeline) -> Result<T, String> {
        let mut connection = self.pool.get().await.map_err(|e| format!("connect: {e}"))?;
        let asked = commands.query_async::<T>(&mut connection);
        match tokio::time::timeout(self.command_timeout, asked).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => Err(format!("{}: {error}", error.category())),
            Err(_) => {
                // its answer may still come, and would be taken for that of another command
                drop(deadpool_redis::Connection::take(connection));
                Err("no answer in time".into())
            }
        }
    }
}
