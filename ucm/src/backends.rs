//! Backends by configuration.
//!
//! **Invariant:** what a configuration cannot have is refused at start, not at the first load.

use std::sync::Arc;

use ucm_store::{
    Backend, BackendCapabilities, Durability, ErrorKind, FileBackend, FileConfig, MemoryBackend,
    Op, Presence, StoreError,
};

use crate::{Config, DurabilityKind, Error, config::BackendKind};

/// The backend that the configuration names.
pub(crate) fn configured(config: &Config) -> Result<Arc<dyn Backend>, Error> {
    Ok(match config.backend.kind {
        BackendKind::None => Arc::new(Nothing),
        BackendKind::Memory => Arc::new(MemoryBackend::new()),
        BackendKind::File => {
            let descriptor = config.namespace.identity().descriptor().to_vec();
            let durability = match config.backend.durability {
                DurabilityKind::None => Durability::None,
                DurabilityKind::Close => Durability::OnClose,
                DurabilityKind::Fsync => Durability::Fsync,
            };
            let mut file = FileConfig::new(&config.backend.dir, descriptor).durability(durability);
            if config.backend.threads != 0 {
                file = file.threads(config.backend.threads);
            }
            Arc::new(FileBackend::open(file)?)
        }
    })
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
