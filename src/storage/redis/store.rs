//! Values in Redis: what every store does, as commands; and a lock.
//!
//! A value in its envelope is one string, which is verified before anybody sees it. Redis forgets it when it has expired.

use super::fault::RedisError;
use super::{Redis, RedisSettings};
use crate::envelope;
use crate::error::{Act, ErrorKind, StoreError};
use crate::key::Key;
use crate::lock::Lock;
use crate::store::{Answer, Cursor, Deleted, Listed, Listing, Page, Store, Value};
use bytes::Bytes;
use deadpool_redis::redis::{Cmd, FromRedisValue, Value as Reply, cmd, pipe};
use std::fmt;
use std::time::{Duration, SystemTime};

/// Removes a lock that is still ours.
const UNLOCK: &str = "\
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])";

/// Values below a prefix of the keys of a Redis server or cluster.
pub struct RedisStore {
    redis: Redis,
    key_prefix: String,
    value_bytes_max: usize,
    /// Tells the locks of this store from those of others.
    token: String,
}

impl RedisStore {
    /// Checks the settings. Asks nothing of the server, which may be away.
    ///
    /// # Errors
    /// Those of [`Redis::open`].
    pub fn open(
        settings: &RedisSettings,
        key_prefix: &str,
        value_bytes_max: usize,
    ) -> Result<Self, StoreError> {
        let redis = Redis::open(settings).map_err(|error| error.while_doing(Act::Open))?;
        Ok(RedisStore::over(redis, key_prefix, value_bytes_max))
    }

    /// Over connections that others use too.
    pub fn over(redis: Redis, key_prefix: &str, value_bytes_max: usize) -> Self {
        RedisStore {
            redis,
            key_prefix: key_prefix.into(),
            value_bytes_max,
            token: format!("{:032x}", fastrand::u128(..)),
        }
    }

    fn name_of(&self, key: &Key) -> String {
        format!("{}{key}", self.key_prefix)
    }

    fn lock_name(&self, name: &str) -> String {
        format!("{}lock/{name}", self.key_prefix)
    }

    /// The answer to one command.
    async fn one<T: FromRedisValue + Send>(&self, command: Cmd) -> Result<T, RedisError> {
        let mut commands = pipe();
        commands.add_command(command);
        let (answer,) = self.redis.run(commands).await?;
        Ok(answer)
    }

    async fn read(&self, key: &Key) -> Result<Option<Value>, StoreError> {
        let get = cmd("GET").arg(self.name_of(key)).to_owned();
        let found = self.one::<Option<Bytes>>(get).await;
        let found = found.map_err(|error| error.while_doing(Act::Get))?;
        found.map(|sealed| self.verified(key, sealed)).transpose()
    }

    fn verified(&self, key: &Key, sealed: Bytes) -> Result<Value, StoreError> {
        let broken = |detail: String| StoreError::new(Act::Get, ErrorKind::Broken, detail);
        let (found, value) = envelope::open(sealed).map_err(|error| broken(error.to_string()))?;
        if found != *key {
            return Err(broken("the value of another key".into()));
        }
        self.check_size(Act::Get, &value)?;
        Ok(value)
    }

    fn check_size(&self, act: Act, value: &Value) -> Result<(), StoreError> {
        let (size, limit) = (value.bytes.len(), self.value_bytes_max);
        if size <= limit {
            return Ok(());
        }
        let detail = format!("a value of {size} bytes, beyond the limit of {limit}");
        Err(StoreError::new(act, ErrorKind::TooLarge, detail))
    }

    async fn write(&self, key: &Key, value: Value, now: SystemTime) -> Result<(), StoreError> {
        self.check_size(Act::Put, &value)?;
        let name = self.name_of(key);
        let lives = value.expires_at.duration_since(now).unwrap_or_default();
        let command = match lapse_ms(lives) {
            // nobody would get it, nor may anybody get an older one
            0 => cmd("UNLINK").arg(name).to_owned(),
            ms => {
                let sealed = envelope::seal(key, &value, now);
                let mut set = cmd("SET");
                set.arg(name).arg(sealed).arg("PX").arg(ms);
                set
            }
        };
        let written = self.one::<()>(command).await;
        written.map_err(|error| error.while_doing(Act::Put))
    }

    async fn remove(&self, key: &Key) -> Result<(), StoreError> {
        let unlink = cmd("UNLINK").arg(self.name_of(key)).to_owned();
        let removed = self.one::<()>(unlink).await;
        removed.map_err(|error| error.while_doing(Act::Delete))
    }

