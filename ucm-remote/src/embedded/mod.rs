//! A directory in the memory of one process.
//!
//! Records lie in shards by key, each under a lock of its own, so that clients and the removal of a
//! whole peer do not wait for each other: a run that is gone is invisible at once, and its records are
//! taken out a thousand at a time.
//!
//! **Invariant:** only records of a registered run are ever told.

mod shard;

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    hash::{BuildHasher, RandomState},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicU64, Ordering},
    },
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use self::shard::{Run, Shard};
use crate::{
    Directory, DirectoryError, Epoch, Member, MostFree, ObjectKey, PeerId, Placement,
    PlacementStrategy, Record, Token,
};

const SHARDS: usize = 64;

/// Records taken out under one hold of a lock.
const BATCH: usize = 1024;

/// Boot tokens of ended runs that are remembered for each peer.
const REMEMBERED: usize = 16;

/// Bounds of an [`EmbeddedDirectory`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EmbeddedLimits {
    /// Records; more are dropped and counted.
    pub records: usize,
    /// Peers, gone ones that are still remembered included; more are refused.
    pub peers: usize,
    /// Candidates of a placement.
    pub candidates: usize,
}

impl Default for EmbeddedLimits {
    /// 2²⁷ records (about 14 GiB when full), 4,096 peers, 3 candidates.
    fn default() -> Self {
        Self { records: 1 << 27, peers: 4096, candidates: 3 }
    }
}

/// The directory of a machine or of a small cluster. Thread-safe; no call does IO or waits longer than
/// for a batch of another's records.
pub struct EmbeddedDirectory {
    epoch: Epoch,
    limits: EmbeddedLimits,
    strategy: Box<dyn PlacementStrategy>,
    hasher: RandomState,
    shards: Vec<Mutex<Shard>>,
    peers: RwLock<Peers>,
    dropped: AtomicU64,
}

#[derive(Debug, Default)]
struct Peers {
    by_id: HashMap<PeerId, Known>,
    /// Members by run.
    runs: HashMap<Run, Arc<Member>>,
    next: Run,
}

#[derive(Debug, Default)]
struct Known {
    run: Option<Run>,
    /// Boot tokens of runs that have ended.
    ended: VecDeque<Token>,
}

impl Known {
    fn end(&mut self, boot: Token) {
        if self.ended.len() == REMEMBERED {
            self.ended.pop_front();
        }
        self.ended.push_back(boot);
    }
}

impl Peers {
    /// Makes room by forgetting a peer that is gone.
    fn forget_one(&mut self, most: usize) -> Result<(), DirectoryError> {
        let gone = self.by_id.iter().find(|(_, known)| known.run.is_none());
        let Some(peer) = gone.map(|(peer, _)| peer.clone()) else {
            return Err(DirectoryError::Refused(format!("there are {most} peers already")));
        };
        self.by_id.remove(&peer);
        Ok(())
    }

    fn run_of(&self, peer: &PeerId, boot: Token) -> Option<Run> {
        let run = self.by_id.get(peer)?.run?;
        self.runs.get(&run).filter(|member| member.boot == boot).map(|_| run)
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while it is held.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl EmbeddedDirectory {
    /// An empty one, with an epoch later than that of any started before on a machine whose clock goes
    /// forward. New objects go where most bytes are free.
    #[must_use]
    pub fn new(limits: EmbeddedLimits) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            epoch: Epoch(u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)),
            limits,
            strategy: Box::new(MostFree),
            hasher: RandomState::new(),
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            peers: RwLock::default(),
            dropped: AtomicU64::new(0),
        }
    }

    /// With another strategy for new objects.
    #[must_use]
    pub fn with_strategy(self, strategy: impl PlacementStrategy + 'static) -> Self {
        Self { strategy: Box::new(strategy), ..self }
    }

    /// Records that were dropped because the directory was full.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Records, those of ended runs that are not taken out yet included.
    #[must_use]
    pub fn records(&self) -> usize {
        self.shards.iter().map(|shard| locked(shard).records_count()).sum()
    }

    /// Bytes of the records' tables, as allocated.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.shards.iter().map(|shard| locked(shard).bytes()).sum()
    }

    fn peers(&self) -> RwLockReadGuard<'_, Peers> {
        self.peers.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn peers_mut(&self) -> RwLockWriteGuard<'_, Peers> {
        self.peers.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn shard(&self, key: &ObjectKey) -> Option<MutexGuard<'_, Shard>> {
        let hash = self.hasher.hash_one(key);
        let index = usize::try_from(hash % SHARDS as u64).unwrap_or(0);
        self.shards.get(index).map(locked)
    }

    fn clear(&self, run: Run) {
        for shard in &self.shards {
            while !locked(shard).clear(run, BATCH) {}
        }
    }
}

/// The runs of all these records, or why they are refused.
fn runs_of(peers: &Peers, records: &[(ObjectKey, Record)]) -> Result<Vec<Run>, DirectoryError> {
    let run = |(_, record): &(ObjectKey, Record)| {
        peers.run_of(&record.peer, record.boot).ok_or_else(|| {
            let peer = &record.peer;
            DirectoryError::Refused(format!("peer {peer} is not registered with this boot token"))
        })
    };
    records.iter().map(run).collect()
}

