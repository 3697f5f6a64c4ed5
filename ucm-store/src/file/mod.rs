//! A backend that keeps each object in a file of its own.
//!
//! **Invariant:** an object is visible only when it is complete: it is written to a temporary file
//! and renamed. What a load reports as good was verified in the memory where it lies. Several
//! processes may use one directory; a process killed at any instant leaves whole objects or none.

mod breaker;
mod buffers;
mod config;
mod direct;
mod failpoint;
mod gc;
mod object;
mod packed;
mod pool;
mod reading;
mod ring;
mod rings;
mod space;
mod switch;
mod sys;
mod transfer;
mod watch;

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    thread::JoinHandle,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

pub use config::{Durability, FileConfig, FileIo, FileMode, MemoryOwner};
#[cfg(feature = "failpoints")]
pub use failpoint::NAMES as FAILPOINTS;
pub use failpoint::{FileFault, FileStep, Stall};

use crate::{Backend, BackendCapabilities, ErrorKind, Op, Presence, StoreError, header};
use breaker::Breaker;
use buffers::Buffers;
use failpoint::FailPoints;
use packed::Packed;
use pool::{Lane, Pool};
use reading::Start;
use rings::Rings;
use space::{Aside, Space};
use switch::Switch;
use watch::Watch;

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
    watcher: Option<JoinHandle<()>>,
}

#[derive(Debug)]
enum Job {
    Load(Op),
    Read(Start),
    Dump(Op),
    Pack(Vec<Op>),
    Touch([u8; 16]),
    Contains(Vec<Key>, mpsc::SyncSender<Vec<Presence>>),
    Remove(Vec<Key>, mpsc::SyncSender<Vec<Result<(), StoreError>>>),
}

