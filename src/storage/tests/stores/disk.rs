//! What only a directory has: a bound, restarts, files that others change.

use crate::support::{disk_settings, key, value};
use futures_util::future::join_all;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};
use storage::{DiskSettings, DiskStore, ErrorKind, Page, Store};

const KIB: usize = 1024;

async fn open(directory: &Path, bytes_max: usize) -> DiskStore {
    let settings = DiskSettings {
        bytes_max: bytes_max as u64,
        ..disk_settings(directory)
    };
    DiskStore::open(settings).await.unwrap()
}

/// The files of values, wherever they are below the directory.
fn files(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => found.extend(files(&path)),
            false if path.file_name().unwrap() == "lock" => {}
            false => found.push(path),
        }
    }
    found
}

async fn keys(store: &DiskStore) -> Vec<String> {
    let listing = store.list("", Page::first()).await.unwrap();
    listing
        .values
        .iter()
        .map(|listed| listed.key.to_string())
        .collect()
}

#[tokio::test]
async fn values_are_still_there_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), 1 << 20).await;
    store.put(&key("v1/a b+é/c"), value("kept")).await.unwrap();
    let (before, bytes) = (
        store.list("", Page::first()).await.unwrap(),
        bytes_of(&store),
    );
    drop(store);
    let store = open(directory.path(), 1 << 20).await;
    assert_eq!(
        store.get(&key("v1/a b+é/c")).await.unwrap(),
        Some(value("kept"))
    );
    assert_eq!(bytes_of(&store), bytes);
    let after = store.list("", Page::first()).await.unwrap();
    let to_the_ms = |listing: &storage::Listing| {
        listing.values[0]
            .stored_at
            .duration_since(UNIX_EPOCH)
            .unwrap()
            .as_millis()
    };
    assert_eq!(to_the_ms(&after), to_the_ms(&before));
}

#[tokio::test]
async fn the_bound_in_bytes_is_kept_and_what_was_used_stays() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), 64 * KIB).await;
    for i in 0..50 {
        store
            .put(&key(&format!("{i:02}")), value(vec![0; 7 * KIB]))
            .await
            .unwrap();
        assert!(store.get(&key("00")).await.unwrap().is_some(), "after {i}");
    }
    assert_eq!(
        keys(&store).await,
        ["00", "43", "44", "45", "46", "47", "48", "49"]
    );
    let on_disk: u64 = files(directory.path())
        .iter()
        .map(|path| path.metadata().unwrap().len())
        .sum();
    assert!(
        on_disk <= bytes_of(&store) && bytes_of(&store) <= 64 * KIB as u64,
        "{on_disk} {}",
        bytes_of(&store)
    );
}

#[tokio::test]
async fn a_smaller_bound_after_a_restart_removes_what_was_used_longest_ago() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), 64 * KIB).await;
    for (i, name) in ["a", "b", "c"].iter().enumerate() {
        let known = files(directory.path());
        store
            .put(&key(name), value(vec![0; 3 * KIB]))
            .await
            .unwrap();
        let new = files(directory.path())
            .into_iter()
            .find(|path| !known.contains(path))
            .unwrap();
        // b, then c, then a
        let used = UNIX_EPOCH + Duration::from_secs([3, 1, 2][i]);
        File::open(new).unwrap().set_modified(used).unwrap();
    }
    drop(store);
    assert_eq!(
        keys(&open(directory.path(), 8 * KIB).await).await,
        ["a", "c"]
    );
    assert_eq!(files(directory.path()).len(), 2);
}

#[tokio::test]
async fn a_read_is_remembered_over_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), 64 * KIB).await;
    store.put(&key("a"), value("x")).await.unwrap();
    let long_ago = UNIX_EPOCH + Duration::from_secs(1);
    let file = files(directory.path()).remove(0);
    File::open(&file).unwrap().set_modified(long_ago).unwrap();
    drop(store);
    let store = open(directory.path(), 64 * KIB).await;
    store.get(&key("a")).await.unwrap();
    assert!(file.metadata().unwrap().modified().unwrap() > long_ago);
}

#[tokio::test]
async fn a_file_that_was_changed_is_broken_once_and_then_absent() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), 64 * KIB).await;
    store.put(&key("a"), value("as it was")).await.unwrap();
    let whole = fs::read(&files(directory.path())[0]).unwrap();
    // every byte of the file, and every length
    let changed = (0..whole.len()).map(|at| {
        let mut changed = whole.clone();
        changed[at] ^= 1;
        changed
    });
    let cut = (0..whole.len()).map(|length| whole[..length].to_vec());
    for bytes in changed.chain(cut) {
        store.put(&key("a"), value("as it was")).await.unwrap();
        fs::write(&files(directory.path())[0], &bytes).unwrap();
        match store.get(&key("a")).await {
            Err(error) => {
                assert_eq!(error.kind, ErrorKind::Broken, "{error}");
                assert!(files(directory.path()).is_empty());
            }
            Ok(got) => assert_eq!(got, None), // the key in the file is another one
        }
        store.delete(&key("a")).await.unwrap();
    }
}