fn in_time(deadline: Instant) -> Result<(), DirectoryError> {
    if Instant::now() < deadline { Ok(()) } else { Err(DirectoryError::Timeout) }
}

impl Directory for EmbeddedDirectory {
    fn epoch(&self, _: Instant) -> Result<Epoch, DirectoryError> {
        Ok(self.epoch)
    }

    fn locate(
        &self,
        keys: &[ObjectKey],
        deadline: Instant,
    ) -> Result<Vec<Vec<Record>>, DirectoryError> {
        in_time(deadline)?;
        let peers = self.peers();
        let records = |key: &ObjectKey| {
            let Some(shard) = self.shard(key) else { return Vec::new() };
            let told = shard.records(key).filter_map(|entry| {
                let member = peers.runs.get(&entry.run)?;
                Some(Record {
                    peer: member.peer.clone(),
                    boot: member.boot,
                    generation: entry.generation,
                    len: entry.len,
                    tier: entry.tier,
                })
            });
            told.collect()
        };
        Ok(keys.iter().map(records).collect())
    }

    fn announce(
        &self,
        records: &[(ObjectKey, Record)],
        deadline: Instant,
    ) -> Result<(), DirectoryError> {
        let room = self.limits.records / SHARDS;
        for batch in records.chunks(BATCH) {
            in_time(deadline)?;
            // Under the lock: a run that ends now is cleared after the last of these.
            let peers = self.peers();
            for ((key, record), run) in batch.iter().zip(runs_of(&peers, batch)?) {
                let what = (record.generation, record.len, record.tier);
                let kept =
                    self.shard(key).is_some_and(|mut shard| shard.announce(key, run, what, room));
                if !kept {
                    self.dropped.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        Ok(())
    }

    fn withdraw(
        &self,
        records: &[(ObjectKey, Record)],
        deadline: Instant,
    ) -> Result<(), DirectoryError> {
        in_time(deadline)?;
        let runs = runs_of(&self.peers(), records)?;
        for ((key, record), run) in records.iter().zip(runs) {
            if let Some(mut shard) = self.shard(key) {
                shard.withdraw(key, run, record.generation);
            }
        }
        Ok(())
    }

    fn register(&self, member: &Member, deadline: Instant) -> Result<Epoch, DirectoryError> {
        in_time(deadline)?;
        let ended = {
            let mut peers = self.peers_mut();
            let peers = &mut *peers;
            if peers.by_id.len() >= self.limits.peers && !peers.by_id.contains_key(&member.peer) {
                peers.forget_one(self.limits.peers)?;
            }
            let known = peers.by_id.entry(member.peer.clone()).or_default();
            if known.ended.contains(&member.boot) {
                return Err(DirectoryError::Refused(
                    "this run was removed: register with a new boot token".into(),
                ));
            }
            let before = known.run.and_then(|run| Some((run, peers.runs.get(&run)?.boot)));
            if let Some((run, boot)) = before
                && boot == member.boot
            {
                peers.runs.insert(run, Arc::new(member.clone()));
                return Ok(self.epoch);
            }
            peers.next = peers.next.wrapping_add(1);
            known.run = Some(peers.next);
            peers.runs.insert(peers.next, Arc::new(member.clone()));
            if let Some((run, boot)) = before {
                known.end(boot);
                peers.runs.remove(&run);
            }
            before.map(|(run, _)| run)
        };
        ended.into_iter().for_each(|run| self.clear(run));
        Ok(self.epoch)
    }

    fn remove_peer(
        &self,
        peer: &PeerId,
        boot: Token,
        deadline: Instant,
    ) -> Result<(), DirectoryError> {
        in_time(deadline)?;
        let run = {
            let mut peers = self.peers_mut();
            let Some(run) = peers.run_of(peer, boot) else { return Ok(()) };
            peers.runs.remove(&run);
            if let Some(known) = peers.by_id.get_mut(peer) {
                known.run = None;
                known.end(boot);
            }
            run
        };
        self.clear(run);
        Ok(())
    }

    fn members(&self, _: Instant) -> Result<Vec<Member>, DirectoryError> {
        let mut members: Vec<Member> =
            self.peers().runs.values().map(|member| Member::clone(member)).collect();
        members.sort_by(|a, b| a.peer.cmp(&b.peer));
        Ok(members)
    }

    fn place(
        &self,
        objects: &[(ObjectKey, u64)],
        deadline: Instant,
    ) -> Result<Vec<Placement>, DirectoryError> {
        let members = self.members(deadline)?;
        let place = |(key, len): &(ObjectKey, u64)| {
            self.strategy.place(key, *len, &members, self.limits.candidates)
        };
        Ok(objects.iter().map(place).collect())
    }
}

impl fmt::Debug for EmbeddedDirectory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EmbeddedDirectory")
            .field("epoch", &self.epoch)
            .field("strategy", &self.strategy)
            .finish_non_exhaustive()
    }
}
