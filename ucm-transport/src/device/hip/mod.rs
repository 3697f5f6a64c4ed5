//! The HIP runtime, loaded at run time.
//!
//! **Invariant:** nothing here links against ROCm: a program with this module starts everywhere.

mod result;
mod sys;

pub(super) use result::{HipDriver, probe};
