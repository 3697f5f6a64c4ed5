//! What all roles of a node start from.
//!
//! **Invariant:** nothing happens to the system before a role is started.

use std::{path::PathBuf, sync::Arc, time::Duration};

use ucm_ctrl::{Expelled, Inspection, MemberId, MemberInspection, MemberState, OBSERVER};
use ucm_store::Backend;
use ucm_transport::TransferEngine;

use crate::{
    Config, Error, PoolConfig, Rank, Scheduler,
    backends::Backends,
    instance::{self, Instance},
    rank::RankParts,
};

/// A node's cache as this process is configured to use it. Cheap to clone; thread-safe.
#[derive(Clone, Debug)]
pub struct Node {
    config: Arc<Config>,
}

/// Settings of a [`Node`] in code.
#[derive(Clone, Debug)]
#[must_use]
pub struct NodeBuilder {
    config: Config,
}

impl Node {
    /// A node with the default settings and this name: processes of one user that use the same name
    /// share a cache.
    pub fn builder(name: impl Into<String>) -> NodeBuilder {
        let mut config = Config::default();
        config.cache.name = name.into();
        NodeBuilder { config }
    }

    /// A node configured by a file, the environment or flags.
    ///
    /// # Errors
    /// `Config` with the setting, the value and what is possible.
    pub fn new(config: Config) -> Result<Self, Error> {
        config.check()?;
        Ok(Self { config: Arc::new(config) })
    }

    /// The settings in force.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// A rank on device `device_id`: creates or joins the cache when started.
    pub fn rank(&self, device_id: u32) -> RankBuilder {
        RankBuilder { node: self.clone(), device_id, backend: None, engine: None, progress: None }
    }

    /// Joins as scheduler: asks what is there and makes leases, maps no bytes.
    ///
    /// # Errors
    /// As [`RankBuilder::start`]. With `cache.scheduler_first = "wait"`, `Environment` when no rank
    /// came in time.
    pub fn scheduler(&self) -> Result<Scheduler, Error> {
        Scheduler::join(&self.config)
    }
}

/// Looks at the cache that lives in the configured directory, whatever its pools; creates none.
///
/// # Errors
/// `Environment` when no cache lives there within `patience`.
pub fn inspect(config: &Config, patience: Duration) -> Result<Inspected, Error> {
    Ok(Observer::join(config, patience)?.look())
}

/// Looks at a cache again and again. It is a member meanwhile: it hears of deaths and clears up, and the
/// cache's memory stays for as long as it does.
pub struct Observer {
    instance: Instance,
}

impl Observer {
    /// Joins the cache that lives in the configured directory, whatever its pools; creates none.
    ///
    /// # Errors
    /// `Environment` when no cache lives there within `patience`.
    pub fn join(config: &Config, patience: Duration) -> Result<Self, Error> {
        Ok(Self { instance: instance::observe(config, patience)? })
    }

    /// What the cache looks like now. Milliseconds per million slots.
    #[must_use]
    pub fn look(&self) -> Inspected {
        let control = self.instance.member.control();
        let segments = self.instance.segments.iter();
        Inspected {
            observer: self.instance.member.id().0,
            shard_bytes: control.geometry().pools.iter().map(|pool| pool.shard_bytes).collect(),
            pages: segments.map(|s| s.geometry().reached().to_string()).collect(),
            inspection: control.inspect(),
        }
    }

    /// Whether there is nobody but observers: time to leave, or they keep memory that nobody uses.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        let members = self.instance.member.control().inspect_members();
        let uses = |m: &MemberInspection| {
            m.device_id != OBSERVER && matches!(m.state, MemberState::Joined | MemberState::Joining)
        };
        !members.iter().any(uses)
    }
}

impl std::fmt::Debug for Observer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Observer").field("seat", &self.instance.member.id()).finish_non_exhaustive()
    }
}

