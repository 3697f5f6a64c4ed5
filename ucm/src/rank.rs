//! A rank: loads shards into its device's memory and dumps them back, through the shared cache.
//!
//! **Invariant:** the queues end before the mapping and the membership they work on.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use ucm_ctrl::{
    BlockId, Identity, Inspection, Key, Member, MemberId, MemberSpec, MemberState, MemberStay,
    Pool, PoolId,
};
use ucm_data::{Mapped, PeerWatch, RendezvousStats, WhenAbsent};
use ucm_queue::{
    Builder, CommitGroup, DumpHandle, DumpRef, DumpTask, GroupId, LoadQueue, QueueStats, Request,
    ShardRef, SharedBoard, StagingLayout, StagingPool, Task, TaskHandle,
};
use ucm_transport::{Addr, HostEngine, Memory, RegionId, SharedEngine, TransferEngine};

use crate::{
    Config, Error,
    backends::Backends,
    instance::{self, Instance, Progress},
    metrics::{LaneMeter, MetricsServer, RankMeter},
    slots::{Buffers, PoolSlots},
};

pub(crate) struct RankParts<'a> {
    pub(crate) config: Arc<Config>,
    pub(crate) device_id: u32,
    pub(crate) backends: Backends,
    pub(crate) engine: Option<Arc<dyn TransferEngine>>,
    pub(crate) progress: &'a Progress<'a>,
}

/// A member with a device. Thread-safe. Dropping it ends its queues and leaves the cache.
#[derive(Debug)]
pub struct Rank {
    // Fields drop in this order: queues, then mappings, then the membership.
    metrics: Option<MetricsServer>,
    lanes: Vec<Lane>,
    engine: Arc<dyn TransferEngine>,
    backends: Backends,
    member: Member,
    watch: PeerWatch,
    created: bool,
    config: Arc<Config>,
    identity: Identity,
    failed_touches: AtomicU64,
    device_id: u32,
}

#[derive(Debug)]
struct Lane {
    queue: LoadQueue,
    pool: Pool,
    mapped: Arc<Mapped>,
    unreachable_bytes: u64,
}

/// What a rank runs on, for reports: nothing degrades silently.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankReport {
    /// True when this process created the cache.
    pub created: bool,
    /// Page tier of each pool.
    pub pages: Vec<String>,
    /// Bytes of each pool that lie on a smaller page tier than asked for.
    pub degraded_bytes: Vec<u64>,
    /// Bytes of each pool that the engine could not register; copied by the processor.
    pub unreachable_bytes: Vec<u64>,
    /// Transfer engine.
    pub engine: String,
    /// Mode of the backend.
    pub backend: String,
}

