//! The two ways that are compared: an engine and its floor.
//!
//! Owns: for each engine, how one exchange is done by it and by its floor.
//! **Invariant:** both move the same pieces out of the same process's memory; what can be prepared
//! beforehand is prepared outside of the measured time for both.

use std::time::{Duration, Instant};

use ucm_data::{Mapped, Membership, Token};
use ucm_transport::{
    Access, Addr, Memory, Quiesce, RdmaChoice, RdmaDevice, RdmaEngine, RegionId, Secret, ShmEngine,
    TcpEngine, Transfer, TransferEngine, TransferError, TransferPlan,
};

use super::{
    Engine,
    case::{Aligned, Case, Piece},
    floor::Floor,
    owner::{self, Order, Served},
};
use crate::{error::BenchError, ranks::Ranks, scratch::Scratch};

pub(crate) struct Way {
    kind: Kind,
    src: RegionId,
    dst: RegionId,
    target: Memory,
    /// The floor's destination, where it has none of its own.
    bytes: Aligned,
    pub(crate) page_tier: Option<String>,
    _scratch: Scratch,
}

enum Kind {
    Tcp { engine: TcpEngine, floor: Floor },
    Rdma { engine: RdmaEngine, floor: Floor },
    Shm { engine: ShmEngine, mapped: std::sync::Arc<Mapped>, _member: Membership },
}

fn peer(error: TransferError) -> BenchError {
    BenchError::Peer(error.to_string())
}

impl Way {
    pub(crate) fn open(
        engine: Engine,
        cases: &[Case],
        owner: &mut Ranks,
    ) -> Result<Self, BenchError> {
        let scratch = Scratch::new(None)?;
        let memory = owner::memory(cases);
        let target = Memory::host(memory).map_err(peer)?;
        let cases = cases.to_vec();
        match engine {
            Engine::Tcp => {
                let secret = b"a secret of this benchmark".to_vec();
                let order = Order::Tcp { cases, secret: secret.clone(), rdma: false };
                let served: Served = owner.ask_one(0, &order)?;
                let (Some(address), Some(floor)) = (served.engine, served.floor) else {
                    return Err(BenchError::Peer("the owner serves nothing".into()));
                };
                let engine = TcpEngine::builder().build().map_err(peer)?;
                let secret = Secret::new(&secret).map_err(peer)?;
                let soon = Instant::now() + Duration::from_secs(10);
                let to = engine.connect(address, &secret, soon).map_err(peer)?;
                let src = engine.attach(&to, &served.token, served.bytes).map_err(peer)?;
                let dst = engine.register(target.clone()).map_err(peer)?;
                let floor = Floor::connect(floor, memory)?;
                let kind = Kind::Tcp { engine, floor };
                let (bytes, page_tier) = (Aligned::new(0, 0), None);
                Ok(Self { kind, src, dst, target, bytes, page_tier, _scratch: scratch })
            }
            Engine::Rdma => {
                let device = RdmaDevice::open(&RdmaChoice::default())
                    .map_err(|absent| BenchError::Environment(absent.to_string()))?;
                let secret = b"a secret of this benchmark".to_vec();
                let order = Order::Tcp { cases, secret: secret.clone(), rdma: true };
                let served: Served = owner.ask_one(0, &order)?;
                let (Some(address), Some(floor)) = (served.engine, served.floor) else {
                    return Err(BenchError::Peer("the owner serves nothing".into()));
                };
                let engine = RdmaEngine::builder(&device).build().map_err(peer)?;
                let secret = Secret::new(&secret).map_err(peer)?;
                let soon = Instant::now() + Duration::from_secs(10);
                let to = engine.connect(address, &secret, soon).map_err(peer)?;
                let src = engine.attach(&to, Token(served.token), soon).map_err(peer)?;
                let dst = engine.register(target.clone()).map_err(peer)?;
                let floor = Floor::connect(floor, memory)?;
                let kind = Kind::Rdma { engine, floor };
                let (bytes, page_tier) = (Aligned::new(0, 0), None);
                Ok(Self { kind, src, dst, target, bytes, page_tier, _scratch: scratch })
            }
            Engine::Shm => {
                let dir = scratch.path("segments");
                let order = Order::Shm { cases, dir: dir.clone() };
                let _: Served = owner.ask_one(0, &order)?;
                let (member, segments) = owner::meet(&dir, memory as u64)?;
                let mapped = segments.map().map_err(|error| BenchError::Peer(error.to_string()))?;
                let engine = ShmEngine::builder().build().map_err(peer)?;
                let number = engine.add_peer(Access::Read).map_err(peer)?;
                let regions = engine.attach_segments(number, &segments).map_err(peer)?;
                let src = regions.first().copied();
                let src = src.ok_or_else(|| BenchError::Peer("a pool without segments".into()))?;
                let dst = engine.register(target.clone()).map_err(peer)?;
                let page_tier = Some(segments.geometry().reached().to_string());
                let kind = Kind::Shm { engine, mapped, _member: member };
                let bytes = Aligned::new(memory, 1);
                Ok(Self { kind, src, dst, target, bytes, page_tier, _scratch: scratch })
            }
        }
    }