#[tokio::test]
async fn files_that_a_crash_left_half_written_are_gone_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), 64 * KIB).await;
    store.put(&key("whole"), value("x")).await.unwrap();
    store.put(&key("half"), value(vec![0; KIB])).await.unwrap();
    drop(store);
    let half = files(directory.path())
        .into_iter()
        .max_by_key(|path| path.metadata().unwrap().len())
        .unwrap();
    File::options()
        .write(true)
        .open(half)
        .unwrap()
        .set_len(500)
        .unwrap();
    fs::write(directory.path().join("cache/tmp/7"), "unfinished").unwrap();
    let store = open(directory.path(), 64 * KIB).await;
    assert_eq!(keys(&store).await, ["whole"]);
    assert_eq!(files(directory.path()).len(), 1);
}

#[tokio::test]
async fn files_of_others_are_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    drop(open(directory.path(), 64 * KIB).await);
    let theirs = [
        directory.path().join("cache/notes.txt"),
        directory.path().join("cache/0a/README"),
    ];
    for path in &theirs {
        fs::write(path, "mine").unwrap();
    }
    let store = open(directory.path(), 64 * KIB).await;
    assert_eq!(
        store
            .delete_prefix("", Page::first())
            .await
            .unwrap()
            .removed,
        0
    );
    assert!(theirs.iter().all(|path| path.exists()));
}

#[tokio::test]
async fn a_value_whose_file_somebody_removed_is_absent_and_takes_no_room() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), 64 * KIB).await;
    store.put(&key("a"), value("x")).await.unwrap();
    fs::remove_file(&files(directory.path())[0]).unwrap();
    assert_eq!(store.get(&key("a")).await.unwrap(), None);
    assert_eq!(bytes_of(&store), 0);
}

#[tokio::test]
async fn a_value_that_does_not_fit_is_too_large_and_removes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let settings = DiskSettings {
        bytes_max: 16 * KIB as u64,
        value_bytes_max: 64 * KIB,
        ..disk_settings(directory.path())
    };
    let store = DiskStore::open(settings).await.unwrap();
    store.put(&key("a"), value("x")).await.unwrap();
    for size in [16 * KIB, 65 * KIB] {
        let error = store
            .put(&key("b"), value(vec![0; size]))
            .await
            .unwrap_err();
        assert_eq!(error.kind, ErrorKind::TooLarge);
    }
    assert_eq!(keys(&store).await, ["a"]);
}

#[tokio::test]
async fn a_directory_belongs_to_one_store_at_a_time() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), 64 * KIB).await;
    let error = DiskStore::open(disk_settings(directory.path()))
        .await
        .unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unavailable);
    drop(store);
    open(directory.path(), 64 * KIB).await;
}

#[tokio::test]
async fn a_file_in_place_of_the_directory_is_a_fault_of_the_settings() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("cache"), "a file").unwrap();
    let error = DiskStore::open(disk_settings(directory.path()))
        .await
        .unwrap_err();
    assert_eq!(error.kind, ErrorKind::Misconfigured, "{error}");
}

#[tokio::test]
async fn a_directory_that_vanishes_is_unavailable_for_writes_and_empty_for_reads() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), 64 * KIB).await;
    store.put(&key("a"), value("x")).await.unwrap();
    fs::remove_dir_all(directory.path().join("cache")).unwrap();
    assert_eq!(
        store.put(&key("a"), value("x")).await.unwrap_err().kind,
        ErrorKind::Unavailable
    );
    assert_eq!(store.get(&key("a")).await.unwrap(), None);
}

#[tokio::test]
async fn writers_readers_and_evictions_at_the_same_time_keep_files_and_index_in_step() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), 40 * KIB).await;
    let store = &store;
    let calls = (0..400_usize).map(|i| async move {
        let name = key(&format!("{}", i % 20));
        match i % 7 {
            0 => store.delete(&name).await.unwrap(),
            1..=3 => store
                .put(&name, value(vec![(i % 20) as u8; 1 + i * 20]))
                .await
                .unwrap(),
            _ => {
                let got = store.get(&name).await.unwrap();
                assert!(
                    got.is_none_or(|got| got.bytes.iter().all(|byte| usize::from(*byte) == i % 20))
                );
            }
        }
    });
    join_all(calls).await;
    let blocks = |path: &PathBuf| path.metadata().unwrap().len().div_ceil(4096) * 4096;
    let on_disk: u64 = files(directory.path()).iter().map(blocks).sum();
    assert_eq!(on_disk, bytes_of(store));
    assert_eq!(keys(store).await.len(), files(directory.path()).len());
    assert!(bytes_of(store) <= 40 * KIB as u64);
}

fn bytes_of(store: &DiskStore) -> u64 {
    store.holdings().unwrap().bytes
}