impl Rank {
    pub(crate) fn start(parts: RankParts<'_>) -> Result<Self, Error> {
        let RankParts { config, device_id, backends, engine, progress } = parts;
        let ranks = config.cache.ranks;
        let device = i32::try_from(device_id)
            .map_err(|_| Error::Config(format!("device id {device_id} is too large")))?;
        let metrics_at = config.cache.metrics_address(device_id)?;
        let spec = MemberSpec::rank(device, ranks);
        let Instance { member, segments, created, watch } =
            instance::enter(&config, spec, WhenAbsent::Create, progress)?;
        let engine = match engine {
            Some(engine) => engine,
            None => Arc::new(HostEngine::builder().workers(config.queue.copy_threads).build()?),
        };
        // Each queue takes all completions of its engine: several need a lane each.
        let shared = (segments.len() > 1).then(|| SharedEngine::new(engine.clone()));
        let mut lanes = Vec::with_capacity(segments.len());
        for (index, segments) in segments.iter().enumerate() {
            let engine = shared.as_ref().map_or_else(|| engine.clone(), SharedEngine::lane);
            let backend = backends.of_pool(index);
            let mapped = segments.map()?;
            if config.cache.prefault {
                let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(4));
                mapped.prefault(threads, progress)?;
            }
            let pool = member.pool(PoolId(u8::try_from(index).unwrap_or(u8::MAX)))?;
            let slots = Arc::new(PoolSlots::register(mapped.clone(), engine.clone())?);
            let unreachable_bytes = slots.unreachable_bytes();
            let mut builder =
                LoadQueue::builder(&member, &pool, slots, backend.clone(), engine.clone())
                    .rank(device_id % ranks, ranks)
                    .order(config.queue.order.into())
                    .dump_depth(config.queue.dump_depth)
                    .max_dump_bytes(config.queue.max_dump_bytes)
                    .grace(std::time::Duration::from_millis(config.queue.close_timeout_ms));
            if config.queue.backend_depth != 0 {
                builder = builder.backend_depth(config.queue.backend_depth);
            }
            if config.queue.tasks_in_flight != 0 {
                builder = builder.tasks_in_flight(config.queue.tasks_in_flight);
            }
            builder = staging(builder, &config, &pool, &engine)?;
            lanes.push(Lane { queue: builder.start()?, pool, mapped, unreachable_bytes });
        }
        let identity = config.namespace.identity();
        let mut rank = Self {
            lanes,
            engine,
            backends,
            member,
            watch,
            created,
            config,
            identity,
            failed_touches: AtomicU64::new(0),
            device_id,
            metrics: None,
        };
        if let Some(at) = metrics_at {
            let meter = rank.meter();
            // The rank ends the server before itself.
            let text = move || Some(meter.text());
            rank.metrics = Some(MetricsServer::start("cache.metrics", at, text)?);
        }
        Ok(rank)
    }

    /// Makes memory usable as destination and source: host memory here, device memory with a
    /// device's engine.
    ///
    /// # Errors
    /// What the engine says.
    pub fn register(&self, memory: Memory) -> Result<RegionId, Error> {
        let len = memory.len() as u64;
        let region = self.engine.register(memory)?;
        for lane in &self.lanes {
            lane.queue.add_region(region, len);
        }
        Ok(region)
    }

    /// Forgets memory.
    ///
    /// # Errors
    /// `Busy` while a copy uses it; it stays usable then.
    pub fn deregister(&self, region: RegionId) -> Result<(), Error> {
        let lens: Vec<_> = self.lanes.iter().map(|lane| lane.queue.remove_region(region)).collect();
        let result = self.engine.deregister(region);
        if result.is_err() {
            for (lane, len) in self.lanes.iter().zip(lens) {
                if let Some(len) = len {
                    lane.queue.add_region(region, len);
                }
            }
        }
        Ok(result?)
    }

    /// Loads shards of full size as one request: the bytes of each key go to its address.
    ///
    /// # Errors
    /// See [`submit`](Self::submit).
    pub fn load(&self, pool: PoolId, shards: &[(Key, Addr)]) -> Result<TaskHandle, Error> {
        let shards = shards.iter().map(|(key, dst)| ShardRef { key: *key, dst: *dst, len: None });
        self.submit(
            pool,
            Task { requests: vec![Request { shards: shards.collect(), deadline: None }] },
        )
    }

    /// Submits a load task. Returns at once.
    ///
    /// # Errors
    /// Nothing was accepted, and the message has the numbers.
    pub fn submit(&self, pool: PoolId, task: Task) -> Result<TaskHandle, Error> {
        Ok(self.lane(pool)?.queue.submit(task)?)
    }

    /// Dumps shards of full size: from each address into the cache and, if `durable`, the backend.
    ///
    /// # Errors
    /// See [`submit_dump`](Self::submit_dump).
    pub fn dump(
        &self,
        pool: PoolId,
        shards: &[(Key, Addr)],
        durable: bool,
    ) -> Result<DumpHandle, Error> {
        let shards = shards.iter().map(|(key, src)| DumpRef { key: *key, src: *src, len: None });
        self.submit_dump(
            pool,
            DumpTask { shards: shards.collect(), durable, ..DumpTask::default() },
        )
    }

    /// Submits a dump task. Returns at once.
    ///
    /// # Errors
    /// Nothing was accepted; `Busy` is back-pressure.
    pub fn submit_dump(&self, pool: PoolId, task: DumpTask) -> Result<DumpHandle, Error> {
        Ok(self.lane(pool)?.queue.dump(task)?)
    }

    /// This rank's part in a commit of all ranks of the node: for [`DumpTask::group`]. The same `id`
    /// for all of them, new for each attempt and each dump task (for example a hash of the block and
    /// a counter).
    ///
    /// # Errors
    /// `Refused` unless each of `cache.ranks` devices has one rank in the cache; nobody waits for
    /// this rank then.
    pub fn commit_group(&self, id: GroupId) -> Result<CommitGroup, Error> {
        let members = self.member.control().inspect_members();
        let mut seats: Vec<_> = members
            .into_iter()
            .filter(|member| member.state == MemberState::Joined && member.device_id >= 0)
            .map(|member| {
                let id = MemberId(member.index);
                (member.device_id, MemberStay { id, generation: member.generation })
            })
            .collect();
        seats.sort_unstable_by_key(|(device, stay)| (*device, stay.id));
        let ranks = self.config.cache.ranks;
        let roster: Vec<_> = seats.iter().map(|(_, stay)| *stay).collect();
        let mine = roster.iter().position(|stay| *stay == self.member.stay());
        let distinct = seats.windows(2).all(|two| matches!(two, [a, b] if a.0 != b.0));
        match mine.and_then(|rank| u32::try_from(rank).ok()) {
            Some(rank) if distinct && roster.len() == ranks as usize => {
                let board = SharedBoard::new(&self.member, roster);
                Ok(CommitGroup { board, id, rank, ranks })
            }
            _ => {
                let devices: Vec<_> = seats.iter().map(|(device, _)| *device).collect();
                Err(Error::Control(ucm_ctrl::CtrlError::Invalid(format!(
                    "ranks of devices {devices:?} are in the cache, a commit of all takes one on \
                     each of {ranks}: try again when they are"
                ))))
            }
        }
    }

    /// Renews blocks in the cache and, once, in the backend; returns resident shards renewed.
    ///
    /// # Errors
    /// `Fenced`. Failures of the backend are counted there.
    pub fn touch(&self, blocks: &[BlockId]) -> Result<usize, Error> {
        let mut touched = 0;
        let raw: Vec<[u8; 16]> = blocks.iter().map(|block| block.0).collect();
        for (index, lane) in self.lanes.iter().enumerate() {
            touched += lane.pool.touch(blocks)?;
            if let Err(error) = self.backends.of_pool(index).touch(&raw) {
                self.failed_touches.fetch_add(1, Ordering::Relaxed);
                tracing::debug!(%error, "the backend could not renew {} blocks", raw.len());
            }
        }
        Ok(touched)
    }

    /// Touches that a backend refused or failed, since the start.
    #[must_use]
    pub fn failed_touches(&self) -> u64 {
        self.failed_touches.load(Ordering::Relaxed)
    }

    /// The control plane of a pool.
    ///
    /// # Errors
    /// `Refused` for a pool that does not exist.
    pub fn pool(&self, pool: PoolId) -> Result<&Pool, Error> {
        Ok(&self.lane(pool)?.pool)
    }

    /// The bytes of a pool.
    ///
    /// # Errors
    /// `Refused` for a pool that does not exist.
    pub fn data(&self, pool: PoolId) -> Result<&Arc<Mapped>, Error> {
        Ok(&self.lane(pool)?.mapped)
    }

    /// What a pool's queue has done and holds.
    ///
    /// # Errors
    /// `Refused` for a pool that does not exist.
    pub fn stats(&self, pool: PoolId) -> Result<QueueStats, Error> {
        Ok(self.lane(pool)?.queue.stats())
    }

    /// Reads the metrics of this rank and its cache.
    #[must_use]
    pub fn meter(&self) -> RankMeter {
        let report = self.report();
        let lane = |lane: &Lane| LaneMeter {
            queue: lane.queue.meter(),
            page_bytes: lane.mapped.geometry().reached().page_bytes(),
            degraded_bytes: lane.mapped.geometry().degraded_bytes(),
            unreachable_bytes: lane.unreachable_bytes,
        };
        RankMeter {
            device: self.device_id,
            engine: report.engine,
            backend: report.backend,
            member: self.member.downgrade(),
            watch: self.watch.clone(),
            lanes: self.lanes.iter().map(lane).collect(),
        }
    }

    /// Where its metrics can be read by HTTP, see [`CacheConfig::metrics`](crate::CacheConfig).
    #[must_use]
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics.as_ref().map(MetricsServer::address)
    }

    /// This rank's membership in the control region.
    #[must_use]
    pub fn member(&self) -> &Member {
        &self.member
    }

    /// What other members were seen to do.
    #[must_use]
    pub fn rendezvous_stats(&self) -> RendezvousStats {
        self.watch.stats()
    }

    /// The identity function of this rank's namespace: engine key → block id.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Settings in force.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// A walk over the control region.
    #[must_use]
    pub fn inspect(&self) -> Inspection {
        self.member.control().inspect()
    }

    /// What this rank runs on.
    #[must_use]
    pub fn report(&self) -> RankReport {
        RankReport {
            created: self.created,
            pages: self
                .lanes
                .iter()
                .map(|lane| lane.mapped.geometry().reached().to_string())
                .collect(),
            degraded_bytes: self
                .lanes
                .iter()
                .map(|lane| lane.mapped.geometry().degraded_bytes())
                .collect(),
            unreachable_bytes: self.lanes.iter().map(|lane| lane.unreachable_bytes).collect(),
            engine: self.engine.name().into(),
            backend: self.backends.of_pool(0).capabilities().mode,
        }
    }

    fn lane(&self, pool: PoolId) -> Result<&Lane, Error> {
        self.lanes.get(usize::from(pool.0)).ok_or_else(|| {
            Error::Control(ucm_ctrl::CtrlError::Invalid(format!(
                "there is no pool {}, the cache has {}",
                pool.0,
                self.lanes.len()
            )))
        })
    }
}

/// Gives a queue its staging buffers: three quarters for loads, a quarter for dumps.
fn staging(
    builder: Builder,
    config: &Config,
    pool: &Pool,
    engine: &Arc<dyn TransferEngine>,
) -> Result<Builder, Error> {
    let queue = &config.queue;
    if queue.staging_bytes == 0 {
        return Ok(builder);
    }
    let given = |value: u64| (value != 0).then_some(value);
    let depth = (queue.staging_buffers != 0).then_some(queue.staging_buffers);
    let size = given(queue.staging_buffer_bytes);
    let shard = pool.shard_bytes();
    // Shards may be larger than anybody who wrote the default had in mind.
    let budget = queue.staging_bytes.max(shard.saturating_mul(4));
    let layout = StagingLayout::for_budget(budget, 1, shard, size, depth)?;
    let buffers = Buffers::new(layout.depth, layout.buffer_bytes, engine.clone())?;
    let buffers = Arc::new(buffers);
    let for_dumps = layout.depth / 4;
    let mut builder = builder.staging(StagingPool::new(buffers.clone(), for_dumps..layout.depth)?);
    if for_dumps > 0 {
        builder = builder.dump_staging(StagingPool::new(buffers, 0..for_dumps)?);
    }
    Ok(builder)
}