    async fn keys(&self, prefix: &str, page: Page) -> Result<Listing, RedisError> {
        let (keys, next) = self.page(prefix, page).await?;
        let heads = keys.iter().map(|key| {
            let mut range = cmd("GETRANGE");
            range.arg(self.name_of(key)).arg(0);
            range.arg(envelope::overhead(key) - 1);
            range
        });
        let heads = self.redis.each(heads.collect()).await?;
        let listed = |(key, head): (Key, Reply)| {
            // gone since, or not ours
            let Reply::BulkString(head) = head else {
                return None;
            };
            let head = envelope::read_head(&head).ok()?;
            let (bytes, stored_at) = (head.value_bytes, head.stored_at);
            (head.key == key).then_some(Listed {
                key,
                bytes,
                stored_at,
            })
        };
        let values = keys.into_iter().zip(heads).filter_map(listed).collect();
        Ok(Listing { values, next })
    }

    async fn clear(&self, prefix: &str, page: Page) -> Result<Deleted, RedisError> {
        let (keys, next) = self.page(prefix, page).await?;
        // one by one: on a cluster, each is in a slot of its own
        let unlinks = keys.iter().map(|key| {
            let name = self.name_of(key);
            cmd("UNLINK").arg(name).to_owned()
        });
        let answers = self.redis.each(unlinks.collect()).await?;
        let refused = |answer: &Reply| matches!(answer, Reply::ServerError(_));
        let kept = answers.iter().filter(|answer| refused(answer)).count();
        let removed = answers.len() - kept;
        if removed == 0
            && let Some(refusal) = answers.into_iter().find(refused)
            && let Err(failure) = refusal.extract_error()
        {
            return Err(RedisError::of(&failure));
        }
        Ok(Deleted {
            removed,
            kept,
            next,
        })
    }

    async fn page(
        &self,
        prefix: &str,
        page: Page,
    ) -> Result<(Vec<Key>, Option<Cursor>), RedisError> {
        let (prefixes, limit) = ((self.key_prefix.as_str(), prefix), page.keys_max());
        let found = self.redis.walk(prefixes, page.after, limit).await?;
        Ok((found.keys, found.next))
    }
}

/// As Redis takes it: whole, and not beyond its numbers.
fn lapse_ms(lapse: Duration) -> u64 {
    const MS_MAX: u64 = 1 << 52; // a server adds its clock to it, and refuses what no longer fits
    let ms = u64::try_from(lapse.as_millis()).unwrap_or(u64::MAX);
    ms.min(MS_MAX)
}

impl Store for RedisStore {
    fn name(&self) -> &'static str {
        "redis"
    }

    fn begin_anew(&self) {
        self.redis.begin_anew();
    }

    fn get<'a>(&'a self, key: &'a Key) -> Answer<'a, Option<Value>> {
        Box::pin(self.read(key))
    }

    fn put<'a>(&'a self, key: &'a Key, value: Value) -> Answer<'a, ()> {
        Box::pin(self.write(key, value, SystemTime::now()))
    }

    fn delete<'a>(&'a self, key: &'a Key) -> Answer<'a, ()> {
        Box::pin(self.remove(key))
    }

    fn list<'a>(&'a self, prefix: &'a str, page: Page) -> Answer<'a, Listing> {
        Box::pin(async move {
            let listed = self.keys(prefix, page).await;
            listed.map_err(|error| error.while_doing(Act::List))
        })
    }

    fn delete_prefix<'a>(&'a self, prefix: &'a str, page: Page) -> Answer<'a, Deleted> {
        Box::pin(async move {
            let deleted = self.clear(prefix, page).await;
            deleted.map_err(|error| error.while_doing(Act::Delete))
        })
    }
}

/// Locks are keys below `lock/`. To delete all below an empty prefix gives them up too.
impl Lock for RedisStore {
    fn lock<'a>(&'a self, name: &'a str, lapses: Duration) -> Answer<'a, bool> {
        Box::pin(async move {
            let mut set = cmd("SET");
            set.arg(self.lock_name(name)).arg(&self.token).arg("NX");
            set.arg("PX").arg(lapse_ms(lapses).max(1));
            let taken = self.one::<Option<String>>(set).await;
            let taken = taken.map_err(|error| error.while_doing(Act::Put))?;
            Ok(taken.is_some())
        })
    }

    fn unlock<'a>(&'a self, name: &'a str) -> Answer<'a, ()> {
        Box::pin(async move {
            let mut eval = cmd("EVAL");
            eval.arg(UNLOCK).arg(1).arg(self.lock_name(name));
            eval.arg(&self.token);
            let unlocked = self.one::<()>(eval).await;
            unlocked.map_err(|error| error.while_doing(Act::Delete))
        })
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RedisStore").field(&self.key_prefix).finish()
    }
}