/// What threads work with.
#[derive(Debug)]
struct Inner {
    space: Space,
    packed: Packed,
    packed_below: usize,
    descriptor: Vec<u8>,
    durability: Durability,
    mode: Mode,
    buffers: Buffers,
    failpoints: FailPoints,
    watch: Arc<Watch>,
    switch: Mutex<Switch>,
    quota_bytes: u64,
    /// Whether this process knows how much is used.
    surveyed: AtomicBool,
    /// Bytes stored since then.
    stored: AtomicU64,
    counters: Counters,
    generations: header::Generations,
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
    used_bytes: AtomicU64,
    evicted: AtomicU64,
    refused_dumps: AtomicU64,
    strangers: AtomicU64,
    index_damage: AtomicU64,
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
    /// Allocated bytes when the namespace was last looked through (which a quota or a full disk causes).
    pub used_bytes: u64,
    /// Blocks and segments that this process removed to make room.
    pub evicted: u64,
    /// Dumps refused because the disk was full a moment ago.
    pub refused_dumps: u64,
    /// Whether dumps are refused now.
    pub stores_off: bool,
    /// How often the device stopped answering.
    pub stalls: u64,
    /// Calls that take longer than they may, now.
    pub stalled_calls: u64,
    /// Packed objects in the index.
    pub packed_objects: u64,
    /// Damaged entries of the index of packed objects, found when it was opened and made anew.
    pub index_damage: u64,
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
        let (packed, found) = Packed::open(
            space.path(),
            &descriptor,
            align.is_some(),
            config.segment_bytes,
            &buffers,
        )
        .map_err(unusable)?;
        let counters = Counters {
            temps_removed: (temps_removed + found.orphans).into(),
            index_damage: found.damaged.into(),
            ..Counters::default()
        };
        let private = matches!(config.memory, MemoryOwner::Private);
        let by_threads = Mode {
            direct: align.is_some(),
            in_place: align.is_none() || private || space.is_local(),
            align: align.unwrap_or(1),
        };
        let locked = matches!(config.memory, MemoryOwner::Locked(_));
        let by_rings = Mode { in_place: private || locked, ..by_threads };
        let by_ring = align.is_some() && config.io == FileIo::Auto;
        let most = if by_ring {
            config.rings.max(1).saturating_mul(config.depth) / 2
        } else {
            threads.saturating_sub(1)
        };
        let watch = Watch::new(Breaker::new(config.stall_after, most)).map_err(unusable)?;
        let mut inner = Arc::new(Inner {
            watch: Arc::new(watch),
            switch: Mutex::default(),
            quota_bytes: config.quota_bytes,
            surveyed: AtomicBool::new(false),
            stored: AtomicU64::new(0),
            space,
            packed,
            packed_below: config.packed_below,
            descriptor,
            durability,
            mode: by_rings,
            buffers,
            failpoints: FailPoints::default(),
            counters,
            generations: header::Generations::default(),
            refused: Mutex::default(),
        });
        let mut rings = None;
        if by_ring {
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
        let waiting = pool.drainer();
        let reads = rings.as_ref().map(Rings::drainer);
        let of_watch = Arc::clone(&inner);
        let opened = move || {
            let reads = reads.as_ref().map(|drain| drain()).unwrap_or_default();
            of_watch.end_as(
                waiting().into_iter().chain(reads.into_iter().map(Job::Read)),
                &unanswered(),
            );
        };
        let watcher = Watch::start(&inner.watch, opened).map_err(unusable)?;
        Ok(Self { inner, rings, pool, mode, depth, watcher: Some(watcher) })
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
        let (stalls, stalled_calls) = self.inner.watch.breaker.report(Instant::now());
        FileReport {
            used_bytes: read(&counters.used_bytes),
            evicted: read(&counters.evicted),
            refused_dumps: read(&counters.refused_dumps),
            stores_off: self.inner.switch().is_off(),
            stalls,
            stalled_calls,
            quarantined: read(&counters.quarantined),
            corrupt_deleted: read(&counters.corrupt_deleted),
            temps_removed: read(&counters.temps_removed),
            touch_failures: read(&counters.touch_failures),
            packed_objects: self.inner.packed.len() as u64,
            index_damage: read(&counters.index_damage),
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

    /// Lets a thread of the pool ask the device, and waits for it as long as a call may take: a device
    /// that never answers does not keep the caller.
    fn ask<T>(&self, job: impl FnOnce(mpsc::SyncSender<T>) -> Job) -> Option<T> {
        let (answer, answers) = mpsc::sync_channel(1);
        self.submit(Lane::Load, vec![job(answer)]);
        answers.recv_timeout(self.inner.watch.breaker.limit()).ok()
    }

    fn submit(&self, lane: Lane, jobs: Vec<Job>) {
        if self.inner.watch.breaker.is_open() {
            return self.inner.end_as(jobs, &unanswered());
        }
        if let Err(left) = self.pool.submit(lane, jobs) {
            self.inner.end_as(left, &rings::closed());
        }
    }
}

impl Backend for FileBackend {
    fn capabilities(&self) -> BackendCapabilities {
        let durable = self.inner.durability == Durability::Fsync;
        BackendCapabilities::new(self.mode.to_string(), self.depth, durable)
    }

    fn load(&self, ops: Vec<Op>) {
        if ops.is_empty() {
            return;
        }
        let find = Start::Find(ops);
        let Some(rings) = &self.rings else {
            return self.submit(Lane::Load, vec![Job::Read(find)]);
        };
        if self.inner.watch.breaker.is_open() {
            return self.inner.end_as([Job::Read(find)], &unanswered());
        }
        if let Err(left) = rings.submit(vec![find]) {
            self.inner.end_as(left.into_iter().map(Job::Read), &rings::closed());
        }
    }

    fn dump(&self, ops: Vec<Op>) {
        let below = self.inner.packed_below;
        let (small, large): (Vec<_>, Vec<_>) =
            ops.into_iter().partition(|op| op.memory().len() < below);
        let mut jobs: Vec<_> = large.into_iter().map(Job::Dump).collect();
        if !small.is_empty() {
            jobs.push(Job::Pack(small));
        }
        self.submit(Lane::Background, jobs);
    }

    fn contains(&self, keys: &[Key]) -> Vec<Presence> {
        if self.inner.watch.breaker.is_open() {
            return vec![Presence::Unknown; keys.len()];
        }
        let unknown = || vec![Presence::Unknown; keys.len()];
        self.ask(|answer| Job::Contains(keys.to_vec(), answer)).unwrap_or_else(unknown)
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
        let late = || vec![Err(unanswered()); keys.len()];
        self.ask(|answer| Job::Remove(keys.to_vec(), answer)).unwrap_or_else(late)
    }
}

impl Drop for FileBackend {
    fn drop(&mut self) {
        let mut rings = self.rings.take();
        let left = rings.as_ref().map(Rings::close).unwrap_or_default();
        let left = left.into_iter().map(Job::Read).chain(self.pool.close());
        self.inner.end_as(left, &rings::closed());
        let answers = self.inner.watch.breaker.wait_idle();
        self.inner.watch.stop();
        if let Some(watcher) = self.watcher.take()
            && watcher.thread().id() != std::thread::current().id()
            && watcher.join().is_err()
        {
            tracing::warn!("the watcher of a file backend ended by a panic");
        }
        if !answers {
            // Threads that a device holds keep what they need, and go when it answers.
            tracing::error!("a file store is closed while its device does not answer");
            rings.iter_mut().for_each(Rings::detach);
            self.pool.detach();
            return;
        }
        drop(rings);
        let left = self.pool.stop();
        self.inner.end_as(left, &rings::closed());
        if self.inner.durability == Durability::OnClose
            && let Err(error) = self.inner.space.sync()
        {
            tracing::error!(%error, "objects may not be on the device");
        }
    }
}

impl Inner {
    /// Does a job; says which are to be done next.
    fn run(&self, job: Job) -> Vec<Job> {
        match job {
            Job::Read(Start::Find(ops)) => {
                return self.expand(ops).into_iter().map(|start| self.job_of(start)).collect();
            }
            Job::Read(start) => {
                if let Some(read) = self.begin_watched(start) {
                    self.read_in_thread(read);
                }
            }
            Job::Pack(ops) => {
                self.packed.store(self, ops);
                self.keep_quota();
            }
            Job::Load(op) => {
                let result = self.watched(|| self.load(&op));
                op.finish(result);
            }
            Job::Dump(op) => {
                let bytes = op.memory().len() as u64;
                let result = self.with_room(bytes, || self.dump(&op));
                op.finish(result);
                self.keep_quota();
            }
            Job::Touch(block) => {
                self.counters.waiting_touches.fetch_sub(1, Ordering::Relaxed);
                let packed = self.packed.touch(&block);
                if let Err(error) = self.space.touch(&block).and(packed) {
                    self.counters.touch_failures.fetch_add(1, Ordering::Relaxed);
                    tracing::debug!(%error, "a touch failed");
                }
            }
            // Whoever asked may have left.
            Job::Contains(keys, answer) => {
                let _ = answer.send(self.watched(|| self.presence(&keys)));
            }
            Job::Remove(keys, answer) => {
                let _ = answer.send(self.watched(|| self.remove_all(&keys)));
            }
        }
        Vec::new()
    }

    /// Through the page cache an object is read and hashed step by step.
    fn job_of(&self, start: Start) -> Job {
        match start {
            Start::Object(op) if !self.mode.direct => Job::Load(op),
            start => Job::Read(start),
        }
    }

    /// Ends all operations of jobs that will not be done.
    fn end_as(&self, jobs: impl IntoIterator<Item = Job>, error: &StoreError) {
        let ops = jobs.into_iter().flat_map(|job| match job {
            Job::Load(op) | Job::Dump(op) => vec![op],
            Job::Read(start) => start.into_ops(),
            Job::Pack(ops) => ops,
            Job::Touch(_) => {
                self.counters.waiting_touches.fetch_sub(1, Ordering::Relaxed);
                Vec::new()
            }
            // Their channels say so.
            Job::Contains(..) | Job::Remove(..) => Vec::new(),
        });
        Op::finish_all(ops.map(|op| (op, Err(error.clone()))));
    }

    fn call_begins(&self) -> u64 {
        self.watch.begin()
    }

    fn call_ends(&self, call: u64) {
        self.watch.end(call);
    }

    /// Does something with the device, with an eye on the clock.
    fn watched<T>(&self, work: impl FnOnce() -> T) -> T {
        struct Call<'a>(&'a Inner, u64);
        impl Drop for Call<'_> {
            fn drop(&mut self) {
                self.0.call_ends(self.1);
            }
        }
        let _call = Call(self, self.call_begins());
        work()
    }

