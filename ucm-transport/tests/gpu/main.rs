//! The device engine over fake drivers. Each test starts itself again for CUDA and for HIP, in a
//! process whose `LD_LIBRARY_PATH` leads to the fake, as a real one would be found.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod absent;
mod child;
mod conforms;
mod fake;
mod faults;
mod harness;
mod order;
mod ownership;
mod pinning;
mod reach;
