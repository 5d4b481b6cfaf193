//! Tells when files have changed and rest again. By looking, not by notices of the file system: mounted
//! configuration maps are swapped by a link above the file, which notices on the file do not show.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

/// How often the files are looked at. A change is taken in once two looks in a row are the same: nobody
/// is writing any more.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// What shows that a file is another one; none while it cannot be looked at.
type Stamp = Option<(SystemTime, u64)>;

/// See the module.
pub struct Files {
    paths: Vec<PathBuf>,
    /// As last taken in.
    taken: Vec<Stamp>,
}

impl Files {
    /// These. As they are now is how they will be read: what is written later is a change.
    pub fn new(paths: Vec<PathBuf>) -> Self {
        let taken = look(&paths);
        Files { paths, taken }
    }

    /// Another one, likewise.
    pub fn add(&mut self, path: PathBuf) {
        self.taken.extend(look(std::slice::from_ref(&path)));
        self.paths.push(path);
    }

    /// They are about to be read as they are now.
    pub fn take(&mut self) {
        self.taken = look(&self.paths);
    }

    /// Ends when the files are other ones than those taken in, and rest.
    pub async fn changed(&self) {
        let mut last = self.taken.clone();
        loop {
            tokio::time::sleep(LOOK_INTERVAL).await;
            let present = look(&self.paths);
            if present == last && present != self.taken {
                return;
            }
            last = present;
        }
    }
}

fn look(paths: &[PathBuf]) -> Vec<Stamp> {
    let stamps = paths.iter().map(|path| {
        let found = std::fs::metadata(path).ok()?;
        Some((found.modified().ok()?, found.len()))
    });
    stamps.collect()
}
