//! Values in a bucket of an S3 object store: what every store does, as requests to the bucket.
//!
//! A value in its envelope is one object, which is verified before anybody sees it. S3 expires nothing: a sweep by age, or a
//! lifecycle rule of the bucket, has to.

mod rusoto;
mod settings;
mod tls;
mod transport;
mod verdict;

pub use settings::{Credentials, S3Settings};

use crate::envelope;
use crate::error::{Act, ErrorKind, StoreError};
use crate::key::Key;
use crate::store::{Answer, Cursor, Deleted, Listed, Listing, Page, Store, Value};
use bytes::Bytes;
use rusoto::{Bucket, FoundPage};
use std::fmt;
use std::future::Future;
use std::time::{Duration, SystemTime};
use tls::Connector;
use transport::Transport;
use verdict::Setback;

/// A bucket of an S3 object store, addressed by path.
///
/// Keeps connections open between calls. They belong to the tokio runtime that first used them, so use a store from one.
pub struct S3Store {
    bucket: Bucket,
    key_prefix: String,
    value_bytes_max: usize,
    connect_timeout: Duration,
    request_timeout: Duration,
    shown: String,
}

impl S3Store {
    /// Checks the settings and reads the CA file. Asks nothing of the store, which may be away.
    pub fn open(settings: S3Settings) -> Result<Self, StoreError> {
        let endpoint = settings.checked_endpoint()?;
        let connector = Connector::new(settings.ca_file.as_deref(), settings.connect_timeout)?;
        let value_bytes_max = settings.value_bytes_max;
        let object_bytes_max = value_bytes_max.saturating_add(envelope::HEAD_BYTES_MAX);
        let transport = Transport::new(connector, object_bytes_max, settings.requests_max);
        let (bucket, region) = (settings.bucket.as_str(), settings.region.as_str());
        Ok(S3Store {
            shown: format!("{endpoint}/{bucket}/{}", settings.key_prefix),
            bucket: Bucket::new(bucket, region, endpoint, settings.credentials, transport),
            key_prefix: settings.key_prefix,
            value_bytes_max,
            connect_timeout: settings.connect_timeout,
            request_timeout: settings.request_timeout,
        })
    }

    fn object(&self, key: &str) -> String {
        format!("{}{key}", self.key_prefix)
    }

    /// Waits for a request within the time of a call. What says no more than "absent" becomes `absent`.
    async fn within<T>(
        &self,
        act: Act,
        absent: Option<T>,
        request: impl Future<Output = Result<T, Setback>>,
    ) -> Result<T, StoreError> {
        let limit = self.request_timeout;
        match tokio::time::timeout(limit, request).await {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(setback)) => match absent {
                Some(absent) if setback.is_absence(act) => Ok(absent),
                _ => Err(setback.error(act, self.connect_timeout, SystemTime::now())),
            },
            Err(_) => Err(StoreError::new(
                act,
                ErrorKind::TooSlow,
                format!("no answer within {limit:?}"),
            )),
        }
    }

    async fn read(&self, key: &Key) -> Result<Option<Value>, StoreError> {
        let request = async { self.bucket.get(self.object(key.as_str())).await.map(Some) };
        let found = self.within(Act::Get, Some(None), request).await?;
        found.map(|sealed| self.verified(key, sealed)).transpose()
    }

    fn verified(&self, key: &Key, sealed: Bytes) -> Result<Value, StoreError> {
        let fault = |kind, detail: String| StoreError::new(Act::Get, kind, detail);
        let broken = |detail: String| fault(ErrorKind::Broken, detail);
        let (found, value) = envelope::open(sealed).map_err(|error| broken(error.to_string()))?;
        if found != *key {
            return Err(broken("the value of another key".into()));
        }
        let (size, limit) = (value.bytes.len(), self.value_bytes_max);
        if size > limit {
            return Err(fault(ErrorKind::TooLarge, too_large(size, limit)));
        }
        Ok(value)
    }

    async fn write(&self, key: &Key, value: Value) -> Result<(), StoreError> {
        let (size, limit) = (value.bytes.len(), self.value_bytes_max);
        if size > limit {
            return Err(StoreError::new(
                Act::Put,
                ErrorKind::TooLarge,
                too_large(size, limit),
            ));
        }
        let sealed = envelope::seal(key, &value, SystemTime::now());
        let request = self.bucket.put(self.object(key.as_str()), sealed.into());
        self.within(Act::Put, None, request).await
    }

    async fn keys(&self, prefix: &str, page: Page) -> Result<Listing, StoreError> {
        let found = self
            .within(Act::List, None, self.page(prefix, page))
            .await?;
        let listed = |object: rusoto::FoundName| {
            // an object that is not ours may have a name that is no key
            let key = Key::new(object.name.strip_prefix(&self.key_prefix)?).ok()?;
            let bytes = object.bytes.saturating_sub(envelope::overhead(&key) as u64);
            let stored_at = object.stored_at;
            Some(Listed {
                key,
                bytes,
                stored_at,
            })
        };
        let values = found.objects.into_iter().filter_map(listed).collect();
        Ok(Listing {
            values,
            next: found.next.map(Cursor),
        })
    }

    /// Two requests, within the time of one call.
    async fn clear(&self, prefix: &str, page: Page) -> Result<Deleted, Setback> {
        let found = self.page(prefix, page).await?;
        let names: Vec<String> = found
            .objects
            .into_iter()
            .map(|object| object.name)
            .collect();
        let count = names.len();
        let removed = match count {
            0 => 0,
            _ => self.bucket.delete_all(names).await?.min(count),
        };
        Ok(Deleted {
            removed,
            kept: count - removed,
            next: found.next.map(Cursor),
        })
    }

    async fn page(&self, prefix: &str, page: Page) -> Result<FoundPage, Setback> {
        let limit = page.keys_max();
        let after = page.after.map(|Cursor(token)| token);
        self.bucket.list(self.object(prefix), after, limit).await
    }
}

fn too_large(size: usize, limit: usize) -> String {
    format!("a value of {size} bytes, beyond the limit of {limit}")
}

impl Store for S3Store {
    fn name(&self) -> &'static str {
        "s3"
    }

    fn get<'a>(&'a self, key: &'a Key) -> Answer<'a, Option<Value>> {
        Box::pin(self.read(key))
    }

    fn put<'a>(&'a self, key: &'a Key, value: Value) -> Answer<'a, ()> {
        Box::pin(self.write(key, value))
    }

    fn delete<'a>(&'a self, key: &'a Key) -> Answer<'a, ()> {
        let request = self.bucket.delete(self.object(key.as_str()));
        Box::pin(self.within(Act::Delete, Some(()), request))
    }

    fn list<'a>(&'a self, prefix: &'a str, page: Page) -> Answer<'a, Listing> {
        Box::pin(self.keys(prefix, page))
    }

    fn delete_prefix<'a>(&'a self, prefix: &'a str, page: Page) -> Answer<'a, Deleted> {
        Box::pin(self.within(Act::Delete, None, self.clear(prefix, page)))
    }
}

impl fmt::Debug for S3Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("S3Store").field(&self.shown).finish()
    }
}
