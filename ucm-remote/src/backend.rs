//! The pool as a storage backend: what a cache misses is looked for on other nodes, what it dumps is
//! kept in this node's memory, or where the agent's placement says.
//!
//! Bytes go between the operation's memory and the node's pages by copies of this process's threads,
//! which end with the process: nothing is left that could write into a slot that others have taken over.
//!
//! **Invariant:** an operation ends once, and nothing copies from or into its memory then.

use std::{
    collections::VecDeque,
    fmt,
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use ucm_store::{Backend, BackendCapabilities, ErrorKind, IoMemory, Op, Presence, StoreError};
use ucm_transport::{Memory, TransferError};

use crate::{
    ByteRange, GetOutcome, ObjectKey, PageList, PutOutcome, RemoveOutcome,
    agent::Want,
    client::{Delivered, Happened, Node},
    core::walk,
    ranks::Rank,
};

/// How often another agent is looked for while this one is not there.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How long another agent may take to answer.
const LOOK: Duration = Duration::from_secs(1);
/// Bytes that are copied at a time: they stay in the caches of a core.
const COPY: usize = 64 << 10;

/// Objects are asked for in ranges of this many bytes: where the medium has no place, a round of the arena
/// takes some of them.
const RANGE: u64 = 256 << 10;

/// Settings of a [`PoolBackend`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolBackendOptions {
    /// Digest of everything that determines the bytes besides block and shard.
    pub identity: [u8; 32],
    /// Shards of a block, for [`Backend::touch`].
    pub shards_per_block: u32,
    /// How long an operation may take. Default 5 s.
    pub patience: Duration,
    /// Threads that ask and copy. Default 4.
    pub threads: usize,
    /// Objects that one of them asks for together. Default 64.
    pub batch: usize,
}

impl PoolBackendOptions {
    /// Defaults.
    #[must_use]
    pub fn new(identity: [u8; 32], shards_per_block: u32) -> Self {
        let patience = Duration::from_secs(5);
        Self { identity, shards_per_block, patience, threads: 4, batch: 64 }
    }
}

/// See the module description. Objects are immutable: to dump one that is there changes nothing, and with
/// another length it is refused. Dropping it ends what waits as `Cancelled`, after what is being copied.
pub struct PoolBackend {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    node: RwLock<Arc<dyn Node>>,
    /// Where the agent is asked for anew, and when that was last done.
    path: Option<PathBuf>,
    looked: Mutex<Instant>,
    options: PoolBackendOptions,
    queue: Mutex<Queue>,
    rung: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<(Kind, Op, Instant)>,
    stopped: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Load,
    Dump,
}

impl PoolBackend {
    /// Of the agent that serves ranks at `path`; maps its memory, and that of the agent that takes over from
    /// it there.
    ///
    /// # Errors
    /// As [`PoolClient::connect`](crate::PoolClient::connect).
    pub fn connect(path: &Path, options: PoolBackendOptions) -> Result<Self, TransferError> {
        Self::start(Arc::new(Rank::connect(path)?), Some(path.to_owned()), options)
    }

    pub(crate) fn start(
        node: Arc<dyn Node>,
        path: Option<PathBuf>,
        options: PoolBackendOptions,
    ) -> Result<Self, TransferError> {
        let shared = Arc::new(Shared {
            node: RwLock::new(node),
            path,
            looked: Mutex::new(Instant::now()),
            options,
            queue: Mutex::default(),
            rung: Condvar::new(),
        });
        // Those that were started are stopped by the drop.
        let mut backend = Self { shared, threads: Vec::new() };
        for _ in 0..options.threads.max(1) {
            let shared = Arc::clone(&backend.shared);
            let thread = std::thread::Builder::new()
                .name("ucm-pool".into())
                .spawn(move || while shared.work() {})
                .map_err(|error| {
                    TransferError::new(
                        ucm_transport::ErrorKind::Failed,
                        format!("no thread: {error}"),
                    )
                })?;
            backend.threads.push(thread);
        }
        Ok(backend)
    }

    fn push(&self, kind: Kind, ops: Vec<Op>) {
        let until = Instant::now() + self.shared.options.patience;
        let mut refused = Vec::new();
        let mut queue = self.shared.lock();
        for op in ops {
            if op.memory().is_empty() {
                refused.push((op, error(ErrorKind::Invalid, "an object of no bytes")));
            } else if queue.stopped {
                refused.push((op, error(ErrorKind::Cancelled, "the pool's backend has ended")));
            } else {
                queue.waiting.push_back((kind, op, until));
            }
        }
        drop(queue);
        self.shared.rung.notify_all();
        Op::finish_all(refused);
    }
}

