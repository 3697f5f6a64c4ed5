//! Failures of the operating system at named steps, for tests.
//!
//! **Invariant:** without the `testing` feature this is nothing at all.

use std::io;

/// A step of the file backend that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileStep {
    /// Opening an object for a load.
    Open,
    /// Reading an object.
    Read,
    /// Creating a temporary file.
    Create,
    /// Writing it.
    Write,
    /// Writing it to the device.
    Sync,
    /// Giving it its name.
    Rename,
    /// Renaming a corrupt object aside.
    Quarantine,
}

/// The failures to come.
#[derive(Debug, Default)]
pub(super) struct FailPoints {
    #[cfg(any(test, feature = "testing"))]
    script: std::sync::Mutex<Vec<(FileStep, i32)>>,
}

impl FailPoints {
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn add(&self, step: FileStep, errno: i32) {
        self.script.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((step, errno));
    }

    /// Fails once if a failure of this step is due.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn check(&self, step: FileStep) -> io::Result<()> {
        let mut script = self.script.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        match script.iter().position(|(s, _)| *s == step) {
            Some(at) => Err(io::Error::from_raw_os_error(script.remove(at).1)),
            None => Ok(()),
        }
    }

    #[cfg(not(any(test, feature = "testing")))]
    #[expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "the same as with tests")]
    pub(super) fn check(&self, _step: FileStep) -> io::Result<()> {
        Ok(())
    }
}
