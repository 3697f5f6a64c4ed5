//! A backend that keeps each object in a file of its own.
//!
//! **Invariant:** an object is visible only when it is complete: it is written to a temporary file
//! and renamed. What a load reports as good was verified in the memory where it lies. Several
//! processes may use one directory; a process killed at any instant leaves whole objects or none.

mod buffers;
mod config;
mod direct;
mod failpoint;
mod header;
mod object;
mod pool;
mod ring;
mod rings;
mod space;
mod sys;
mod transfer;

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

pub use config::{Durability, FileConfig, FileIo, FileMode, MemoryOwner};
#[cfg(feature = "failpoints")]
pub use failpoint::NAMES as FAILPOINTS;
pub use failpoint::{FileFault, FileStep, Stall};

use crate::{Backend, BackendCapabilities, ErrorKind, Op, Presence, StoreError};
use buffers::Buffers;
use failpoint::FailPoints;
use pool::{Lane, Pool};
use rings::Rings;
use space::{Aside, Space};

type Key = ([u8; 16], u32);

/// Touches that may wait; more are refused.
const MAX_WAITING_TOUCHES: u64 = 4096;
/// Corrupt objects that could not be put aside are remembered, up to this many.
const MAX_REFUSED: usize = 65_536;

/// Keeps objects in files below a directory; the layout is described in `docs/store.md`.
///
/// What works here is found out when it is opened ([`FileBackend::mode`]): loads go through rings past
/// the page cache, or run on a bounded pool of threads, as dumps do. Threads sleep when there is
/// nothing to do. Dropping the backend waits for operations that have begun and ends the others as
/// `Cancelled`.
#[derive(Debug)]
pub struct FileBackend {
    inner: Arc<Inner>,
    rings: Option<Rings>,
    pool: Pool<Job>,
    mode: FileMode,
    depth: usize,
}

#[derive(Debug)]
enum Job {
    Load(Op),
    Dump(Op),
    Touch([u8; 16]),
}

/// What threads work with.
#[derive(Debug)]
struct Inner {
    space: Space,
    descriptor: Vec<u8>,
    durability: Durability,
    mode: Mode,
    buffers: Buffers,
    failpoints: FailPoints,
    counters: Counters,
    last_generation: AtomicU64,
    /// Corrupt objects that could not be put aside.
    refused: Mutex<HashSet<Key>>,
}

/// How the threads work.
#[derive(Clone, Copy, Debug)]
struct Mode {
    direct: bool,
    in_place: bool,
    align: usize,
}

#[derive(Debug, Default)]
struct Counters {
    strangers: AtomicU64,
    quarantined: AtomicU64,
    corrupt_deleted: AtomicU64,
    temps_removed: AtomicU64,
    touch_failures: AtomicU64,
    waiting_touches: AtomicU64,
}

/// What happened besides operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileReport {
    /// Corrupt objects put into quarantine.
    pub quarantined: u64,
    /// Corrupt objects deleted because the quarantine was full.
    pub corrupt_deleted: u64,
    /// Temporary files of dead writers removed at the start.
    pub temps_removed: u64,
    /// Blocks whose touch failed.
    pub touch_failures: u64,
    /// Completions of no request: a bug in the kernel or here. They change nothing.
    pub strangers: u64,
}

