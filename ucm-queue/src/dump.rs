//! Dump tasks: what callers submit, how they are checked, and how they end.
//!
//! **Invariant:** both levels of every key end exactly once. A key's `cached` level ends only when
//! nothing reads its source any more, whatever it ends with, so the source may be reused then.

use std::{
    collections::HashSet,
    fmt,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use ucm_ctrl::{FailKind, Key};
use ucm_transport::Addr;

use crate::{
    CommitGroup, ErrorKind, Produced, QueueError,
    admission::{Admission, Share},
    group::Ballot,
    inbox::{Event, Inbox},
    regions::Regions,
    task::Bounds,
};

/// Shards to put into the cache, and further down if asked.
#[derive(Clone, Debug, Default)]
pub struct DumpTask {
    /// The shards; a key may appear once.
    pub shards: Vec<DumpRef>,
    /// Whether the backend must store them too.
    pub durable: bool,
    /// Nothing is read before this event; if its producer fails, the shards end as `Abandoned`.
    pub after: Option<Produced>,
    /// Nothing is published before the whole group commits; if it does not, the shards end as
    /// `Cancelled`. A group waits for a rank that lives and does not vote: see
    /// [`DumpHandle::give_up`]. Its shards need slots, all at once: `NoSpace` if the cache is full,
    /// `Unavailable` if somebody else is filling one, so the ranks of a group dump different keys.
    pub group: Option<CommitGroup>,
}

/// One shard and where its bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DumpRef {
    /// What the bytes are.
    pub key: Key,
    /// First byte of the source.
    pub src: Addr,
    /// Exact length in bytes; the pool's shard size if absent. Never zero.
    pub len: Option<u64>,
}

/// How one level of one key ended.
pub type DumpResult = Result<(), FailKind>;

/// How far one key has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DumpProgress {
    /// Whether the shard is in the cache. `Some` also means that the source may be reused.
    /// `Err(NoSpace)`: the cache was full; the backend's copy does not depend on it.
    pub cached: Option<DumpResult>,
    /// Whether the backend has published the object. Equals `cached` if the task is not `durable`.
    pub durable: Option<DumpResult>,
}

/// The caller's end of a dump task. Thread-safe; dropping it changes nothing.
pub struct DumpHandle {
    shared: Arc<Shared>,
    id: u64,
    inbox: Weak<Inbox>,
}

impl DumpHandle {
    /// Number of keys.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shared.lock().keys.len()
    }

    /// True for a task without keys.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Progress of key `index`; nothing for an index out of range.
    #[must_use]
    pub fn progress(&self, index: usize) -> DumpProgress {
        self.shared.lock().keys.get(index).copied().unwrap_or_default()
    }

    /// Sleeps until the `cached` level of all keys has ended (all sources may be reused), at most
    /// until `deadline`; one result per key.
    #[must_use]
    pub fn wait_cached(&self, deadline: Option<Instant>) -> Option<Vec<DumpResult>> {
        self.shared.wait(deadline, |state| {
            if state.open_cached > 0 {
                return None;
            }
            state.keys.iter().map(|key| key.cached).collect()
        })
    }

    /// Sleeps until the `durable` level of all keys has ended, at most until `deadline`; one result
    /// per key.
    #[must_use]
    pub fn wait_durable(&self, deadline: Option<Instant>) -> Option<Vec<DumpResult>> {
        self.shared.wait(deadline, |state| {
            if state.open_durable > 0 {
                return None;
            }
            state.keys.iter().map(|key| key.durable).collect()
        })
    }

    /// Takes this rank's vote back, if the task is one of a group and the group is not decided: then
    /// the group is off, for all its ranks. The keys end either way; wait for that before you reuse
    /// the sources.
    pub fn give_up(&self) {
        // A queue that is gone has ended the dump.
        let _ = self.inbox.upgrade().map(|inbox| inbox.push(Event::GiveUp(self.id)));
    }
}

