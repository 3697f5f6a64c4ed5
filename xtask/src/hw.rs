//! `cargo xtask hw cuda|rocm|rdma`: tests that want a real device.
//!
//! Owns: which tests these are.
//! **Invariant:** where there is no device, every test prints `SKIP <reason>` and is counted as
//! skipped; none is counted as passed.

use crate::{
    shell::{Failure, Shell, fail, print},
    summary::LibtestReader,
};

/// Options of `cargo xtask hw`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Which device
    #[arg(value_enum)]
    device: Device,
    /// Only tests whose name contains one of these
    #[arg(value_name = "FILTER")]
    filters: Vec<String>,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Device {
    /// A CUDA device, by the NVIDIA driver
    Cuda,
    /// A HIP device, by the ROCm runtime
    Rocm,
    /// An RDMA adapter, by the verbs library
    Rdma,
}

impl Device {
    /// The features of ucm-transport, and the test target.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Cuda => ("cuda", "hw_cuda"),
            Self::Rocm => ("rocm", "hw_rocm"),
            Self::Rdma => ("rdma,testing", "rdma"),
        }
    }
}

/// Runs the tests, optimised: they also print figures.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let (feature, target) = args.device.names();
    let mut reader = LibtestReader::default();
    let good = Shell::cargo(&["test", "--release", "-p", "ucm-transport", "--no-fail-fast"])
        .args(&["--features", feature, "--test", target])
        // One at a time: they measure, and share the device.
        .args(&["--", "--ignored", "--show-output", "--test-threads=1"])
        .args(&args.filters)
        .watch(|line| reader.line(line))?;
    let mut summary = reader.finish();
    if !good {
        summary.broken_run();
    }
    summary.reasons().for_each(|reason| print(&reason));
    print(&summary.to_string());
    if summary.failed() > 0 { fail("") } else { Ok(()) }
}