    pub(crate) fn plan(&self, pieces: &[Piece]) -> TransferPlan {
        let items = pieces.iter().map(|piece| Transfer {
            src: Addr { region: self.src, offset: piece.from as u64 },
            dst: Addr { region: self.dst, offset: piece.to as u64 },
            len: piece.len as u64,
        });
        TransferPlan { items: items.collect(), holds: Vec::new() }
    }

    /// By the engine; in nanoseconds.
    pub(crate) fn engine(&self, plan: TransferPlan) -> Result<f64, BenchError> {
        let soon = Instant::now() + Duration::from_secs(20);
        let start = Instant::now();
        let result = match &self.kind {
            Kind::Tcp { engine, .. } => {
                engine.transfer(plan, soon).map_err(|rejected| peer(rejected.error))?.result
            }
            Kind::Rdma { engine, .. } => {
                let ticket = engine.submit(plan).map_err(|rejected| peer(rejected.error))?;
                engine.quiesce(Quiesce::Ticket(ticket), soon).map_err(peer)?;
                let mut ends = Vec::new();
                engine.poll(&mut ends);
                let end =
                    ends.pop().ok_or_else(|| BenchError::Peer("a plan without end".into()))?;
                end.result
            }
            Kind::Shm { engine, .. } => {
                engine.submit(plan).map_err(|rejected| peer(rejected.error))?;
                let mut ends = Vec::new();
                engine.poll(&mut ends);
                let end =
                    ends.pop().ok_or_else(|| BenchError::Peer("a plan without end".into()))?;
                end.result
            }
        };
        let took = start.elapsed();
        result.map_err(peer)?;
        Ok(took.as_secs_f64() * 1e9)
    }

    /// By the floor; in nanoseconds.
    pub(crate) fn floor(&mut self, number: usize, pieces: &[Piece]) -> Result<f64, BenchError> {
        let start = Instant::now();
        match &mut self.kind {
            Kind::Tcp { floor, .. } | Kind::Rdma { floor, .. } => {
                floor.exchange(number, pieces)?;
            }
            Kind::Shm { mapped, .. } => {
                for piece in pieces {
                    let to = self.bytes.bytes_mut().get_mut(piece.to..piece.to + piece.len);
                    let to = to.ok_or_else(|| BenchError::Usage("a piece outside".into()))?;
                    mapped
                        .read(0, piece.from as u64, to)
                        .map_err(|error| BenchError::Peer(error.to_string()))?;
                }
            }
        }
        Ok(start.elapsed().as_secs_f64() * 1e9)
    }

    /// Destinations of engine and floor.
    pub(crate) fn destinations(&self) -> Result<(Vec<u8>, Vec<u8>), BenchError> {
        let mut bytes = vec![0; self.target.len()];
        self.target.read(0, &mut bytes).map_err(peer)?;
        let floor = match &self.kind {
            Kind::Tcp { floor, .. } | Kind::Rdma { floor, .. } => floor.bytes().to_vec(),
            Kind::Shm { .. } => self.bytes.bytes().to_vec(),
        };
        Ok((bytes, floor))
    }

    /// Forgets what is in the engine's destination.
    pub(crate) fn clear(&self) -> Result<(), BenchError> {
        self.target.write(0, &vec![0xA5; self.target.len()]).map_err(peer)
    }
}
