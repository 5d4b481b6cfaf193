//! Files of a directory and the index of them, kept in step. Blocking; one process at a time.
//!
//! A file's name is a hash of its key, so no key leads out of the directory and every key fits; the key itself stands in the file.
//! Renames and removals happen under the index's lock: what the index counts is what is there. What is being written counts once
//! it has its place.

use super::file::{self, unreadable};
use super::index::{Entry, Index};
use crate::envelope::{self, Head};
use crate::error::{Act, ErrorKind, StoreError};
use crate::key::Key;
use crate::store::{Cursor, Deleted, Holdings, Listed, Listing, Page, Value};
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};
use xxhash_rust::xxh3::xxh3_128;

/// A read is noted in the file's time at most this often: the order of use that a restart finds is no finer.
const NOTE_EVERY: Duration = Duration::from_secs(60);
/// Hexadecimal digits of a hash of 128 bits; the first two name the directory.
const NAME_DIGITS: usize = 32;

/// A directory that this process has for itself.
#[derive(Debug)]
pub(super) struct Directory {
    root: PathBuf,
    value_bytes_max: u64,
    bytes_max: u64,
    index: Mutex<Index>,
    writes: AtomicU64,
    _lock: File, // closed, it is released
}

impl Directory {
    /// Takes the directory, and reads which values are in it: one small read for each.
    pub(super) fn open(
        root: &Path,
        bytes_max: u64,
        value_bytes_max: u64,
    ) -> Result<Self, StoreError> {
        let fault = |error| fault(Act::Open, error);
        fs::create_dir_all(root).map_err(fault)?;
        let lock = take(&root.join("lock"))?;
        let directory = Directory {
            root: root.to_owned(),
            value_bytes_max,
            bytes_max,
            index: Mutex::new(Index::new(bytes_max)),
            writes: AtomicU64::new(0),
            _lock: lock,
        };
        directory.prepare().map_err(fault)?;
        Ok(directory)
    }

