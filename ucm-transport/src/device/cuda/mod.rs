//! The CUDA driver, loaded at run time.
//!
//! **Invariant:** nothing here links against CUDA: a program with this module starts everywhere.

mod result;
mod sys;

pub(super) use result::{CudaDriver, probe};
