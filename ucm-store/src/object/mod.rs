//! A backend that keeps each object in an object store.
//!
//! Owns: a small async runtime, the operations on their way, and the breaker.
//! **Invariant:** an object gets its name only when the service has all of it. A load ends well only if
//! identity, length and hash are right for the bytes in its memory; no byte is written outside of it, and
//! none after its end.

mod config;
mod dump;
mod load;
mod service;

use std::{
    fmt,
    future::Future,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use object_store::{ObjectStore, ObjectStoreExt as _, path::Path};
use tokio::{
    runtime::{Builder, Runtime},
    sync::Semaphore,
    time::timeout,
};

pub use config::ObjectConfig;

use crate::{
    Backend, BackendCapabilities, ErrorKind, Op, Presence, StoreError, header,
    health::{Health, Verdict},
    random::SplitMix,
    xxh3::xxh3_64,
};

type Key = ([u8; 16], u32);

/// So many failures in a row open the breaker.
const FAILURES_OFF: u32 = 5;

/// Keeps objects in an object store; the layout is described in `docs/store.md`.
///
/// Threads may share it. Operations end on threads of its runtime. Dropping it ends what has not begun as
/// `Cancelled`, waits a while (`close_within`) for what has, and ends the rest as `Cancelled`, too: such a dump may be
/// stored or not.
pub struct ObjectBackend {
    inner: Arc<Inner>,
    runtime: Option<Runtime>,
    mode: String,
}

struct Inner {
    store: Arc<dyn ObjectStore>,
    /// Of this namespace.
    prefix: Path,
    descriptor: Vec<u8>,
    part_bytes: usize,
    concurrency: usize,
    deadline: Duration,
    answer_within: Duration,
    close_within: Duration,
    /// Places for operations; closed at the end.
    places: Semaphore,
    /// Whether the service can create without replacing.
    creates: AtomicBool,
    loads: Mutex<Health>,
    dumps: Mutex<Health>,
    /// Operations that have begun.
    begun: Mutex<usize>,
    idle: Condvar,
    counters: Counters,
    generations: header::Generations,
}

#[derive(Debug, Default)]
struct Counters {
    deduplicated: AtomicU64,
    replaced: AtomicU64,
    quarantined: AtomicU64,
    late: AtomicU64,
}

/// What happened besides operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ObjectReport {
    /// Dumps of objects that were there already, with the same bytes.
    pub deduplicated: u64,
    /// Dumps that replaced other bytes.
    pub replaced: u64,
    /// Corrupt objects taken out of the store.
    pub quarantined: u64,
    /// Operations that did not end within the deadline.
    pub late: u64,
    /// How often failures opened a breaker.
    pub turned_off: u64,
    /// Whether loads are refused now.
    pub loads_off: bool,
    /// Whether dumps are refused now.
    pub dumps_off: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Load,
    Dump,
}

impl ObjectBackend {
    /// Opens the store, and proves that it can be written and read.
    ///
    /// # Errors
    /// `Invalid` for a URL, setting or descriptor that makes no sense; `Io` when the service cannot be used,
    /// with its answer.
    pub fn open(config: ObjectConfig) -> Result<Self, StoreError> {
        if config.descriptor.len() > header::MAX_DESCRIPTOR_BYTES {
            let message = format!(
                "a namespace descriptor of {} bytes; at most {} fit into an object's header",
                config.descriptor.len(),
                header::MAX_DESCRIPTOR_BYTES
            );
            return Err(StoreError::new(ErrorKind::Invalid, message));
        }
        let runtime = Builder::new_multi_thread()
            .worker_threads(config.threads.max(1))
            .thread_name("ucm-object")
            .enable_all()
            .build()
            .map_err(|e| StoreError::new(ErrorKind::Io, format!("no runtime: {e}")))?;
        let (store, prefix) = {
            let _inside = runtime.enter();
            service::connect(&config)?
        };
        let health = || Mutex::new(Health::new(FAILURES_OFF, config.deadline.saturating_mul(2)));
        let inner = Arc::new(Inner {
            store,
            prefix: prefix.join(format!("ns-{:016x}", xxh3_64(&config.descriptor))),
            descriptor: config.descriptor,
            part_bytes: config.part_bytes,
            concurrency: config.concurrency.max(1),
            deadline: config.deadline,
            answer_within: config.answer_within,
            close_within: config.close_within,
            places: Semaphore::new(config.concurrency.max(1)),
            creates: AtomicBool::new(true),
            loads: health(),
            dumps: health(),
            begun: Mutex::new(0),
            idle: Condvar::new(),
            counters: Counters::default(),
            generations: header::Generations::default(),
        });
        let probe = runtime.block_on(async { timeout(config.deadline, inner.probe()).await });
        let creates = probe.unwrap_or_else(|_| Err(inner.too_late())).map_err(|e| {
            let message = format!("{} cannot be used as a store: {e}", config.url);
            StoreError::new(e.kind(), message)
        })?;
        inner.creates.store(creates, Ordering::Relaxed);
        let mode = format!("object: {}{}", inner.store, if creates { "" } else { ", replacing" });
        tracing::info!(url = config.url, mode, "an object store is open");
        Ok(Self { inner, runtime: Some(runtime), mode })
    }

