//! `cargo xtask loom`: the models of the control plane's protocols.
//!
//! Owns: the build settings of loom runs. They have a target folder of their own, because the cfg
//! changes every crate.
//! **Invariant:** a run in which no model was executed is a failure.

use crate::{
    shell::{Failure, Shell, fail},
    summary::LibtestReader,
    workspace::Workspace,
};

/// Options of `cargo xtask loom`.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Args {
    /// Only models whose name contains this (all names start with `loom_`)
    filter: Option<String>,
    /// How often a thread may be interrupted in one execution (default 2)
    #[arg(long, value_name = "N")]
    preemptions: Option<u32>,
}

/// Runs the models in release mode.
pub(crate) fn run(args: &Args, workspace: &Workspace) -> Result<(), Failure> {
    let filter = args.filter.as_deref().unwrap_or("loom_");
    let target = workspace.root().join("target/loom");
    let mut reader = LibtestReader::default();
    let good = Shell::cargo(&["test", "--release", "-p", "ucm-ctrl", "--lib", filter])
        .env("RUSTFLAGS", "--cfg ucm_loom")
        .env("CARGO_TARGET_DIR", &target.to_string_lossy())
        .env("LOOM_MAX_PREEMPTIONS", &args.preemptions.unwrap_or(2).to_string())
        .watch(|line| reader.line(line))?;
    let summary = reader.finish();
    if !good {
        return fail(format!("loom: {summary}"));
    }
    if summary.total() == 0 { fail(format!("loom: no model matches `{filter}`")) } else { Ok(()) }
}
