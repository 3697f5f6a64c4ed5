//! Engines over devices: CUDA and HIP.
//!
//! All rules stand here, once: order, events, pins, what a failure means, when memory is free. A
//! driver is a thin layer below ([`driver::Driver`]), loaded at run time, so that a program with both
//! starts everywhere.
//!
//! **Invariant:** memory that a plan names is free only when the driver has said that the event
//! behind the plan's copies has ended; no error, deadline or drop frees it earlier.

mod absent;
mod blocking;
mod counters;
mod driver;
mod engine;
mod error;
mod export;
mod gpu;
mod handles;
mod issue;
mod measure;
mod opened;
mod pinner;
mod pins;
mod shared;
mod tender;
mod work;

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "rocm")]
mod hip;

pub use absent::{DeviceAbsent, GpuFamily};
pub use counters::DeviceCounters;
pub use engine::{DeviceEngine, DeviceEngineBuilder, EndNotice, PinPolicy, Producer};
pub use export::{DmaBuf, SharedMemory};
pub use gpu::{Gpu, GpuAbilities, GpuInfo};
pub use measure::{KernelUse, SwitchPoint};
pub use pinner::GpuPinner;
