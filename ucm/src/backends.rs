//! Backends by configuration.
//!
//! **Invariant:** what a configuration cannot have is refused at start, not at the first load.

use std::{path::PathBuf, sync::Arc};

use ucm_remote::PoolBackendOptions;
use ucm_store::{
    Backend, BackendCapabilities, Durability, ErrorKind, FileBackend, FileConfig, MemoryBackend,
    Op, Presence, Promotion, Spread, Stack, StoreError, Tier,
};

use crate::{BackendConfig, Config, DurabilityKind, Error, PoolConfig, config::BackendKind};

/// The backend of each pool. Objects of different pools never meet: a pool's name is part of what
/// its backend compares.
#[derive(Clone, Debug)]
pub(crate) struct Backends(Vec<Arc<dyn Backend>>);

impl Backends {
    /// What the configuration names.
    pub(crate) fn configured(config: &Config) -> Result<Self, Error> {
        config.pool.iter().map(|pool| configured(config, pool)).collect::<Result<_, _>>().map(Self)
    }

    /// One backend of the caller's for all pools.
    pub(crate) fn given(config: &Config, backend: Arc<dyn Backend>) -> Self {
        if config.pool.len() == 1 {
            return Self(vec![backend]);
        }
        let of_pool = |pool: &PoolConfig| -> Arc<dyn Backend> {
            let key = *blake3::hash(pool.name.as_bytes()).as_bytes();
            Arc::new(PoolBackend { inner: backend.clone(), key })
        };
        Self(config.pool.iter().map(of_pool).collect())
    }

    pub(crate) fn of_pool(&self, index: usize) -> Arc<dyn Backend> {
        self.0.get(index).cloned().unwrap_or_else(|| Arc::new(Nothing))
    }
}

/// What the backend's kind names, below the remote pool if this node has a peer.
fn configured(config: &Config, pool: &PoolConfig) -> Result<Arc<dyn Backend>, Error> {
    let home = with_objects(config, pool, home(config, pool)?)?;
    let socket = &config.remote.socket;
    if socket.as_os_str().is_empty() {
        return Ok(home);
    }
    let identity = *blake3::hash(&pool_descriptor(config, pool)).as_bytes();
    let options = PoolBackendOptions::new(identity, pool.shards_per_block);
    let remote: Arc<dyn Backend> = Arc::new(ucm_remote::PoolBackend::connect(socket, options)?);
    if config.backend.kind == BackendKind::None && config.backend.object_url.is_empty() {
        return Ok(remote);
    }
    let remote = Tier::new("remote pool", remote).promotion(Promotion::Always);
    Ok(Arc::new(Stack::new(vec![remote, Tier::new("home", home)])?))
}

/// The object store below, if there is one.
#[cfg(feature = "object-store")]
fn with_objects(
    config: &Config,
    pool: &PoolConfig,
    home: Arc<dyn Backend>,
) -> Result<Arc<dyn Backend>, Error> {
    use std::time::Duration;

    use ucm_store::{Admission, ObjectBackend, ObjectConfig, Writes};

    use crate::ObjectWrites;

    /// How long an object that another node has stored may look absent.
    const ABSENT_FOR: Duration = Duration::from_secs(1);
    /// Objects that are known to be absent.
    const ABSENT: usize = 65_536;
    /// Header and padding of a file.
    const FILE_OVERHEAD: u64 = 6144;

    let BackendConfig { kind, object_url, object_writes, quota_bytes, .. } = &config.backend;
    if object_url.is_empty() {
        return Ok(home);
    }
    let objects = ObjectConfig::new(object_url, pool_descriptor(config, pool));
    let objects: Arc<dyn Backend> = Arc::new(ObjectBackend::open(objects)?);
    if *kind == BackendKind::None {
        return Ok(objects);
    }
    let mut above = Tier::new("home", home).promotion(Promotion::Always);
    if *kind == BackendKind::File && *quota_bytes > 0 {
        let disks = config.backend.more_dirs.len() as u64 + 1;
        let room = quota_bytes.saturating_mul(disks) / (pool.shard_bytes + FILE_OVERHEAD);
        above = above.admission(Arc::new(Admission::new(room)));
    }
    let writes = match object_writes {
        ObjectWrites::Through => Writes::Through,
        ObjectWrites::Back => Writes::Back,
    };
    let below = Tier::new("objects", objects).writes(writes).remember_absent(ABSENT, ABSENT_FOR);
    Ok(Arc::new(Stack::new(vec![above, below])?))
}

#[cfg(not(feature = "object-store"))]
#[expect(clippy::unnecessary_wraps, reason = "the same as with the feature")]
fn with_objects(
    _config: &Config,
    _pool: &PoolConfig,
    home: Arc<dyn Backend>,
) -> Result<Arc<dyn Backend>, Error> {
    // `Config::check` has refused what cannot be had.
    Ok(home)
}

