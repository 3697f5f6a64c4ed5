//! `cargo xtask demo`: the guided example of the `ucm` crate.
//!
//! Owns: nothing but the command line; the demo itself is `ucm/examples/demo.rs`.
//! **Invariant:** what the demo prints is what it did; xtask adds nothing.

use crate::{
    shell::{Failure, Shell},
    workspace::Workspace,
};

/// Options of `cargo xtask demo`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Which example of the ucm crate to run
    #[arg(default_value = "demo")]
    example: String,
    /// Arguments handed to the example as they are
    #[arg(last = true, value_name = "EXAMPLE ARGS")]
    rest: Vec<String>,
}

impl Args {
    /// What `ci` runs.
    pub(crate) fn standard() -> Self {
        Self { example: "demo".to_owned(), rest: Vec::new() }
    }
}

/// Builds the example in release mode and runs it from the workspace root.
pub(crate) fn run(args: &Args, workspace: &Workspace) -> Result<(), Failure> {
    Shell::cargo(&["run", "--release", "-p", "ucm", "--example", &args.example, "--"])
        .args(&args.rest)
        .dir(workspace.root())
        .run()
}
