//! A sink that keeps what ended, and makes operations that end in it.
//!
//! **Invariant:** an operation that ends twice, or one that nobody made here, is a panic.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use crate::{Completed, ErrorKind, IoMemory, Op, Sink, StoreError};

/// Longest time that anything in a test may take.
const WATCHDOG: Duration = Duration::from_secs(60);

/// A sink for tests.
#[derive(Debug, Default)]
pub struct Collector {
    state: Mutex<State>,
    more: Condvar,
}

#[derive(Debug, Default)]
struct State {
    next_token: u64,
    open: HashSet<u64>,
    ended: Vec<Completed>,
    batches: Vec<usize>,
}

impl Collector {
    /// A new sink.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// An operation on zeroed private memory; returns it with its token.
    ///
    /// # Panics
    /// When the memory cannot be allocated.
    pub fn op(self: &Arc<Self>, block: [u8; 16], shard: u32, len: usize) -> (u64, Op) {
        let memory = if len == 0 {
            // SAFETY: zero bytes are valid everywhere.
            unsafe { IoMemory::from_raw(std::ptr::NonNull::dangling(), 0, Box::new(())) }
        } else {
            IoMemory::private(len).unwrap()
        };
        self.op_on(block, shard, memory)
    }

    /// An operation on this memory; returns it with its token.
    pub fn op_on(self: &Arc<Self>, block: [u8; 16], shard: u32, memory: IoMemory) -> (u64, Op) {
        let mut state = self.lock();
        let token = state.next_token;
        state.next_token += 1;
        state.open.insert(token);
        let sink: Arc<dyn Sink> = Arc::<Self>::clone(self);
        (token, Op::new(block, shard, token, memory, sink))
    }

    /// An operation on private memory with these bytes, to be dumped.
    ///
    /// # Panics
    /// When the memory cannot be allocated.
    pub fn op_with(self: &Arc<Self>, block: [u8; 16], shard: u32, bytes: &[u8]) -> (u64, Op) {
        let memory = IoMemory::private(bytes.len()).unwrap();
        memory.write(0, bytes).unwrap();
        self.op_on(block, shard, memory)
    }

    /// Waits for `count` ends and takes them, by token.
    ///
    /// # Panics
    /// When they do not come within a minute.
    pub fn wait(&self, count: usize) -> HashMap<u64, Completed> {
        self.wait_within(count, WATCHDOG)
    }

    /// As [`wait`](Self::wait), with a watchdog of its own.
    ///
    /// # Panics
    /// When the ends do not come in time.
    pub fn wait_within(&self, count: usize, watchdog: Duration) -> HashMap<u64, Completed> {
        let deadline = Instant::now() + watchdog;
        let mut state = self.lock();
        while state.ended.len() < count {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(
                !left.is_zero(),
                "{} of {count} operations ended within {watchdog:?}; open: {:?}",
                state.ended.len(),
                state.open
            );
            state = self.more.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.ended.drain(..).map(|c| (c.token, c)).collect()
    }

    /// Waits for one end and takes its result and bytes.
    ///
    /// # Panics
    /// When it does not come, or when more than one was there.
    pub fn wait_one(&self) -> (Result<(), ErrorKind>, Vec<u8>) {
        let mut all = self.wait(1).into_values();
        let one = all.next().unwrap();
        assert!(all.next().is_none(), "more than one operation had ended");
        (one.result.map_err(|e: StoreError| e.kind()), bytes_of(&one.memory))
    }

    /// Number of operations that have not ended.
    pub fn open(&self) -> usize {
        self.lock().open.len()
    }

    /// Number of ends not taken yet.
    pub fn ended(&self) -> usize {
        self.lock().ended.len()
    }

    /// Sizes of the batches in which ends came.
    pub fn batches(&self) -> Vec<usize> {
        self.lock().batches.clone()
    }

    fn take(&self, batch: Vec<Completed>) {
        let mut state = self.lock();
        state.batches.push(batch.len());
        for completed in batch {
            assert!(state.open.remove(&completed.token), "token {} ended twice", completed.token);
            state.ended.push(completed);
        }
        drop(state);
        self.more.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sink for Collector {
    fn complete(&self, completed: Completed) {
        self.take(vec![completed]);
    }

    fn complete_all(&self, batch: Vec<Completed>) {
        self.take(batch);
    }
}

fn bytes_of(memory: &IoMemory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    memory.read(0, &mut bytes).unwrap();
    bytes
}
