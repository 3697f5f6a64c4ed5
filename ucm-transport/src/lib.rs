//! Transfer engines of ucm.
//!
//! Owns: memory locations, registered regions, transfer plans, the planner and the engines.
//! **Invariant:** memory named by a submitted plan, and everything the plan holds, stays untouched
//! until the plan's ticket has reached a terminal state ("memory belongs to the operation").
//! This crate knows no cache keys and no cache policy.
//!
//! ```
//! use ucm_transport::{Addr, HostEngine, Memory, Transfer, TransferEngine, TransferPlan};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let engine = HostEngine::builder().build()?;
//! let (source, target) = (Memory::host(4096)?, Memory::host(4096)?);
//! source.write(100, b"bytes")?;
//! let src = Addr { region: engine.register(source)?, offset: 100 };
//! let dst = Addr { region: engine.register(target.clone())?, offset: 0 };
//!
//! let plan = TransferPlan { items: vec![Transfer { src, dst, len: 5 }], holds: vec![] };
//! let ticket = engine.submit(plan).map_err(|rejected| rejected.error)?;
//! let mut ends = Vec::new();
//! engine.poll(&mut ends);
//! assert_eq!((ends[0].ticket, ends[0].result.clone()?), (ticket, 5));
//!
//! let mut bytes = [0; 5];
//! target.read(0, &mut bytes)?;
//! assert_eq!(&bytes, b"bytes");
//! # Ok(())
//! # }
//! ```

mod check;
#[cfg(any(feature = "cuda", feature = "rocm"))]
mod device;
mod engine;
mod error;
mod host;
mod memory;
mod plan;
mod planner;
#[cfg(feature = "rdma")]
mod rdma;
mod region_table;
mod share;
mod shm;
mod sim;
#[cfg(feature = "tcp")]
mod tcp;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use check::SourceCheck;
#[cfg(any(feature = "cuda", feature = "rocm"))]
pub use device::{
    DeviceAbsent, DeviceCounters, DeviceEngine, DeviceEngineBuilder, DmaBuf, EndNotice, Gpu,
    GpuAbilities, GpuFamily, GpuInfo, GpuPinner, KernelUse, PinPolicy, Producer, SharedMemory,
    SwitchPoint,
};
pub use engine::{Capabilities, Completion, Quiesce, Ticket, TransferEngine};
pub use error::{ErrorKind, Rejected, TransferError};
pub use host::{HostEngine, HostEngineBuilder};
pub use memory::{Location, Memory, RegionId};
pub use plan::{Addr, Hold, Transfer, TransferPlan};
pub use planner::{Group, PlanLimits, Planned, RegionInfo, plan};
#[cfg(feature = "rdma")]
pub use rdma::{
    RdmaAbsent, RdmaChoice, RdmaDevice, RdmaEngine, RdmaEngineBuilder, RdmaInfo, RdmaOwner,
    RdmaOwnerBuilder, RdmaOwnerStats, RdmaPeer, RdmaStats,
};
pub use region_table::{Region, RegionLease, RegionTable, RegionView};
pub use share::SharedEngine;
pub use shm::{Access, ShmEngine, ShmEngineBuilder, Stamp, StampCheck, Stamps};
pub use sim::{DeviceFault, DeviceRates, DeviceStats, SimDevice};
#[cfg(feature = "tcp")]
pub use tcp::{
    Exports, PeerRange, PeerState, Pieces, Refusal, RefusalKind, Request, Secret, Serve, Served,
    Session, TcpEngine, TcpEngineBuilder, TcpPeer, TcpServer, TcpServerConfig, TcpServerStats,
    TcpStats,
};
#[cfg(feature = "tls")]
pub use tcp::{TlsClient, TlsServer};
