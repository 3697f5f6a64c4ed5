//! Configuration: one tree of settings from defaults, a TOML file, the environment and flags.
//!
//! **Invariant:** later sources win (defaults < file < environment < flags), a key that nobody
//! knows stops the start, and what is in force can be printed whole.

use std::{
    net::{SocketAddr, ToSocketAddrs as _},
    path::PathBuf,
    time::Duration,
};

use serde::{Deserialize, Serialize};
use ucm_ctrl::{Identity, Namespace, ParallelAxis};
use ucm_data::{PageTier, Sockets, WhenAbsent};

use crate::Error;

mod layers;
mod remote;

pub use remote::{PlacementKind, RemoteConfig};

/// Longest pool name.
const MAX_NAME_BYTES: usize = 64;

/// What a file's header has room for.
const MAX_DESCRIPTOR_BYTES: usize = 4008;

/// All settings of a node's cache.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The shared cache.
    pub cache: CacheConfig,
    /// Slot classes, at least one.
    pub pool: Vec<PoolConfig>,
    /// Where shards come from and go to below the cache.
    pub backend: BackendConfig,
    /// Load and dump queues of each rank.
    pub queue: QueueConfig,
    /// What determines the bytes of a block besides the engine's key.
    pub namespace: NamespaceConfig,
    /// The remote pool: `ucm peer`, `ucm pool`, and ranks that find a peer of their node.
    pub remote: RemoteConfig,
}

/// The shared cache.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct CacheConfig {
    /// Instance directory: processes that name the same directory share a cache. Empty: a
    /// directory of this user named after `name`.
    pub dir: PathBuf,
    /// Name of the cache, used when `dir` is empty.
    pub name: String,
    /// Ranks on this node.
    pub ranks: u32,
    /// Best page tier to try: "1g", "2m", "thp" or "4k".
    pub pages: Pages,
    /// Fail instead of going down to a smaller page tier.
    pub strict_pages: bool,
    /// Where members listen: "abstract", or "files" when they do not share a network namespace.
    pub sockets: SocketKind,
    /// What a scheduler does when no cache lives: "create" or "wait".
    pub scheduler_first: SchedulerFirst,
    /// Longest time to create or join the cache, in milliseconds.
    pub join_timeout_ms: u64,
    /// Leases that may exist at once.
    pub leases: u32,
    /// Fill each rank's page tables at start instead of on first touch.
    pub prefault: bool,
    /// Address and port at which metrics can be read by HTTP: each rank's at this port plus its device
    /// id, or at any if the port is 0. Empty: nowhere.
    pub metrics: String,
}

impl CacheConfig {
    pub(crate) fn metrics_address(&self, device: u32) -> Result<Option<SocketAddr>, Error> {
        if self.metrics.is_empty() {
            return Ok(None);
        }
        let refused = |why: &dyn std::fmt::Display| {
            Error::Config(format!("cache.metrics = {:?} of device {device}: {why}", self.metrics))
        };
        let mut address = self
            .metrics
            .to_socket_addrs()
            .map_err(|error| refused(&format_args!("{error}: name address:port")))?
            .next()
            .ok_or_else(|| refused(&"no such host"))?;
        if address.port() != 0 {
            let port =
                u16::try_from(device).ok().and_then(|device| address.port().checked_add(device));
            address.set_port(port.ok_or_else(|| refused(&"there is no such port"))?);
        }
        Ok(Some(address))
    }
}

impl Default for CacheConfig {
    fn default() -> Self {
        Self {
            dir: PathBuf::new(),
            name: "default".into(),
            ranks: 1,
            pages: Pages::Huge2M,
            strict_pages: false,
            sockets: SocketKind::Abstract,
            scheduler_first: SchedulerFirst::Create,
            join_timeout_ms: 60_000,
            leases: 1024,
            prefault: true,
            metrics: String::new(),
        }
    }
}

/// One slot class.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct PoolConfig {
    /// Name for reports.
    pub name: String,
    /// Bytes of one shard.
    pub shard_bytes: u64,
    /// Shards of one block.
    pub shards_per_block: u32,
    /// Slots; 0 computes them from `bytes`.
    pub slots: u32,
    /// Bytes of host memory for the slots, used when `slots` is 0.
    pub bytes: u64,
    /// Further slots for preallocation only.
    pub reserved: u32,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            name: "kv".into(),
            shard_bytes: 0,
            shards_per_block: 1,
            slots: 0,
            bytes: 0,
            reserved: 0,
        }
    }
}

