//! Several backends as one: each block lives in one of them.
//!
//! **Invariant:** which one follows from the block and the names alone (rendezvous hashing), so every
//! process that names the same backends, in any order, looks in the same place; adding or removing one moves
//! only the blocks that it gets or had.

use std::collections::HashSet;

use crate::{
    Backend, BackendCapabilities, ErrorKind, Op, Presence, Stack, StoreError, Tier, TierReport,
    random::SplitMix, xxh3::xxh3_64,
};

type Key = ([u8; 16], u32);

/// Several backends of the same speed, for example one for each disk, with the blocks spread evenly.
///
/// All shards of a block are in one backend: what fails takes whole blocks along, and only its own. Each has
/// its own breaker, as in a [`Stack`]: while one is off, operations on its blocks end as `Unavailable`, and
/// those of the others go on. An object is looked for nowhere else: blocks that a new backend gets are
/// missing until they are stored again, and what lies where nobody looks is removed as unused by its quota.
///
/// Threads may share it.
#[derive(Debug)]
pub struct Spread {
    members: Vec<Member>,
}

#[derive(Debug)]
struct Member {
    seed: u64,
    stack: Stack,
}

impl Spread {
    /// Puts backends together; their names are what blocks are spread by.
    ///
    /// # Errors
    /// `Invalid` without a backend, if two have the same name, or for settings that make no sense for a
    /// backend alone (see [`Stack::new`]).
    pub fn new(backends: Vec<Tier>) -> Result<Self, StoreError> {
        let invalid = |what: String| Err(StoreError::new(ErrorKind::Invalid, what));
        if backends.is_empty() {
            return invalid("there is no backend to spread blocks over".into());
        }
        let mut names = HashSet::new();
        let mut members = Vec::new();
        for backend in backends {
            let name = backend.name().to_owned();
            let seed = xxh3_64(name.as_bytes());
            if !names.insert(name.clone()) {
                return invalid(format!("two backends are named {name:?}"));
            }
            members.push(Member { seed, stack: Stack::new(vec![backend])? });
        }
        Ok(Self { members })
    }

    /// Counts of each backend, in order.
    #[must_use]
    pub fn report(&self) -> Vec<TierReport> {
        self.members.iter().flat_map(|member| member.stack.report()).collect()
    }

    /// Where a block lives.
    fn place(&self, block: &[u8; 16]) -> usize {
        let hash = xxh3_64(block);
        let weight = |member: &Member| SplitMix::new(hash ^ member.seed).next();
        let weights = self.members.iter().enumerate().map(|(at, m)| ((weight(m), m.seed), at));
        weights.max().map_or(0, |(_, at)| at)
    }

    /// What each backend gets, with the places where it stood.
    fn split<T>(
        &self,
        all: impl IntoIterator<Item = T>,
        block: impl Fn(&T) -> [u8; 16],
    ) -> impl Iterator<Item = (&Stack, Vec<usize>, Vec<T>)> {
        let mut parts: Vec<_> = self.members.iter().map(|m| (&m.stack, vec![], vec![])).collect();
        for (at, one) in all.into_iter().enumerate() {
            if let Some((_, places, part)) = parts.get_mut(self.place(&block(&one))) {
                places.push(at);
                part.push(one);
            }
        }
        parts.into_iter().filter(|(_, places, _)| !places.is_empty())
    }
}

impl Backend for Spread {
    fn capabilities(&self) -> BackendCapabilities {
        let all: Vec<_> = self.members.iter().map(|m| m.stack.capabilities()).collect();
        let modes: Vec<&str> = all.iter().map(|c| c.mode.as_str()).collect();
        let alike = modes.iter().all(|mode| Some(mode) == modes.first());
        let mode = match modes.first() {
            Some(mode) if alike => format!("{} x {mode}", modes.len()),
            _ => modes.join(" + "),
        };
        BackendCapabilities {
            mode,
            depth: all.iter().map(|c| c.depth).sum(),
            durable: all.iter().all(|c| c.durable),
            writable: all.iter().any(|c| c.writable),
        }
    }

    fn load(&self, ops: Vec<Op>) {
        self.split(ops, |op| *op.block()).for_each(|(backend, _, ops)| backend.load(ops));
    }

    fn dump(&self, ops: Vec<Op>) {
        self.split(ops, |op| *op.block()).for_each(|(backend, _, ops)| backend.dump(ops));
    }

    fn contains(&self, keys: &[Key]) -> Vec<Presence> {
        let mut merged = vec![Presence::Unknown; keys.len()];
        for (backend, places, keys) in self.split(keys.iter().copied(), |key| key.0) {
            for (at, presence) in places.into_iter().zip(backend.contains(&keys)) {
                if let Some(place) = merged.get_mut(at) {
                    *place = presence;
                }
            }
        }
        merged
    }

    fn touch(&self, blocks: &[[u8; 16]]) -> Result<(), StoreError> {
        let touch = |(backend, _, blocks): (&Stack, _, Vec<_>)| backend.touch(&blocks);
        // All of them, whatever one says.
        let results: Vec<_> =
            self.split(blocks.iter().copied(), |block| *block).map(touch).collect();
        results.into_iter().collect()
    }

