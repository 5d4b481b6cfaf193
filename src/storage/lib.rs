//! Values by key that outlive a process. One trait, [`Store`], over Redis, an S3 object store, a
//! directory, and (for tests) memory; and the connections to [`Redis`], for those who keep other things there.
//!
//! A store knows nothing of what a value means, and does not look at the clock: a value comes back with the expiry that it was
//! stored with, and whoever asks decides what is too old. Every call ends: within a time, with a bounded answer, and with an
//! error that says whose fault it is.

mod disk;
mod envelope;
mod error;
mod key;
mod lock;
#[cfg(feature = "memory")]
mod memory;
mod redis;
mod s3;
mod store;
mod trust;

pub use deadpool_redis::redis::{FromRedisValue, Pipeline, pipe};
pub use disk::{DiskSettings, DiskStore};
pub use error::{Act, ErrorKind, StoreError};
pub use key::{KEY_BYTES_MAX, Key, KeyError};
pub use lock::Lock;
#[cfg(feature = "memory")]
pub use memory::MemoryStore;
pub use redis::{Redis, RedisError, RedisSettings, RedisStore};
pub use s3::{Credentials, S3Settings, S3Store};
pub use store::{
    Answer, Cursor, Deleted, Holdings, LIST_KEYS_MAX, Listed, Listing, Page, Store, Value,
};
pub use trust::client_config;