/// Backend below the cache.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct BackendConfig {
    /// "none", "memory" or "file".
    pub kind: BackendKind,
    /// Directory of the file backend.
    pub dir: PathBuf,
    /// Threads of the file backend; 0 chooses.
    pub threads: usize,
    /// When a dump counts as stored: "none", "close" or "fsync".
    pub durability: DurabilityKind,
    /// Bytes that each pool may take in `dir`, as its file system counts them; 0: no limit. Above it, what
    /// was used longest ago goes. Of each directory, if there are several.
    pub quota_bytes: u64,
    /// Directories on further disks: each block lives in one of them, or in `dir`.
    pub more_dirs: Vec<PathBuf>,
    /// Object store below the files, or alone if `kind` is "none": `s3://bucket/prefix`, `gs://bucket/prefix`,
    /// `az://container/prefix` or `file:///directory`. Credentials come from the environment. Needs the
    /// feature `object-store`. Empty: none.
    pub object_url: String,
    /// Whether a dump waits for the object store ("through"), or ends with the files ("back").
    pub object_writes: ObjectWrites,
}

/// Queues of each rank.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct QueueConfig {
    /// Loads in flight in the backend per rank; 0 asks the backend.
    pub backend_depth: usize,
    /// Dumps in flight in the backend per rank.
    pub dump_depth: usize,
    /// Threads that copy between slots and destinations; 0 copies in the dispatcher's thread.
    pub copy_threads: usize,
    /// Bytes of staging buffers per rank and pool, for shards that find the cache full or a slot that
    /// the engine cannot reach; at least four shards, and 0 does without. A quarter serves dumps.
    pub staging_bytes: u64,
    /// Number of staging buffers; 0 derives it from `staging_bytes`.
    pub staging_buffers: u32,
    /// Bytes of a staging buffer; 0 derives it from `staging_bytes`.
    pub staging_buffer_bytes: u64,
    /// Load tasks with reads in flight per rank and pool; 0 is no limit.
    pub tasks_in_flight: usize,
    /// Bytes of dumps that may be on their way at once, per rank.
    pub max_dump_bytes: u64,
    /// How long closing waits for operations in flight, in milliseconds.
    pub close_timeout_ms: u64,
    /// In which order a task's shards are visited: "rotated", or "natural" for comparisons.
    pub order: OrderKind,
}

impl Default for QueueConfig {
    fn default() -> Self {
        Self {
            backend_depth: 0,
            dump_depth: 4,
            copy_threads: 0,
            staging_bytes: 64 << 20,
            staging_buffers: 0,
            staging_buffer_bytes: 0,
            tasks_in_flight: 0,
            max_dump_bytes: 1 << 30,
            close_timeout_ms: 5_000,
            order: OrderKind::Rotated,
        }
    }
}

/// What determines the bytes of a block besides the engine's key. Mixed into every block id,
/// stored with every object of a backend and compared on load.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct NamespaceConfig {
    /// Model name.
    pub model: String,
    /// Revision of the weights.
    pub revision: String,
    /// Element type of the KV cache, with its scale format.
    pub dtype: String,
    /// Name and version of the memory layout.
    pub layout: String,
    /// Tokens in a block.
    pub block_tokens: u32,
    /// Tenant salt.
    pub salt: String,
    /// Axes of parallelism: name, this rank's coordinate, size.
    pub axes: Vec<AxisConfig>,
}

/// One axis of parallelism.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct AxisConfig {
    /// Name of the axis ("tp", "pp", …).
    pub name: String,
    /// This rank's coordinate; 0 when all ranks of the axis hold the same bytes.
    pub rank: u32,
    /// Size of the axis.
    pub degree: u32,
}

impl NamespaceConfig {
    /// The identity function of this namespace.
    #[must_use]
    pub fn identity(&self) -> Identity {
        let axis =
            |a: &AxisConfig| ParallelAxis { name: a.name.clone(), rank: a.rank, degree: a.degree };
        Namespace {
            model: self.model.clone(),
            revision: self.revision.clone(),
            dtype: self.dtype.clone(),
            layout: self.layout.clone(),
            block_tokens: self.block_tokens,
            axes: self.axes.iter().map(axis).collect(),
            salt: self.salt.clone().into_bytes(),
            extra: Vec::new(),
        }
        .identity()
    }
}

