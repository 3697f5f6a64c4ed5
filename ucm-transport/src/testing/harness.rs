//! How the suite gets engines and memory, and how it waits for plans.
//!
//! **Invariant:** a [`Runner`] polls only after a wake-up, so a lost one fails the test.

use std::{collections::HashMap, sync::Arc};

use super::Bell;
use crate::{
    Addr, Completion, Hold, Memory, RegionId, Ticket, Transfer, TransferEngine, TransferPlan,
};

/// Makes engines, and the memory they work on, for the conformance suite.
///
/// Any `Fn() -> Arc<dyn TransferEngine>` is one, with host memory on both sides.
pub trait Harness {
    /// A new engine that nothing else refers to.
    fn engine(&self) -> Arc<dyn TransferEngine>;

    /// Memory that the engine can read from.
    fn source(&self, len: usize) -> Memory {
        Memory::host(len).unwrap()
    }

    /// Memory that the engine can write to.
    fn destination(&self, len: usize) -> Memory {
        Memory::host(len).unwrap()
    }

    /// Makes such memory usable in plans of an engine made by [`engine`](Self::engine).
    fn register(&self, engine: &dyn TransferEngine, memory: &Memory) -> RegionId {
        engine.register(memory.clone()).unwrap()
    }

    /// Whether the engine moves bytes from destination memory to destination memory.
    fn copies_locally(&self) -> bool {
        true
    }

    /// Reads bytes of such memory.
    fn read(&self, memory: &Memory, offset: usize, into: &mut [u8]) {
        memory.read(offset, into).unwrap();
    }

    /// Writes bytes of such memory.
    fn write(&self, memory: &Memory, offset: usize, from: &[u8]) {
        memory.write(offset, from).unwrap();
    }
}

impl<F: Fn() -> Arc<dyn TransferEngine>> Harness for F {
    fn engine(&self) -> Arc<dyn TransferEngine> {
        self()
    }
}

/// Submits plans to an engine and collects their ends.
#[derive(Debug)]
pub struct Runner {
    engine: Arc<dyn TransferEngine>,
    bell: Arc<Bell>,
    ended: HashMap<Ticket, Completion>,
}

impl Runner {
    /// Becomes the engine's waker.
    #[must_use]
    pub fn new(engine: Arc<dyn TransferEngine>) -> Self {
        let bell = Bell::new();
        engine.set_waker(Some(bell.waker()));
        Self { engine, bell, ended: HashMap::new() }
    }

    /// Submits items.
    ///
    /// # Panics
    /// When the engine rejects them.
    pub fn submit(&self, items: Vec<Transfer>, holds: Vec<Hold>) -> Ticket {
        self.engine.submit(TransferPlan { items, holds }).unwrap()
    }

    /// Waits for the end of a plan.
    ///
    /// # Panics
    /// When it does not come in time, or a ticket ends twice.
    pub fn wait(&mut self, ticket: Ticket) -> Completion {
        loop {
            let seen = self.bell.rings();
            self.poll();
            if let Some(completion) = self.ended.remove(&ticket) {
                return completion;
            }
            self.bell.wait_past(seen);
        }
    }

    /// Polls once; returns how many plans ended.
    ///
    /// # Panics
    /// When a ticket ends twice.
    pub fn poll(&mut self) -> usize {
        let mut out = Vec::new();
        let count = self.engine.poll(&mut out);
        assert_eq!(count, out.len(), "poll returns what it pushed");
        for completion in out {
            let ticket = completion.ticket;
            assert!(self.ended.insert(ticket, completion).is_none(), "{ticket:?} ended twice");
        }
        count
    }

    /// The engine.
    #[must_use]
    pub fn engine(&self) -> &Arc<dyn TransferEngine> {
        &self.engine
    }
}

/// Tells a thread of a test to stop, also when the test fails.
#[cfg(test)]
#[derive(Debug, Default)]
pub(crate) struct StopOnDrop(pub(crate) Arc<std::sync::atomic::AtomicBool>);

#[cfg(test)]
impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, std::sync::atomic::Ordering::SeqCst);
    }
}

/// One item.
pub(crate) fn item(src: RegionId, from: u64, dst: RegionId, to: u64, len: u64) -> Transfer {
    Transfer { src: Addr { region: src, offset: from }, dst: Addr { region: dst, offset: to }, len }
}
