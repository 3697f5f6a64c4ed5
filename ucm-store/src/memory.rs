//! A backend in the memory of this process.
//!
//! **Invariant:** an object is replaced as a whole: a reader copies from the old bytes or the new
//! ones, never from a mix.

use std::{
    collections::HashMap,
    sync::{
        Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{Backend, BackendCapabilities, ErrorKind, Op, Presence, StoreError, op, raw};

const SHARDS: usize = 64;

type Key = ([u8; 16], u32);
type Map = HashMap<Key, Arc<[u8]>>;

/// Keeps objects in this process. All operations complete inside the call.
///
/// Cheap to share by `Arc`; safe to use from many threads.
#[derive(Debug)]
pub struct MemoryBackend {
    maps: Vec<RwLock<Map>>,
    used_bytes: AtomicU64,
    capacity_bytes: u64,
}

impl Default for MemoryBackend {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryBackend {
    /// Without a limit.
    #[must_use]
    pub fn new() -> Self {
        Self::with_capacity(u64::MAX)
    }

    /// With at most this many bytes of objects; a dump beyond it ends as `NoSpace`.
    #[must_use]
    pub fn with_capacity(capacity_bytes: u64) -> Self {
        let maps = (0..SHARDS).map(|_| RwLock::default()).collect();
        Self { maps, used_bytes: AtomicU64::new(0), capacity_bytes }
    }

    /// Bytes of all objects.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }

    /// Number of objects.
    #[must_use]
    pub fn len(&self) -> usize {
        self.maps.iter().map(|m| read(m).len()).sum()
    }

    /// True when nothing is stored.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes of an object.
    #[must_use]
    pub fn object(&self, block: &[u8; 16], shard: u32) -> Option<Arc<[u8]>> {
        let key = (*block, shard);
        read(self.map(&key)).get(&key).cloned()
    }

    /// Stores an object as a dump does.
    ///
    /// # Errors
    /// `NoSpace` when the capacity does not allow it; an object that was there stays.
    pub fn insert(&self, block: &[u8; 16], shard: u32, bytes: Arc<[u8]>) -> Result<(), StoreError> {
        let key = (*block, shard);
        let mut map = write(self.map(&key));
        let new = bytes.len() as u64;
        let old = map.get(&key).map_or(0, |o| o.len() as u64);
        // Other maps may change the sum meanwhile; growth is reserved by compare-and-swap.
        let reserve = |used: u64| {
            let after = used.saturating_sub(old).checked_add(new)?;
            (after <= self.capacity_bytes || new <= old).then_some(after)
        };
        let swap = self.used_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, reserve);
        if let Err(used) = swap {
            return Err(StoreError::new(
                ErrorKind::NoSpace,
                format!("{new} bytes more than {used} of {} bytes in memory", self.capacity_bytes),
            ));
        }
        map.insert(key, bytes);
        Ok(())
    }

    fn load_one(&self, op: &Op) -> Result<(), StoreError> {
        op::refuse_empty(op)?;
        let Some(object) = self.object(op.block(), op.shard()) else {
            return Err(StoreError::new(ErrorKind::Missing, "not in memory"));
        };
        if object.len() != op.memory().len() {
            return Err(StoreError::new(
                ErrorKind::Corrupt,
                format!("the object has {} bytes, not {}", object.len(), op.memory().len()),
            ));
        }
        op.memory().write(0, &object)
    }

    fn dump_one(&self, op: &Op) -> Result<(), StoreError> {
        op::refuse_empty(op)?;
        self.insert(op.block(), op.shard(), raw::snapshot(op.memory()))
    }

    fn map(&self, key: &Key) -> &RwLock<Map> {
        // Block ids are hashes already: any byte spreads, the shard index is mixed in.
        let [a, .., b] = key.0;
        let at = (usize::from(a ^ b) ^ key.1 as usize) % SHARDS;
        match self.maps.get(at) {
            Some(map) => map,
            None => unreachable!("invariant: there are {SHARDS} maps"),
        }
    }
}

impl Backend for MemoryBackend {
    fn capabilities(&self) -> BackendCapabilities {
        BackendCapabilities::new("memory", 64, false)
    }

    fn load(&self, ops: Vec<Op>) {
        op::finish_each(ops, |op| self.load_one(op));
    }

    fn dump(&self, ops: Vec<Op>) {
        op::finish_each(ops, |op| self.dump_one(op));
    }

    fn contains(&self, keys: &[Key]) -> Vec<Presence> {
        let there = |key: &Key| read(self.map(key)).contains_key(key);
        keys.iter().map(|k| if there(k) { Presence::There } else { Presence::Absent }).collect()
    }

    fn touch(&self, _blocks: &[[u8; 16]]) -> Result<(), StoreError> {
        Ok(())
    }

    fn remove(&self, keys: &[Key]) -> Vec<Result<(), StoreError>> {
        let one = |key: &Key| {
            let removed = write(self.map(key)).remove(key);
            if let Some(object) = removed {
                self.used_bytes.fetch_sub(object.len() as u64, Ordering::Relaxed);
            }
            Ok(())
        };
        keys.iter().map(one).collect()
    }
}

fn read(map: &RwLock<Map>) -> RwLockReadGuard<'_, Map> {
    map.read().unwrap_or_else(PoisonError::into_inner)
}

fn write(map: &RwLock<Map>) -> RwLockWriteGuard<'_, Map> {
    map.write().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capacity_is_exact_and_failures_change_nothing() {
        let backend = MemoryBackend::with_capacity(100);
        let bytes = |n: usize, b: u8| Arc::from(vec![b; n]);
        backend.insert(&[1; 16], 0, bytes(60, 1)).unwrap();
        backend.insert(&[2; 16], 0, bytes(40, 2)).unwrap();
        assert_eq!(backend.used_bytes(), 100);
        let err = backend.insert(&[3; 16], 0, bytes(1, 3)).unwrap_err();
        assert_eq!(err.kind(), ErrorKind::NoSpace);
        let err = backend.insert(&[1; 16], 0, bytes(61, 9)).unwrap_err();
        assert_eq!(err.kind(), ErrorKind::NoSpace);
        assert_eq!(*backend.object(&[1; 16], 0).unwrap(), [1; 60]);
        backend.insert(&[1; 16], 0, bytes(50, 4)).unwrap();
        assert_eq!(backend.used_bytes(), 90);
        assert!(backend.remove(&[([1; 16], 0), ([9; 16], 0)]).iter().all(Result::is_ok));
        assert_eq!((backend.used_bytes(), backend.len()), (40, 1));
    }
}