fn home(config: &Config, pool: &PoolConfig) -> Result<Arc<dyn Backend>, Error> {
    Ok(match config.backend.kind {
        BackendKind::None => Arc::new(Nothing),
        BackendKind::Memory => Arc::new(MemoryBackend::new()),
        BackendKind::File => {
            let durability = match config.backend.durability {
                DurabilityKind::None => Durability::None,
                DurabilityKind::Close => Durability::OnClose,
                DurabilityKind::Fsync => Durability::Fsync,
            };
            let open = |dir: &PathBuf| {
                let mut file = FileConfig::new(dir, pool_descriptor(config, pool))
                    .durability(durability)
                    .quota_bytes(config.backend.quota_bytes);
                if config.backend.threads != 0 {
                    file = file.threads(config.backend.threads);
                }
                FileBackend::open(file).map(Arc::new)
            };
            let BackendConfig { dir, more_dirs, .. } = &config.backend;
            if more_dirs.is_empty() {
                return Ok(open(dir)?);
            }
            let dirs = std::iter::once(dir).chain(more_dirs);
            let disks = dirs.map(|dir| Ok(Tier::new(dir.display().to_string(), open(dir)?)));
            Arc::new(Spread::new(disks.collect::<Result<_, StoreError>>()?)?)
        }
    })
}

/// What determines the bytes of a pool's objects: the namespace and the pool.
pub(crate) fn pool_descriptor(config: &Config, pool: &PoolConfig) -> Vec<u8> {
    let mut descriptor = config.namespace.identity().descriptor().to_vec();
    descriptor.extend_from_slice(b"pool\0");
    descriptor.extend_from_slice(&pool.shard_bytes.to_le_bytes());
    descriptor.extend_from_slice(&pool.shards_per_block.to_le_bytes());
    descriptor.extend_from_slice(pool.name.as_bytes());
    descriptor
}

/// One pool's part of a backend that serves several: block ids are derived from pool and block
/// (keyed BLAKE3, as all identities).
#[derive(Debug)]
struct PoolBackend {
    inner: Arc<dyn Backend>,
    key: [u8; 32],
}

impl PoolBackend {
    fn block(&self, block: &[u8; 16]) -> [u8; 16] {
        let mut id = [0; 16];
        for (to, from) in id.iter_mut().zip(blake3::keyed_hash(&self.key, block).as_bytes()) {
            *to = *from;
        }
        id
    }

    fn ops(&self, ops: Vec<Op>) -> Vec<Op> {
        ops.into_iter()
            .map(|op| {
                let block = self.block(op.block());
                op.renamed(block)
            })
            .collect()
    }

    fn keys(&self, keys: &[([u8; 16], u32)]) -> Vec<([u8; 16], u32)> {
        keys.iter().map(|(block, shard)| (self.block(block), *shard)).collect()
    }
}

impl Backend for PoolBackend {
    fn capabilities(&self) -> BackendCapabilities {
        self.inner.capabilities()
    }

    fn load(&self, ops: Vec<Op>) {
        self.inner.load(self.ops(ops));
    }

    fn dump(&self, ops: Vec<Op>) {
        self.inner.dump(self.ops(ops));
    }

    fn contains(&self, keys: &[([u8; 16], u32)]) -> Vec<Presence> {
        self.inner.contains(&self.keys(keys))
    }

    fn touch(&self, blocks: &[[u8; 16]]) -> Result<(), StoreError> {
        let blocks: Vec<_> = blocks.iter().map(|block| self.block(block)).collect();
        self.inner.touch(&blocks)
    }

    fn remove(&self, keys: &[([u8; 16], u32)]) -> Vec<Result<(), StoreError>> {
        self.inner.remove(&self.keys(keys))
    }
}

/// Below the cache there is nothing: every load is a miss, nothing can be stored.
#[derive(Debug)]
struct Nothing;

impl Backend for Nothing {
    fn capabilities(&self) -> BackendCapabilities {
        let mut capabilities = BackendCapabilities::new("none", 64, false);
        capabilities.writable = false;
        capabilities
    }

    fn load(&self, ops: Vec<Op>) {
        let missing = || Err(StoreError::new(ErrorKind::Missing, "there is no backend"));
        Op::finish_all(ops.into_iter().map(|op| (op, missing())));
    }

    fn dump(&self, ops: Vec<Op>) {
        let off = || {
            Err(StoreError::new(ErrorKind::Unavailable, "there is no backend: set backend.kind"))
        };
        Op::finish_all(ops.into_iter().map(|op| (op, off())));
    }

    fn contains(&self, keys: &[([u8; 16], u32)]) -> Vec<Presence> {
        vec![Presence::Absent; keys.len()]
    }

    fn touch(&self, _blocks: &[[u8; 16]]) -> Result<(), StoreError> {
        Ok(())
    }

