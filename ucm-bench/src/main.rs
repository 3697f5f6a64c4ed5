//! The `ucm-bench` command.
//!
//! Owns: nothing; the library holds everything, so that tests can reach it.
//! **Invariant:** the exit code is the library's.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    ucm_bench::main()
}
