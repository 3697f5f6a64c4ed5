//! The device engine on real HIP devices: `cargo xtask hw rocm`.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

#[path = "hw/cases.rs"]
mod cases;
#[path = "gpu/harness.rs"]
mod harness;

cases::cases!(ucm_transport::GpuFamily::Hip);
