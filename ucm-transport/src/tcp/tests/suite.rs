//! The suite of all engines over tcp, in both directions.
//!
//! **Invariant:** the far side of every plan is memory behind a real server.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, Weak},
};

use super::kit::{secret, serve, soon};
use crate::{
    Access, Exports, Memory, RegionId, TcpEngine, TcpPeer, TcpServer, TransferEngine,
    testing::{Harness, conformance},
};

/// How engines connect.
type Connect = Box<dyn Fn(&TcpEngine, SocketAddr) -> TcpPeer>;

pub(super) struct TcpHarness {
    reads: bool,
    exports: Exports,
    server: TcpServer,
    far: Mutex<Vec<Memory>>,
    engines: Mutex<Vec<(Weak<TcpEngine>, TcpPeer)>>,
    exchange_bytes: u64,
    connect: Connect,
}

impl TcpHarness {
    fn new(reads: bool, exchange_bytes: u64) -> Self {
        let exports = Exports::default();
        let server = serve(Arc::new(exports.clone()));
        let connect =
            |engine: &TcpEngine, address| engine.connect(address, &secret(), soon()).unwrap();
        Self::over(server, exports, reads, exchange_bytes, Box::new(connect))
    }

    pub(super) fn over(
        server: TcpServer,
        exports: Exports,
        reads: bool,
        exchange_bytes: u64,
        connect: Connect,
    ) -> Self {
        let (far, engines) = (Mutex::default(), Mutex::default());
        Self { reads, exports, server, far, engines, exchange_bytes, connect }
    }

    fn far(&self, len: usize) -> Memory {
        let memory = Memory::host(len).unwrap();
        self.far.lock().unwrap().push(memory.clone());
        memory
    }

    fn is_far(&self, memory: &Memory) -> bool {
        let first = memory.as_ptr().addr().get();
        self.far.lock().unwrap().iter().any(|far| {
            let start = far.as_ptr().addr().get();
            (start..start + far.len()).contains(&first)
        })
    }
}

impl Harness for TcpHarness {
    fn engine(&self) -> Arc<dyn TransferEngine> {
        let engine = TcpEngine::builder().exchange_bytes(self.exchange_bytes).build().unwrap();
        let peer = (self.connect)(&engine, self.server.address());
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
        let token = self.exports.export(memory.clone(), Access::ReadWrite).unwrap();
        let engines = self.engines.lock().unwrap();
        let upgraded = engines.iter().filter_map(|(e, peer)| Some((e.upgrade()?, *peer)));
        let same = |(e, _): &(Arc<TcpEngine>, TcpPeer)| {
            std::ptr::addr_eq(Arc::as_ptr(e), &raw const *engine)
        };
        let (engine, peer) = upgraded.into_iter().find(same).unwrap();
        engine.attach(&peer, &token.0, memory.len() as u64).unwrap()
    }

    fn copies_locally(&self) -> bool {
        false
    }
}

#[test]
fn conforms_when_it_reads() {
    conformance(&TcpHarness::new(true, 32 << 20));
}

#[test]
fn conforms_when_it_writes() {
    conformance(&TcpHarness::new(false, 32 << 20));
}

#[test]
fn conforms_when_plans_are_cut_into_small_exchanges() {
    conformance(&TcpHarness::new(true, 50_000));
}
