//! `cargo xtask fuzz`: the fuzz targets, each for a while.
//!
//! Owns: how they are run; the targets themselves are in `fuzz/`.
//! **Invariant:** without cargo-fuzz and a nightly toolchain the command fails with the remedy. Only
//! continuous integration installs cargo-fuzz, into the target folder.

use std::{fs, path::PathBuf};

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
    /// What continuous integration runs: a minute in all.
    pub(crate) fn standard() -> Self {
        Self { target: None, seconds: 20 }
    }
}

/// Cargo, which also finds what was installed into the target folder.
fn cargo(workspace: &Workspace) -> Shell {
    let mut path = tools(workspace).join("bin").into_os_string();
    path.push(":");
    path.push(std::env::var_os("PATH").unwrap_or_default());
    Shell::program("cargo").env("PATH", &path.to_string_lossy())
}

fn tools(workspace: &Workspace) -> PathBuf {
    workspace.target().join("tools")
}

/// Why the targets cannot run here, if they cannot.
pub(crate) fn what_is_missing(workspace: &Workspace) -> Option<&'static str> {
    if cargo(workspace).args(&["+nightly", "--version"]).quiet().is_none() {
        return Some("install it with: rustup toolchain install nightly");
    }
    let fuzz = cargo(workspace).args(&["fuzz", "--version"]).quiet();
    fuzz.is_none().then_some("install it with: cargo install cargo-fuzz")
}

/// Tries to install what is missing.
pub(crate) fn install(workspace: &Workspace) -> Option<&'static str> {
    let missing = what_is_missing(workspace)?;
    say("fuzz: installing cargo-fuzz");
    let install = Shell::program("cargo")
        .args(&["install", "--quiet", "--locked", "cargo-fuzz", "--root"])
        .args(&[tools(workspace).to_string_lossy().into_owned()]);
    match install.status() {
        Ok(true) => what_is_missing(workspace),
        _ => Some(missing),
    }
}

/// Runs the targets. New inputs go to the target folder, not to the corpus that is kept.
pub(crate) fn run(args: &Args, workspace: &Workspace) -> Result<(), Failure> {
    if let Some(remedy) = what_is_missing(workspace) {
        return fail(format!("fuzz: {remedy}"));
    }
    let fuzz = workspace.root().join("fuzz");
    let suppressions = fuzz.join("leaks.supp");
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
        cargo(workspace)
            .args(&["+nightly", "fuzz", "run", &target])
            .args(&folders)
            .args(&["--", "-max_len=4096", "-timeout=30"])
            .args(&[format!("-max_total_time={}", args.seconds)])
            .env("LSAN_OPTIONS", &format!("suppressions={}", suppressions.display()))
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
