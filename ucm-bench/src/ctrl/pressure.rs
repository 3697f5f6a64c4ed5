//! Misses in a full cache, with and without preallocation.
//!
//! Owns: the full tables and the supply of new keys.
//! **Invariant:** processor time is measured, so that a mean over uneven work can be trusted on a
//! busy machine. The tables are full before anything is timed and no key is asked for twice, so
//! every miss evicts.

use ucm_ctrl::{
    Acquired, Control, Fill, Geometry, Key, Member, MemberSpec, Pool, PoolId, Prealloc as Made,
};

use super::{
    peer,
    spec::{Prealloc, TASK_BLOCKS, key, shard},
};
use crate::{clock, error::BenchError};

/// A full table in which everything is asked for once.
#[derive(Debug)]
pub(crate) struct Pressure {
    member: Member,
    pool: Pool,
    slots: u32,
    next: u64,
}

impl Pressure {
    /// With `reserved` slots for preallocation, and blocks of this many shards.
    pub(crate) fn make(slots: u32, reserved: u32, shards: u32) -> Result<Self, BenchError> {
        let geometry = Geometry::single(slots, reserved, shards, 1);
        let control = Control::create(&geometry, [4; 16]).map_err(peer)?;
        let member = control.join(MemberSpec::rank(0, 1)).map_err(peer)?;
        let pool = member.pool(PoolId(0)).map_err(peer)?;
        let mut made = Self { member, pool, slots, next: 0 };
        for _ in 0..slots {
            let number = made.number();
            made.load(&key(number))?;
        }
        Ok(made)
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn own(&self, key: &Key) -> Result<Fill, BenchError> {
        match self.pool.acquire(key).map_err(peer)? {
            Acquired::Owner(fill) => Ok(fill),
            other => Err(peer(format!("{key:?} was never loaded, but: {other:?}"))),
        }
    }

    fn load(&self, key: &Key) -> Result<(), BenchError> {
        publish(self.own(key)?)
    }

    fn evictions(&self) -> u64 {
        self.member.control().statistics().evictions
    }

    /// Nanoseconds of acquire, publish, release and, one lap later, eviction; over two laps of the
    /// CLOCK hand, as its work is uneven within a lap.
    pub(crate) fn miss(&mut self) -> Result<f64, BenchError> {
        let count = u64::from(self.slots) * 2;
        let before = self.evictions();
        let keys: Vec<Key> = (0..count).map(|_| key(self.number())).collect();
        let start = clock::cpu_ns();
        for key in &keys {
            self.load(key)?;
        }
        let passed = clock::cpu_ns() - start;
        let evicted = self.evictions() - before;
        if evicted != count {
            return Err(peer(format!("{count} misses in a full cache evicted {evicted} keys")));
        }
        Ok(passed as f64 / count as f64)
    }

    /// Tasks of [`TASK_BLOCKS`] blocks load shard 0; then, in every other task after preallocation,
    /// the acquires of shard 1 are timed. Two laps as in [`miss`](Self::miss).
    pub(crate) fn prealloc(&mut self) -> Result<Prealloc, BenchError> {
        let rounds = (self.slots / TASK_BLOCKS / 2).max(1);
        let mut timed = [0_u64; 2];
        let (mut prealloc_ns, mut made) = (0, 0_u64);
        for round in 0..rounds * 2 {
            let blocks: Vec<u64> = (0..TASK_BLOCKS).map(|_| self.number()).collect();
            for block in &blocks {
                self.load(&shard(*block, 0))?;
            }
            let keys: Vec<Key> = blocks.iter().map(|block| shard(*block, 1)).collect();
            let ahead = round % 2 == 1;
            if ahead {
                let start = clock::cpu_ns();
                for key in &keys {
                    let answer = self.pool.prealloc(key).map_err(peer)?;
                    made += u64::from(matches!(answer, Made::Made | Made::MadeReserved));
                }
                prealloc_ns += clock::cpu_ns() - start;
            }
            let mut fills = Vec::with_capacity(keys.len());
            let start = clock::cpu_ns();
            for key in &keys {
                fills.push(self.own(key)?);
            }
            let [without, with] = &mut timed;
            *if ahead { with } else { without } += clock::cpu_ns() - start;
            fills.into_iter().try_for_each(publish)?;
        }
        let count = f64::from(rounds * TASK_BLOCKS);
        let [without, with] = timed.map(|ns| ns as f64 / count);
        Ok(Prealloc {
            with_ns: with,
            without_ns: without,
            prealloc_ns: prealloc_ns as f64 / count,
            made_ratio: made as f64 / count,
        })
    }
}

fn publish(fill: Fill) -> Result<(), BenchError> {
    fill.publish().map(drop).map_err(|error| peer(format!("a publish was refused: {error:?}")))
}

#[cfg(test)]
mod tests {
    use super::Pressure;

    #[test]
    fn p4_preallocation_is_used_by_the_acquires_after_it() {
        let mut pressure = Pressure::make(1024, 64, 2).unwrap();
        let before = pressure.member.control().statistics();
        let measured = pressure.prealloc().unwrap();
        let after = pressure.member.control().statistics();
        let made = after.preallocs - before.preallocs;
        assert_eq!(after.takeovers - before.takeovers, made, "{measured:?}");
        assert!((measured.made_ratio - made as f64 / 512.0).abs() < 1e-9, "{measured:?}");
        assert!(made > 0 && measured.with_ns > 0.0 && measured.without_ns > 0.0, "{measured:?}");
    }

    #[test]
    fn every_miss_evicts() {
        let mut pressure = Pressure::make(512, 0, 1).unwrap();
        assert!(pressure.miss().unwrap() > 0.0);
    }
}
