//! A directory for one measurement.
//!
//! Owns: its creation and removal, also of those that a killed run has left.
//! **Invariant:** only a directory made here is removed, and never while a process uses it: its user
//! holds a lock that the kernel drops with the process.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
};

use rustix::fs::{FlockOperation, flock};

use crate::{clock, error::BenchError};

const PREFIX: &str = "ucm-bench-";
const LOCK: &str = "in-use";

/// A directory that is removed with the value, unless the caller chose it.
#[derive(Debug)]
pub(crate) struct Scratch {
    root: PathBuf,
    /// Held while this process lives; none for a directory of the caller's.
    lock: Option<File>,
}

impl Scratch {
    pub(crate) fn new(chosen: Option<&Path>) -> Result<Self, BenchError> {
        match chosen {
            Some(dir) => {
                fs::create_dir_all(dir).map_err(|e| BenchError::path("create", dir, e))?;
                Ok(Self { root: dir.to_path_buf(), lock: None })
            }
            None => Self::within(&std::env::temp_dir()),
        }
    }

    fn within(parent: &Path) -> Result<Self, BenchError> {
        remove_left(parent);
        let name = format!("{PREFIX}{}-{}", std::process::id(), clock::now_ns());
        // It gets its name when it is locked, so that nobody takes it for one left behind.
        let new = parent.join(format!(".{name}"));
        fs::create_dir(&new).map_err(|e| BenchError::path("create", &new, e))?;
        let path = new.join(LOCK);
        let lock = File::create(&path).map_err(|e| BenchError::path("create", &path, e))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)
            .map_err(|e| BenchError::path("lock", &path, e.into()))?;
        let root = parent.join(name);
        fs::rename(&new, &root).map_err(|e| BenchError::path("create", &root, e))?;
        Ok(Self { root, lock: Some(lock) })
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if self.lock.is_some() {
            let _ = fs::remove_dir_all(&self.root);
        }
    }
}

/// Removes directories whose process is gone. One without a lock file is of somebody else.
fn remove_left(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        if !entry.file_name().to_string_lossy().starts_with(PREFIX) {
            continue;
        }
        let root = entry.path();
        let Ok(lock) = File::open(root.join(LOCK)) else { continue };
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
            let _ = fs::remove_dir_all(&root);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{LOCK, PREFIX, Scratch};

    #[test]
    fn what_a_killed_run_left_goes_and_what_is_used_stays() {
        let parent = tempfile::tempdir().unwrap();
        let used = Scratch::within(parent.path()).unwrap();
        let left = parent.path().join(format!("{PREFIX}1-1"));
        let strange = parent.path().join(format!("{PREFIX}2-2"));
        let other = parent.path().join("other");
        for dir in [&left, &strange, &other] {
            fs::create_dir(dir).unwrap();
            fs::write(dir.join("data"), "x").unwrap();
        }
        fs::write(left.join(LOCK), "").unwrap();
        fs::write(other.join(LOCK), "").unwrap();
        let next = Scratch::within(parent.path()).unwrap();
        assert!(!left.exists() && strange.exists() && other.exists());
        let (used_root, next_root) = (used.path(""), next.path(""));
        assert!(used_root.exists() && next_root.exists());
        drop((used, next));
        assert!(!used_root.exists() && !next_root.exists());
    }

    #[test]
    fn a_chosen_directory_is_kept() {
        let parent = tempfile::tempdir().unwrap();
        let chosen = parent.path().join("deep/chosen");
        drop(Scratch::new(Some(&chosen)).unwrap());
        assert!(chosen.is_dir());
    }
}