macro_rules! choice {
    ($(#[doc = $doc:literal])+ $name:ident { $($(#[doc = $vdoc:literal])+ $variant:ident = $text:literal,)+ } default $default:ident) => {
        $(#[doc = $doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
        #[non_exhaustive]
        pub enum $name {
            $($(#[doc = $vdoc])+ #[serde(rename = $text)] $variant,)+
        }

        impl Default for $name {
            fn default() -> Self {
                Self::$default
            }
        }
    };
}

choice! {
    /// Page tiers by their configuration names.
    Pages {
        /// 1 GiB huge pages.
        Huge1G = "1g",
        /// 2 MiB huge pages.
        Huge2M = "2m",
        /// Transparent huge pages.
        Transparent = "thp",
        /// Ordinary pages.
        Small = "4k",
    } default Huge2M
}

choice! {
    /// Where members listen.
    SocketKind {
        /// Abstract names; nothing is written anywhere.
        Abstract = "abstract",
        /// Socket files in the instance directory.
        Files = "files",
    } default Abstract
}

choice! {
    /// What a scheduler does when no cache lives.
    SchedulerFirst {
        /// Create it.
        Create = "create",
        /// Wait for a rank to create it.
        Wait = "wait",
    } default Create
}

choice! {
    /// Kinds of backends.
    BackendKind {
        /// Nothing below the cache: a miss is a miss.
        None = "none",
        /// Memory of this process; for trials.
        Memory = "memory",
        /// Files in a directory.
        File = "file",
    } default None
}

choice! {
    /// How dumps come to the object store.
    ObjectWrites {
        /// A dump ends when it is there, too.
        Through = "through",
        /// A dump ends with the tier above; a crash may lose what was not written yet.
        Back = "back",
    } default Through
}

choice! {
    /// Order of visits.
    OrderKind {
        /// Each rank starts at another shard.
        Rotated = "rotated",
        /// 0, 1, 2, ….
        Natural = "natural",
    } default Rotated
}

choice! {
    /// When a dump counts as stored.
    DurabilityKind {
        /// As soon as it is visible to other processes; a crash of the machine may lose it.
        None = "none",
        /// The same, and everything is written to the device when the rank ends.
        Close = "close",
        /// Only when it is on the device.
        Fsync = "fsync",
    } default None
}

impl From<Pages> for PageTier {
    fn from(pages: Pages) -> Self {
        match pages {
            Pages::Huge1G => Self::Huge1G,
            Pages::Huge2M => Self::Huge2M,
            Pages::Transparent => Self::Transparent,
            Pages::Small => Self::Small,
        }
    }
}

impl From<SocketKind> for Sockets {
    fn from(kind: SocketKind) -> Self {
        match kind {
            SocketKind::Abstract => Self::Abstract,
            SocketKind::Files => Self::Files,
        }
    }
}

impl From<OrderKind> for ucm_queue::Order {
    fn from(order: OrderKind) -> Self {
        match order {
            OrderKind::Rotated => Self::Rotated,
            OrderKind::Natural => Self::Natural,
        }
    }
}

impl From<SchedulerFirst> for WhenAbsent {
    fn from(first: SchedulerFirst) -> Self {
        match first {
            SchedulerFirst::Create => Self::Create,
            SchedulerFirst::Wait => Self::Wait,
        }
    }
}

impl Config {
    /// Reads the file (if any), then `UCM__SECTION__KEY` variables, then `section.key=value`
    /// overrides.
    ///
    /// # Errors
    /// `Config`: an unreadable file, an unknown key from any source, a value of the wrong type or
    /// out of range, with the key and its source.
    pub fn load(
        file: Option<&std::path::Path>,
        environment: impl IntoIterator<Item = (String, String)>,
        overrides: &[String],
    ) -> Result<Self, Error> {
        layers::load(file, environment, overrides)
    }

    /// Settings from TOML text alone.
    ///
    /// # Errors
    /// `Config` with the unknown key or wrong value.
    pub fn from_toml(text: &str) -> Result<Self, Error> {
        toml::from_str(text).map_err(|error| Error::Config(error.to_string()))
    }

    /// The settings in force, as TOML.
    ///
    /// # Errors
    /// `Config` if they cannot be written as TOML (numbers beyond 63 bits).
    pub fn to_toml(&self) -> Result<String, Error> {
        toml::to_string_pretty(self).map_err(|error| Error::Config(error.to_string()))
    }

    /// Checks what can be checked without touching the system.
    ///
    /// # Errors
    /// `Config` with the setting, the value and what is possible.
    pub fn check(&self) -> Result<(), Error> {
        let bad = |text: String| Err(Error::Config(text));
        if self.cache.ranks == 0 {
            return bad("cache.ranks is 0, it must be at least 1".into());
        }
        if self.pool.is_empty() {
            return bad(
                "there is no [[pool]]: give at least one with shard_bytes and slots or bytes"
                    .into(),
            );
        }
        if self.pool.len() > ucm_ctrl::MAX_POOLS {
            return bad(format!(
                "there are {} pools, at most {} are possible",
                self.pool.len(),
                ucm_ctrl::MAX_POOLS
            ));
        }
        for (index, pool) in self.pool.iter().enumerate() {
            if pool.name.is_empty() || pool.name.len() > MAX_NAME_BYTES {
                return bad(format!(
                    "pool.{index}.name is {:?}: it must have 1 to {MAX_NAME_BYTES} bytes",
                    pool.name
                ));
            }
            if self.pool.iter().take(index).any(|other| other.name == pool.name) {
                return bad(format!(
                    "two pools are named {:?}: names tell their objects apart",
                    pool.name
                ));
            }
            let descriptor = crate::backends::pool_descriptor(self, pool).len();
            if descriptor > MAX_DESCRIPTOR_BYTES {
                return bad(format!(
                    "namespace and pool {:?} take {descriptor} bytes, at most {MAX_DESCRIPTOR_BYTES} can be stored \
                     with an object",
                    pool.name
                ));
            }
            if pool.shard_bytes == 0 {
                return bad(format!(
                    "pool {:?}: shard_bytes is 0, it must be at least 1",
                    pool.name
                ));
            }
            if pool.slots_in_force() == 0 {
                return bad(format!(
                    "pool {:?}: slots is 0 and bytes = {} hold no shard of {} bytes",
                    pool.name, pool.bytes, pool.shard_bytes
                ));
            }
        }
        if self.backend.kind == BackendKind::File && self.backend.dir.as_os_str().is_empty() {
            return bad("backend.kind is \"file\" but backend.dir is empty".into());
        }
        if self.backend.kind != BackendKind::File && !self.backend.more_dirs.is_empty() {
            return bad("backend.more_dirs is set, but backend.kind is not \"file\"".into());
        }
        if !self.backend.object_url.is_empty() && !cfg!(feature = "object-store") {
            return bad(format!(
                "backend.object_url is {:?}, but this program was built without the feature object-store",
                self.backend.object_url
            ));
        }
        if self.cache.dir.as_os_str().is_empty()
            && (self.cache.name.is_empty()
                || self.cache.name.contains(['/', '\0'])
                || self.cache.name.starts_with('.'))
        {
            return bad(format!(
                "cache.name is {:?}: it must be a plain file name",
                self.cache.name
            ));
        }
        Ok(())
    }

    /// The instance directory in force: `cache.dir`, or one of this user's own.
    #[must_use]
    pub fn instance_dir(&self) -> PathBuf {
        if !self.cache.dir.as_os_str().is_empty() {
            return self.cache.dir.clone();
        }
        let base =
            std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|dir| dir.is_dir());
        let user = rustix::process::geteuid().as_raw();
        base.unwrap_or_else(std::env::temp_dir).join(format!("ucm-{user}-{}", self.cache.name))
    }

    /// Time to create or join.
    #[must_use]
    pub fn join_timeout(&self) -> Duration {
        Duration::from_millis(self.cache.join_timeout_ms)
    }
}

impl PoolConfig {
    /// Slots in force: `slots`, or as many as fit into `bytes`.
    #[must_use]
    pub fn slots_in_force(&self) -> u32 {
        if self.slots != 0 || self.shard_bytes == 0 {
            return self.slots;
        }
        u32::try_from(self.bytes / self.shard_bytes).unwrap_or(u32::MAX)
    }
}
