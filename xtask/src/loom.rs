//! `cargo xtask loom` and `cargo xtask shuttle`: the models of the control plane's protocols, and long
//! random histories of it.
//!
//! Owns: the build settings of these runs. They have target folders of their own, because the cfg
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

/// Options of `cargo xtask shuttle`.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct ShuttleArgs {
    /// Only tests whose name contains this (all names start with `shuttle_`)
    filter: Option<String>,
    /// Histories for each scheduler (default 20,000)
    #[arg(long, value_name = "N")]
    histories: Option<u32>,
}

/// Runs the models in release mode.
pub(crate) fn run(args: &Args, workspace: &Workspace) -> Result<(), Failure> {
    let preemptions = args.preemptions.unwrap_or(2).to_string();
    let checker = Checker { name: "loom", cfg: "--cfg ucm_loom" };
    checker.run(args.filter.as_deref(), ("LOOM_MAX_PREEMPTIONS", &preemptions), workspace)
}

/// Runs the histories in release mode.
pub(crate) fn run_shuttle(args: &ShuttleArgs, workspace: &Workspace) -> Result<(), Failure> {
    let histories = args.histories.unwrap_or(20_000).to_string();
    let checker = Checker { name: "shuttle", cfg: "--cfg ucm_loom --cfg ucm_shuttle" };
    checker.run(args.filter.as_deref(), ("UCM_SHUTTLE_HISTORIES", &histories), workspace)
}

struct Checker {
    /// Names its tests and its target folder.
    name: &'static str,
    cfg: &'static str,
}

impl Checker {
    fn run(
        &self,
        filter: Option<&str>,
        (variable, value): (&str, &str),
        workspace: &Workspace,
    ) -> Result<(), Failure> {
        let name = self.name;
        let all = format!("{name}_");
        let filter = filter.unwrap_or(&all);
        let target = workspace.root().join("target").join(name);
        let mut reader = LibtestReader::default();
        let good = Shell::cargo(&["test", "--release", "-p", "ucm-ctrl", "--lib", filter])
            .env("RUSTFLAGS", self.cfg)
            .env("CARGO_TARGET_DIR", &target.to_string_lossy())
            .env(variable, value)
            .watch(|line| reader.line(line))?;
        let summary = reader.finish();
        if !good {
            return fail(format!("{name}: {summary}"));
        }
        if summary.total() == 0 {
            fail(format!("{name}: nothing matches `{filter}`"))
        } else {
            Ok(())
        }
    }
}