    fn switch(&self) -> std::sync::MutexGuard<'_, Switch> {
        self.switch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores something of about so many bytes: once more, after evicting, when the disk is full; not
    /// at all for a while when that does not help.
    fn with_room(
        &self,
        bytes: u64,
        mut store: impl FnMut() -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let asked = self.switch().ask(Instant::now());
        if let Err(wait) = asked {
            self.counters.refused_dumps.fetch_add(1, Ordering::Relaxed);
            let dir = self.space.path().display();
            let message =
                format!("{dir} was full; dumps are tried again in {} ms", wait.as_millis());
            return Err(StoreError::new(ErrorKind::Unavailable, message));
        }
        let is_full =
            |r: &Result<(), StoreError>| r.as_ref().is_err_and(|e| e.kind() == ErrorKind::NoSpace);
        let mut result = self.watched(&mut store);
        if is_full(&result) {
            // Enough for some more, so that not every dump comes here.
            self.evict(bytes.saturating_mul(16).max(4 << 20));
            result = self.watched(&mut store);
        }
        if is_full(&result) {
            if self.switch().full(Instant::now()) {
                tracing::error!(dir = %self.space.path().display(), "full: dumps pause, loads go on");
            }
        } else if result.is_ok() {
            self.stored.fetch_add(bytes, Ordering::Relaxed);
            if self.switch().worked() {
                tracing::warn!(dir = %self.space.path().display(), "dumps go on");
            }
        }
        result
    }