    fn prepare(&self) -> io::Result<()> {
        let unfinished = self.root.join("tmp");
        match fs::remove_dir_all(&unfinished) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => fs::create_dir(&unfinished)?,
        }
        let mut found = Vec::new();
        for part in 0..=u8::MAX {
            let part = self.root.join(format!("{part:02x}"));
            fs::create_dir_all(&part)?;
            for listed in fs::read_dir(&part)? {
                found.extend(self.recognize(&listed?.path()));
            }
        }
        // the order of use before the restart
        found.sort_by_key(|(_, entry)| entry.noted_at);
        let mut index = self.index();
        for (key, entry) in found {
            self.insert(&mut index, &key, entry);
        }
        Ok(())
    }

    /// The value in a file. A file of ours that cannot be read is removed; what is not ours stays.
    fn recognize(&self, path: &Path) -> Option<(Key, Entry)> {
        let name = path.file_name()?.to_str()?;
        if name.len() != NAME_DIGITS - 2 || !name.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return None;
        }
        let read = || -> io::Result<(Head, SystemTime)> {
            let file = File::open(path)?;
            Ok((file::read_head(&file)?, file.metadata()?.modified()?))
        };
        match read() {
            Ok((head, noted_at)) if self.path(head.key.as_str()) == path => {
                let value_bytes = head.value_bytes;
                let file_bytes = envelope::overhead(&head.key) as u64 + value_bytes;
                let stored_at = head.stored_at;
                Some((
                    head.key,
                    Entry {
                        file_bytes,
                        value_bytes,
                        stored_at,
                        noted_at,
                    },
                ))
            }
            _ => {
                let _ = fs::remove_file(path); // or the next start tries again
                None
            }
        }
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn path(&self, key: &str) -> PathBuf {
        let name = format!("{:0NAME_DIGITS$x}", xxh3_128(key.as_bytes()));
        let (part, rest) = name.split_at(2);
        self.root.join(part).join(rest)
    }

    /// Notes a file, and removes those that must make room for it.
    fn insert(&self, index: &mut Index, key: &Key, entry: Entry) {
        for gone in index.insert(key.as_str(), entry) {
            let _ = fs::remove_file(self.path(&gone)); // if it stays, the next start counts it again
        }
    }

    pub(super) fn get(&self, key: &Key, now: SystemTime) -> Result<Option<Value>, StoreError> {
        let path = self.path(key.as_str());
        let bytes_max = self
            .value_bytes_max
            .saturating_add(envelope::overhead(key) as u64);
        let read = || -> io::Result<(File, Key, Value)> {
            let file = File::open(&path)?;
            let sealed = file::read(&file, bytes_max)?;
            let (found, value) = envelope::open(sealed).map_err(unreadable)?;
            Ok((file, found, value))
        };
        match read() {
            // another key with the same hash came later
            Ok((_, found, _)) if found != *key => Ok(None),
            Ok((file, _, value)) => {
                self.note_use(key, &file, now);
                Ok(Some(value))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.forget_missing(key, &path);
                Ok(None)
            }
            Err(error) => Err(self.failed_read(key, &path, error)),
        }
    }

    fn note_use(&self, key: &Key, file: &File, now: SystemTime) {
        let mut index = self.index();
        let Some(entry) = index.used(key.as_str()) else {
            return;
        };
        if now
            .duration_since(entry.noted_at)
            .is_ok_and(|since| since >= NOTE_EVERY)
        {
            entry.noted_at = now;
            let _ = file.set_modified(now); // only the order after a restart depends on it
        }
    }

    /// Somebody else removed the file. Under the lock, since a write may have put it back by now.
    fn forget_missing(&self, key: &Key, path: &Path) {
        let mut index = self.index();
        if !path.exists() {
            index.remove(key.as_str());
        }
    }

    /// A file that was changed or cut is removed; one that could not be read for now stays.
    fn failed_read(&self, key: &Key, path: &Path, error: io::Error) -> StoreError {
        if error.kind() == io::ErrorKind::InvalidData {
            let mut index = self.index();
            index.remove(key.as_str());
            let _ = fs::remove_file(path);
        }
        fault(Act::Get, error)
    }

    pub(super) fn put(&self, key: &Key, value: &Value, now: SystemTime) -> Result<(), StoreError> {
        let value_bytes = value.bytes.len() as u64;
        let file_bytes = envelope::overhead(key) as u64 + value_bytes;
        if value_bytes > self.value_bytes_max || file_bytes > self.bytes_max {
            return Err(self.too_large(value_bytes));
        }
        let number = self.writes.fetch_add(1, Ordering::Relaxed);
        let beside = self.root.join("tmp").join(number.to_string());
        file::write(&beside, &envelope::seal(key, value, now))
            .map_err(|error| fault(Act::Put, error))?;
        let mut index = self.index();
        if let Err(error) = fs::rename(&beside, self.path(key.as_str())) {
            let _ = fs::remove_file(&beside); // or the next start does
            return Err(fault(Act::Put, error));
        }
        let entry = Entry {
            file_bytes,
            value_bytes,
            stored_at: now,
            noted_at: now,
        };
        self.insert(&mut index, key, entry);
        Ok(())
    }

    pub(super) fn delete(&self, key: &str) -> Result<(), StoreError> {
        let mut index = self.index();
        match fs::remove_file(self.path(key)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(fault(Act::Delete, error));
            }
            _ => index.remove(key),
        };
        Ok(())
    }

    pub(super) fn list(&self, prefix: &str, page: &Page) -> Listing {
        let after = page.after.as_ref().map(|Cursor(key)| key.as_str());
        let (found, more) = self.index().page(prefix, after, page.keys_max());
        let next = found
            .last()
            .filter(|_| more)
            .map(|(key, _)| Cursor(key.to_string()));
        let listed = |(key, entry): (Arc<str>, Entry)| {
            let key = Key::new(&*key).ok()?; // it was one when it came in
            Some(Listed {
                key,
                bytes: entry.value_bytes,
                stored_at: entry.stored_at,
            })
        };
        let values = found.into_iter().filter_map(listed).collect();
        Listing { values, next }
    }

    pub(super) fn delete_prefix(&self, prefix: &str, page: &Page) -> Deleted {
        let Listing { values, next } = self.list(prefix, page);
        let done = values.iter().map(|listed| self.delete(listed.key.as_str()));
        let removed = done.filter(Result::is_ok).count();
        let kept = values.len() - removed;
        Deleted {
            removed,
            kept,
            next,
        }
    }

    /// What is there.
    pub(super) fn holdings(&self) -> Holdings {
        self.index().holdings()
    }

    fn too_large(&self, value_bytes: u64) -> StoreError {
        let (value_max, all_max) = (self.value_bytes_max, self.bytes_max);
        let detail = format!(
            "a value of {value_bytes} bytes, beyond {value_max} for one or {all_max} for all"
        );
        StoreError::new(Act::Put, ErrorKind::TooLarge, detail)
    }
}

/// Takes a directory for this process alone, since two would not know of each other's files.
fn take(path: &Path) -> Result<File, StoreError> {
    let lock = File::create(path).map_err(|error| fault(Act::Open, error))?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(TryLockError::WouldBlock) => {
            let detail = "the directory is in use by another process";
            Err(StoreError::new(Act::Open, ErrorKind::Unavailable, detail))
        }
        Err(TryLockError::Error(error)) => Err(fault(Act::Open, error)),
    }
}

fn fault(act: Act, error: io::Error) -> StoreError {
    let kind = match error.kind() {
        io::ErrorKind::InvalidData => ErrorKind::Broken,
        io::ErrorKind::FileTooLarge => ErrorKind::TooLarge,
        io::ErrorKind::PermissionDenied
        | io::ErrorKind::AlreadyExists // a file where a directory should be
        | io::ErrorKind::NotADirectory
        | io::ErrorKind::ReadOnlyFilesystem => ErrorKind::Misconfigured,
        _ => ErrorKind::Unavailable, // full, gone, failing
    };
    StoreError::new(act, kind, error.to_string())
}