impl FileBackend {
    /// Opens or creates the store and proves that it can be written and read.
    ///
    /// # Errors
    /// `Invalid` for a descriptor over 4008 bytes; `NoSpace` or `Io` when the directory cannot be
    /// used, naming it and what to do.
    pub fn open(config: FileConfig) -> Result<Self, StoreError> {
        let FileConfig { dir, descriptor, threads, durability, quarantine_files, .. } = config;
        if descriptor.len() > header::MAX_DESCRIPTOR_BYTES {
            return Err(StoreError::new(
                ErrorKind::Invalid,
                format!(
                    "a namespace descriptor of {} bytes; at most {} fit into an object's header",
                    descriptor.len(),
                    header::MAX_DESCRIPTOR_BYTES
                ),
            ));
        }
        let unusable = |e: std::io::Error| {
            let kind = match e.raw_os_error() {
                Some(libc::ENOSPC | libc::EDQUOT) => ErrorKind::NoSpace,
                _ => ErrorKind::Io,
            };
            let message = format!(
                "{} cannot be used as a store: {e}; give this user write access to a directory \
                 with free space, or choose another `dir`",
                dir.display()
            );
            StoreError::new(kind, message)
        };
        let (space, temps_removed) =
            Space::open(&dir, &descriptor, quarantine_files).map_err(unusable)?;
        space.probe().map_err(unusable)?;
        let buffers = Buffers::default();
        let mut missing = Vec::new();
        let align = match config.io {
            FileIo::Buffered => None,
            FileIo::Auto | FileIo::Threads => space
                .probe_direct(&buffers)
                .map_err(|e| missing.push(format!("O_DIRECT in {}: {e}", dir.display())))
                .ok(),
        };
        let counters = Counters { temps_removed: temps_removed.into(), ..Counters::default() };
        let private = matches!(config.memory, MemoryOwner::Private);
        let by_threads = Mode {
            direct: align.is_some(),
            in_place: align.is_none() || private || space.is_local(),
            align: align.unwrap_or(1),
        };
        let locked = matches!(config.memory, MemoryOwner::Locked(_));
        let by_rings = Mode { in_place: private || locked, ..by_threads };
        let mut inner = Arc::new(Inner {
            space,
            descriptor,
            durability,
            mode: by_rings,
            buffers,
            failpoints: FailPoints::default(),
            counters,
            last_generation: AtomicU64::new(0),
            refused: Mutex::default(),
        });
        let mut rings = None;
        if align.is_some() && config.io == FileIo::Auto {
            let kept = match &config.memory {
                MemoryOwner::Locked(kept) => Some(&**kept),
                MemoryOwner::Shared | MemoryOwner::Private => None,
            };
            rings = Rings::new(&inner, config.rings, config.depth, kept)
                .map_err(|e| {
                    missing.push(format!(
                        "io_uring: {e}; allow it to containers (seccomp), \
                    see /proc/sys/kernel/io_uring_disabled; threads read instead"
                    ))
                })
                .ok();
        }
        if rings.is_none() {
            // Nobody else has it: rings that could not be made have ended their threads.
            let alone = Arc::get_mut(&mut inner)
                .ok_or_else(|| StoreError::new(ErrorKind::Io, "a thread of a ring did not end"))?;
            alone.mode = by_threads;
        }
        let mode = FileMode {
            rings: if rings.is_some() { config.rings.max(1) } else { 0 },
            direct: inner.mode.direct,
            in_place: inner.mode.in_place,
            align: inner.mode.align,
            missing,
        };
        tracing::info!(dir = %dir.display(), %mode, missing = ?mode.missing, "a file store is open");
        let of_pool = Arc::clone(&inner);
        let pool = Pool::new(threads, move |job| of_pool.run(job))?;
        let depth =
            if rings.is_some() { config.rings.max(1) * config.depth } else { pool.threads() };
        Ok(Self { inner, rings, pool, mode, depth })
    }

    /// What works here.
    #[must_use]
    pub fn mode(&self) -> &FileMode {
        &self.mode
    }

    /// What happened so far.
    #[must_use]
    pub fn report(&self) -> FileReport {
        let counters = &self.inner.counters;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        FileReport {
            quarantined: read(&counters.quarantined),
            corrupt_deleted: read(&counters.corrupt_deleted),
            temps_removed: read(&counters.temps_removed),
            touch_failures: read(&counters.touch_failures),
            strangers: read(&counters.strangers),
        }
    }

    /// The next time this step is taken, it fails with this error number; for tests.
    #[cfg(any(test, feature = "testing"))]
    pub fn fail_next(&self, step: FileStep, errno: i32) {
        self.inject(step, FileFault::Errno(errno));
    }

    /// The next time this step is taken, this happens instead; for tests.
    #[cfg(any(test, feature = "testing"))]
    pub fn inject(&self, step: FileStep, fault: FileFault) {
        self.inner.failpoints.add(step, fault);
    }

    fn submit(&self, lane: Lane, jobs: Vec<Job>) {
        if let Err(left) = self.pool.submit(lane, jobs) {
            cancel(left);
        }
    }
}

impl Backend for FileBackend {
    fn capabilities(&self) -> BackendCapabilities {
        let durable = self.inner.durability == Durability::Fsync;
        BackendCapabilities::new(self.mode.to_string(), self.depth, durable)
    }

    fn load(&self, ops: Vec<Op>) {
        if let Some(rings) = &self.rings {
            if let Err(left) = rings.submit(ops) {
                Op::finish_all(left.into_iter().map(|op| (op, Err(rings::closed()))));
            }
            return;
        }
        self.submit(Lane::Load, ops.into_iter().map(Job::Load).collect());
    }