/// Declares the member on a seat gone although its process lives: for an operator who knows that it
/// will not come back in time (stuck in the kernel, in a debugger, in swap). Its fills are taken from
/// it and their keys can be loaded again at once; what it may still write stays in quarantine until
/// it lets go or ends. When it goes on, all its calls fail as `Fenced`.
///
/// # Errors
/// `Environment` when no cache lives in the directory within `patience`; `Config` when nobody (or
/// another stay than `generation` names) holds the seat.
pub fn expel(
    config: &Config,
    patience: Duration,
    seat: u8,
    generation: Option<u32>,
) -> Result<Expelled, Error> {
    let instance = instance::observe(config, patience)?;
    let members = instance.member.control().inspect_members();
    let holder = members.iter().find(|m| m.index == seat && m.index != instance.member.id().0);
    let wanted = |m: &&MemberInspection| generation.is_none_or(|g| g == m.generation);
    let Some(holder) = holder.filter(wanted) else {
        let seats: Vec<String> =
            members.iter().map(|m| format!("{} (generation {})", m.index, m.generation)).collect();
        return Err(Error::Config(format!(
            "nobody to expel on seat {seat}; seats in use: {}",
            seats.join(", ")
        )));
    };
    Ok(instance.member.expel(MemberId(seat), holder.generation))
}

/// A cache as [`inspect`] found it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Inspected {
    /// Seat of the process that looked.
    pub observer: u8,
    /// Bytes of a shard, by pool.
    pub shard_bytes: Vec<u64>,
    /// Page tier, by pool.
    pub pages: Vec<String>,
    /// What it saw.
    pub inspection: Inspection,
}

impl NodeBuilder {
    /// Adds a slot class: bytes of a shard, shards of a block, slots.
    pub fn pool(mut self, shard_bytes: u64, shards_per_block: u32, slots: u32) -> Self {
        let name = format!("pool{}", self.config.pool.len());
        self.config.pool.push(PoolConfig {
            name,
            shard_bytes,
            shards_per_block,
            slots,
            ..PoolConfig::default()
        });
        self
    }

    /// Ranks on this node.
    pub fn ranks(mut self, ranks: u32) -> Self {
        self.config.cache.ranks = ranks;
        self
    }

    /// Instance directory, instead of one of this user's own.
    pub fn dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.config.cache.dir = dir.into();
        self
    }

    /// Changes any other setting.
    pub fn configure(mut self, change: impl FnOnce(&mut Config)) -> Self {
        change(&mut self.config);
        self
    }

    /// Checks the settings.
    ///
    /// # Errors
    /// `Config` with the setting, the value and what is possible.
    pub fn build(self) -> Result<Node, Error> {
        Node::new(self.config)
    }
}

/// Called with bytes done and bytes in total.
type Progress = Arc<dyn Fn(u64, u64) + Send + Sync>;

/// What a rank is started with.
#[must_use]
pub struct RankBuilder {
    node: Node,
    device_id: u32,
    backend: Option<Arc<dyn Backend>>,
    engine: Option<Arc<dyn TransferEngine>>,
    progress: Option<Progress>,
}

impl RankBuilder {
    /// Backend below the cache, instead of the configured one. With several pools it serves all of
    /// them: block ids are then derived from pool and block, so that pools never meet in it.
    pub fn backend(mut self, backend: Arc<dyn Backend>) -> Self {
        self.backend = Some(backend);
        self
    }

    /// Transfer engine, instead of the host engine. The rank takes all its completions: to share one
    /// between ranks of a process, give each a lane of a [`SharedEngine`](ucm_transport::SharedEngine).
    pub fn engine(mut self, engine: Arc<dyn TransferEngine>) -> Self {
        self.engine = Some(engine);
        self
    }

    /// Called while memory is allocated and mapped, with bytes done and bytes in total.
    pub fn progress(mut self, progress: impl Fn(u64, u64) + Send + Sync + 'static) -> Self {
        self.progress = Some(Arc::new(progress));
        self
    }

    /// Creates or joins the cache and starts a queue per pool.
    ///
    /// # Errors
    /// `Incompatible` when the directory's cache has another version or geometry (both named),
    /// `Environment` when memory, pages, permissions or time do not suffice, with what would help.
    pub fn start(self) -> Result<Rank, Error> {
        let config = &self.node.config;
        let backends = match self.backend {
            Some(backend) => Backends::given(config, backend),
            None => Backends::configured(config)?,
        };
        let progress = self.progress;
        Rank::start(RankParts {
            config: config.clone(),
            device_id: self.device_id,
            backends,
            engine: self.engine,
            progress: &|done, total| {
                if let Some(progress) = &progress {
                    progress(done, total);
                }
            },
        })
    }
}

impl std::fmt::Debug for RankBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RankBuilder").field("device_id", &self.device_id).finish_non_exhaustive()
    }
}