impl Backend for PoolBackend {
    fn capabilities(&self) -> BackendCapabilities {
        let PoolBackendOptions { threads, batch, .. } = self.shared.options;
        BackendCapabilities::new("remote pool", threads.max(1).saturating_mul(batch.max(1)), false)
    }

    fn load(&self, ops: Vec<Op>) {
        self.push(Kind::Load, ops);
    }

    fn dump(&self, ops: Vec<Op>) {
        self.push(Kind::Dump, ops);
    }

    fn contains(&self, keys: &[([u8; 16], u32)]) -> Vec<Presence> {
        let keys: Vec<ObjectKey> =
            keys.iter().map(|(block, shard)| self.shared.key(block, *shard)).collect();
        let node = self.shared.node();
        let said = node.exists(&keys, self.shared.deadline());
        if said.contains(&Err(GetOutcome::PeerDown)) {
            self.shared.look_for_another(&*node);
        }
        said.into_iter()
            .map(|said| match said {
                Ok(Some(_)) => Presence::There,
                Ok(None) => Presence::Absent,
                Err(_) => Presence::Unknown,
            })
            .collect()
    }

    fn touch(&self, blocks: &[[u8; 16]]) -> Result<(), StoreError> {
        let shards = 0..self.shared.options.shards_per_block;
        let keys: Vec<ObjectKey> = blocks
            .iter()
            .flat_map(|block| shards.clone().map(|shard| self.shared.key(block, shard)))
            .collect();
        self.shared.node().touch(&keys);
        Ok(())
    }

    fn remove(&self, keys: &[([u8; 16], u32)]) -> Vec<Result<(), StoreError>> {
        let keys: Vec<ObjectKey> =
            keys.iter().map(|(block, shard)| self.shared.key(block, *shard)).collect();
        let outcomes = self.shared.node().remove(&keys, self.shared.deadline());
        outcomes
            .into_iter()
            .map(|outcome| match outcome {
                RemoveOutcome::Removed | RemoveOutcome::Miss => Ok(()),
                RemoveOutcome::PeerDown | RemoveOutcome::Timeout => {
                    error(ErrorKind::Unavailable, "a peer that may have it cannot be reached")
                }
            })
            .collect()
    }
}

impl Drop for PoolBackend {
    fn drop(&mut self) {
        let waiting = {
            let mut queue = self.shared.lock();
            queue.stopped = true;
            std::mem::take(&mut queue.waiting)
        };
        self.shared.rung.notify_all();
        let why = || error(ErrorKind::Cancelled, "the pool's backend has ended");
        Op::finish_all(waiting.into_iter().map(|(_, op, _)| (op, why())));
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of the pool's backend ended by a panic");
            }
        }
    }
}

fn error<T>(kind: ErrorKind, why: impl Into<String>) -> Result<T, StoreError> {
    Err(StoreError::new(kind, why))
}

/// All of an object.
fn ranges(len: u64) -> impl Iterator<Item = ByteRange> {
    (0..len.div_ceil(RANGE)).map(move |number| {
        let offset = number * RANGE;
        ByteRange { offset, len: RANGE.min(len - offset) }
    })
}

/// A load that is asked for.
struct Loading {
    op: Option<Op>,
    key: ObjectKey,
    failed: bool,
}

impl Shared {
    /// Every (block, shard, identity) has a key of its own: digests that differ only where the shard's
    /// number is mixed in do not occur.
    fn key(&self, block: &[u8; 16], shard: u32) -> ObjectKey {
        let mut identity = self.options.identity;
        for (byte, mixed) in identity.iter_mut().zip(shard.to_le_bytes()) {
            *byte ^= mixed;
        }
        ObjectKey { block: *block, identity }
    }

