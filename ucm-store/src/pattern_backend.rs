//! A synthetic backend: every object exists, and its bytes are the pattern of its key.
//!
//! **Invariant:** a load that ends well filled the memory with exactly the pattern of its key and
//! generation; a dump ends well only if the bytes are that pattern.

use std::{
    collections::{HashMap, HashSet},
    sync::{Mutex, MutexGuard, PoisonError},
};

use crate::{
    Backend, BackendCapabilities, ErrorKind, Meter, Op, Presence, StoreError, fill_pattern,
    meter::Direction, op, verify_pattern,
};

type Key = ([u8; 16], u32);

const CHUNK: usize = 4096;

/// Generates objects instead of keeping them: for benchmarks, and for tests in several processes
/// that must agree on the bytes without sharing anything.
///
/// All operations complete inside the call; wrap it in a
/// [`LatencyBackend`](crate::LatencyBackend) to give it the timing of a device.
#[derive(Debug)]
pub struct PatternBackend {
    generation: u64,
    object_bytes: Option<usize>,
    shards_per_block: Option<u32>,
    meter: Meter,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    removed: HashSet<Key>,
    generations: HashMap<Key, u64>,
}

impl Default for PatternBackend {
    fn default() -> Self {
        Self::new(0)
    }
}

impl PatternBackend {
    /// Objects of this generation; every length and every shard index exists.
    #[must_use]
    pub fn new(generation: u64) -> Self {
        Self {
            generation,
            object_bytes: None,
            shards_per_block: None,
            meter: Meter::default(),
            state: Mutex::default(),
        }
    }

    /// Fixes the length of all objects: other lengths end as `Corrupt`.
    #[must_use]
    pub fn object_bytes(mut self, bytes: usize) -> Self {
        self.object_bytes = Some(bytes);
        self
    }

    /// Limits the shard indexes: a shard beyond ends as `Missing`.
    #[must_use]
    pub fn shards_per_block(mut self, shards: u32) -> Self {
        self.shards_per_block = Some(shards);
        self
    }

    /// What was loaded and dumped. Operations end within their call, so the in-flight figures
    /// count what one call brings; those of a device are in the meter of the latency wrapper.
    pub fn meter(&self) -> &Meter {
        &self.meter
    }

    /// Gives one object another generation, as if it had been stored anew.
    pub fn set_generation(&self, block: &[u8; 16], shard: u32, generation: u64) {
        self.lock().generations.insert((*block, shard), generation);
    }

    fn generation_of(&self, key: Key) -> Result<u64, StoreError> {
        if let Some(shards) = self.shards_per_block.filter(|shards| key.1 >= *shards) {
            return Err(StoreError::new(
                ErrorKind::Missing,
                format!("shard {} of blocks with {shards} shards", key.1),
            ));
        }
        let state = self.lock();
        if state.removed.contains(&key) {
            return Err(StoreError::new(ErrorKind::Missing, "removed"));
        }
        Ok(state.generations.get(&key).copied().unwrap_or(self.generation))
    }

    fn check_length(&self, op: &Op) -> Result<(), StoreError> {
        op::refuse_empty(op)?;
        match self.object_bytes {
            Some(bytes) if bytes != op.memory().len() => Err(StoreError::new(
                ErrorKind::Corrupt,
                format!("objects have {bytes} bytes, not {}", op.memory().len()),
            )),
            _ => Ok(()),
        }
    }

    fn load_one(&self, op: &Op) -> Result<(), StoreError> {
        let generation = self.generation_of((*op.block(), op.shard()))?;
        self.check_length(op)?;
        let mut chunk = [0; CHUNK];
        for_chunks(op.memory().len(), |offset, len, word| {
            let (chunk, _) = chunk.split_at_mut(len);
            fill_pattern(chunk, op.block(), op.shard(), word, generation);
            op.memory().write(offset, chunk)
        })
    }

    fn dump_one(&self, op: &Op) -> Result<(), StoreError> {
        self.check_length(op)?;
        let key = (*op.block(), op.shard());
        let known = self.lock().generations.get(&key).copied();
        let generation = known.unwrap_or(self.generation);
        let mut chunk = [0; CHUNK];
        for_chunks(op.memory().len(), |offset, len, word| {
            let (chunk, _) = chunk.split_at_mut(len);
            op.memory().read(offset, chunk)?;
            verify_pattern(chunk, op.block(), op.shard(), word, generation).map_err(|wrong| {
                StoreError::new(ErrorKind::Corrupt, format!("dumped bytes are wrong: {wrong}"))
            })
        })?;
        self.lock().removed.remove(&key);
        Ok(())
    }

    fn run(
        &self,
        direction: Direction,
        ops: Vec<Op>,
        work: impl Fn(&Op) -> Result<(), StoreError>,
    ) {
        self.meter.started(&ops, direction);
        for op in ops {
            let result = work(&op);
            self.meter.ended(direction, op.memory().len(), result.is_ok());
            op.finish(result);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Backend for PatternBackend {
    fn capabilities(&self) -> BackendCapabilities {
        BackendCapabilities::new("pattern", 64, false)
    }

    fn load(&self, ops: Vec<Op>) {
        self.run(Direction::Load, ops, |op| self.load_one(op));
    }

    fn dump(&self, ops: Vec<Op>) {
        self.run(Direction::Dump, ops, |op| self.dump_one(op));
    }

    fn contains(&self, keys: &[Key]) -> Vec<Presence> {
        let there = |key: &Key| self.generation_of(*key).is_ok();
        keys.iter().map(|k| if there(k) { Presence::There } else { Presence::Absent }).collect()
    }

    fn touch(&self, _blocks: &[[u8; 16]]) -> Result<(), StoreError> {
        Ok(())
    }

    fn remove(&self, keys: &[Key]) -> Vec<Result<(), StoreError>> {
        let mut state = self.lock();
        keys.iter()
            .map(|key| {
                state.removed.insert(*key);
                Ok(())
            })
            .collect()
    }
}

/// Calls `each` with (offset in bytes, length, first word) of all chunks.
fn for_chunks(
    len: usize,
    mut each: impl FnMut(usize, usize, u64) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    (0..len)
        .step_by(CHUNK)
        .try_for_each(|offset| each(offset, CHUNK.min(len - offset), offset as u64 / 8))
}
