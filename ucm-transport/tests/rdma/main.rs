//! The rdma engine over real verbs: `cargo xtask rdma-vm` runs this in a guest with a software
//! adapter, `cargo xtask hw rdma` on a machine that has one. Elsewhere each case prints `SKIP` and why.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod bytes;
mod conforms;
mod kit;
mod late;
mod life;
mod peer;
mod refused;