    fn node(&self) -> Arc<dyn Node> {
        Arc::clone(&self.node.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// The agent, or a peer of it, cannot be reached: perhaps another agent has taken over.
    fn look_for_another(&self, node: &dyn Node) {
        let Some(path) = &self.path else { return };
        // One thread looks, and not for every operation.
        let Ok(mut looked) = self.looked.try_lock() else { return };
        if looked.elapsed() < LOOK_EVERY {
            return;
        }
        if node.is_over()
            && let Ok(next) = Rank::connect_by(path, Instant::now() + LOOK)
        {
            *self.node.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(next);
        }
        *looked = Instant::now();
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.options.patience
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        // Nothing panics while it is held.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does what comes next; false when it is over.
    fn work(&self) -> bool {
        let mut queue = self.lock();
        let first = loop {
            if queue.stopped {
                return false;
            }
            match queue.waiting.pop_front() {
                Some(first) => break first,
                None => queue = self.rung.wait(queue).unwrap_or_else(PoisonError::into_inner),
            }
        };
        let (kind, op, until) = first;
        if until <= Instant::now() {
            drop(queue);
            // Others wait behind it: an agent that does not answer is not asked for each.
            op.finish(error(
                ErrorKind::Unavailable,
                "the pool: it waited too long to be asked for",
            ));
            return true;
        }
        if kind == Kind::Dump {
            drop(queue);
            let node = self.node();
            let outcome = self.put(&*node, &op, until);
            if outcome == PutOutcome::PeerDown {
                self.look_for_another(&*node);
            }
            let result = dumped(outcome, op.memory().len());
            op.finish(result);
            return true;
        }
        let mut batch = vec![op];
        while batch.len() < self.options.batch
            && matches!(queue.waiting.front(), Some((Kind::Load, ..)))
            && let Some((_, op, _)) = queue.waiting.pop_front()
        {
            batch.push(op);
        }
        drop(queue);
        self.load(batch, until);
        true
    }

    fn load(&self, ops: Vec<Op>, until: Instant) {
        let wants = ops.iter().map(|op| {
            let len = op.memory().len() as u64;
            Want {
                key: self.key(op.block(), op.shard()),
                len,
                ranges: ranges(len).collect(),
                will_read_all: true,
            }
        });
        let node = self.node();
        // Of the call, should the agent end meanwhile.
        let memory = node.segments();
        let mut call = node.call(wants.collect(), until);
        let mut is_down = false;
        let mut loads: Vec<Loading> = ops
            .into_iter()
            .map(|op| {
                let key = self.key(op.block(), op.shard());
                Loading { op: Some(op), key, failed: false }
            })
            .collect();
        while let Some(event) = call.next() {
            match event {
                Happened::Ready(delivered) => {
                    let Some(load) = loads.get_mut(delivered.index) else { continue };
                    if let Some(op) = &load.op {
                        load.failed |= copy_out(&memory, &delivered, op.memory()).is_none();
                    }
                    let (last, outcome) = (delivered.last, delivered.outcome);
                    // The pages go before anybody is told.
                    drop(delivered);
                    if last {
                        self.end(load, outcome, until);
                    }
                }
                Happened::Ended(index, outcome) => {
                    is_down |= outcome == GetOutcome::PeerDown;
                    if let Some(load) = loads.get_mut(index) {
                        self.end(load, outcome, until);
                    }
                }
            }
        }
        // All have ended; who has not, is told so by the drop.
        if is_down {
            self.look_for_another(&*node);
        }
    }

    fn end(&self, load: &mut Loading, outcome: GetOutcome, until: Instant) {
        let Some(op) = load.op.take() else { return };
        let result = if load.failed && outcome.is_served() {
            error(ErrorKind::Io, "the node's pages could not be copied")
        } else {
            self.loaded(&load.key, op.memory().len() as u64, outcome, until)
        };
        op.finish(result);
    }

    fn loaded(
        &self,
        key: &ObjectKey,
        len: u64,
        outcome: GetOutcome,
        until: Instant,
    ) -> Result<(), StoreError> {
        match outcome {
            GetOutcome::Local | GetOutcome::Remote | GetOutcome::Joined => Ok(()),
            GetOutcome::Miss => error(ErrorKind::Missing, "no peer has it"),
            GetOutcome::Stale => {
                // Gone, or of another length: only the second is somebody's mistake.
                let said = self.node().exists(&[*key], until).pop();
                match said {
                    Some(Ok(Some(there))) if there != len => error(
                        ErrorKind::Corrupt,
                        format!("the object has {there} bytes, not {len}"),
                    ),
                    _ => error(ErrorKind::Missing, "it was evicted or replaced meanwhile"),
                }
            }
            GetOutcome::Invalid | GetOutcome::TooLarge => error(
                ErrorKind::Invalid,
                format!("{len} bytes fit neither the node's medium nor its arena"),
            ),
            GetOutcome::Corrupt => error(ErrorKind::Corrupt, "the bytes are not the object's"),
            GetOutcome::Failed => error(ErrorKind::Io, "the bytes could not be copied"),
            GetOutcome::Busy | GetOutcome::PeerDown | GetOutcome::Timeout => {
                error(ErrorKind::Unavailable, format!("the pool: {outcome:?}"))
            }
        }
    }

    fn put(&self, node: &dyn Node, op: &Op, until: Instant) -> PutOutcome {
        let len = op.memory().len() as u64;
        let key = self.key(op.block(), op.shard());
        let memory = node.segments();
        match node.begin_put(&key, len, until) {
            Ok(put) => {
                let mut buffer = vec![0; COPY.min(op.memory().len())];
                let copied = pieces(&memory, put.pages(), 0, len, |memory, to, before, count| {
                    let buffer = buffer.get_mut(..count)?;
                    op.memory().read(before, buffer).ok()?;
                    memory.write(to, buffer).ok()
                });
                if copied.is_some() { put.commit(until) } else { PutOutcome::Failed }
            }
            Err(outcome) => outcome,
        }
    }
}

fn dumped(outcome: PutOutcome, len: usize) -> Result<(), StoreError> {
    match outcome {
        PutOutcome::Created | PutOutcome::AlreadyExists => Ok(()),
        PutOutcome::Conflict => error(
            ErrorKind::Invalid,
            format!("an object of this key is there with another length than {len}"),
        ),
        PutOutcome::Invalid => error(ErrorKind::Invalid, "an object that cannot be stored"),
        PutOutcome::TooLarge => {
            error(ErrorKind::NoSpace, format!("no peer can ever hold {len} bytes"))
        }
        PutOutcome::NoSpace => error(ErrorKind::NoSpace, format!("no room for {len} bytes")),
        PutOutcome::Failed => error(ErrorKind::Io, "the bytes could not be copied"),
        PutOutcome::Busy | PutOutcome::PeerDown | PutOutcome::Timeout | PutOutcome::Stale => {
            error(ErrorKind::Unavailable, format!("the pool: {outcome:?}"))
        }
    }
}

/// From the node's pages into the operation's memory.
fn copy_out(memory: &[Memory], delivered: &Delivered, to: &IoMemory) -> Option<()> {
    let len = to.len() as u64;
    let mut buffer = vec![0; COPY.min(to.len())];
    let mut copy = |at: u64, len: u64, place: u64| {
        let place = usize::try_from(place).ok()?;
        pieces(memory, &delivered.pages, at, len, |memory, from, before, count| {
            let buffer = buffer.get_mut(..count)?;
            memory.read(from, buffer).ok()?;
            to.write(place + before, buffer).ok()
        })
    };
    if delivered.parts.is_empty() {
        return copy(0, len, 0);
    }
    delivered.parts.iter().try_for_each(|(index, at)| {
        let range = ranges(len).nth(*index)?;
        copy(*at, range.len, range.offset)
    })
}

/// Pieces of at most [`COPY`] bytes of a range of pages: memory, place in it, bytes before, count.
fn pieces(
    segments: &[Memory],
    pages: &PageList,
    offset: u64,
    len: u64,
    mut each: impl FnMut(&Memory, usize, usize, usize) -> Option<()>,
) -> Option<()> {
    let mut good = true;
    let walked = walk(pages, ByteRange { offset, len }, |fragment| {
        let mut copy = || {
            let index = usize::try_from(fragment.addr.region.index).ok()?;
            let memory = segments.get(index)?;
            let from = usize::try_from(fragment.addr.offset).ok()?;
            let before = usize::try_from(fragment.before).ok()?;
            let count = usize::try_from(fragment.len).ok()?;
            (0..count)
                .step_by(COPY)
                .try_for_each(|at| each(memory, from + at, before + at, COPY.min(count - at)))
        };
        good &= copy().is_some();
        if good { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    });
    (good && walked.is_ok()).then_some(())
}
impl fmt::Debug for PoolBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolBackend")
            .field("options", &self.shared.options)
            .field("waiting", &self.shared.lock().waiting.len())
            .finish_non_exhaustive()
    }
}
