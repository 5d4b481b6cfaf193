//! The storage that engines share: blocks by namespace, behind a link of some bandwidth and latency. `shelf` has the blocks, `link`
//! the times; both are pure. Here they become a store that engines of one process share, and `server` makes it a process of its own.

pub mod client;
pub mod link;
pub mod server;
mod shelf;

use crate::kv_cache::BlockHash;
use link::{Link, LinkSpeed};
use serde::{Deserialize, Serialize};
use shelf::Shelf;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};
use std::time::Duration;
use tokio::time::{Instant, sleep, sleep_until};

/// What a store can do.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StoreSettings {
    /// The way to it, for reading and writing together.
    pub link: LinkSpeed,
    /// Blocks of all namespaces together.
    pub blocks_max: usize,
    /// Multiplies every simulated time.
    pub time_scale: f64,
}

impl Default for StoreSettings {
    /// Two ports of 100 Gb/s less their overhead, a millisecond or two of NFS over RDMA, and a million blocks.
    fn default() -> Self {
        Self {
            link: LinkSpeed {
                bytes_per_second: 20e9,
                latency: Duration::from_millis(2),
            },
            blocks_max: 1_000_000,
            time_scale: 1.0,
        }
    }
}

/// What is wrong with a store, settable while it runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StoreFault {
    /// Wall milliseconds that each call takes longer.
    pub slow_ms: u64,
    /// Refuses each call with this status.
    pub refuse: Option<u16>,
    /// Never answers.
    pub hang: bool,
}

/// Blocks that one call is about.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Blocks {
    /// Whose: namespace, model, block size and KV dtype in one text. Engines that differ in any of these never meet.
    pub namespace: String,
    /// Their names, in a prompt's order.
    pub hashes: Vec<BlockHash>,
    /// Size of one.
    #[serde(default)]
    pub block_bytes: u64,
}

/// Counts at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct StoreStats {
    /// Blocks that it has.
    pub blocks: usize,
    /// Blocks written since the start; known ones are not written again.
    pub written: u64,
    /// Blocks read since the start.
    pub read: u64,
    /// Blocks that left for want of room.
    pub evicted: u64,
}

/// A running store.
#[derive(Debug)]
pub struct NamespaceStore {
    shelf: Mutex<Shelf>,
    link: Mutex<Link>,
    fault: Mutex<StoreFault>,
    written: AtomicU64,
    read: AtomicU64,
}

impl NamespaceStore {
    /// An empty store.
    pub fn new(settings: StoreSettings) -> Self {
        Self {
            shelf: Mutex::new(Shelf::new(settings.blocks_max)),
            link: Mutex::new(Link::new(settings.link, settings.time_scale)),
            fault: Mutex::new(StoreFault::default()),
            written: AtomicU64::new(0),
            read: AtomicU64::new(0),
        }
    }

    /// How many of the leading blocks are here.
    ///
    /// # Errors
    /// The status of a fault.
    pub async fn contains(&self, blocks: &Blocks) -> Result<usize, u16> {
        self.suffer().await?;
        let shelf = locked(&self.shelf);
        Ok(shelf.leading(&Arc::from(blocks.namespace.as_str()), &blocks.hashes))
    }

    /// Reads the leading blocks that are here: how many, after the time that they travel.
    ///
    /// # Errors
    /// The status of a fault.
    pub async fn get(&self, blocks: &Blocks) -> Result<usize, u16> {
        self.suffer().await?;
        let namespace = Arc::from(blocks.namespace.as_str());
        let found = {
            let mut shelf = locked(&self.shelf);
            let found = shelf.leading(&namespace, &blocks.hashes);
            shelf.put(&namespace, &blocks.hashes[..found]);
            found
        };
        self.travel(found as u64 * blocks.block_bytes).await;
        self.read.fetch_add(found as u64, Relaxed);
        Ok(found)
    }

    /// Writes the blocks that are not here yet: how many, after the time that they travel.
    ///
    /// # Errors
    /// The status of a fault.
    pub async fn put(&self, blocks: &Blocks) -> Result<usize, u16> {
        self.suffer().await?;
        let namespace = Arc::from(blocks.namespace.as_str());
        let new = locked(&self.shelf).missing(&namespace, &blocks.hashes);
        self.travel(new as u64 * blocks.block_bytes).await;
        locked(&self.shelf).put(&namespace, &blocks.hashes);
        self.written.fetch_add(new as u64, Relaxed);
        Ok(new)
    }

    /// Forgets all blocks.
    pub fn clear(&self) {
        locked(&self.shelf).clear();
    }

    /// From the next call on, what is wrong.
    pub fn set_fault(&self, fault: StoreFault) {
        *locked(&self.fault) = fault;
    }

    /// Counts at this moment.
    pub fn stats(&self) -> StoreStats {
        let shelf = locked(&self.shelf);
        StoreStats {
            blocks: shelf.len(),
            written: self.written.load(Relaxed),
            read: self.read.load(Relaxed),
            evicted: shelf.evicted(),
        }
    }

    async fn suffer(&self) -> Result<(), u16> {
        let fault = *locked(&self.fault);
        if fault.hang {
            std::future::pending::<()>().await;
        }
        if fault.slow_ms > 0 {
            sleep(Duration::from_millis(fault.slow_ms)).await;
        }
        fault.refuse.map_or(Ok(()), Err)
    }

    async fn travel(&self, bytes: u64) {
        let arrival = locked(&self.link).transfer(bytes, Instant::now());
        sleep_until(arrival).await;
    }
}

/// The store that engines of this process share under an endpoint's name. The first one to ask for it decides the settings.
pub fn in_process(endpoint: &str, settings: StoreSettings) -> Arc<NamespaceStore> {
    static STORES: LazyLock<Mutex<HashMap<String, Arc<NamespaceStore>>>> =
        LazyLock::new(Mutex::default);
    let mut stores = locked(&STORES);
    let store = stores.entry(endpoint.to_owned());
    store
        .or_insert_with(|| Arc::new(NamespaceStore::new(settings)))
        .clone()
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("nobody panics with this lock")
}
