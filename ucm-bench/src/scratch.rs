//! A directory for one measurement.
//!
//! Owns: its creation and removal.
//! **Invariant:** only a directory made here is removed.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{clock, error::BenchError};

/// A directory that is removed with the value, unless the caller chose it.
#[derive(Debug)]
pub(crate) struct Scratch {
    root: PathBuf,
    mine: bool,
}

impl Scratch {
    pub(crate) fn new(chosen: Option<&Path>) -> Result<Self, BenchError> {
        let root = match chosen {
            Some(dir) => dir.to_path_buf(),
            None => std::env::temp_dir().join(format!(
                "ucm-bench-{}-{}",
                std::process::id(),
                clock::now_ns()
            )),
        };
        fs::create_dir_all(&root).map_err(|e| BenchError::path("create", &root, e))?;
        Ok(Self { root, mine: chosen.is_none() })
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if self.mine {
            let _ = fs::remove_dir_all(&self.root);
        }
    }
}
