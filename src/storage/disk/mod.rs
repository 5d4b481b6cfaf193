//! Values in a directory of this machine: bounded in bytes, kept over restarts. For a single router, or where there is no object
//! store. File calls block, so each runs on a thread of its own kind, bounded in number and in time.

mod directory;
mod file;
mod index;

use crate::error::{Act, ErrorKind, StoreError};
use crate::key::Key;
use crate::store::{Answer, Deleted, Holdings, Listing, Page, Store, Value};
use directory::Directory;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;

/// File calls at a time. Enough to keep a disk busy, few enough that one that hangs holds no more threads than these.
const CALLS_MAX: usize = 16;

/// A directory of values.
#[derive(Debug, Clone)]
pub struct DiskSettings {
    /// Made if it is not there. One process has it for itself.
    pub directory: PathBuf,
    /// The most bytes of all files, counted in whole blocks of 4 KiB. Values that are just being written come on top.
    pub bytes_max: u64,
    /// The largest value, in bytes.
    pub value_bytes_max: usize,
    /// For one call.
    pub request_timeout: Duration,
}

/// Values as files. When there is no room, the value that was not used for longest goes first.
#[derive(Debug)]
pub struct DiskStore {
    directory: Arc<Directory>,
    permits: Arc<Semaphore>,
    timeout: Duration,
}

impl DiskStore {
    /// Takes the directory and finds out which values are in it: about 10 microseconds for each while the system has their
    /// beginnings in memory, a read of the disk otherwise. Unavailable while another process has the directory.
    pub async fn open(settings: DiskSettings) -> Result<Self, StoreError> {
        let DiskSettings {
            directory,
            bytes_max,
            value_bytes_max,
            request_timeout,
        } = settings;
        let open = move || Directory::open(&directory, bytes_max, value_bytes_max as u64);
        let opened = spawn_blocking(open).await;
        Ok(DiskStore {
            directory: Arc::new(opened.map_err(|_| died(Act::Open))??),
            permits: Arc::new(Semaphore::new(CALLS_MAX)),
            timeout: request_timeout,
        })
    }

    async fn run<T: Send + 'static>(
        &self,
        act: Act,
        call: impl FnOnce(&Directory) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (directory, permits) = (self.directory.clone(), self.permits.clone());
        let done = tokio::time::timeout(self.timeout, async move {
            let permit = permits.acquire_owned().await.map_err(|_| died(act))?;
            // a call that nobody waits for any more keeps its place until it ends
            let call = move || {
                let _permit = permit;
                call(&directory)
            };
            spawn_blocking(call).await.map_err(|_| died(act))?
        });
        let limit = self.timeout;
        done.await.unwrap_or_else(|_| {
            Err(StoreError::new(
                act,
                ErrorKind::TooSlow,
                format!("no answer within {limit:?}"),
            ))
        })
    }
}

/// The thread of a call panicked, or the runtime is shutting down.
fn died(act: Act) -> StoreError {
    StoreError::new(act, ErrorKind::Unavailable, "the call was cut off")
}

impl Store for DiskStore {
    fn name(&self) -> &'static str {
        "disk"
    }

    fn holdings(&self) -> Option<Holdings> {
        Some(self.directory.holdings())
    }

    fn get<'a>(&'a self, key: &'a Key) -> Answer<'a, Option<Value>> {
        let key = key.clone();
        Box::pin(self.run(Act::Get, move |directory| {
            directory.get(&key, SystemTime::now())
        }))
    }

    fn put<'a>(&'a self, key: &'a Key, value: Value) -> Answer<'a, ()> {
        let key = key.clone();
        Box::pin(self.run(Act::Put, move |directory| {
            directory.put(&key, &value, SystemTime::now())
        }))
    }

    fn delete<'a>(&'a self, key: &'a Key) -> Answer<'a, ()> {
        let key = key.clone();
        Box::pin(self.run(Act::Delete, move |directory| directory.delete(key.as_str())))
    }

    fn list<'a>(&'a self, prefix: &'a str, page: Page) -> Answer<'a, Listing> {
        let prefix = prefix.to_owned();
        Box::pin(self.run(Act::List, move |directory| {
            Ok(directory.list(&prefix, &page))
        }))
    }

    fn delete_prefix<'a>(&'a self, prefix: &'a str, page: Page) -> Answer<'a, Deleted> {
        let prefix = prefix.to_owned();
        Box::pin(self.run(Act::Delete, move |directory| {
            Ok(directory.delete_prefix(&prefix, &page))
        }))
    }
}
