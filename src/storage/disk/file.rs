//! One value as a file. Written beside its place and renamed into it, so that a file is whole or not there. Nothing is synced to
//! the disk: what a power cut leaves half written fails its checksum.

use crate::envelope::{self, HEAD_BYTES_MAX, Head};
use bytes::Bytes;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::Path;

/// Writes a new file, and leaves nothing there if that fails.
pub(super) fn write(beside: &Path, sealed: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(beside)?;
    let written = file.write_all(sealed);
    if written.is_err() {
        let _ = fs::remove_file(beside); // the first fault is the one to tell
    }
    written
}

/// Reads what a file says of its value, and checks that the file has the length for it.
pub(super) fn read_head(file: &File) -> io::Result<Head> {
    let mut beginning = Vec::with_capacity(HEAD_BYTES_MAX);
    file.take(HEAD_BYTES_MAX as u64)
        .read_to_end(&mut beginning)?;
    let head = envelope::read_head(&beginning).map_err(unreadable)?;
    let expected = (envelope::overhead(&head.key) as u64).checked_add(head.value_bytes);
    match expected == Some(file.metadata()?.len()) {
        true => Ok(head),
        false => Err(unreadable("a length that does not fit")),
    }
}

/// Reads a whole file, or none of one with more than `bytes_max` bytes.
pub(super) fn read(file: &File, bytes_max: u64) -> io::Result<Bytes> {
    let length = file.metadata()?.len();
    if length > bytes_max {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let mut sealed = Vec::with_capacity(usize::try_from(length).map_err(io::Error::other)?);
    file.take(bytes_max).read_to_end(&mut sealed)?;
    Ok(sealed.into())
}

pub(super) fn unreadable(what: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
