//! What every store does: the trait and what passes through it.

use crate::error::StoreError;
use crate::key::Key;
use bytes::Bytes;
use futures_util::future::BoxFuture;
use std::fmt::Debug;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The most keys of one page. S3 gives no more.
pub const LIST_KEYS_MAX: usize = 1000;

/// What a call becomes.
pub type Answer<'a, T> = BoxFuture<'a, Result<T, StoreError>>;

/// Values by key.
///
/// Every call ends within the time that the store was set up with. Dropping a call gives it up; a `put` or a deletion that was
/// given up may have happened all the same.
pub trait Store: Debug + Send + Sync {
    /// What it is, in one word, for log lines and labels: `redis`, `s3`, `disk`.
    fn name(&self) -> &'static str;

    /// What the store keeps open may lead to nobody any more, though nothing said so: calls begin anew from here.
    fn begin_anew(&self) {}

    /// What it holds, where it knows that without asking anybody.
    fn holdings(&self) -> Option<Holdings> {
        None
    }

    /// The value of a key, whole and as it was stored, or none if there is none. It may have expired, unless the
    /// store forgets by itself, as Redis does.
    fn get<'a>(&'a self, key: &'a Key) -> Answer<'a, Option<Value>>;

    /// Keeps a value in place of any older one. Nobody ever gets a part of it.
    fn put<'a>(&'a self, key: &'a Key, value: Value) -> Answer<'a, ()>;

    /// Removes a value, if there is one.
    fn delete<'a>(&'a self, key: &'a Key) -> Answer<'a, ()>;

    /// One page of the keys that begin with `prefix`. An empty prefix means all.
    ///
    /// In the order of their bytes, where the store can: Redis has none, and may name a key twice over several pages.
    fn list<'a>(&'a self, prefix: &'a str, page: Page) -> Answer<'a, Listing>;

    /// Removes one page of the keys that begin with `prefix`. Go on with the cursor until there is none.
    fn delete_prefix<'a>(&'a self, prefix: &'a str, page: Page) -> Answer<'a, Deleted>;
}

/// How much a store holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holdings {
    /// Values.
    pub entries: u64,
    /// Bytes that they take.
    pub bytes: u64,
    /// Values that have gone for want of room, since it was opened.
    pub crowded_out: u64,
}

/// What is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Value {
    /// The value itself.
    pub bytes: Bytes,
    /// When it is to be forgotten, kept to the millisecond.
    pub expires_at: SystemTime,
}

/// Where a walk over keys goes on, and how far.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// Where the page before ended; none: at the beginning.
    pub after: Option<Cursor>,
    /// The most keys to look at, taken as 1 to [`LIST_KEYS_MAX`].
    pub limit: usize,
}

/// Where a page ended. Meant for the same store and prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cursor(pub(crate) String);

/// A page of keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listing {
    /// What was found. May be shorter than asked for, and even empty, before the end.
    pub values: Vec<Listed>,
    /// Where to go on; none: that was all.
    pub next: Option<Cursor>,
}

/// One key of a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its name.
    pub key: Key,
    /// Bytes of its value.
    pub bytes: u64,
    /// When it was stored, by the store's clock, at least to the second.
    pub stored_at: SystemTime,
}

/// What became of a page of keys that were to be removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Deleted {
    /// How many are gone.
    pub removed: usize,
    /// How many the store would not remove.
    pub kept: usize,
    /// Where to go on; none: that was all.
    pub next: Option<Cursor>,
}

impl Page {
    /// The first page, of as many keys as a page can have.
    pub fn first() -> Self {
        let (after, limit) = (None, LIST_KEYS_MAX);
        Page { after, limit }
    }

    pub(crate) fn keys_max(&self) -> usize {
        self.limit.clamp(1, LIST_KEYS_MAX)
    }
}

/// Milliseconds since 1970, as stores keep a time. What is earlier counts as 1970.
pub(crate) fn to_unix_ms(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// The time of [`to_unix_ms`], or none if no clock goes that far.
pub(crate) fn from_unix_ms(ms: u64) -> Option<SystemTime> {
    UNIX_EPOCH.checked_add(Duration::from_millis(ms))
}
