//! Failures of the operating system at named steps, and named points where a test kills the process.
//!
//! **Invariant:** without the `testing` feature no step fails on purpose, without `failpoints` no
//! point exists; [`NAMES`] is the list of all points in this crate's source.

#[cfg(any(test, feature = "testing"))]
use std::sync::{Condvar, Mutex, PoisonError};
use std::{io, sync::Arc};

/// A named point. Expands to nothing without the feature.
macro_rules! failpoint {
    ($name:literal) => {
        #[cfg(feature = "failpoints")]
        ucm_failpoint::hit($name);
    };
}
pub(crate) use failpoint;

/// A step of the file backend that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileStep {
    /// Looking where the objects of a load lie.
    Find,
    /// Opening an object for a load.
    Open,
    /// Reading an object.
    Read,
    /// Creating a temporary file.
    Create,
    /// Reserving its blocks (only past the page cache).
    Allocate,
    /// Writing it.
    Write,
    /// Writing it to the device.
    Sync,
    /// Giving it its name.
    Rename,
    /// Renaming a corrupt object aside.
    Quarantine,
}

/// What a step does instead of its work; for tests.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum FileFault {
    /// It fails with this error number.
    Errno(i32),
    /// A read or write moves this many thousandths of the bytes asked for (0 of them for 0; at least
    /// one byte less than all of them for 1000). Other steps ignore it.
    Short(u32),
    /// It waits until the stall ends, then does its work.
    Stall(Stall),
}

/// Steps that wait, until they are let go.
#[derive(Clone, Debug, Default)]
pub struct Stall {
    #[cfg(any(test, feature = "testing"))]
    inner: Arc<(Mutex<(bool, u64)>, Condvar)>,
    #[cfg(not(any(test, feature = "testing")))]
    inner: Arc<()>,
}

/// A step that does not go its usual way.
#[derive(Debug)]
pub(super) enum Injected {
    Error(io::Error),
    /// At most this many bytes are said to be moved.
    Short(usize),
    Stall(Stall),
}

#[cfg(any(test, feature = "testing"))]
impl Stall {
    /// Lets all steps go that wait, and those to come.
    pub fn end(&self) {
        self.inner.0.lock().unwrap_or_else(PoisonError::into_inner).0 = true;
        self.inner.1.notify_all();
    }

    /// Waits until this many steps have met the stall.
    pub fn wait_for(&self, steps: u64) {
        let mut state = self.inner.0.lock().unwrap_or_else(PoisonError::into_inner);
        while state.1 < steps {
            state = self.inner.1.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(super) fn wait(&self) {
        let mut state = self.inner.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.1 += 1;
        self.inner.1.notify_all();
        while !state.0 {
            state = self.inner.1.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(not(any(test, feature = "testing")))]
impl Stall {
    pub(super) fn wait(&self) {
        let _ = &self.inner;
    }
}

/// The failures to come.
#[derive(Debug, Default)]
pub(super) struct FailPoints {
    #[cfg(any(test, feature = "testing"))]
    script: Mutex<Vec<(FileStep, FileFault)>>,
}

impl FailPoints {
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn add(&self, step: FileStep, fault: FileFault) {
        self.script.lock().unwrap_or_else(PoisonError::into_inner).push((step, fault));
    }

    #[cfg(any(test, feature = "testing"))]
    fn due(&self, step: FileStep) -> Option<FileFault> {
        let mut script = self.script.lock().unwrap_or_else(PoisonError::into_inner);
        let at = script.iter().position(|(s, _)| *s == step)?;
        Some(script.remove(at).1)
    }

    #[cfg(not(any(test, feature = "testing")))]
    #[expect(clippy::unused_self, reason = "the same as with tests")]
    fn due(&self, _step: FileStep) -> Option<FileFault> {
        None
    }

    /// Fails once if a failure of this step is due.
    pub(super) fn check(&self, step: FileStep) -> io::Result<()> {
        match self.due(step) {
            Some(FileFault::Errno(errno)) => Err(io::Error::from_raw_os_error(errno)),
            Some(FileFault::Stall(stall)) => {
                stall.wait();
                Ok(())
            }
            Some(FileFault::Short(_)) | None => Ok(()),
        }
    }

    /// What a call for `bytes` bytes does instead of its work, if something is due.
    pub(super) fn inject(&self, step: FileStep, bytes: usize) -> Option<Injected> {
        Some(match self.due(step)? {
            FileFault::Errno(errno) => Injected::Error(io::Error::from_raw_os_error(errno)),
            FileFault::Short(thousandths) => {
                let part = bytes as u128 * u128::from(thousandths) / 1000;
                let most = usize::try_from(part).unwrap_or(bytes);
                Injected::Short(most.min(bytes.saturating_sub(1)))
            }
            FileFault::Stall(stall) => Injected::Stall(stall),
        })
    }
}

/// All points of this crate, by operation.
#[cfg(any(test, feature = "failpoints"))]
#[cfg_attr(
    not(feature = "failpoints"),
    expect(unreachable_pub, reason = "public with the feature")
)]
pub const NAMES: &[&str] = &[
    "file.create.after",
    "file.publish.after",
    "file.publish.before",
    "file.sync.after",
    "file.write.after",
    "file.write.half",
    "gc.block.after",
    "gc.block.before",
    "gc.segment.after",
    "gc.segment.before",
    "packed.append.after",
    "packed.append.before",
    "packed.append.half",
    "packed.create.after",
    "packed.index.after",
    "packed.index.before",
    "packed.write.after",
];

#[cfg(test)]
mod tests {
    #[test]
    fn the_list_names_all_points_once() {
        let source = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        assert_eq!(ucm_failpoint::names_in(&source).unwrap(), super::NAMES);
    }
}
