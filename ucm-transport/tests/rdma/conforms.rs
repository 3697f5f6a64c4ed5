//! The suite of all engines, in both directions.

use std::sync::{Arc, Mutex, Weak};

use ucm_transport::{
    Access, Memory, RdmaDevice, RdmaEngine, RdmaEngineBuilder, RdmaPeer, RegionId, TransferEngine,
    testing::{Harness, conformance},
};

use crate::kit::{Far, device, secret, soon};

type Settings = fn(RdmaEngineBuilder) -> RdmaEngineBuilder;

struct OverRdma {
    device: RdmaDevice,
    far: Far,
    reads: bool,
    settings: Settings,
    memories: Mutex<Vec<Memory>>,
    engines: Mutex<Vec<(Weak<RdmaEngine>, RdmaPeer)>>,
}

impl OverRdma {
    fn new(reads: bool, settings: Settings) -> Option<Self> {
        let device = device()?;
        let far = Far::new(&device);
        let (memories, engines) = (Mutex::default(), Mutex::default());
        Some(Self { device, far, reads, settings, memories, engines })
    }

    fn far(&self, len: usize) -> Memory {
        let memory = Memory::host(len).unwrap();
        self.memories.lock().unwrap().push(memory.clone());
        memory
    }

    fn is_far(&self, memory: &Memory) -> bool {
        let first = memory.as_ptr().addr().get();
        self.memories.lock().unwrap().iter().any(|far| {
            let start = far.as_ptr().addr().get();
            (start..start + far.len()).contains(&first)
        })
    }
}

impl Harness for OverRdma {
    fn engine(&self) -> Arc<dyn TransferEngine> {
        let engine = (self.settings)(RdmaEngine::builder(&self.device)).build().unwrap();
        let peer = engine.connect(self.far.server.address(), &secret(), soon()).unwrap();
        let engine = Arc::new(engine);
        self.engines.lock().unwrap().push((Arc::downgrade(&engine), peer));
        engine
    }

    fn source(&self, len: usize) -> Memory {
        if self.reads { self.far(len) } else { Memory::host(len).unwrap() }
    }

    fn destination(&self, len: usize) -> Memory {
        if self.reads { Memory::host(len).unwrap() } else { self.far(len) }
    }

    fn register(&self, engine: &dyn TransferEngine, memory: &Memory) -> RegionId {
        if !self.is_far(memory) {
            return engine.register(memory.clone()).unwrap();
        }
        let token = self.far.owner.export(memory.clone(), Access::ReadWrite).unwrap();
        let engines = self.engines.lock().unwrap();
        let upgraded = engines.iter().filter_map(|(e, peer)| Some((e.upgrade()?, *peer)));
        let same = |(e, _): &(Arc<RdmaEngine>, RdmaPeer)| {
            std::ptr::addr_eq(Arc::as_ptr(e), &raw const *engine)
        };
        let (engine, peer) = upgraded.into_iter().find(same).unwrap();
        engine.attach(&peer, token, soon()).unwrap()
    }

    fn copies_locally(&self) -> bool {
        false
    }
}

fn conforms(reads: bool, settings: Settings) {
    if let Some(harness) = OverRdma::new(reads, settings) {
        conformance(&harness);
    }
}

#[test]
#[ignore = "wants an RDMA device: cargo xtask rdma-vm"]
fn conforms_when_it_reads() {
    conforms(true, |builder| builder);
}

#[test]
#[ignore = "wants an RDMA device: cargo xtask rdma-vm"]
fn conforms_when_it_writes() {
    conforms(false, |builder| builder);
}

/// Short queues, operations of two pieces, memory registered in many.
#[test]
#[ignore = "wants an RDMA device: cargo xtask rdma-vm"]
fn conforms_when_everything_is_scarce() {
    let scarce: Settings =
        |builder| builder.queue(8).pieces(2).piece_bytes(2 << 20).inline_bytes(0);
    conforms(true, scarce);
    conforms(false, scarce);
}

/// The thread sleeps before each completion, and is told of it.
#[test]
#[ignore = "wants an RDMA device: cargo xtask rdma-vm"]
fn conforms_when_it_never_looks_without_being_told() {
    conforms(true, |builder| builder.spin(std::time::Duration::ZERO));
}
