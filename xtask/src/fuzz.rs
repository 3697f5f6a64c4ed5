//! `cargo xtask fuzz`: the fuzz targets, each for a while.
//!
//! Owns: how they are run; the targets themselves are in `fuzz/`.
//! **Invariant:** without cargo-fuzz and a nightly toolchain the command fails with the remedy; it
//! installs nothing.

use std::fs;

use crate::{
    shell::{Failure, Shell, fail, say},
    workspace::Workspace,
};

/// Options of `cargo xtask fuzz`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only this target
    target: Option<String>,
    /// Seconds for each target
    #[arg(long, default_value_t = 60)]
    seconds: u32,
}

impl Args {
    /// What continuous integration runs.
    pub(crate) fn standard() -> Self {
        Self { target: None, seconds: 60 }
    }
}

/// Why the targets cannot run here, if they cannot.
pub(crate) fn what_is_missing() -> Option<&'static str> {
    if Shell::program("cargo").args(&["fuzz", "--version"]).quiet().is_none() {
        return Some("install it with: cargo install cargo-fuzz");
    }
    let nightly = Shell::program("cargo").args(&["+nightly", "--version"]).quiet();
    nightly.is_none().then_some("install it with: rustup toolchain install nightly")
}

/// Runs the targets. New inputs go to the target folder, not to the corpus that is kept.
pub(crate) fn run(args: &Args, workspace: &Workspace) -> Result<(), Failure> {
    if let Some(remedy) = what_is_missing() {
        return fail(format!("fuzz: {remedy}"));
    }
    let fuzz = workspace.root().join("fuzz");
    for target in targets(workspace)? {
        if args.target.as_ref().is_some_and(|only| *only != target) {
            continue;
        }
        let found = workspace.target().join("fuzz-corpus").join(&target);
        if let Err(error) = fs::create_dir_all(&found) {
            return fail(format!("fuzz: cannot make {}: {error}", found.display()));
        }
        // The first folder takes new inputs, the others are only read.
        let folders = [found.to_string_lossy().into_owned(), format!("corpus/{target}")];
        Shell::program("cargo")
            .args(&["+nightly", "fuzz", "run", &target])
            .args(&folders)
            .args(&["--", "-max_len=4096", "-timeout=30"])
            .args(&[format!("-max_total_time={}", args.seconds)])
            .env("CARGO_TARGET_DIR", &workspace.target().join("fuzz").to_string_lossy())
            .dir(&fuzz)
            .run()?;
    }
    Ok(())
}

fn targets(workspace: &Workspace) -> Result<Vec<String>, Failure> {
    let folder = workspace.root().join("fuzz/fuzz_targets");
    let entries = match fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(error) => return fail(format!("fuzz: cannot list {}: {error}", folder.display())),
    };
    let mut targets: Vec<String> = entries
        .flatten()
        .filter_map(|entry| Some(entry.path().file_stem()?.to_string_lossy().into_owned()))
        .collect();
    targets.sort();
    if targets.is_empty() {
        say("fuzz: there are no targets");
        return fail("");
    }
    Ok(targets)
}
