//! Developer commands of the ucm workspace: `cargo xtask --help`.
//!
//! Owns: the command line. Each command lives in its own module and prints what it runs.
//! **Invariant:** a command that could not do its work ends with a non-zero code; nothing is
//! installed or downloaded besides what cargo itself needs.

#![forbid(unsafe_code)]

mod bench;
mod ci;
mod crash;
mod demo;
mod features;
mod fuzz;
mod hw;
mod loom;
mod rdma_vm;
mod servers;
mod shell;
mod summary;
mod test;
mod tidy;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::{
    shell::{Failure, say},
    workspace::Workspace,
};

#[derive(Debug, Parser)]
#[command(
    name = "xtask",
    bin_name = "cargo xtask",
    about = "Developer commands of the ucm workspace",
    version
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run every test (nextest when installed, else cargo test) and the doctests
    Test(test::Args),
    /// Run what continuous integration runs, in its order
    Ci(ci::Args),
    /// Check the house rules a compiler cannot check
    Tidy(tidy::Args),
    /// Run the loom models of ucm-ctrl
    Loom(loom::Args),
    /// Hold random histories of ucm-ctrl against a sequential model
    Shuttle(loom::ShuttleArgs),
    /// Build and lint every feature alone, in pairs where few, and all together
    Features(features::Args),
    /// Run the standard benchmarks, or compare two runs
    Bench(bench::Args),
    /// Kill, stop and expel members at every failpoint: a random slice, or the whole matrix
    Crash(crash::Args),
    /// Run the fuzz targets (needs cargo-fuzz and a nightly toolchain)
    Fuzz(fuzz::Args),
    /// Run the tests that want a real device: cuda, rocm or rdma
    Hw(hw::Args),
    /// Run the tests of the rdma engine over real verbs, in a virtual machine
    RdmaVm(rdma_vm::Args),
    /// Run the demo: rank processes sharing one cache
    Demo(demo::Args),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = Workspace::load().and_then(|workspace| match &cli.command {
        Command::Test(args) => test::run(args, &workspace),
        Command::Ci(args) => ci::run(args, &workspace),
        Command::Tidy(args) => tidy::run(args, &workspace),
        Command::Loom(args) => loom::run(args, &workspace),
        Command::Shuttle(args) => loom::run_shuttle(args, &workspace),
        Command::Features(args) => features::run(args, &workspace),
        Command::Bench(args) => bench::run(args, &workspace),
        Command::Crash(args) => crash::run(args),
        Command::Fuzz(args) => fuzz::run(args, &workspace),
        Command::Hw(args) => hw::run(args),
        Command::RdmaVm(args) => rdma_vm::run(args, &workspace),
        Command::Demo(args) => demo::run(args, &workspace),
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure { message, code }) => {
            if !message.is_empty() {
                say(&format!("xtask: {message}"));
            }
            ExitCode::from(code)
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::Cli;

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