    /// What happened so far.
    #[must_use]
    pub fn report(&self) -> ObjectReport {
        let counters = &self.inner.counters;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let now = Instant::now();
        let (loads, dumps) = (lock(&self.inner.loads), lock(&self.inner.dumps));
        ObjectReport {
            deduplicated: read(&counters.deduplicated),
            replaced: read(&counters.replaced),
            quarantined: read(&counters.quarantined),
            late: read(&counters.late),
            turned_off: loads.opened() + dumps.opened(),
            loads_off: loads.is_open(now),
            dumps_off: dumps.is_open(now),
        }
    }

    fn start(&self, direction: Direction, mut ops: Vec<Op>) {
        let health = self.inner.health(direction);
        let allowed = lock(health).begin(ops.len(), Instant::now());
        let off = ops.split_off(allowed);
        let message = || "the object store is failing; it is tried again in a minute at most";
        let off = off.into_iter().map(|op| (op, Err(unavailable(message()))));
        for op in ops {
            let inner = Arc::clone(&self.inner);
            let task = Task { inner: Arc::clone(&inner), direction, op: Some(op) };
            self.spawn(async move { inner.run(task).await });
        }
        Op::finish_all(off);
    }

    /// Asks something about each key, some at once, and waits for the answers.
    fn ask<T, F, Fut>(&self, keys: &[Key], ask: F) -> Vec<Option<T>>
    where
        T: Send + 'static,
        F: Fn(Arc<Inner>, Path) -> Fut,
        Fut: Future<Output = T> + Send + 'static,
    {
        let (sender, answers) = mpsc::channel();
        for (at, key) in keys.iter().enumerate() {
            let answer = ask(Arc::clone(&self.inner), self.inner.path(key));
            let (inner, sender) = (Arc::clone(&self.inner), sender.clone());
            self.spawn(async move {
                // Whoever does not wait any more does not keep a place.
                let asked = async {
                    let _place = inner.places.acquire().await.ok()?;
                    Some(answer.await)
                };
                if let Ok(Some(answer)) = timeout(inner.answer_within, asked).await {
                    let _ = sender.send((at, answer));
                }
            });
        }
        drop(sender);
        let mut all: Vec<Option<T>> = keys.iter().map(|_| None).collect();
        while let Ok((at, answer)) = answers.recv() {
            if let Some(place) = all.get_mut(at) {
                *place = Some(answer);
            }
        }
        all
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        if let Some(runtime) = &self.runtime {
            runtime.spawn(task);
        }
    }
}

impl Backend for ObjectBackend {
    fn capabilities(&self) -> BackendCapabilities {
        BackendCapabilities::new(&self.mode, self.inner.concurrency, true)
    }

    fn load(&self, ops: Vec<Op>) {
        self.start(Direction::Load, ops);
    }

    fn dump(&self, ops: Vec<Op>) {
        self.start(Direction::Dump, ops);
    }

    fn contains(&self, keys: &[Key]) -> Vec<Presence> {
        if lock(&self.inner.loads).is_open(Instant::now()) {
            return vec![Presence::Unknown; keys.len()];
        }
        let ask = |inner: Arc<Inner>, path: Path| async move { inner.store.head(&path).await };
        let said = |answer: Option<object_store::Result<_>>| match answer {
            Some(Ok(_)) => Presence::There,
            Some(Err(object_store::Error::NotFound { .. })) => Presence::Absent,
            Some(Err(_)) | None => Presence::Unknown,
        };
        self.ask(keys, ask).into_iter().map(said).collect()
    }

    /// Nothing: what a bucket keeps is the matter of its lifecycle rules.
    fn touch(&self, _blocks: &[[u8; 16]]) -> Result<(), StoreError> {
        Ok(())
    }

    fn remove(&self, keys: &[Key]) -> Vec<Result<(), StoreError>> {
        let ask = |inner: Arc<Inner>, path: Path| async move { inner.delete(&path).await };
        let late = || Err(unavailable("the object store did not answer in time"));
        let said = |answer: Option<Result<(), StoreError>>| answer.unwrap_or_else(late);
        self.ask(keys, ask).into_iter().map(said).collect()
    }
}