impl fmt::Debug for DumpHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DumpHandle").field("keys", &self.shared.lock().keys).finish()
    }
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    keys: Vec<DumpProgress>,
    open_cached: usize,
    open_durable: usize,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<T>(
        &self,
        deadline: Option<Instant>,
        mut ready: impl FnMut(&State) -> Option<T>,
    ) -> Option<T> {
        let mut state = self.lock();
        loop {
            if let Some(value) = ready(&state) {
                return Some(value);
            }
            state = match deadline {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(at) => {
                    let left = at.checked_duration_since(Instant::now())?;
                    let waited = self.changed.wait_timeout(state, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}

/// The queue's end of one key. Whoever works on the key holds it; dropped early, it ends both levels
/// as `Abandoned`.
pub(crate) struct KeyPromise {
    shared: Arc<Shared>,
    index: u32,
}

impl KeyPromise {
    /// Ends the `cached` level.
    pub(crate) fn cached(&self, result: DumpResult) {
        self.end(Some(result), None);
    }

    fn end(&self, cached: Option<DumpResult>, durable: Option<DumpResult>) {
        let mut state = self.shared.lock();
        let State { keys, open_cached, open_durable } = &mut *state;
        let Some(key) = keys.get_mut(self.index as usize) else { return };
        if key.cached.is_none() && cached.is_some() {
            key.cached = cached;
            *open_cached -= 1;
        }
        if key.durable.is_none() && durable.is_some() {
            key.durable = durable;
            *open_durable -= 1;
        }
        let changed = *open_cached == 0 || *open_durable == 0;
        drop(state);
        if changed {
            self.shared.changed.notify_all();
        }
    }
}

impl Drop for KeyPromise {
    fn drop(&mut self) {
        self.end(Some(Err(FailKind::Abandoned)), Some(Err(FailKind::Abandoned)));
    }
}

/// One key of a dump, as it travels through the core. Its share of the limits goes with it.
pub(crate) struct DumpItem {
    pub(crate) key: Key,
    pub(crate) src: Addr,
    pub(crate) len: u64,
    pub(crate) durable: bool,
    /// The dump task, if its shards are held back together.
    pub(crate) group: Option<u64>,
    /// How often another filler's failure was met.
    pub(crate) retries: u8,
    // Fields drop in this order: what the item takes of the limits is back before its end is told.
    /// Set while the item may keep a slot of the cache.
    pub(crate) slot: Option<SlotShare>,
    share: Share,
    task: Arc<Share>,
    pub(crate) promise: KeyPromise,
}

/// Counts slots that dumps keep from the loads of all ranks until they end.
#[derive(Debug, Default)]
pub(crate) struct SlotShares(Arc<AtomicUsize>);

/// One of them; given back on drop.
#[derive(Debug)]
pub(crate) struct SlotShare(Arc<AtomicUsize>);

impl SlotShares {
    pub(crate) fn taken(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn take(&self) -> SlotShare {
        self.0.fetch_add(1, Ordering::Relaxed);
        SlotShare(Arc::clone(&self.0))
    }
}

impl Drop for SlotShare {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl DumpItem {
    /// Ends what is open of the key, and gives its share of the limits back before.
    pub(crate) fn end(self, cached: DumpResult, durable: DumpResult) {
        let Self { promise, slot, share, task, .. } = self;
        drop((slot, share, task));
        promise.end(Some(cached), Some(durable));
    }
}

/// A checked dump task.
pub(crate) struct PreparedDump {
    pub(crate) id: u64,
    pub(crate) items: Vec<DumpItem>,
    /// Whether it must wait for its producer.
    pub(crate) gated: bool,
    pub(crate) ballot: Option<Ballot>,
    /// What the task takes of the limits, beside its items' shares.
    pub(crate) share: Arc<Share>,
}

impl DumpTask {
    /// Checks everything and computes what the core needs.
    pub(crate) fn prepare(
        self,
        id: u64,
        bounds: &Bounds,
        regions: &Regions,
        admission: &Arc<Admission>,
        inbox: &Arc<Inbox>,
    ) -> Result<(Box<PreparedDump>, DumpHandle), QueueError> {
        let mut keys = HashSet::with_capacity(self.shards.len());
        let mut extents = Vec::with_capacity(self.shards.len());
        let mut total = 0_u64;
        for (index, shard) in self.shards.iter().enumerate() {
            if shard.key.shard >= bounds.shards_per_block {
                return Err(QueueError::new(
                    ErrorKind::Invalid,
                    format!(
                        "shard {index} is {:?}, the pool's blocks have {} shards",
                        shard.key, bounds.shards_per_block
                    ),
                ));
            }
            let len = shard.len.unwrap_or(bounds.shard_bytes);
            if len == 0 || len > bounds.shard_bytes {
                return Err(QueueError::new(
                    ErrorKind::TooLarge,
                    format!(
                        "shard {index} has {len} bytes, the pool's slots take 1 to {}",
                        bounds.shard_bytes
                    ),
                ));
            }
            if !keys.insert(shard.key) {
                return Err(QueueError::new(
                    ErrorKind::Invalid,
                    format!("{:?} appears twice in one dump", shard.key),
                ));
            }
            total = total.saturating_add(len);
            extents.push((shard.src, len));
        }
        regions.check(extents.iter().copied())?;
        let (task, shares) = admission.dump(extents.iter().map(|(_, len)| *len), total)?;
        let task = Arc::new(task);
        let open = self.shards.len();
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                keys: vec![DumpProgress::default(); open],
                open_cached: open,
                open_durable: open,
            }),
            changed: Condvar::new(),
        });
        let items = (0_u32..)
            .zip(self.shards)
            .zip(extents)
            .zip(shares)
            .map(|(((index, shard), (src, len)), share)| DumpItem {
                key: shard.key,
                src,
                len,
                durable: self.durable,
                group: self.group.as_ref().map(|_| id),
                retries: 0,
                promise: KeyPromise { shared: Arc::clone(&shared), index },
                slot: None,
                share,
                task: Arc::clone(&task),
            })
            .collect();
        let ballot = self.group.map(|group| {
            let inbox = Arc::downgrade(inbox);
            let decided = move |commit| {
                // Nobody is left to care when the queue is gone.
                let _ = inbox.upgrade().map(|inbox| inbox.push(Event::Decided(id, commit)));
            };
            Ballot::new(group, Box::new(decided))
        });
        let gated = self.after.is_some();
        Ok((
            Box::new(PreparedDump { id, items, gated, ballot, share: task }),
            DumpHandle { shared, id, inbox: Arc::downgrade(inbox) },
        ))
    }
}