    fn dump(&self, ops: Vec<Op>) {
        self.submit(Lane::Background, ops.into_iter().map(Job::Dump).collect());
    }

    fn contains(&self, keys: &[Key]) -> Vec<Presence> {
        keys.iter().map(|key| self.inner.contains(key)).collect()
    }

    fn touch(&self, blocks: &[[u8; 16]]) -> Result<(), StoreError> {
        let waiting = &self.inner.counters.waiting_touches;
        let count = blocks.len() as u64;
        let before = waiting.fetch_add(count, Ordering::Relaxed);
        if before + count > MAX_WAITING_TOUCHES {
            waiting.fetch_sub(count, Ordering::Relaxed);
            return Err(StoreError::new(
                ErrorKind::Unavailable,
                format!("{before} blocks wait to be touched, {count} more are over the limit"),
            ));
        }
        self.submit(Lane::Background, blocks.iter().copied().map(Job::Touch).collect());
        Ok(())
    }

    fn remove(&self, keys: &[Key]) -> Vec<Result<(), StoreError>> {
        keys.iter().map(|key| self.inner.remove(key)).collect()
    }
}

impl Drop for FileBackend {
    fn drop(&mut self) {
        if let Some(mut rings) = self.rings.take() {
            Op::finish_all(rings.stop().into_iter().map(|op| (op, Err(rings::closed()))));
        }
        cancel(self.pool.stop());
        if self.inner.durability == Durability::OnClose
            && let Err(error) = self.inner.space.sync()
        {
            tracing::error!(%error, "objects may not be on the device");
        }
    }
}

impl Inner {
    fn run(&self, job: Job) {
        match job {
            Job::Load(op) if self.mode.direct => {
                if let Some(read) = self.start_read(op) {
                    self.read_in_thread(read);
                }
            }
            Job::Load(op) => {
                let result = self.load(&op);
                op.finish(result);
            }
            Job::Dump(op) => {
                let result = self.dump(&op);
                op.finish(result);
            }
            Job::Touch(block) => {
                self.counters.waiting_touches.fetch_sub(1, Ordering::Relaxed);
                if let Err(error) = self.space.touch(&block) {
                    self.counters.touch_failures.fetch_add(1, Ordering::Relaxed);
                    tracing::debug!(%error, "a touch failed");
                }
            }
        }
    }

    fn contains(&self, key: &Key) -> Presence {
        match self.space.has_object(&key.0, key.1) {
            Ok(true) if self.is_refused(key) => Presence::Absent,
            Ok(true) => Presence::There,
            Ok(false) => Presence::Absent,
            Err(_) => Presence::Unknown,
        }
    }

    fn remove(&self, key: &Key) -> Result<(), StoreError> {
        let removed = self.space.remove_object(&key.0, key.1).map(|_| self.accept(*key));
        removed.map_err(|e| StoreError::new(ErrorKind::Io, format!("remove: {e}")))
    }

    /// Time in nanoseconds, growing from dump to dump of this process.
    fn next_generation(&self) -> u64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
        let next = |last: u64| now.max(last.saturating_add(1));
        let update =
            self.last_generation
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |last| Some(next(last)));
        next(update.unwrap_or_else(|last| last))
    }

    fn refuse(&self, key: Key) {
        let mut refused = self.refused();
        if refused.len() < MAX_REFUSED {
            refused.insert(key);
        }
    }

    fn accept(&self, key: Key) {
        self.refused().remove(&key);
    }

    fn is_refused(&self, key: &Key) -> bool {
        self.refused().contains(key)
    }

    fn refused(&self) -> std::sync::MutexGuard<'_, HashSet<Key>> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Counters {
    fn count_corrupt(&self, aside: Aside) {
        match aside {
            Aside::Kept => self.quarantined.fetch_add(1, Ordering::Relaxed),
            Aside::Deleted => self.corrupt_deleted.fetch_add(1, Ordering::Relaxed),
            Aside::Gone => 0,
        };
    }
}

fn cancel(jobs: Vec<Job>) {
    let ended = jobs.into_iter().filter_map(|job| match job {
        Job::Load(op) | Job::Dump(op) => Some((op, Err(rings::closed()))),
        Job::Touch(_) => None,
    });
    Op::finish_all(ended);
}

#[cfg(test)]
mod tests;