    fn remove(&self, keys: &[Key]) -> Vec<Result<(), StoreError>> {
        let mut merged: Vec<_> = keys.iter().map(|_| Ok(())).collect();
        for (backend, places, keys) in self.split(keys.iter().copied(), |key| key.0) {
            for (at, result) in places.into_iter().zip(backend.remove(&keys)) {
                if let Some(place) = merged.get_mut(at) {
                    *place = result;
                }
            }
        }
        merged
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    };

    use super::*;
    use crate::{
        Fault, FaultBackend, FileBackend, FileConfig, MemoryBackend, Rule, fill_pattern,
        testing::{Collector, Keeps, conformance},
        verify_pattern,
    };

    const LEN: usize = 1000;

    fn block(n: u64) -> [u8; 16] {
        let mut block = [0; 16];
        block[..8].copy_from_slice(&n.to_le_bytes());
        block
    }

    fn memory(names: &[&str]) -> Spread {
        let one = |name: &&str| Tier::new(*name, Arc::new(MemoryBackend::new()));
        Spread::new(names.iter().map(one).collect()).unwrap()
    }

    /// Broken on purpose: answers of `contains` and `remove` are not put back in their places.
    #[test]
    fn conforms_over_three_directories() {
        let dir = tempfile::tempdir().unwrap();
        let next = AtomicU64::new(0);
        conformance(Keeps::Everything, || {
            let case = dir.path().join(next.fetch_add(1, Ordering::Relaxed).to_string());
            let one = |name| {
                let config = FileConfig::new(case.join(name), "ns").threads(2);
                Tier::new(name, Arc::new(FileBackend::open(config).unwrap()))
            };
            Arc::new(Spread::new(["a", "b", "c"].map(one).into()).unwrap())
        });
    }

    /// Broken on purpose: blocks are spread by number modulo the count; by the order of the names.
    #[test]
    fn blocks_are_spread_evenly_and_few_move() {
        let three = memory(&["a", "b", "c"]);
        let four = memory(&["d", "c", "b", "a"]);
        let mut counts = [0_u32; 4];
        let mut moved = 0;
        for n in 0..40_000 {
            let (before, after) = (three.place(&block(n)), 3 - four.place(&block(n)));
            counts[after] += 1;
            if before != after {
                assert_eq!(after, 3, "only the new one gets blocks");
                moved += 1;
            }
        }
        assert!(counts.iter().all(|n| (9_500..10_500).contains(n)), "{counts:?}");
        assert_eq!(moved, counts[3]);
    }

    /// Broken on purpose: one breaker for all.
    #[test]
    fn a_failing_backend_takes_only_its_own_blocks() {
        let disks =
            ["a", "b", "c"].map(|name| (name, Arc::new(FaultBackend::new(MemoryBackend::new()))));
        let tier = |(name, disk): &(&str, Arc<FaultBackend<MemoryBackend>>)| {
            Tier::new(*name, Arc::<FaultBackend<MemoryBackend>>::clone(disk)).failures_off(5)
        };
        let spread = Spread::new(disks.iter().map(tier).collect()).unwrap();
        let bytes = |n: u64| {
            let mut bytes = vec![0; LEN];
            fill_pattern(&mut bytes, &block(n), 3, 0, 0);
            bytes
        };
        let sink = Collector::new();
        spread.dump((0..60).map(|n| sink.op_with(block(n), 3, &bytes(n)).1).collect());
        assert!(sink.wait(60).into_values().all(|c| c.result.is_ok()));
        disks[1].1.add(Rule::new(Fault::Fail(ErrorKind::Io)));
        let mut kinds = Vec::new();
        for n in 0..60 {
            spread.load(vec![sink.op(block(n), 3, LEN).1]);
            let (result, bytes) = sink.wait_one();
            if spread.place(&block(n)) == 1 {
                kinds.push(result.unwrap_err());
            } else {
                result.unwrap();
                verify_pattern(&bytes, &block(n), 3, 0, 0).unwrap();
            }
        }
        assert!(kinds.len() > 8, "{}", kinds.len());
        assert_eq!(kinds[..5], [ErrorKind::Io; 5]);
        assert!(kinds[5..].iter().all(|kind| *kind == ErrorKind::Unavailable));
        let off: Vec<bool> = spread.report().iter().map(|r| r.loads_off).collect();
        assert_eq!(off, [false, true, false]);
        let of = |n: u64| spread.contains(&[(block(n), 3)])[0];
        for n in 0..60 {
            let expected =
                if spread.place(&block(n)) == 1 { Presence::Unknown } else { Presence::There };
            assert_eq!(of(n), expected);
        }
    }

    #[test]
    fn names_tell_backends_apart() {
        let same = || Tier::new("a", Arc::new(MemoryBackend::new()));
        for backends in [vec![], vec![same(), same()]] {
            assert_eq!(Spread::new(backends).unwrap_err().kind(), ErrorKind::Invalid);
        }
        assert_eq!(memory(&["a", "b"]).capabilities().mode, "2 x memory");
    }
}
