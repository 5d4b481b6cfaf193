//! A store that forgets with its process: for the tests of those who use a store, and the plain meaning of the trait.

use crate::key::Key;
use crate::store::{Answer, Cursor, Deleted, Listed, Listing, Page, Store, Value};
use futures_util::future::{FutureExt, ready};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

/// Values in a map. Unbounded, and never fails.
#[derive(Debug, Default)]
pub struct MemoryStore(Mutex<BTreeMap<Key, (Value, SystemTime)>>);

impl MemoryStore {
    /// How many values there are.
    pub fn count(&self) -> usize {
        self.values().len()
    }

    fn values(&self) -> MutexGuard<'_, BTreeMap<Key, (Value, SystemTime)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn page(&self, prefix: &str, page: &Page) -> Listing {
        let values = self.values();
        let after = page.after.as_ref().map(|Cursor(key)| key.as_str());
        let mut found = values
            .iter()
            .filter(|(key, _)| key.as_str().starts_with(prefix))
            .filter(|(key, _)| after.is_none_or(|after| key.as_str() > after))
            .map(|(key, (value, stored_at))| Listed {
                key: key.clone(),
                bytes: value.bytes.len() as u64,
                stored_at: *stored_at,
            });
        let values: Vec<Listed> = found.by_ref().take(page.keys_max()).collect();
        let more = found.next().is_some();
        let next = values
            .last()
            .filter(|_| more)
            .map(|last| Cursor(last.key.to_string()));
        Listing { values, next }
    }
}

impl Store for MemoryStore {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn get<'a>(&'a self, key: &'a Key) -> Answer<'a, Option<Value>> {
        let found = self.values().get(key).map(|(value, _)| value.clone());
        ready(Ok(found)).boxed()
    }

    fn put<'a>(&'a self, key: &'a Key, value: Value) -> Answer<'a, ()> {
        self.values()
            .insert(key.clone(), (value, SystemTime::now()));
        ready(Ok(())).boxed()
    }

    fn delete<'a>(&'a self, key: &'a Key) -> Answer<'a, ()> {
        self.values().remove(key);
        ready(Ok(())).boxed()
    }

    fn list<'a>(&'a self, prefix: &'a str, page: Page) -> Answer<'a, Listing> {
        ready(Ok(self.page(prefix, &page))).boxed()
    }

    fn delete_prefix<'a>(&'a self, prefix: &'a str, page: Page) -> Answer<'a, Deleted> {
        let Listing {
            values: found,
            next,
        } = self.page(prefix, &page);
        let mut values = self.values();
        let removed = found
            .iter()
            .filter(|listed| values.remove(&listed.key).is_some())
            .count();
        ready(Ok(Deleted {
            removed,
            kept: 0,
            next,
        }))
        .boxed()
    }
}