    fn remove(&self, keys: &[([u8; 16], u32)]) -> Vec<Result<(), StoreError>> {
        keys.iter().map(|_| Ok(())).collect()
    }
}

#[cfg(test)]
mod tests {
    use ucm_store::testing::Collector;

    use super::*;

    /// Broken on purpose: the quota does not reach the backend.
    #[test]
    fn a46_the_quota_of_the_configuration_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let pool = vec![PoolConfig { shard_bytes: 1 << 20, slots: 1, ..PoolConfig::default() }];
        let mut config = Config { pool, ..Config::default() };
        config.backend.kind = BackendKind::File;
        config.backend.dir = dir.path().to_owned();
        config.backend.quota_bytes = 4 << 20;
        let backend = Backends::configured(&config).unwrap().of_pool(0);
        for n in 0..12 {
            let sink = Collector::new();
            backend.dump(vec![sink.op_with([n; 16], 0, &vec![n; 1 << 20]).1]);
            assert_eq!(sink.wait_one().0, Ok(()));
        }
        let keys: Vec<_> = (0..12).map(|n| ([n; 16], 0)).collect();
        // Making room follows the end of a dump, in another thread; dropping the backend waits for it.
        drop(backend);
        config.backend.quota_bytes = 0;
        let backend = Backends::configured(&config).unwrap().of_pool(0);
        let there = backend.contains(&keys).into_iter().filter(|p| *p == Presence::There).count();
        assert!((1..=4).contains(&there), "{there} objects of 1 MiB in 4 MiB");
        assert_eq!(backend.contains(&[([11; 16], 0)]), [Presence::There], "the youngest stays");
    }

    fn one_pool() -> Config {
        let pool = vec![PoolConfig { shard_bytes: 1 << 20, slots: 1, ..PoolConfig::default() }];
        Config { pool, ..Config::default() }
    }

    /// Broken on purpose: only the first directory is used.
    #[test]
    fn several_directories_share_the_blocks() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = one_pool();
        config.backend.kind = BackendKind::File;
        config.backend.dir = dir.path().join("a");
        config.backend.more_dirs = vec![dir.path().join("b"), dir.path().join("c")];
        let backend = Backends::configured(&config).unwrap().of_pool(0);
        let sink = Collector::new();
        backend.dump((0..30).map(|n| sink.op_with([n; 16], 0, &vec![n; 1 << 20]).1).collect());
        assert!(sink.wait(30).into_values().all(|c| c.result.is_ok()));
        let keys: Vec<_> = (0..30).map(|n| ([n; 16], 0)).collect();
        let there = |backend: &dyn Backend| {
            backend.contains(&keys).into_iter().filter(|p| *p == Presence::There).count()
        };
        assert_eq!(there(&*backend), 30);
        drop(backend);
        // Each alone has its share.
        let mut shares = Vec::new();
        for name in ["a", "b", "c"] {
            config.backend.dir = dir.path().join(name);
            config.backend.more_dirs = Vec::new();
            shares.push(there(&*Backends::configured(&config).unwrap().of_pool(0)));
        }
        assert!(shares.iter().all(|n| *n > 3) && shares.iter().sum::<usize>() == 30, "{shares:?}");
    }

    /// Broken on purpose: the object store is not below the files; it is not written.
    #[cfg(feature = "object-store")]
    #[test]
    fn what_the_files_lose_the_object_store_has() {
        for writes in [crate::ObjectWrites::Through, crate::ObjectWrites::Back] {
            let dir = tempfile::tempdir().unwrap();
            let mut config = one_pool();
            config.backend.kind = BackendKind::File;
            config.backend.dir = dir.path().join("files");
            config.backend.quota_bytes = 1 << 30;
            config.backend.object_url = format!("file://{}", dir.path().join("objects").display());
            config.backend.object_writes = writes;
            config.check().unwrap();
            let backend = Backends::configured(&config).unwrap().of_pool(0);
            let sink = Collector::new();
            backend.dump(vec![sink.op_with([7; 16], 0, &vec![9; 1 << 20]).1]);
            assert_eq!(sink.wait_one().0, Ok(()));
            drop(backend);
            std::fs::remove_dir_all(dir.path().join("files")).unwrap();
            let backend = Backends::configured(&config).unwrap().of_pool(0);
            for _ in 0..2 {
                backend.load(vec![sink.op([7; 16], 0, 1 << 20).1]);
                assert_eq!(sink.wait_one(), (Ok(()), vec![9; 1 << 20]));
            }
        }
    }

    #[cfg(not(feature = "object-store"))]
    #[test]
    fn an_object_store_that_cannot_be_had_is_refused() {
        let mut config = one_pool();
        config.backend.object_url = "s3://bucket/x".into();
        let error = config.check().unwrap_err().to_string();
        assert!(error.contains("object-store"), "{error}");
    }
}