    /// Looks through the namespace now and then, and evicts what is over the quota.
    fn keep_quota(&self) {
        let enough = self.stored.load(Ordering::Relaxed) > self.quota_bytes / 64;
        if self.quota_bytes > 0 && (enough || !self.surveyed.load(Ordering::Relaxed)) {
            self.evict(0);
        }
    }

    fn evict(&self, bytes: u64) {
        match self.collect(bytes) {
            Ok(Some(done)) => {
                self.surveyed.store(true, Ordering::Relaxed);
                self.stored.store(0, Ordering::Relaxed);
                self.counters.used_bytes.store(done.used, Ordering::Relaxed);
                self.counters.evicted.fetch_add(done.removed, Ordering::Relaxed);
            }
            // Whoever is at it makes room for all.
            Ok(None) => {}
            Err(error) => tracing::warn!(%error, "a store could not be looked through"),
        }
    }

    /// A load renews what eviction goes by, at most once a minute.
    fn renew(&self, file: std::os::fd::BorrowedFd<'_>, modified_s: i64) {
        const MINUTE: i64 = 60;
        if self.quota_bytes == 0 {
            return;
        }
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now_s = i64::try_from(since.as_secs()).unwrap_or(i64::MAX);
        if modified_s.saturating_add(MINUTE) > now_s {
            return;
        }
        let now = rustix::fs::Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_NOW };
        let times = rustix::fs::Timestamps { last_access: now, last_modification: now };
        if let Err(error) = rustix::fs::futimens(file, &times) {
            tracing::debug!(%error, "an object looks older than it is");
        }
    }

    fn presence(&self, keys: &[Key]) -> Vec<Presence> {
        if self.failpoints.check(FileStep::Find).is_err() {
            return vec![Presence::Unknown; keys.len()];
        }
        let mut known = vec![Presence::Absent; keys.len()];
        self.packed.add_presence(keys, &mut known);
        for (key, known) in keys.iter().zip(&mut known) {
            if *known == Presence::Absent {
                *known = self.contains(key);
            }
        }
        known
    }

    fn remove_all(&self, keys: &[Key]) -> Vec<Result<(), StoreError>> {
        if let Err(e) =
            self.failpoints.check(FileStep::Find).and_then(|()| self.packed.remove(keys))
        {
            let error = StoreError::new(ErrorKind::Io, format!("remove from the index: {e}"));
            return vec![Err(error); keys.len()];
        }
        keys.iter().map(|key| self.remove(key)).collect()
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

    /// Takes corrupt packed objects out of the index; their bytes are kept aside.
    fn condemn_packed(&self, bad: &[(Key, Vec<u8>)]) {
        if bad.is_empty() {
            return;
        }
        for (key, bytes) in bad {
            tracing::warn!(object = ?key, "a corrupt packed object");
            match self.space.keep_aside(&key.0, key.1, bytes) {
                Ok(kept) => self.count_packed_corrupt(kept),
                Err(error) => {
                    self.count_packed_corrupt(false);
                    tracing::warn!(%error, "a corrupt packed object could not be kept");
                }
            }
        }
        let keys: Vec<Key> = bad.iter().map(|(key, _)| *key).collect();
        if let Err(error) = self.packed.remove(&keys) {
            tracing::warn!(%error, "corrupt packed objects stay in the index");
        }
    }

    fn count_packed_corrupt(&self, kept: bool) {
        self.counters.count_corrupt(if kept { Aside::Kept } else { Aside::Deleted });
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

fn unanswered() -> StoreError {
    let message = "the device does not answer; operations are taken again when it does";
    StoreError::new(ErrorKind::Unavailable, message)
}

#[cfg(test)]
mod tests;
