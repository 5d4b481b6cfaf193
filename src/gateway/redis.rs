//! What gateways keep in Redis beside the answers of the cache, over the connections of the storage layer.

use crate::settings::{CacheBackend, RedisSettings, Settings};
use storage::{FromRedisValue, Pipeline, RedisStore};

/// See the module. Clones share the connections.
#[derive(Clone)]
pub struct Redis {
    redis: storage::Redis,
    prefix: String,
}

impl Redis {
    /// For the settings of `response_cache.redis`; connects when it is needed.
    ///
    /// # Errors
    /// When the URL is none, or the CA file cannot be used. The URL may hold a password, so the message does not repeat it.
    pub fn new(settings: &RedisSettings) -> Result<Self, String> {
        let url = settings.url.as_ref();
        let url = url.ok_or("response_cache.redis.url is not set")?;
        let redis = storage::Redis::open(&storage::RedisSettings {
            url: url.0.to_string(),
            pool_size: settings.pool_size,
            connect_timeout: settings.connect_timeout,
            command_timeout: settings.command_timeout,
            connection_max_age: settings.connection_max_age,
            ca_file: settings.ca_file.clone(),
        });
        Ok(Redis {
            redis: redis.map_err(|error| format!("response_cache.redis: {error}"))?,
            prefix: settings.key_prefix.clone(),
        })
    }

    /// When something is kept there, as the settings say.
    ///
    /// # Errors
    /// Those of [`Redis::new`].
    pub fn where_used(settings: &Settings) -> Result<Option<Self>, String> {
        let cache = &settings.response_cache;
        let by_cache = cache.enabled && cache.l1() == CacheBackend::Redis;
        let by_index = settings.kv_cache_index.enabled && settings.kv_cache_index.shared;
        let used = by_cache || by_index;
        used.then(|| Redis::new(&cache.redis)).transpose()
    }

    /// Answers of the cache, over the same connections.
    pub fn store(&self, value_bytes_max: usize) -> RedisStore {
        RedisStore::over(self.redis.clone(), &self.prefix, value_bytes_max)
    }

    /// A key of the KV index: beside those of answers, whose prefix mostly ends in `resp:`. All of them are in one slot of a
    /// cluster, since commands that are sent in one go must be.
    pub fn kv_key(&self, name: &str) -> String {
        let prefix = self.prefix.strip_suffix("resp:").unwrap_or(&self.prefix);
        format!("{prefix}kv:{{kv}}{name}")
    }

    /// Sends commands in one go and reads their answers. Their keys are made by [`Redis::kv_key`].
    ///
    /// # Errors
    /// When Redis does not answer in time, or not as it should. Names no key and no secret.
    pub async fn run<T: FromRedisValue + Send>(&self, commands: Pipeline) -> Result<T, String> {
        let answer = self.redis.run(commands).await;
        answer.map_err(|error| error.to_string())
    }
}