impl Drop for ObjectBackend {
    fn drop(&mut self) {
        self.inner.places.close();
        let inside = tokio::runtime::Handle::try_current().is_ok();
        let deadline = Instant::now() + self.inner.close_within;
        let mut begun = self.inner.begun.lock().unwrap_or_else(PoisonError::into_inner);
        while *begun > 0 && !inside {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                tracing::error!(operations = *begun, "an object store is closed before they ended");
                break;
            }
            let waited = self.inner.idle.wait_timeout(begun, left);
            begun = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(begun);
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl fmt::Debug for ObjectBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectBackend").field("mode", &self.mode).finish_non_exhaustive()
    }
}

/// An operation that has been counted by the breaker. A task of a runtime that ends drops it: then it ends
/// as `Cancelled`, and nothing writes into its memory any more.
struct Task {
    inner: Arc<Inner>,
    direction: Direction,
    op: Option<Op>,
}

impl Task {
    fn op(&self) -> Option<&Op> {
        self.op.as_ref()
    }

    fn end(&mut self, result: Result<(), StoreError>) {
        if let Some(op) = self.op.take() {
            let health = self.inner.health(self.direction);
            lock(health).end(Verdict::of(&result), Instant::now());
            op.finish(result);
        }
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.end(Err(closed()));
    }
}

/// An operation that has begun.
struct Begun<'a>(&'a Inner);

impl<'a> Begun<'a> {
    fn new(inner: &'a Inner) -> Self {
        *inner.begun.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Self(inner)
    }
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        let mut begun = self.0.begun.lock().unwrap_or_else(PoisonError::into_inner);
        *begun -= 1;
        if *begun == 0 {
            self.0.idle.notify_all();
        }
    }
}

impl Inner {
    async fn run(&self, mut task: Task) {
        let Ok(_place) = self.places.acquire().await else {
            task.end(Err(closed()));
            return;
        };
        let _begun = Begun::new(self);
        let Some(op) = task.op() else { return };
        let work = async {
            match task.direction {
                Direction::Load => self.load(op).await,
                Direction::Dump => self.dump(op).await,
            }
        };
        // The work is dropped at the deadline, and touches the memory no more.
        let result = timeout(self.deadline, work).await.unwrap_or_else(|_| {
            self.counters.late.fetch_add(1, Ordering::Relaxed);
            Err(self.too_late())
        });
        task.end(result);
    }

    /// Says whether the service can create without replacing.
    async fn probe(&self) -> Result<bool, StoreError> {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let seed = u64::from(since.subsec_nanos()) << 32 | u64::from(std::process::id());
        let number = SplitMix::new(seed ^ since.as_secs()).next();
        let path = self.prefix.clone().join(format!("probe-{number:016x}"));
        let text = number.to_le_bytes().to_vec();
        let first = self.put(&path, text.clone().into(), true).await;
        let second = match first {
            Ok(()) => self.put(&path, text.clone().into(), true).await,
            Err(e) if is_unsupported(&e) => {
                self.put(&path, text.clone().into(), false).await.map_err(|e| failed("put", &e))?;
                Ok(())
            }
            Err(e) => return Err(failed("put", &e)),
        };
        let read = async { self.store.get(&path).await?.bytes().await };
        let read = read.await.map_err(|e| failed("get", &e))?;
        let deleted = self.delete(&path).await;
        if *read != *text {
            return Err(StoreError::new(ErrorKind::Io, "it returned other bytes than were stored"));
        }
        deleted?;
        Ok(matches!(second, Err(object_store::Error::AlreadyExists { .. })))
    }

    async fn delete(&self, path: &Path) -> Result<(), StoreError> {
        match self.store.delete(path).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(e) => Err(failed("delete", &e)),
        }
    }

    fn path(&self, (block, shard): &Key) -> Path {
        let name = format!("{:032x}-{shard}", u128::from_be_bytes(*block));
        // A directory would hold too many; services do not mind.
        let part = format!("{:02x}", xxh3_64(block) & 0xFF);
        self.prefix.clone().join(part).join(name)
    }

    fn health(&self, direction: Direction) -> &Mutex<Health> {
        match direction {
            Direction::Load => &self.loads,
            Direction::Dump => &self.dumps,
        }
    }

    fn too_late(&self) -> StoreError {
        let message = format!(
            "no end within {} ms: see `deadline`, or what the service says",
            self.deadline.as_millis()
        );
        StoreError::new(ErrorKind::Io, message)
    }
}

fn lock(health: &Mutex<Health>) -> MutexGuard<'_, Health> {
    health.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_unsupported(error: &object_store::Error) -> bool {
    use object_store::Error::{NotImplemented, NotSupported};
    matches!(error, NotImplemented { .. } | NotSupported { .. })
}

fn failed(what: &str, error: &object_store::Error) -> StoreError {
    StoreError::new(ErrorKind::Io, format!("{what}: {error}"))
}

fn unavailable(what: &str) -> StoreError {
    StoreError::new(ErrorKind::Unavailable, what)
}

fn closed() -> StoreError {
    StoreError::new(ErrorKind::Cancelled, "the object store is closed")
}
