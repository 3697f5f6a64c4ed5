//! The process that owns the bytes.
//!
//! Owns: the orders of the measuring process, and what the other side keeps until it leaves.
//! **Invariant:** all sources hold the same bytes, whichever way they are reached.

use std::{net::SocketAddr, path::PathBuf, sync::Arc};

use serde::{Deserialize, Serialize};
use ucm_data::{
    Admission, Admitted, DataError, Enter, Geometry, LayoutTag, Membership, Offer, PageTier,
    Rendezvous, RendezvousConfig, Segments, SegmentsConfig, StewardHooks, Token,
};
use ucm_transport::{
    Access, Exports, Memory, RdmaChoice, RdmaDevice, RdmaOwner, Secret, Serve, TcpServer,
    TcpServerConfig,
};

use super::{
    case::{self, Case},
    floor,
};
use crate::{error::BenchError, ranks};

/// What the owner is to do.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Serve the cases over tcp, or by an RDMA adapter.
    Tcp { cases: Vec<Case>, secret: Vec<u8>, rdma: bool },
    /// Offer the bytes as segments, met in this directory.
    Shm { cases: Vec<Case>, dir: PathBuf },
}

/// What it answers.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Served {
    pub(crate) engine: Option<SocketAddr>,
    pub(crate) floor: Option<SocketAddr>,
    /// The export's token.
    pub(crate) token: [u8; 16],
    pub(crate) bytes: u64,
}

pub(crate) fn memory(cases: &[Case]) -> usize {
    cases.iter().map(Case::memory).max().unwrap_or(1)
}

/// The owner's side, until the parent closes the pipe.
pub(crate) fn run() -> Result<(), BenchError> {
    let mut kept: Vec<Box<dyn std::any::Any>> = Vec::new();
    ranks::serve(|order: Order| match order {
        Order::Tcp { cases, secret, rdma } => {
            let peer = |e: ucm_transport::TransferError| BenchError::Peer(e.to_string());
            let len = memory(&cases);
            let bytes = Memory::host(len).map_err(peer)?;
            bytes.write(0, &case::source(len)).map_err(peer)?;
            let exports = Exports::default();
            let (token, service): (_, Arc<dyn Serve>) = if rdma {
                let device = RdmaDevice::open(&RdmaChoice::default())
                    .map_err(|absent| BenchError::Environment(absent.to_string()))?;
                let owner = RdmaOwner::builder(&device).build().map_err(peer)?;
                let token = owner.export(bytes, Access::Read).map_err(peer)?;
                (token, owner.service(Arc::new(exports)))
            } else {
                let token = exports.export(bytes, Access::Read).map_err(peer)?;
                (token, Arc::new(exports))
            };
            let config = TcpServerConfig::new(Secret::new(&secret).map_err(peer)?);
            let local = SocketAddr::from(([127, 0, 0, 1], 0));
            let server = TcpServer::bind(local, config, service).map_err(peer)?;
            let served = Served {
                engine: Some(server.address()),
                floor: Some(floor::serve(&cases)?),
                token: token.0,
                bytes: len as u64,
            };
            kept.push(Box::new(server));
            Ok(served)
        }
        Order::Shm { cases, dir } => {
            let len = memory(&cases);
            let (membership, segments) = meet(&dir, len as u64)?;
            let data = |e: DataError| BenchError::Peer(e.to_string());
            let mapped = segments.map().map_err(data)?;
            mapped.write(0, 0, &case::source(len)).map_err(data)?;
            kept.push(Box::new((membership, mapped)));
            Ok(Served { engine: None, floor: None, token: [0; 16], bytes: len as u64 })
        }
    })
}

/// Enters the directory: the first one makes a segment of one slot, the next ones get it.
pub(crate) fn meet(
    dir: &std::path::Path,
    bytes: u64,
) -> Result<(Membership, Segments), BenchError> {
    let config = RendezvousConfig::new(dir, LayoutTag::any_geometry(1, 1));
    let mut party = Party { bytes, segments: None };
    let membership = Rendezvous::enter(&config, &mut party)
        .map_err(|error| BenchError::Peer(error.to_string()))?;
    let segments =
        party.segments.ok_or_else(|| BenchError::Peer("no segment was offered".into()))?;
    Ok((membership, segments))
}

struct NoHooks;

impl StewardHooks for NoHooks {
    fn on_death(&self, _: u16, _: Token) -> bool {
        true
    }
    fn on_leave(&self, _: u16, _: Token) {}
}

struct Party {
    bytes: u64,
    segments: Option<Segments>,
}

impl Enter for Party {
    type Error = DataError;

    fn create(&mut self) -> Result<Offer, DataError> {
        let segments = Segments::create(&SegmentsConfig {
            segment_bytes: self.bytes.next_multiple_of(2 << 20),
            prefer: PageTier::Huge2M,
            threads: 1,
            ..SegmentsConfig::new(self.bytes, 1)
        })?;
        Ok(Offer { meta: segments.geometry().encode(), fds: segments.fds().to_vec() })
    }

    fn admit(&mut self, admission: &Admission<'_>) -> Result<Admitted, DataError> {
        let geometry = Geometry::decode(&admission.offer.meta)?;
        self.segments = Some(Segments::from_fds(geometry, admission.offer.fds.iter().cloned())?);
        let free = (0..admission.max_seats).find(|seat| !admission.occupied.contains(seat));
        let seat =
            free.ok_or_else(|| DataError::new(ucm_data::ErrorKind::Seat, "all seats are taken"))?;
        Ok(Admitted { seat, hooks: Arc::new(NoHooks) })
    }
}
